"""Absolute positions: a vector for each position, added to the token vectors."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from model.position.config import LearnedConfig, SinusoidalConfig
from model.position.rope import join_pairs, rope_frequencies, rope_tables
from model.position.scheme import Draw, PositionScheme

if TYPE_CHECKING:
    from model.config import ModelConfig


class Learned(PositionScheme):
    """One learned vector a position: x + table[position] (Radford et al., 2018; Devlin et al., 2018).

    With `layers: all` the same table is added again before every block. The table ends at the training context; what
    stands beyond is an error, unless `beyond` names a way to go on.
    """

    config: LearnedConfig

    def __init__(self, config: "ModelConfig") -> None:
        super().__init__(config)
        rows = config.random_positions or config.context
        self.max_positions = rows if self.config.beyond == "error" else None
        self.init_std = config.embedding_std if self.config.init_std is None else self.config.init_std
        self.table = nn.Parameter(torch.empty(rows, config.d_model))

    def initialise(self, draw: Draw) -> None:
        draw(self.table, self.init_std)

    def embed(self, x: Tensor, positions: Tensor, layer: int, length: int) -> Tensor:
        rows = len(self.table)
        if self.config.beyond == "interpolate" and length > rows:
            places = positions.double() * (rows - 1) / (length - 1)
            return x + between_rows(self.table, places).to(x.dtype)
        if self.config.beyond == "clamp":
            positions = positions.clamp(max=rows - 1)
        if self.config.beyond == "wrap":
            positions = positions % rows
        # A pad's position -1 reads the last row: its own output is never used, and no other token sees it.
        return x + self.table[positions].to(x.dtype)


def between_rows(table: Tensor, places: Tensor) -> Tensor:
    """Return the rows of a table at fractional places (...), each blended from its two neighbours, in float64."""
    below = places.floor().clamp(0, len(table) - 2).long()
    share = (places - below)[..., None]
    return table[below] * (1 - share) + table[below + 1] * share


def sinusoids(positions: Tensor, width: int, base: float, dtype: torch.dtype) -> Tensor:
    """Return (sin, cos, sin, cos, ...) of position * base^(-2i/width), shape (..., width) (Vaswani et al., 2017)."""
    cos, sin = rope_tables(positions, rope_frequencies(base, width, positions.device), dtype)
    return join_pairs(sin, cos, "interleaved")


class Sinusoidal(PositionScheme):
    """Fixed sines and cosines of the position, added to the token vectors (Vaswani et al., 2017)."""

    config: SinusoidalConfig

    def __init__(self, config: "ModelConfig") -> None:
        super().__init__(config)
        self.scale = config.embedding_std if self.config.scale is None else self.config.scale

    def embed(self, x: Tensor, positions: Tensor, layer: int, length: int) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        vectors = self.scale * sinusoids(positions, x.shape[-1], self.config.base, dtype)
        return x + vectors.to(x.dtype)
