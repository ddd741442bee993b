"""The contract of a positional scheme.

Position can enter a Transformer at the input, at the queries and keys, and at the scores. A scheme returns data for
the places it uses; the network applies the data, and knows no scheme by name.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from model.attention import Signal
    from model.config import ModelConfig

Draw = Callable[[nn.Parameter, float], None]


class Rotation(NamedTuple):
    """By how much queries and keys turn: tables of shape (1 or B, T, P) and the rule that pairs the channels."""

    q_cos: Tensor
    q_sin: Tensor
    k_cos: Tensor
    k_sin: Tensor
    layout: str


class PositionScheme(nn.Module):
    """How a Transformer learns where its tokens are. This class itself is NoPE: it does nothing.

    Every method gets `positions` as an explicit integer tensor of shape (1 or B, T). A pad has position -1; what a
    scheme returns for it must be finite, and is never seen by another token. `dtype` is float32, or float64 in a
    float64 network: the precision in which angles and biases are computed, whatever the weights are cast to.
    """

    max_positions: int | None = None
    """Positions from here on are undefined; None: the scheme is defined for every position."""

    def __init__(self, config: "ModelConfig") -> None:
        super().__init__()
        self.config = config.position

    def applies_to(self, layer: int) -> bool:
        """Say whether the scheme acts in this layer."""
        return self.config.applies_to(layer)

    def initialise(self, draw: Draw) -> None:
        """Fill the scheme's own parameters; `draw(parameter, std)` draws from a normal distribution."""

    def embed(self, x: Tensor, positions: Tensor, layer: int, length: int) -> Tensor:
        """Return x (B, T, C) told of its positions; called before each block that the scheme applies to.

        `length` is the declared length of the whole call; only schemes whose meaning depends on it read it.
        """
        return x

    def rotation(self, positions: Tensor, length: int, dtype: torch.dtype) -> Rotation | None:
        """Return the angles' cosines and sines for new tokens, once a forward pass."""
        return None

    def bias(self, q_positions: Tensor, k_positions: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Return what is added to the scores, (1 or B, H, T, S), once a forward pass."""
        return None

    def scores(self, q: Tensor, scores: Tensor, layer: int, signal: "Signal") -> Tensor:
        """Return scores (B, H, T, S) changed by a rule that reads q (B, H, T, D); content-dependent schemes only."""
        return scores

    @property
    def reads_content(self) -> bool:
        """Say whether `scores` is overridden, which rules out every fused attention kernel."""
        return type(self).scores is not PositionScheme.scores
