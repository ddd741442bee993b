"""The settings of every positional scheme; torch-free, so that `--help` and errors are instant."""

from typing import Annotated, Literal

from pydantic import Field

from model.settings import Settings

Layer = Annotated[int, Field(ge=0)]


class SchemeConfig(Settings):
    """What all schemes have in common."""

    kind: str
    """Name of the positional scheme."""
    layers: Literal["all", "first"] | tuple[Layer, ...] = "all"
    """Layers in which the scheme acts: all, first, or a list of layer numbers counted from 0."""

    def applies_to(self, layer: int) -> bool:
        """Say whether the scheme acts in this layer (counted from 0)."""
        if isinstance(self.layers, str):
            return self.layers == "all" or layer == 0
        return layer in self.layers

    def check(self, d_model: int, head_dim: int, n_layers: int) -> None:
        """Refuse, in words, a model that this scheme cannot serve (ValueError)."""
        if not isinstance(self.layers, str):
            beyond = [layer for layer in self.layers if layer >= n_layers]
            if beyond or not self.layers:
                raise ValueError(f"position.layers {list(self.layers)} must name layers from 0 to {n_layers - 1}")


class NoPEConfig(SchemeConfig):
    """No positional signal at all: only the causal mask tells earlier from later (Haviv et al., 2022)."""

    kind: Literal["nope"] = "nope"
    layers: Literal["all"] = "all"
    """NoPE does the same nothing in every layer."""


class AdditiveConfig(SchemeConfig):
    """A vector for each position, added to the token vectors."""

    layers: Literal["all", "first"] = "first"
    """first: added below the first block, as GPT and BERT do; all: added again before every block."""


class LearnedConfig(AdditiveConfig):
    """One learned vector a position, as in GPT and BERT (Radford et al., 2018; Devlin et al., 2018)."""

    kind: Literal["learned"] = "learned"
    init_std: Annotated[float, Field(ge=0)] | None = None
    """Standard deviation of the table at the start; none: that of the token embedding."""


class SinusoidalConfig(AdditiveConfig):
    """Fixed sines and cosines of the position (Vaswani et al., 2017)."""

    kind: Literal["sinusoidal"] = "sinusoidal"
    base: Annotated[float, Field(gt=1)] = 10000.0
    """Base of the geometric series of wavelengths."""
    scale: Annotated[float, Field(ge=0)] | None = None
    """Amplitude; none: the token embedding's standard deviation, which is the ratio of the paper."""

    def check(self, d_model: int, head_dim: int, n_layers: int) -> None:
        super().check(d_model, head_dim, n_layers)
        if d_model % 2:
            raise ValueError(f"d_model {d_model} is odd: sinusoidal positions need pairs of channels")


class RoPEConfig(SchemeConfig):
    """Rotary position embedding: queries and keys are turned by angles that grow with position (Su et al., 2021)."""

    kind: Literal["rope"] = "rope"
    base: Annotated[float, Field(gt=1)] = 10000.0
    """Base of the geometric series of frequencies: frequency i is base^(-2i/D)."""
    layout: Literal["interleaved", "half"] = "interleaved"
    """Which channels form a pair: interleaved (2i, 2i+1), as in the paper; half (i, i+D/2), as in Hugging Face."""
    fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of each head's channels that turns; the others, the last ones, stand still."""

    def turned_width(self, head_dim: int) -> int:
        """Return how many channels of a head turn: 2P."""
        return round(self.fraction * head_dim)

    def check(self, d_model: int, head_dim: int, n_layers: int) -> None:
        super().check(d_model, head_dim, n_layers)
        if head_dim % 2:
            raise ValueError(
                f"head_dim {head_dim} (d_model / n_heads) is odd: RoPE turns pairs of channels, so it must be even"
            )
        width = self.fraction * head_dim
        if width != round(width) or round(width) % 2 or round(width) < 2:
            raise ValueError(
                f"position.fraction {self.fraction} of head_dim {head_dim} is {width:g} channels: "
                "RoPE turns pairs, so it must be an even whole number"
            )


class RoPEInputConfig(SchemeConfig):
    """Negative control of the study note: the embedding is turned once, before the projections, not q and k."""

    kind: Literal["rope_input"] = "rope_input"
    layers: Literal["first"] = "first"
    """The embedding is turned once, below the first block."""
    base: Annotated[float, Field(gt=1)] = 10000.0
    """Base of the geometric series of frequencies: frequency i is base^(-2i/d_model)."""
    layout: Literal["interleaved", "half"] = "interleaved"
    """Which channels form a pair: interleaved (2i, 2i+1) or half (i, i+C/2)."""

    def check(self, d_model: int, head_dim: int, n_layers: int) -> None:
        super().check(d_model, head_dim, n_layers)
        if d_model % 2:
            raise ValueError(f"d_model {d_model} is odd: rope_input turns pairs of channels, so it must be even")
