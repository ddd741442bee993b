"""RoPE beyond its training length: functions from frequencies to frequencies, and a temperature.

Each takes the frequencies (P,) of the trained model in radians per position, the factor s >= 1 by which the length
grows, and what else its rule needs; float64 in, float64 out. Blends are written f * (1 - r * (1 - 1/s)), so that at
s = 1 every function returns its input to the last bit.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from model.position.scaling_config import (
    DynamicNTKConfig,
    LinearConfig,
    Llama3Config,
    LongRoPEConfig,
    NTKConfig,
    ScalingConfig,
    YaRNConfig,
)


class Scaled(NamedTuple):
    """Frequencies (P,), and the factor on cos and sin of both queries and keys: scores grow by its square."""

    frequencies: Tensor
    temperature: float = 1.0


class Reach(NamedTuple):
    """From which length to which: `trained` tokens in training, `declared` tokens in this call."""

    trained: int
    declared: int

    def factor(self, config: ScalingConfig) -> float:
        """Return s: the configured factor, or how far the call reaches beyond the trained length, at least 1."""
        return max(1.0, self.declared / self.trained) if config.factor == "auto" else config.factor


def interpolate(frequencies: Tensor, share: Tensor | float, s: float) -> Tensor:
    """Divide by s the share r of each frequency: f (1 - r (1 - 1/s)), which is f / s at r = 1 and f at r = 0."""
    return frequencies * (1 - share * (1 - 1 / s))


def stretch_base(frequencies: Tensor, s: float) -> Tensor:
    """Return the frequencies of the base b s^(D/(D-2)): the first stays, the last is divided by s.

    Written on the frequencies b^(-2i/D) themselves: f_i s^(-2i/(D-2)).
    """
    pairs = torch.arange(len(frequencies), dtype=frequencies.dtype, device=frequencies.device)
    return frequencies * s ** (-pairs / (len(frequencies) - 1))


def linear(frequencies: Tensor, config: LinearConfig, reach: Reach) -> Scaled:
    """f / s (Chen et al., 2023, "position interpolation")."""
    return Scaled(frequencies / reach.factor(config))


def ntk(frequencies: Tensor, config: NTKConfig, reach: Reach) -> Scaled:
    """Base b s^(D/(D-2)) (bloc97, 2023, "NTK-aware")."""
    return Scaled(stretch_base(frequencies, reach.factor(config)))


def dynamic_ntk(frequencies: Tensor, config: DynamicNTKConfig, reach: Reach) -> Scaled:
    """Base b (s n / L - (s - 1))^(D/(D-2)) at length n beyond the trained length L (emozilla, 2023)."""
    beyond = max(1.0, reach.declared / reach.trained)
    return Scaled(stretch_base(frequencies, config.factor * beyond - (config.factor - 1)))


def yarn(frequencies: Tensor, config: YaRNConfig, reach: Reach) -> Scaled:
    """f (1 - r (1 - 1/s)) with a ramp r over the pairs, and the temperature 0.1 ln(s) + 1 (Peng et al., 2023)."""
    s = reach.factor(config)
    ramp = yarn_ramp(frequencies, config.beta_fast, config.beta_slow, reach.trained)
    temperature = 0.1 * math.log(s) + 1 if config.attention_factor is None else config.attention_factor
    return Scaled(interpolate(frequencies, ramp, s), temperature)


def yarn_ramp(frequencies: Tensor, beta_fast: float, beta_slow: float, trained: int) -> Tensor:
    """Return r (P,): 0 for pairs that turn over beta_fast times in the trained length, 1 below beta_slow.

    Between the two it is a line. The pair that turns n times has the number D ln(L / (2 pi n)) / (2 ln b), and the
    line's ends are rounded outwards, as in the authors' code. The base b is read off the second frequency, b^(-2/D).
    """
    last = len(frequencies) - 1
    log_step = -math.log(frequencies[1]) if last else 1.0  # 2 ln(b) / D
    first_pair = math.floor(math.log(trained / (2 * math.pi * beta_fast)) / log_step)
    last_pair = math.ceil(math.log(trained / (2 * math.pi * beta_slow)) / log_step)
    low, high = max(first_pair, 0), min(last_pair, 2 * last + 1)
    pairs = torch.arange(last + 1, dtype=frequencies.dtype, device=frequencies.device)
    return ((pairs - low) / max(high - low, 0.001)).clamp(0, 1)


def llama3(frequencies: Tensor, config: Llama3Config, reach: Reach) -> Scaled:
    """f (1 - r (1 - 1/s)), r = (h - L / wavelength) / (h - l) clipped to 0 .. 1 (Grattafiori et al., 2024)."""
    turns = reach.trained * frequencies / (2 * math.pi)
    low, high = config.low_freq_factor, config.high_freq_factor
    return Scaled(interpolate(frequencies, ((high - turns) / (high - low)).clamp(0, 1), reach.factor(config)))


def longrope(frequencies: Tensor, config: LongRoPEConfig, reach: Reach) -> Scaled:
    """f_i / divisor_i, from the long list where the call is longer than the trained length (Ding et al., 2024)."""
    s = reach.factor(config)
    is_long = reach.declared > reach.trained
    divisors = (config.long_factor or (s,)) if is_long else (config.short_factor or (1.0,))
    temperature = math.sqrt(1 + math.log(s) / math.log(max(reach.trained, 2)))
    temperature = temperature if config.attention_factor is None else config.attention_factor
    return Scaled(frequencies / frequencies.new_tensor(divisors), temperature)


RULES: dict[str, Callable[[Tensor, Any, Reach], Scaled]] = {
    "linear": linear,
    "ntk": ntk,
    "dynamic_ntk": dynamic_ntk,
    "yarn": yarn,
    "llama3": llama3,
    "longrope": longrope,
}


def scaled(frequencies: Tensor, config: ScalingConfig | None, context: int, declared: int) -> Scaled:
    """Apply the configured rule; without one the frequencies stay as they are."""
    if config is None:
        return Scaled(frequencies)
    return RULES[config.kind](frequencies, config, Reach(config.trained_length or context, declared))
