"""Positions in the scores: a number added for each head and distance, the same in every layer.

Every bias is a function of the distance q_position - k_position >= 0. Where a key is not visible, what stands there is
finite and never used.
"""

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.position.config import ALiBiConfig, FIREConfig, KERPLEConfig, SandwichConfig, T5Config
from model.position.rope import rope_frequencies
from model.position.scheme import Draw, PositionScheme

if TYPE_CHECKING:
    from model.config import ModelConfig


def distances(q_positions: Tensor, k_positions: Tensor) -> Tensor:
    """Return how far each key lies before each query, (1 or B, 1, T, S); 0 where it does not lie before it."""
    return (q_positions[:, None, :, None] - k_positions[:, None, None, :]).clamp(min=0)


def alibi_slopes(n_heads: int) -> list[float]:
    """Return 2^(-8h/n) for h = 1 .. n heads (Press et al., 2022).

    For a number that is no power of two: the slopes of the power below, then every second one, from the first, of the
    power above, in this order, as in the authors' code.
    """
    power = 2 ** math.floor(math.log2(n_heads))
    slopes = [2 ** (-8 * h / power) for h in range(1, power + 1)]
    finer = [2 ** (-4 * h / power) for h in range(1, 2 * power + 1)]
    return slopes + finer[0::2][: n_heads - power]


class ALiBi(PositionScheme):
    """-slope_h * distance (Press et al., 2022, "Train Short, Test Long")."""

    config: ALiBiConfig

    def __init__(self, config: "ModelConfig") -> None:
        super().__init__(config)
        self.slopes = alibi_slopes(config.n_heads)

    def bias(self, q_positions: Tensor, k_positions: Tensor, dtype: torch.dtype) -> Tensor:
        slopes = torch.tensor(self.slopes, dtype=dtype, device=q_positions.device)
        return -slopes[:, None, None] * distances(q_positions, k_positions).to(dtype)


def t5_bucket(distance: Tensor, buckets: int, max_distance: int) -> Tensor:
    """Return the bucket of each distance >= 0: one each for the first half, then ever wider ones (Raffel et al., 2020).

    With e = buckets / 2: d below e, else e + floor(e ln(d / e) / ln(max_distance / e)), at most buckets - 1. This is
    the causal half; T5's encoder splits its buckets between the two directions.
    """
    exact = buckets // 2
    # float32 as in the published code: the borders of buckets depend on the rounding.
    wider = torch.log(distance.float().clamp(min=1) / exact) / math.log(max_distance / exact) * (buckets - exact)
    return torch.where(distance < exact, distance, (exact + wider.long()).clamp(max=buckets - 1))


class T5(PositionScheme):
    """A learned number for each head and bucket of distances (Raffel et al., 2020)."""

    config: T5Config

    def __init__(self, config: "ModelConfig") -> None:
        super().__init__(config)
        self.table = nn.Parameter(torch.empty(self.config.buckets, config.n_heads))

    def initialise(self, draw: Draw) -> None:
        draw(self.table, self.config.init_std)

    def bias(self, q_positions: Tensor, k_positions: Tensor, dtype: torch.dtype) -> Tensor:
        buckets = t5_bucket(distances(q_positions, k_positions), self.config.buckets, self.config.max_distance)
        return self.table.to(dtype)[buckets.squeeze(1)].permute(0, 3, 1, 2)  # B T S H -> B H T S


def positive(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """Return softplus of a parameter in at least float32: always above 0."""
    return F.softplus(parameter.to(dtype))


class KERPLE(PositionScheme):
    """-r1 ln(1 + r2 d) (log) or -r1 d^r2 (power), with learned r > 0 for each head (Chi et al., 2022)."""

    config: KERPLEConfig

    def __init__(self, config: "ModelConfig") -> None:
        super().__init__(config)
        self.r1, self.r2 = (nn.Parameter(torch.empty(config.n_heads)) for _ in "12")

    def initialise(self, draw: Draw) -> None:
        # Heads start apart, as ALiBi's slopes do: equal heads would get equal gradients from equal distances.
        for parameter in (self.r1, self.r2):
            draw(parameter, 0.5)

    def bias(self, q_positions: Tensor, k_positions: Tensor, dtype: torch.dtype) -> Tensor:
        r1, r2 = (positive(r, dtype)[:, None, None] for r in (self.r1, self.r2))
        d = distances(q_positions, k_positions).to(dtype)
        if self.config.form == "log":
            return -r1 * torch.log1p(r2 * d)
        # d = 0 apart: the gradient of 0^r in r is 0 * -inf. The exponent stays within 0 .. 2, the kernel's domain.
        return -r1 * torch.where(d > 0, d.clamp(min=1) ** r2.clamp(max=2), 0.0)


class FIRE(PositionScheme):
    """mlp(psi(d) / psi(max(q_position, L))), psi(x) = ln(c x + 1), c and L learned (Li et al., 2024)."""

    config: FIREConfig

    def __init__(self, config: "ModelConfig") -> None:
        super().__init__(config)
        self.rise = nn.Parameter(torch.empty(self.config.width))
        self.offset = nn.Parameter(torch.empty(self.config.width))
        self.mix = nn.Parameter(torch.empty(config.n_heads, self.config.width))
        # Learned as logarithms of factors on where they start, so that a step changes either by a share of itself.
        self.log_c, self.log_threshold = (nn.Parameter(torch.zeros(())) for _ in "cL")

    def initialise(self, draw: Draw) -> None:
        draw(self.rise, 1.0)
        # At offset 0 a unit that falls would be off at every x >= 0, for good, and the others one straight line.
        draw(self.offset, 1.0)
        draw(self.mix, self.config.width**-0.5)

    def bias(self, q_positions: Tensor, k_positions: Tensor, dtype: torch.dtype) -> Tensor:
        c = self.config.c * self.log_c.to(dtype).exp()
        threshold = self.config.threshold * self.log_threshold.to(dtype).exp()
        reach = torch.maximum(q_positions.to(dtype)[:, None, :, None], threshold)
        x = torch.log1p(c * distances(q_positions, k_positions).to(dtype)) / torch.log1p(c * reach)  # (B, 1, T, S)
        hidden = torch.relu(x[..., None] * self.rise.to(dtype) + self.offset.to(dtype))
        return (hidden @ self.mix.to(dtype).T).squeeze(1).permute(0, 3, 1, 2)  # B T S H -> B H T S


class Sandwich(PositionScheme):
    """(sum over i of cos(d / base^(2i/w)) - w/2) / ratio_h, the product of two sinusoids without content.

    Chi et al. (2023): heads differ by the compression ratio 8h / H, for h = 1 .. H heads; w/2 is taken off so that
    distance 0 costs nothing.
    """

    config: SandwichConfig

    def __init__(self, config: "ModelConfig") -> None:
        super().__init__(config)
        self.compression = [8 * h / config.n_heads for h in range(1, config.n_heads + 1)]

    def bias(self, q_positions: Tensor, k_positions: Tensor, dtype: torch.dtype) -> Tensor:
        frequencies = rope_frequencies(self.config.base, self.config.width, q_positions.device).to(dtype)
        d = distances(q_positions, k_positions).to(dtype)
        # One wave at a time: all at once would take w/2 times the memory of the scores.
        total = torch.full_like(d, -self.config.width / 2)
        for frequency in frequencies:
            total += torch.cos(d * frequency)
        return total / torch.tensor(self.compression, dtype=dtype, device=d.device)[:, None, None]
