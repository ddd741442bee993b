"""Positions that depend on content: the rule reads queries or scores, so no fused kernel can serve it."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from model.attention import visible
from model.position.bias import distances
from model.position.config import CoPEConfig, ShawConfig
from model.position.scheme import Draw, PositionScheme

if TYPE_CHECKING:
    from model.attention import Signal
    from model.config import ModelConfig


class Shaw(PositionScheme):
    """q (k + a_d) / sqrt(D) with a learned key a_d for each distance d, clipped (Shaw et al., 2018).

    The authors' relative keys, without their relative values, as in Music Transformer and later work; for a causal
    model only distances into the past are needed.
    """

    config: ShawConfig

    def __init__(self, config: "ModelConfig") -> None:
        super().__init__(config)
        shape = (config.n_layers, self.config.max_distance + 1, config.head_dim)
        self.keys = nn.Parameter(torch.empty(shape))

    def initialise(self, draw: Draw) -> None:
        draw(self.keys, self.config.init_std)

    def scores(self, q: Tensor, scores: Tensor, layer: int, signal: "Signal") -> Tensor:
        distance = distances(signal.q_positions, signal.k_positions).clamp(max=self.config.max_distance)
        by_distance = q.to(scores.dtype) @ self.keys[layer].to(scores.dtype).T / q.shape[-1] ** 0.5  # B H T K
        return scores + by_distance.gather(-1, distance.expand(*scores.shape[:2], -1, -1))


class CoPE(PositionScheme):
    """score_ij + q_i e(p_ij), p_ij = sum over k = j .. i of sigmoid(score_ik), e blended between whole positions.

    Golovneva et al. (2024), "Contextual Position Encoding". The vectors e are shared by a layer's heads.
    """

    config: CoPEConfig

    def __init__(self, config: "ModelConfig") -> None:
        super().__init__(config)
        shape = (config.n_layers, self.config.max_position + 1, config.head_dim)
        self.vectors = nn.Parameter(torch.empty(shape))

    def initialise(self, draw: Draw) -> None:
        draw(self.vectors, self.config.init_std)

    def scores(self, q: Tensor, scores: Tensor, layer: int, signal: "Signal") -> Tensor:
        gates = scores.sigmoid() * visible(signal.q_positions, signal.k_positions)
        # Summed from the query back to each key: keys are stored in order, so from the last slot.
        places = gates.flip(-1).cumsum(-1).flip(-1).clamp(max=self.config.max_position)
        by_place = q.to(scores.dtype) @ self.vectors[layer].to(scores.dtype).T  # B H T places
        below = places.floor().clamp(max=self.config.max_position - 1)
        share = places - below
        low, high = (by_place.gather(-1, below.long() + step) for step in (0, 1))
        return scores + low * (1 - share) + high * share
