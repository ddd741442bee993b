"""The settings of every positional scheme; torch-free, so that `--help` and errors are instant."""

import re
from typing import Annotated, Literal

from pydantic import Field
from pydantic.config import JsonDict

from model.errors import UserError
from model.position.scaling_config import AnyScalingConfig
from model.settings import Settings

Layer = Annotated[int, Field(ge=0)]
Pattern = Annotated[str, Field(pattern=r"^all but every [1-9]\d*(st|nd|rd|th)$", examples=["all but every 4th"])]
Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(gt=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
Base = Annotated[float, Field(gt=1)]

# A setting that may be changed after training, for evaluation and generation: it adds and removes no weight.
AFTER_TRAINING: JsonDict = {"after_training": True}


class SchemeConfig(Settings):
    """What all schemes have in common."""

    kind: str
    """Name of the positional scheme."""
    layers: Literal["all", "first"] | Pattern | tuple[Layer, ...] = "all"
    """Layers in which the scheme acts: all, first, `all but every 4th`, or a list of layer numbers counted from 0."""

    def applies_to(self, layer: int) -> bool:
        """Say whether the scheme acts in this layer (counted from 0)."""
        if not isinstance(self.layers, str):
            return layer in self.layers
        left_out = re.search(r"\d+", self.layers)
        return (layer + 1) % int(left_out[0]) != 0 if left_out else self.layers == "all" or layer == 0

    def check(self, d_model: int, head_dim: int, n_layers: int) -> None:
        """Refuse, in words, a model that this scheme cannot serve (ValueError)."""
        if isinstance(self.layers, str) and not any(map(self.applies_to, range(n_layers))):
            raise ValueError(f"position.layers {self.layers!r} leaves out all {n_layers} layers")
        if not isinstance(self.layers, str):
            beyond = [layer for layer in self.layers if layer >= n_layers]
            if beyond or not self.layers:
                raise ValueError(f"position.layers {list(self.layers)} must name layers from 0 to {n_layers - 1}")


def may_change_after_training(scheme: type[SchemeConfig]) -> list[str]:
    """Return the settings of a scheme that touch no weight."""
    return [name for name, field in scheme.model_fields.items() if field.json_schema_extra == AFTER_TRAINING]


def refuse_changes_of_weights(trained: SchemeConfig, asked: SchemeConfig) -> None:
    """Raise a UserError where a scheme is asked to differ from the trained one in more than may change afterwards."""
    if type(trained) is not type(asked):
        raise UserError(
            f"position {asked.kind!r}: the run was trained with {trained.kind!r}, and its weights fit no other"
        )
    free = may_change_after_training(type(trained))
    fixed = [name for name in type(trained).model_fields if name not in free]
    changed = [name for name in fixed if getattr(trained, name) != getattr(asked, name)]
    if changed:
        listed = ", ".join(f"{n} (run: {getattr(trained, n)}, asked: {getattr(asked, n)})" for n in changed)
        raise UserError(f"position {trained.kind!r} keeps its {listed}; after training may change: {', '.join(free)}")


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
    beyond: Literal["error", "clamp", "wrap", "interpolate"] = Field("error", json_schema_extra=AFTER_TRAINING)
    """Past the table: error; clamp: the last row; wrap: from the first row again; interpolate: the table is stretched
    over the declared length."""


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


class RotaryConfig(SchemeConfig):
    """What the schemes that turn queries and keys have in common."""

    base: Base = Field(10000.0, json_schema_extra=AFTER_TRAINING)
    """Base of the geometric series of frequencies: frequency i is base^(-2i/D)."""
    layout: Literal["interleaved", "half"] = "interleaved"
    """Which channels form a pair: interleaved (2i, 2i+1), as in the paper; half (i, i+D/2), as in Hugging Face."""

    def turned_width(self, head_dim: int) -> int:
        """Return how many channels of a head turn: 2P."""
        return head_dim

    def check(self, d_model: int, head_dim: int, n_layers: int) -> None:
        super().check(d_model, head_dim, n_layers)
        if head_dim % 2:
            raise ValueError(
                f"head_dim {head_dim} (d_model / n_heads) is odd: RoPE turns pairs of channels, so it must be even"
            )


class RoPEConfig(RotaryConfig):
    """Rotary position embedding: queries and keys are turned by angles that grow with position (Su et al., 2021)."""

    kind: Literal["rope"] = "rope"
    fraction: Share = 1.0
    """Share of each head's channels that turns; the others, the last ones, stand still."""
    turning_pairs: Share = 1.0
    """Share of the pairs, the fastest ones, that turns; the slowest stand still (p-RoPE, Barbero et al., 2025)."""
    scaling: AnyScalingConfig | None = Field(None, json_schema_extra=AFTER_TRAINING)
    """How the frequencies are changed to reach past the training length."""
    log_n: bool = Field(False, json_schema_extra=AFTER_TRAINING)
    """Queries grow with the number of visible keys n: by ln(n) / ln(model.context), at least 1 (Su, 2021)."""

    def turned_width(self, head_dim: int) -> int:
        return round(self.fraction * head_dim)

    def check(self, d_model: int, head_dim: int, n_layers: int) -> None:
        super().check(d_model, head_dim, n_layers)
        width = self.fraction * head_dim
        if width != round(width) or round(width) % 2 or round(width) < 2:
            raise ValueError(
                f"position.fraction {self.fraction} of head_dim {head_dim} is {width:g} channels: "
                "RoPE turns pairs, so it must be an even whole number"
            )
        if round(self.turning_pairs * width / 2) == 0:
            raise ValueError(f"position.turning_pairs {self.turning_pairs} of {width / 2:g} pairs is none that turns")
        if self.log_n and self.fraction < 1:
            raise ValueError(f"position.log_n scales whole queries, but position.fraction {self.fraction} turns a part")
        if self.scaling is not None:
            self.scaling.check(round(width))


class XPosConfig(RotaryConfig):
    """RoPE whose pairs also fade with distance, the fast ones sooner (Sun et al., 2022, "xPos")."""

    kind: Literal["xpos"] = "xpos"
    gamma: Positive = 0.4
    """The fastest pair keeps gamma / (1 + gamma) of a score every scale_base tokens; the slowest keeps all of it."""
    scale_base: Positive = 512.0
    """Distance, in tokens, over which a pair fades by its own factor."""


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


class ALiBiConfig(SchemeConfig):
    """A penalty on scores that grows with distance, at a fixed slope for each head (Press et al., 2022)."""

    kind: Literal["alibi"] = "alibi"


class T5Config(SchemeConfig):
    """A learned number added to the scores, for each head and bucket of distances (Raffel et al., 2020)."""

    kind: Literal["t5"] = "t5"
    buckets: Annotated[int, Field(ge=2)] = 32
    """Number of buckets: half of them hold one distance each, the others ever more."""
    max_distance: Count = 128
    """Distances from here on share the last bucket."""
    init_std: Annotated[float, Field(ge=0)] = 0.02
    """Standard deviation of the table at the start."""

    def check(self, d_model: int, head_dim: int, n_layers: int) -> None:
        super().check(d_model, head_dim, n_layers)
        if self.buckets % 2 or self.max_distance <= self.buckets // 2:
            raise ValueError(
                f"position.buckets {self.buckets} must be even, and position.max_distance {self.max_distance} "
                f"larger than half of them"
            )


class KERPLEConfig(SchemeConfig):
    """A penalty on scores by a kernel of the distance with two learned numbers a head (Chi et al., 2022)."""

    kind: Literal["kerple"] = "kerple"
    form: Literal["log", "power"] = "log"
    """log: -r1 ln(1 + r2 d); power: -r1 d^r2, r2 at most 2."""


class FIREConfig(SchemeConfig):
    """A small network of the distance relative to the position, added to the scores (Li et al., 2024)."""

    kind: Literal["fire"] = "fire"
    width: Count = 32
    """Hidden width of the network."""
    c: Positive = 0.1
    """Where ln(c d + 1) bends, at the start; learned."""
    threshold: Positive = 64.0
    """Positions below this count as this many, at the start; learned."""


class SandwichConfig(SchemeConfig):
    """The product of two sinusoids as a penalty on scores, without parameters (Chi et al., 2023)."""

    kind: Literal["sandwich"] = "sandwich"
    base: Base = 10000.0
    """Base of the geometric series of wavelengths."""
    width: Annotated[int, Field(ge=2, multiple_of=2)] = 128
    """Channels of the sinusoids: half as many cosines are added."""


class ShawConfig(SchemeConfig):
    """A learned key for each clipped distance, the same for all heads of a layer (Shaw et al., 2018)."""

    kind: Literal["shaw"] = "shaw"
    max_distance: Count = 16
    """Distances from here on share the last key."""
    init_std: Annotated[float, Field(ge=0)] = 0.02
    """Standard deviation of the keys at the start."""


class CoPEConfig(SchemeConfig):
    """Distances counted by content: each key between adds a gate between 0 and 1 (Golovneva et al., 2024)."""

    kind: Literal["cope"] = "cope"
    max_position: Count = 64
    """Contextual distances from here on share the last vector."""
    init_std: Annotated[float, Field(ge=0)] = 0.02
    """Standard deviation of the vectors at the start; the paper begins at 0."""
