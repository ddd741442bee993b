"""Rotary position embedding (Su et al., 2021, "RoFormer"): pairs of channels turn by angles that grow with position.

The derivation of the elementwise form used here stands in `model/position/derivation.py`.
"""

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from model.position.config import RoPEConfig, RoPEInputConfig, XPosConfig
from model.position.scaling import Scaled, scaled
from model.position.scheme import PositionScheme, Rotation

if TYPE_CHECKING:
    from model.config import ModelConfig


# A factor on a key's channels that leaves room for the channels themselves in float32, which ends at 3e38.
LARGEST_FACTOR = 1e30


def rope_frequencies(base: float, width: int, device: torch.device | None = None) -> Tensor:
    """Return the angle that each pair turns per position: frequency_i = base^(-2i/width), i = 0 .. width/2 - 1.

    Shape (P,), radians per position, float64: a function of the configuration, not a buffer that a cast could round.
    """
    pairs = torch.arange(0, width, 2, dtype=torch.float64, device=device)
    return base ** (-pairs / width)


def rope_tables(positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cos and sin of angle = position * frequency, each (..., P), for positions (...)."""
    angles = positions[..., None].to(dtype) * frequencies.to(dtype)
    return angles.cos(), angles.sin()


def split_pairs(x: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """Return the first and the second channel of each pair, each (..., P)."""
    if layout == "interleaved":
        return x[..., 0::2], x[..., 1::2]
    first, second = x.chunk(2, dim=-1)
    return first, second


def join_pairs(first: Tensor, second: Tensor, layout: str) -> Tensor:
    """Undo `split_pairs`."""
    if layout == "interleaved":
        return torch.stack((first, second), dim=-1).flatten(-2)
    return torch.cat((first, second), dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    """Turn each pair (a, b) of the first 2P channels: (a cos - b sin, a sin + b cos); the other channels stand still.

    x (..., D), cos and sin (..., P) and broadcastable. Computed in the precision of the tables, returned in x's.
    """
    turned = 2 * cos.shape[-1]
    first, second = split_pairs(x[..., :turned].to(cos.dtype), layout)
    pairs = join_pairs(first * cos - second * sin, first * sin + second * cos, layout).to(x.dtype)
    return pairs if turned == x.shape[-1] else torch.cat((pairs, x[..., turned:]), dim=-1)


def log_n_factor(positions: Tensor, trained: int, dtype: torch.dtype) -> Tensor:
    """Return max(1, ln(n) / ln(trained)) for n = position + 1 visible keys, shape of `positions` (Su, 2021).

    Attention over more keys is flatter; a larger query keeps its entropy where it was in training.
    """
    visible_keys = (positions + 1).clamp(min=1).to(dtype)
    return (visible_keys.log() / math.log(trained)).clamp(min=1)


class RoPE(PositionScheme):
    """Queries and keys turn, after their projection, in every layer that the scheme applies to."""

    config: RoPEConfig

    def __init__(self, config: "ModelConfig") -> None:
        super().__init__(config)
        self.context = config.context
        self.width = self.config.turned_width(config.head_dim)

    def frequencies(self, length: int, device: torch.device | None = None) -> Scaled:
        """Return the frequencies (P,) of a call of this declared length, scaled, and their temperature."""
        plain = rope_frequencies(self.config.base, self.width, device)
        frequencies, temperature = scaled(plain, self.config.scaling, self.context, length)
        turning = round(self.config.turning_pairs * len(frequencies))
        still = torch.arange(len(frequencies), device=device) >= turning
        return Scaled(frequencies.masked_fill(still, 0.0), temperature)

    def rotation(self, positions: Tensor, length: int, dtype: torch.dtype) -> Rotation:
        frequencies, temperature = self.frequencies(length, positions.device)
        cos, sin = (temperature * table for table in rope_tables(positions, frequencies, dtype))
        if not self.config.log_n:
            return Rotation(cos, sin, cos, sin, self.config.layout)
        factor = log_n_factor(positions, self.context, dtype)[..., None]
        return Rotation(factor * cos, factor * sin, cos, sin, self.config.layout)


class XPos(PositionScheme):
    """RoPE whose pair i is scaled by zeta_i^(m / scale_base) in queries and by its inverse in keys (Sun et al., 2022).

    zeta_i = (2i / D + gamma) / (1 + gamma), so a score fades by zeta_i^((m - n) / scale_base): it depends on distance
    alone, like the angle. The factors themselves grow with position, and end where float32 would overflow.
    """

    config: XPosConfig

    def __init__(self, config: "ModelConfig") -> None:
        super().__init__(config)
        self.width = config.head_dim
        fastest = self.config.gamma / (1 + self.config.gamma)
        self.max_positions = int(self.config.scale_base * math.log(LARGEST_FACTOR) / -math.log(fastest))

    def rotation(self, positions: Tensor, length: int, dtype: torch.dtype) -> Rotation:
        frequencies = rope_frequencies(self.config.base, self.width, positions.device)
        cos, sin = rope_tables(positions, frequencies, dtype)
        share = torch.arange(0, self.width, 2, dtype=dtype, device=positions.device) / self.width
        zeta = (share + self.config.gamma) / (1 + self.config.gamma)
        scale = zeta ** (positions[..., None].to(dtype) / self.config.scale_base)
        return Rotation(cos * scale, sin * scale, cos / scale, sin / scale, self.config.layout)


class RoPEInput(PositionScheme):
    """Negative control: the embedding turns once, below the first block, so before the projections.

    The projections then mix what was turned with what was not, and scores no longer depend on distance alone.
    """

    config: RoPEInputConfig

    def embed(self, x: Tensor, positions: Tensor, layer: int, length: int) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        frequencies = rope_frequencies(self.config.base, x.shape[-1], x.device)
        cos, sin = rope_tables(positions, frequencies, dtype)
        return rotate(x, cos, sin, self.config.layout)
