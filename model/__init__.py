"""The network: a LLaMA-style decoder that is told where its tokens are by one exchangeable scheme.

Legend of the shapes that stand in comments throughout this room:

    B  batch (rows)                    H  query heads            C  model width, d_model
    T  new tokens (queries)            G  key/value heads        V  vocabulary
    S  keys: cached and new            D  width of one head      L  layers
                                       P  pairs of channels that RoPE turns, at most D / 2

The room imports torch and nothing of ours outside `model/`. Its configuration (`model.config`) needs no torch, so
that `--help` stays instant: torch is imported with the first name below that needs it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from model.checkpoint import load_model as load_model
    from model.config import ModelConfig as ModelConfig
    from model.sampling import generate as generate
    from model.transformer import Transformer as Transformer

_HOMES = {
    "ModelConfig": "model.config",
    "Transformer": "model.transformer",
    "generate": "model.sampling",
    "load_model": "model.checkpoint",
}
__all__ = ["ModelConfig", "Transformer", "generate", "load_model"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'model' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)
