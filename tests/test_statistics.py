"""Differences paired by seed: against scipy's own tests, hand-worked examples, and simulation."""

import math

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats  # type: ignore[import-untyped]

from experiments.statistics import (
    Comparison,
    compare_pairs,
    compare_to_reference,
    holm,
    interval,
    smallest_difference,
    tokens_to,
)

NOTHING_TESTED = (None, None, None, None)  # low, high, p, adjusted


def by_seed(values: list[float] | NDArray[np.float64]) -> dict[int, float | None]:
    return {seed: float(value) for seed, value in enumerate(values)}


def only(values: dict[str, dict[int, float | None]]) -> Comparison:
    (found,) = compare_to_reference(values, "learned")
    return found


def untested(found: Comparison) -> bool:
    return (found.low, found.high, found.p, found.adjusted) == NOTHING_TESTED


# --- one arm against the reference


def test_interval_and_p_are_those_of_scipys_paired_t_test() -> None:
    draw = np.random.default_rng(0)
    rope, learned = draw.normal(3.1, 0.05, 5), draw.normal(3.15, 0.05, 5)
    found = only({"learned": by_seed(learned), "rope": by_seed(rope)})
    truth = stats.ttest_rel(rope, learned)
    bounds = truth.confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((bounds.low, bounds.high), rel=1e-12)
    assert found.p == pytest.approx(truth.pvalue, rel=1e-10)
    assert found.adjusted == found.p
    assert found.mean == pytest.approx(rope.mean(), rel=1e-14)
    assert found.difference == pytest.approx((rope - learned).mean(), rel=1e-12)
    assert found.sd == pytest.approx(stats.tstd(rope - learned), rel=1e-12)
    assert found.n == 5


def test_runs_are_paired_by_seed_and_not_by_their_order() -> None:
    learned: dict[int, float | None] = {0: 3.0, 1: 4.0, 2: 5.0}
    rope: dict[int, float | None] = {2: 4.9, 0: 2.9, 1: 3.8}
    found = only({"learned": learned, "rope": rope})
    assert found.difference == pytest.approx(-0.4 / 3)
    assert found.sd == pytest.approx(math.sqrt(1 / 300))


def test_a_seed_that_one_arm_lacks_makes_no_pair() -> None:
    found = only({"learned": by_seed([3.0, 3.1, 3.2, 9.0]), "rope": by_seed([2.9, 3.1, 3.3])})
    assert found.n == 3
    assert found.difference == pytest.approx(0.0, abs=1e-15)


def test_a_planted_gap_is_found_and_its_side_is_said() -> None:
    draw = np.random.default_rng(1)
    seeds = draw.normal(3.2, 0.2, 5)  # shared by the arms: pairing takes it out
    arms = {"learned": seeds, "rope": seeds - 0.3, "nope": seeds + 0.3, "twin": seeds}
    values = {arm: by_seed(mean + draw.normal(0, 0.02, 5)) for arm, mean in arms.items()}
    verdicts = {found.arm: found.verdict for found in compare_to_reference(values, "learned")}
    assert verdicts == {"rope": "lower than learned", "nope": "higher than learned", "twin": "no difference shown"}


def test_the_verdict_follows_from_the_adjusted_p_and_not_from_the_interval() -> None:
    draw = np.random.default_rng(3)
    values = {f"arm{i}": by_seed(draw.normal(0, 1, 5)) for i in range(40)}
    values |= {"learned": by_seed([0.1, -0.2, 0.3, 0.0, 0.2])}
    found = compare_to_reference(values, "learned")
    assert any(each.p is not None and each.p < 0.05 for each in found)
    assert {each.verdict for each in found} == {"no difference shown"}


def test_the_arms_keep_their_order_and_the_reference_is_not_among_them() -> None:
    values = {"rope": by_seed([1, 2, 3.5]), "learned": by_seed([2, 2.5, 3]), "alibi": by_seed([2, 9, 4])}
    assert [found.arm for found in compare_to_reference(values, "learned")] == ["rope", "alibi"]


def test_equal_arms_differ_by_exactly_0_without_a_test() -> None:
    values = by_seed([3.1, 3.2, 0.1 + 0.2])
    found = only({"learned": values, "twin": dict(values)})
    assert (found.difference, found.low, found.high) == (0.0, 0.0, 0.0)
    assert (found.p, found.adjusted, found.verdict) == (None, None, "exactly equal")


