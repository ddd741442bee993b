"""Rotary position embedding (Su et al., 2021, "RoFormer"): pairs of channels turn by angles that grow with position.

The derivation of the elementwise form used here stands in `model/position/derivation.py`.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from model.position.config import RoPEConfig, RoPEInputConfig
from model.position.scheme import PositionScheme, Rotation

if TYPE_CHECKING:
    from model.config import ModelConfig


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


class RoPE(PositionScheme):
    """Queries and keys turn, after their projection, in every layer that the scheme applies to."""

    config: RoPEConfig

    def __init__(self, config: "ModelConfig") -> None:
        super().__init__(config)
        self.width = self.config.turned_width(config.head_dim)

    def rotation(self, positions: Tensor, length: int, dtype: torch.dtype) -> Rotation:
        frequencies = rope_frequencies(self.config.base, self.width, positions.device)
        cos, sin = rope_tables(positions, frequencies, dtype)
        return Rotation(cos, sin, cos, sin, self.config.layout)


class RoPEInput(PositionScheme):
    """Negative control: the embedding turns once, below the first block, so before the projections.

    The projections then mix what was turned with what was not, and scores no longer depend on distance alone.
    """

    config: RoPEInputConfig

    def embed(self, x: Tensor, positions: Tensor, layer: int) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        frequencies = rope_frequencies(self.config.base, x.shape[-1], x.device)
        cos, sin = rope_tables(positions, frequencies, dtype)
        return rotate(x, cos, sin, self.config.layout)
