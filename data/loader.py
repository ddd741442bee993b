"""Which windows of a token file are read when: pure functions, so there is no reader whose state could be lost."""

from functools import lru_cache
from typing import Protocol

import numpy as np

from model.errors import UserError


class Rows(Protocol):
    """What a run trains on: rows of one width, each a pure function of its number."""

    def rows(self, numbers: np.ndarray) -> np.ndarray:
        """Return these rows of the run as int64."""
        ...


class Windows:
    """Training windows: `context` inputs and the token after them, in a seeded order that never ends.

    Rows are numbered from 0 over the whole run. Epoch e holds the disjoint windows that fit after a seeded shift, in
    seeded order; the next row after its last one is the first of epoch e + 1. So a row depends on (seed, number) alone
    and reading on after a stop needs no more than the number of the step.
    """

    def __init__(self, ids: np.ndarray, context: int, seed: int, split: str = "train") -> None:
        _refuse_too_short(ids, context, split)
        self.ids, self.context, self.seed = ids, context, seed
        # Any shift below this leaves room for at least one window.
        self._shifts = min(context, len(ids) - context)
        self._ends = np.zeros(0, dtype=np.int64)
        # Only a memory of what was computed last; the results do not depend on it.
        self._order = lru_cache(maxsize=2)(self._order_of_epoch)

    def batch(self, step: int, rows: int) -> np.ndarray:
        """Return the windows (rows, context + 1) of a step as int64; inputs are [:, :-1], targets are [:, 1:]."""
        return self.rows(rows_of_step(step, rows))

    def rows(self, numbers: np.ndarray) -> np.ndarray:
        """Return the windows (len(numbers), context + 1) of these rows of the run as int64."""
        return take(self.ids, self.starts(numbers), self.context)

    def starts(self, numbers: np.ndarray) -> np.ndarray:
        """Return where in the ids the windows of these rows start, as int64."""
        return np.array([self.start(int(number)) for number in numbers], dtype=np.int64)

    def start(self, number: int) -> int:
        """Return where in the ids the window of a row starts."""
        epoch = self._epoch(number)
        first = int(self._ends[epoch - 1]) if epoch else 0
        shift = int(self._shift(np.array([epoch]))[0])
        return shift + self.context * int(self._order(epoch)[number - first])

    def _epoch(self, number: int) -> int:
        while not len(self._ends) or number >= self._ends[-1]:
            known = len(self._ends)
            sizes = self._size(np.arange(known, 2 * known + 16))
            self._ends = np.append(self._ends, (self._ends[-1] if known else 0) + np.cumsum(sizes))
        return int(np.searchsorted(self._ends, number, side="right"))

    def _size(self, epochs: np.ndarray) -> np.ndarray:
        return (len(self.ids) - 1 - self._shift(epochs)) // self.context

    def _shift(self, epochs: np.ndarray) -> np.ndarray:
        # Hashed, not drawn: a small corpus has millions of epochs, and all their sizes are needed to find a row.
        return (mixed(epochs, self.seed) % np.uint64(self._shifts)).astype(np.int64)

    def _order_of_epoch(self, epoch: int) -> np.ndarray:
        size = int(self._size(np.array([epoch]))[0])
        return np.random.default_rng([self.seed, epoch]).permutation(size)


def rows_of_step(step: int, rows: int) -> np.ndarray:
    """Return the numbers of the rows that a step of so many rows reads, counted over the whole run."""
    return np.arange(step * rows, (step + 1) * rows)


def evaluation_windows(
    ids: np.ndarray, context: int, count: int | None = None, split: str = "validation"
) -> np.ndarray:
    """Return disjoint windows (n, context + 1) in the order of the file as int64: no target is scored twice.

    Of more than `count` windows, `count` are taken, evenly spread over the file. The last tokens, too few for a
    window, are not scored.
    """
    _refuse_too_short(ids, context, split)
    available = (len(ids) - 1) // context
    wanted = available if count is None else min(count, available)
    return take(ids, np.arange(wanted) * available // wanted * context, context)


def take(ids: np.ndarray, starts: np.ndarray, context: int) -> np.ndarray:
    """Return the windows (len(starts), context + 1) that begin at `starts`, as int64."""
    return np.stack([ids[start : start + context + 1] for start in starts.tolist()]).astype(np.int64)


def mixed(numbers: np.ndarray, seed: int) -> np.ndarray:
    """Return a 64-bit hash of each (number, seed), the finisher of SplitMix64 (Steele and others, 2014)."""
    with np.errstate(over="ignore"):  # arithmetic modulo 2^64 is what is wanted
        z = numbers.astype(np.uint64) + np.uint64((seed + 1) * 0x9E3779B97F4A7C15 % 2**64)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            z = (z ^ (z >> np.uint64(shift))) * np.uint64(factor)
        return z ^ (z >> np.uint64(31))


def _refuse_too_short(ids: np.ndarray, context: int, split: str) -> None:
    if len(ids) <= context:
        raise UserError(
            f"the {split} split has {len(ids)} tokens, and a window of context {context} needs {context + 1}: "
            "bring more text or lower model.context"
        )