def test_what_is_not_tested_takes_no_part_in_holm() -> None:
    learned = by_seed([3.0, 3.1, 3.3, 3.2])
    rope = by_seed([2.95, 3.0, 3.26, 3.1])
    others: dict[str, dict[int, float | None]] = {
        "twin": dict(learned),
        "lost": {**learned, 2: None},
        "early": {0: 3.0},
        "constant": by_seed([2.0, 2.1, 2.3, 2.2]),
    }
    alone = only({"learned": learned, "rope": rope})
    found = {each.arm: each for each in compare_to_reference({"learned": learned, "rope": rope, **others}, "learned")}
    assert found["rope"].adjusted == alone.p
    assert all(found[arm].p is None and found[arm].adjusted is None for arm in others)


def test_one_seed_never_names_a_winner() -> None:
    found = only({"learned": {0: 9.0}, "rope": {0: 1.0}})
    assert found.difference == -8.0
    assert found.verdict == "one seed: no verdict"
    assert untested(found)
    assert only({"learned": {0: 9.0}, "twin": {0: 9.0}}).verdict == "one seed: no verdict"


def test_an_arm_that_is_not_measured_is_said_to_be_so() -> None:
    found = only({"learned": by_seed([1.0, 2.0]), "rope": {}})
    assert found == Comparison("rope", 0, None, verdict="not measured")
    assert compare_to_reference({"rope": by_seed([1.0, 2.0])}, "learned")[0].verdict == "not measured"


def test_a_diverged_seed_leaves_its_arm_without_an_interval() -> None:
    found = only({"learned": by_seed([3.0, 3.1, 3.2]), "rope": {0: 2.9, 1: None, 2: 3.0}})
    assert found.verdict == "1 of 3 diverged"
    assert untested(found)
    assert found.mean == pytest.approx(2.95)


def test_a_diverged_seed_of_the_reference_leaves_every_arm_without_an_interval() -> None:
    learned: dict[int, float | None] = {0: 3.0, 1: None, 2: None}
    found = compare_to_reference({"learned": learned, "rope": by_seed([1, 2, 3])}, "learned")
    assert found[0].verdict == "2 of 3 diverged in learned"
    assert untested(found[0])


def test_an_arm_all_of_whose_seeds_diverged_has_no_number_at_all() -> None:
    found = only({"learned": by_seed([3.0, 3.1]), "rope": {0: None, 1: None}})
    assert found == Comparison("rope", 0, None, verdict="2 of 2 diverged")


@pytest.mark.parametrize(("gap", "side"), [(-0.1, "lower"), (0.7, "higher")])
def test_a_gap_without_spread_is_said_and_not_tested(gap: float, side: str) -> None:
    learned = [3.1, 3.2, 3.7]  # the differences agree but for rounding
    found = only({"learned": by_seed(learned), "rope": by_seed([value + gap for value in learned])})
    assert found.verdict == f"{side} by the same amount in every seed: no test"
    assert found.difference == pytest.approx(gap)
    assert untested(found)


def test_the_smallest_real_spread_is_tested() -> None:
    found = only({"learned": by_seed([3.0, 3.0, 3.0]), "rope": by_seed([3.0, 3.0, 3.0 + 1e-7])})
    assert found.p == pytest.approx(stats.ttest_1samp([0.0, 0.0, 1e-7], 0.0).pvalue, rel=1e-6)


def test_pairs_may_each_have_their_own_second_side() -> None:
    draw = np.random.default_rng(2)
    sides = {arm: (draw.normal(3, 1, 4), draw.normal(4, 1, 4)) for arm in ("rope", "nope")}
    found = compare_pairs({arm: (by_seed(a), by_seed(b)) for arm, (a, b) in sides.items()}, "the control")
    assert [each.p for each in found] == pytest.approx([stats.ttest_rel(a, b).pvalue for a, b in sides.values()])


# --- several arms


def test_holm_agrees_with_a_hand_worked_example() -> None:
    # .01, .02, .03, .04 by rank: 4 x .01, 3 x .02, then 2 x .03 = .06, then 1 x .04, which may not fall below .06.
    assert holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.9, 0.6]) == [1.0, 1.0]
    assert holm([0.03]) == [0.03]
    assert holm([]) == []


def test_holm_agrees_with_its_definition_by_brute_force() -> None:
    """Adjusted p = the smallest level at which Holm's step-down procedure rejects."""
    p = np.random.default_rng(4).uniform(0, 0.3, 6)
    levels = np.linspace(1e-4, 1, 5000)
    first = [next((level for level in levels if _step_down(p, level)[i]), 1.0) for i in range(6)]
    assert holm(list(p)) == pytest.approx(first, abs=2.1e-4)


