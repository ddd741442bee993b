"""Runs paired by seed: differences to a reference, what they show, and what n runs could show at all.

Student (1908) for the interval, Holm (1979) for several arms, the noncentral t distribution for power.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import special  # type: ignore[import-untyped]

LEVEL = 0.05
POWER = 0.8
EQUAL = "exactly equal"  # the verdict on pairs that do not differ at all

BySeed = Mapping[int, float | None]  # None: the run diverged
Curve = Sequence[tuple[float, float]]  # tokens seen, loss


class Comparison(NamedTuple):
    """An arm against another, paired by seed; None where there is no such number.

    `adjusted` is p after Holm over the arms compared together; the verdict follows from it alone.
    """

    arm: str
    n: int  # pairs
    mean: float | None  # of all the arm's own seeds that did not diverge
    difference: float | None = None  # mean over the pairs
    low: float | None = None  # raw 95 % interval of the difference
    high: float | None = None
    sd: float | None = None  # of the differences
    p: float | None = None
    adjusted: float | None = None
    verdict: str = ""


def compare_to_reference(values: Mapping[str, BySeed], reference: str) -> list[Comparison]:
    """Compare every other arm with the reference; Holm's family is the arms of this one table."""
    base = values.get(reference, {})
    return compare_pairs({arm: (own, base) for arm, own in values.items() if arm != reference}, reference)


def compare_pairs(pairs: Mapping[str, tuple[BySeed, BySeed]], against: str) -> list[Comparison]:
    """Compare the two sides of each pair; `against` is what the verdicts call the second side."""
    raw = [_compare(arm, own, other, against) for arm, (own, other) in pairs.items()]
    adjusted = iter(holm([each.p for each in raw if each.p is not None]))
    return [each if each.p is None else _judged(each, next(adjusted), against) for each in raw]


def holm(p_values: Sequence[float]) -> list[float]:
    """Return Holm's adjusted p: the i-th smallest of m (from 0) times m - i, never falling, at most 1."""
    p = np.asarray(p_values, dtype=float)
    order = np.argsort(p, kind="stable")
    steps = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1))
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(steps, 1.0)
    return [float(each) for each in adjusted]


def interval(values: Sequence[float] | NDArray[np.float64]) -> tuple[float, float] | None:
    """Return the 95 % t interval of a mean, mean ± t(n - 1) sd / √n; None for fewer than two values."""
    n = len(values)
    if n < 2:
        return None
    half = float(special.stdtrit(n - 1, 1 - LEVEL / 2) * np.std(values, ddof=1)) / math.sqrt(n)
    mean = float(np.mean(values))
    return mean - half, mean + half


def smallest_difference(sd: float, n: int, tests: int = 1) -> float | None:
    """Return the difference that n pairs show with 80 % power in a two-sided t test at .05 / tests; None for n < 2.

    `sd` is the standard deviation of the paired differences; with sd = 1 the answer is a multiple of it. With
    several `tests` it is the difference that the first step of Holm's procedure finds. It solves
    P(T > critical) = .8 for the shift of a noncentral t, δ √n / sd.
    """
    if n < 2:
        return None
    critical = float(special.stdtrit(n - 1, 1 - LEVEL / tests / 2))
    # Rejecting on the wrong side is no find; it has a probability below 1e-5 at this power.
    return sd * float(special.nctdtrinc(n - 1, 1 - POWER, critical)) / math.sqrt(n)


def tokens_to(curve: Curve, target: float) -> float | None:
    """Return the tokens at which a curve first reaches a loss, linear between its points; None: not reached."""
    before: tuple[float, float] | None = None
    for tokens, loss in curve:
        if loss <= target:
            return tokens if before is None else _crossing(before, (tokens, loss), target)
        before = tokens, loss
    return None


def _crossing(before: tuple[float, float], after: tuple[float, float], target: float) -> float:
    share = (before[1] - target) / (before[1] - after[1])
    return before[0] + share * (after[0] - before[0])


def _compare(arm: str, own: BySeed, other: BySeed, against: str) -> Comparison:
    """Compare one arm before Holm: the verdict stands already where nothing is tested."""
    pairs = [(own[seed], other[seed]) for seed in sorted(own.keys() & other.keys())]
    both = np.array([(a, b) for a, b in pairs if a is not None and b is not None], dtype=float).reshape(-1, 2)
    differences = both[:, 0] - both[:, 1]
    found = Comparison(arm, len(differences), _mean(own), _mean(dict(enumerate(differences.tolist()))))
    if lost := _diverged(own, "") or _diverged(other, f" in {against}"):
        return found._replace(verdict=lost)
    if found.n < 2:
        return found._replace(verdict="one seed: no verdict" if found.n else "not measured")
    if not differences.any():
        return found._replace(low=0.0, high=0.0, sd=0.0, verdict=EQUAL)
    if np.ptp(differences) <= 8 * np.finfo(float).eps * np.abs(both).max():
        # Without spread there is nothing to measure the difference by; t would be infinite, and p 0 from two seeds.
        return found._replace(sd=0.0, verdict=f"{_side(differences[0])} by the same amount in every seed: no test")
    return _tested(found, differences)


def _tested(found: Comparison, differences: NDArray[np.float64]) -> Comparison:
    """Add interval and raw p of the paired t test."""
    sd = float(np.std(differences, ddof=1))
    t = float(differences.mean()) / (sd / math.sqrt(found.n))
    bounds = interval(differences)
    assert bounds is not None
    return found._replace(low=bounds[0], high=bounds[1], sd=sd, p=float(2 * special.stdtr(found.n - 1, -abs(t))))


def _judged(found: Comparison, adjusted: float, against: str) -> Comparison:
    assert found.difference is not None
    shown = f"{_side(found.difference)} than {against}" if adjusted < LEVEL else "no difference shown"
    return found._replace(adjusted=adjusted, verdict=shown)


def _side(difference: float) -> str:
    return "lower" if difference < 0 else "higher"


def _diverged(values: BySeed, where: str) -> str:
    lost = sum(value is None for value in values.values())
    return f"{lost} of {len(values)} diverged{where}" if lost else ""


def _mean(values: BySeed) -> float | None:
    known = [value for value in values.values() if value is not None]
    return float(np.mean(known)) if known else None
