"""How RoPE's frequencies are changed to reach past the training length, as settings; torch-free."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from model.settings import A_WORD_IS_A_KIND, Settings

Factor = Annotated[float, Field(ge=1)] | Literal["auto"]
Count = Annotated[int, Field(ge=1)]


class ScalingConfig(Settings):
    """What all scalings have in common."""

    kind: str
    """Name of the scaling."""
    factor: Factor = "auto"
    """How many times the trained length to reach; auto: the declared length of the call / the trained length."""
    trained_length: Count | None = None
    """Length that the weights were trained at; none: model.context."""

    def check(self, width: int) -> None:
        """Refuse, in words, a head that this scaling cannot serve (ValueError)."""


class LinearConfig(ScalingConfig):
    """Position interpolation: every frequency is divided by the factor (Chen et al., 2023)."""

    kind: Literal["linear"] = "linear"


class NTKConfig(ScalingConfig):
    """A larger base, so that the lowest frequency is divided by the factor and the highest stays (bloc97, 2023)."""

    kind: Literal["ntk"] = "ntk"

    def check(self, width: int) -> None:
        if width < 4:
            raise ValueError(f"position.scaling ntk needs at least 4 turning channels a head, not {width}")


class DynamicNTKConfig(ScalingConfig):
    """NTK with a base that grows with the declared length, and is untouched up to the trained one (emozilla, 2023)."""

    kind: Literal["dynamic_ntk"] = "dynamic_ntk"
    factor: Annotated[float, Field(ge=1)] = 1.0
    """How much faster than the length the base's stretch grows: s n / L - (s - 1) at length n, trained at L."""

    def check(self, width: int) -> None:
        NTKConfig().check(width)


class YaRNConfig(ScalingConfig):
    """Slow pairs are interpolated, fast pairs are not, and scores get a temperature (Peng et al., 2023)."""

    kind: Literal["yarn"] = "yarn"
    beta_fast: Annotated[float, Field(gt=0)] = 32.0
    """Pairs that turn more often than this in the trained length stay as they are."""
    beta_slow: Annotated[float, Field(gt=0)] = 1.0
    """Pairs that turn less often than this in the trained length are interpolated in full."""
    attention_factor: Annotated[float, Field(gt=0)] | None = None
    """Multiplies cos and sin of queries and keys; none: 0.1 ln(factor) + 1."""

    @model_validator(mode="after")
    def _fast_is_faster(self) -> "YaRNConfig":
        if self.beta_fast <= self.beta_slow:
            raise ValueError(f"beta_fast {self.beta_fast} must be larger than beta_slow {self.beta_slow}")
        return self


class Llama3Config(ScalingConfig):
    """Long wavelengths are interpolated, short ones are not, those between are blended (Grattafiori et al., 2024)."""

    kind: Literal["llama3"] = "llama3"
    low_freq_factor: Annotated[float, Field(gt=0)] = 1.0
    """Wavelengths above trained_length / this are interpolated in full."""
    high_freq_factor: Annotated[float, Field(gt=0)] = 4.0
    """Wavelengths below trained_length / this stay as they are."""

    @model_validator(mode="after")
    def _high_is_higher(self) -> "Llama3Config":
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor {self.high_freq_factor} must be larger than low_freq_factor {self.low_freq_factor}"
            )
        return self


class LongRoPEConfig(ScalingConfig):
    """Each pair has a divisor of its own, one list up to the trained length and one beyond (Ding et al., 2024)."""

    kind: Literal["longrope"] = "longrope"
    short_factor: tuple[Annotated[float, Field(gt=0)], ...] = ()
    """Divisors of the frequencies up to the trained length, one a pair; empty: all 1."""
    long_factor: tuple[Annotated[float, Field(gt=0)], ...] = ()
    """Divisors of the frequencies beyond the trained length, one a pair; empty: all the factor."""
    attention_factor: Annotated[float, Field(gt=0)] | None = None
    """Multiplies cos and sin of queries and keys; none: sqrt(1 + ln(factor) / ln(trained length))."""

    def check(self, width: int) -> None:
        for name in ("short_factor", "long_factor"):
            count = len(getattr(self, name))
            if count not in (0, width // 2):
                raise ValueError(f"position.scaling.{name} has {count} divisors, but {width // 2} pairs turn")


AnyScalingConfig = Annotated[
    LinearConfig | NTKConfig | DynamicNTKConfig | YaRNConfig | Llama3Config | LongRoPEConfig,
    Field(discriminator="kind"),
    A_WORD_IS_A_KIND,
]
