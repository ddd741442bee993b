"""Keys and values of the past, and which positions they hold."""

import torch
from torch import Tensor

from model.config import ModelConfig


class LayerCache:
    """One layer's keys and values, (B, G, capacity, D), of which the first `used` slots are filled."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values, self.used = keys, values, 0

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store new keys and values (B, G, T, D) and return all that are filled, (B, G, S, D)."""
        end = self.used + k.shape[2]
        self.reserve(end)
        self.keys[:, :, self.used : end] = k
        self.values[:, :, self.used : end] = v
        self.used = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def reserve(self, size: int) -> None:
        """Make room for `size` slots in all."""
        self.keys, self.values = with_room(self.keys, size, dim=2), with_room(self.values, size, dim=2)


def with_room(slots: Tensor, size: int, dim: int) -> Tensor:
    """Return `slots`, or a copy at least twice as large whose first slots are the same, when `size` does not fit."""
    capacity = slots.shape[dim]
    if size <= capacity:
        return slots
    shape = list(slots.shape)
    shape[dim] = max(size, 2 * capacity)
    larger = slots.new_zeros(shape)
    larger.narrow(dim, 0, capacity).copy_(slots)
    return larger


class Cache:
    """The past of a batch of rows: what attention needs of tokens that were already read.

    `length` is the declared length of the whole call, prompt and new tokens. Angles that depend on a length use this
    one, so that the keys stored first and those stored last were turned by the same rule. `capacity` is the room that
    is there from the start (none: length); the cache grows when it is outgrown.
    """

    def __init__(
        self,
        config: ModelConfig,
        batch: int,
        length: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        capacity: int | None = None,
    ) -> None:
        capacity = length if capacity is None else capacity
        shape = (batch, config.kv_heads, capacity, config.head_dim)
        self.length = length
        self.layers = [
            LayerCache(*(torch.zeros(shape, dtype=dtype, device=device) for _ in "kv")) for _ in range(config.n_layers)
        ]
        self._positions = torch.full((batch, capacity), -1, device=device)
        self.used = 0

    @property
    def positions(self) -> Tensor:
        """The position that each filled slot holds, (B, S); -1 for pads."""
        return self._positions[:, : self.used]

    def append_positions(self, positions: Tensor) -> Tensor:
        """Store the positions (1 or B, T) of new tokens and return those of all filled slots, (B, S)."""
        end = self.used + positions.shape[1]
        self._positions = with_room(self._positions, end, dim=1)
        self._positions[:, self.used : end] = positions
        self.used = end
        return self.positions

    @property
    def all_positions(self) -> Tensor:
        """The position of every slot, (B, capacity): also of those entered ahead; -1 for pads and empty slots."""
        return self._positions

    def enter_ahead(self, positions: Tensor) -> None:
        """Enter the positions (B, N) of tokens that will come next, and make room for them everywhere.

        Slots behind `used` are not yet filled; what was entered there before is forgotten.
        """
        end = self.used + positions.shape[1]
        self._positions = with_room(self._positions, end, dim=1)
        self._positions[:, self.used : end] = positions
        self._positions[:, end:] = -1
        for layer in self.layers:
            layer.reserve(end)

    def advance(self) -> None:
        """Count one more slot as filled, in every layer: its position was entered ahead, keys and values are there."""
        self.used += 1
        for layer in self.layers:
            layer.used = self.used
