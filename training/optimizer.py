"""AdamW, and which parameters decay."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from training.config import OptimizerConfig


def decays(name: str, parameter: nn.Parameter) -> bool:
    """Say whether weight decay applies: to matrices, token embeddings among them; not to gains or positions."""
    return parameter.dim() >= 2 and not name.startswith("position.")


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Put each parameter into exactly one group: decayed or not. A tied matrix is one parameter."""
    named = list(model.named_parameters())
    return [
        {"params": [p for name, p in named if decays(name, p)], "weight_decay": weight_decay},
        {"params": [p for name, p in named if not decays(name, p)], "weight_decay": 0.0},
    ]


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Build AdamW over the model's parameters (Loshchilov and Hutter, 2019), fused where the device has it."""
    device = next(model.parameters()).device.type
    return torch.optim.AdamW(
        parameter_groups(model, config.weight_decay),
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        fused=device in ("cpu", "cuda", "mps"),
    )


def clip(parameters: Iterable[nn.Parameter], norm: Tensor, limit: float) -> None:
    """Scale gradients of total `norm` down to `limit`; 0: never."""
    if limit > 0:
        nn.utils.clip_grads_with_norm_(parameters, limit, norm)


def first_nonfinite(model: nn.Module) -> str | None:
    """Return the name of the first parameter whose gradient holds NaN or infinity; None: all are finite."""
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not bool(parameter.grad.isfinite().all()):
            return name
    return None