def _step_down(p: NDArray[np.float64], level: float) -> list[bool]:
    rejected = [False] * len(p)
    for rank, i in enumerate(np.argsort(p)):
        if p[i] > level / (len(p) - rank):
            break
        rejected[i] = True
    return rejected


def test_the_interval_covers_the_true_difference_19_times_in_20() -> None:
    draw = np.random.default_rng(5)
    gap, trials = 0.1, 3000
    covered = 0
    for _ in range(trials):
        shared = draw.normal(3, 0.2, 5)
        learned, rope = shared + draw.normal(0, 0.05, 5), shared + gap + draw.normal(0, 0.05, 5)
        found = only({"learned": by_seed(learned), "rope": by_seed(rope)})
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= gap <= found.high
    error = math.sqrt(0.05 * 0.95 / trials)
    assert covered / trials == pytest.approx(0.95, abs=3 * error)


def test_with_eight_arms_and_no_difference_one_is_named_at_most_1_time_in_20() -> None:
    """Holm holds the family-wise error for any dependence: here all arms share the reference's noise."""
    draw = np.random.default_rng(6)
    trials, named, named_raw = 1000, 0, 0
    for _ in range(trials):
        values = {arm: by_seed(draw.normal(3, 0.05, 5)) for arm in ("learned", *"abcdefgh")}
        found = compare_to_reference(values, "learned")
        named += any(each.verdict != "no difference shown" for each in found)
        named_raw += any(each.p is not None and each.p < 0.05 for each in found)
    error = math.sqrt(0.05 * 0.95 / trials)
    assert named / trials <= 0.05 + 3 * error
    assert named / trials > 0.02  # not merely deaf
    assert named_raw / trials > 0.15  # what it would be without Holm


# --- what n runs can show


def test_the_smallest_difference_is_found_four_times_in_five() -> None:
    draw = np.random.default_rng(7)
    for n in (3, 5, 10):
        gap = smallest_difference(0.5, n)
        assert gap is not None
        rows = draw.normal(gap, 0.5, (20_000, n))
        assert np.mean(stats.ttest_1samp(rows, 0.0, axis=1).pvalue < 0.05) == pytest.approx(0.8, abs=0.012)


def test_the_smallest_difference_under_holm_is_that_of_its_first_step() -> None:
    draw = np.random.default_rng(8)
    gap = smallest_difference(1.0, 5, tests=8)
    assert gap is not None
    rows = draw.normal(gap, 1.0, (20_000, 5))
    assert np.mean(stats.ttest_1samp(rows, 0.0, axis=1).pvalue < 0.05 / 8) == pytest.approx(0.8, abs=0.012)


def test_the_smallest_difference_is_a_multiple_of_the_spread_and_needs_two_runs() -> None:
    one, three = smallest_difference(1.0, 5), smallest_difference(3.0, 5)
    assert one is not None
    assert three == pytest.approx(3 * one)
    assert smallest_difference(0.0, 5) == 0.0
    assert smallest_difference(1.0, 1) is None
    # As many runs as Lehr's rule asks for a difference of half a standard deviation: about 32 (8 / .5²).
    assert smallest_difference(1.0, 32) == pytest.approx(0.5, abs=0.02)


# --- intervals of a mean, tokens to a loss


def test_the_interval_of_a_mean_is_students() -> None:
    values = [3.0, 3.2, 3.1, 3.6]
    truth = stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
    assert interval(values) == pytest.approx((truth.low, truth.high), rel=1e-12)
    assert interval([3.0]) is None


@pytest.mark.parametrize(
    ("target", "tokens"),
    [(7.0, 0.0), (6.0, 0.0), (5.0, 50.0), (4.0, 100.0), (3.5, 150.0), (3.25, 200 + 100 * 2 / 3), (2.0, None)],
)
def test_tokens_to_a_loss_are_those_where_the_curve_first_reaches_it(target: float, tokens: float | None) -> None:
    curve = [(0.0, 6.0), (100.0, 4.0), (150.0, 3.5), (200.0, 3.75), (300.0, 3.0)]
    assert tokens_to(curve, target) == pytest.approx(tokens)


def test_an_empty_curve_reaches_nothing() -> None:
    assert tokens_to([], 3.0) is None
