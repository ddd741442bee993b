"""What runs against the clock. Each function prepares something and returns a `Measurement` of it.

These run in processes of their own (`served.py`), and against the network and training of whichever tree is measured:
so they use nothing of the project but what a person using it would.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class Measurement(NamedTuple):
    """Something that can be measured again and again: `rate` returns an amount a second. `notes` say what it was."""

    rate: Callable[[], float]
    notes: dict[str, Any]


def repeated(work: Callable[[], object], amount: float, seconds: float) -> Callable[[], float]:
    """Return a function that does the work again until `seconds` are over, and says how much was done a second."""

    def rate() -> float:
        done, begin = 0, time.perf_counter()
        while True:
            work()
            done += 1
            elapsed = time.perf_counter() - begin
            if elapsed >= seconds:
                return done * amount / elapsed

    return rate


def fastest(works: Sequence[Callable[[], object]], amount: float, seconds: float) -> Callable[[], float]:
    """Return a function that tries all in turn until `seconds` are over: the amount a second of the fastest try."""

    def timed(work: Callable[[], object]) -> float:
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin

    def rate() -> float:
        best, end = float("inf"), time.perf_counter() + seconds
        while best == float("inf") or time.perf_counter() < end:
            best = min(best, *(timed(work) for work in works))
        return amount / best

    return rate


def wait() -> None:
    """Wait until the accelerator, if there is one, has done what it was given."""
    import torch

    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
