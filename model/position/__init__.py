"""How a Transformer is told where its tokens are: the table of schemes.

A new scheme is one class, one line here, and one YAML file in `configs/position/`. The table is torch-free: it holds
each scheme's configuration class and, as text, the home of the module that does the work.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Annotated, NamedTuple, Union

from pydantic import Field

from model.position.config import (
    ALiBiConfig,
    CoPEConfig,
    FIREConfig,
    KERPLEConfig,
    LearnedConfig,
    NoPEConfig,
    RoPEConfig,
    RoPEInputConfig,
    SandwichConfig,
    SchemeConfig,
    ShawConfig,
    SinusoidalConfig,
    T5Config,
    XPosConfig,
)
from model.settings import A_WORD_IS_A_KIND

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
    "xpos": Entry(XPosConfig, "model.position.rope:XPos", "queries and keys"),
    "alibi": Entry(ALiBiConfig, "model.position.bias:ALiBi", "scores"),
    "t5": Entry(T5Config, "model.position.bias:T5", "scores"),
    "kerple": Entry(KERPLEConfig, "model.position.bias:KERPLE", "scores"),
    "fire": Entry(FIREConfig, "model.position.bias:FIRE", "scores"),
    "sandwich": Entry(SandwichConfig, "model.position.bias:Sandwich", "scores"),
    "shaw": Entry(ShawConfig, "model.position.content:Shaw", "scores, by content"),
    "cope": Entry(CoPEConfig, "model.position.content:CoPE", "scores, by content"),
    "rope_input": Entry(RoPEInputConfig, "model.position.rope:RoPEInput", "input"),
}


def build_scheme(config: "ModelConfig") -> "PositionScheme":
    """Build the scheme that `config.position` names; the one place where a name becomes a module."""
    module, _, name = SCHEMES[config.position.kind].home.partition(":")
    scheme: PositionScheme = getattr(import_module(module), name)(config)
    return scheme


if TYPE_CHECKING:
    PositionConfig = SchemeConfig
else:
    PositionConfig = Annotated[
        Union[tuple(entry.config for entry in SCHEMES.values())],
        Field(discriminator="kind"),
        A_WORD_IS_A_KIND,
    ]
