"""How a Transformer is told where its tokens are: the table of schemes.

A new scheme is one class, one line here, and one YAML file in `configs/position/`. The table is torch-free: it holds
each scheme's configuration class and, as text, the home of the module that does the work.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Union

from pydantic import BeforeValidator, Field

from model.position.config import (
    LearnedConfig,
    NoPEConfig,
    RoPEConfig,
    RoPEInputConfig,
    SchemeConfig,
    SinusoidalConfig,
)

if TYPE_CHECKING:
    from model.config import ModelConfig
    from model.position.scheme import PositionScheme


class Entry(NamedTuple):
    """One scheme: its configuration, where its class lives, and where position enters the network."""

    config: type[SchemeConfig]
    home: str
    place: str


SCHEMES: dict[str, Entry] = {
    "nope": Entry(NoPEConfig, "model.position.scheme:PositionScheme", "nowhere"),
    "learned": Entry(LearnedConfig, "model.position.absolute:Learned", "input"),
    "sinusoidal": Entry(SinusoidalConfig, "model.position.absolute:Sinusoidal", "input"),
    "rope": Entry(RoPEConfig, "model.position.rope:RoPE", "queries and keys"),
    "rope_input": Entry(RoPEInputConfig, "model.position.rope:RoPEInput", "input"),
}


def build_scheme(config: "ModelConfig") -> "PositionScheme":
    """Build the scheme that `config.position` names; the one place where a name becomes a module."""
    module, _, name = SCHEMES[config.position.kind].home.partition(":")
    scheme: PositionScheme = getattr(import_module(module), name)(config)
    return scheme


def _a_word_is_a_kind(value: Any) -> Any:
    return {"kind": value} if isinstance(value, str) else value


if TYPE_CHECKING:
    PositionConfig = SchemeConfig
else:
    PositionConfig = Annotated[
        Union[tuple(entry.config for entry in SCHEMES.values())],
        Field(discriminator="kind"),
        BeforeValidator(_a_word_is_a_kind),
    ]
