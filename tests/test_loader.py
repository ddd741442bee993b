"""Windows: a pure function of (seed, row), disjoint within an epoch, and nothing at the end of the file is lost."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.loader import Windows, evaluation_windows
from model.errors import UserError


def starts_of(windows: Windows, rows: int) -> list[int]:
    """Read the first token of so many windows over ids 0, 1, 2 ...: it is where the window starts."""
    return windows.batch(0, rows)[:, 0].tolist()


def test_inputs_and_targets_are_neighbours_in_the_text() -> None:
    batch = Windows(np.arange(100, dtype=np.uint16), 10, 0).batch(3, 4)
    assert batch.shape == (4, 11)
    assert batch.dtype == np.int64
    assert (np.diff(batch, axis=1) == 1).all()


@pytest.mark.parametrize(("tokens", "context"), [(100, 10), (37, 5), (23, 11), (12, 10)])
def test_an_epoch_holds_every_disjoint_window_of_one_shift_once(tokens: int, context: int) -> None:
    windows = Windows(np.arange(tokens), context, 7)
    row = 0
    for _ in range(40):
        first = starts_of_rows(windows, row, 1)[0]
        shift = first % context
        expected = list(range(shift, tokens - context, context))
        found = starts_of_rows(windows, row, len(expected))
        assert sorted(found) == expected
        row += len(expected)


def starts_of_rows(windows: Windows, first: int, count: int) -> list[int]:
    return windows.rows(np.arange(first, first + count))[:, 0].tolist()


def test_epochs_differ_in_shift_and_order() -> None:
    windows = Windows(np.arange(1000), 10, 0)
    some = [tuple(starts_of_rows(windows, 99 * epoch, 99)) for epoch in range(5)]
    assert len(set(some)) == 5
    assert len({starts[0] % 10 for starts in some}) > 1
    assert all(list(starts) != sorted(starts) for starts in some)


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 3), st.integers(2, 60), st.integers(0, 60))
def test_a_row_does_not_depend_on_what_was_read_before(seed: int, tokens: int, row: int) -> None:
    ids = np.arange(tokens)
    read = Windows(ids, min(7, tokens - 1), seed)
    many = read.rows(np.arange(61))
    fresh = Windows(ids, min(7, tokens - 1), seed)
    assert np.array_equal(fresh.rows(np.array([row]))[0], many[row])
    assert np.array_equal(read.rows(np.array([row]))[0], many[row])


def test_the_rows_of_a_run_are_the_same_however_a_step_is_cut() -> None:
    windows = Windows(np.arange(200), 9, 5)
    sixes = np.concatenate([windows.batch(step, 6) for step in range(10)])
    fours = np.concatenate([windows.batch(step, 4) for step in range(15)])
    assert np.array_equal(sixes, fours)


def test_another_seed_is_another_order_and_the_same_seed_the_same() -> None:
    ids = np.arange(1000)
    assert starts_of(Windows(ids, 10, 1), 50) == starts_of(Windows(ids, 10, 1), 50)
    one, two = (np.array(starts_of(Windows(ids, 10, seed), 50)) for seed in (1, 2))
    assert one[0] % 10 != two[0] % 10  # the shift
    assert (one // 10 != two // 10).any()  # the order


def test_the_first_windows_of_a_seed_stay_what_they_are() -> None:
    # Pinned: another order would make old runs resume on other text.
    assert starts_of(Windows(np.arange(100), 10, 0), 9) == [45, 55, 25, 65, 35, 85, 75, 5, 15]


@pytest.mark.parametrize("tokens", [7, 8])
def test_a_text_no_longer_than_the_context_is_refused_with_both_numbers_and_the_split(tokens: int) -> None:
    for read in (
        lambda: Windows(np.arange(tokens), 8, 0, "train"),
        lambda: evaluation_windows(np.arange(tokens), 8, split="train"),
    ):
        with pytest.raises(UserError, match=rf"train split has {tokens} tokens, .* context 8 needs 9"):
            read()


def test_one_token_more_than_the_context_is_one_window() -> None:
    assert Windows(np.arange(9), 8, 0).batch(5, 2).tolist() == [list(range(9))] * 2
    assert evaluation_windows(np.arange(9), 8).tolist() == [list(range(9))]


@pytest.mark.parametrize("tokens", range(9, 40))
def test_the_last_token_is_used_as_a_target(tokens: int) -> None:
    assert Windows(np.arange(tokens), 8, 0).batch(0, 400).max() == tokens - 1


def test_a_row_far_into_a_long_run_over_a_tiny_text_is_found_quickly() -> None:
    assert Windows(np.arange(10), 8, 0).batch(100_000, 16).shape == (16, 9)


# --- Evaluation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [9, 10, 16, 17, 18, 100])
def test_evaluation_scores_each_target_once_from_the_front(tokens: int) -> None:
    targets = evaluation_windows(np.arange(tokens), 8)[:, 1:].ravel()
    assert targets.tolist() == list(range(1, 1 + (tokens - 1) // 8 * 8))


@pytest.mark.parametrize("count", [1, 2, 3, 7, 12, 13])
def test_some_evaluation_windows_are_spread_over_the_file(count: int) -> None:
    windows = evaluation_windows(np.arange(100, dtype=np.uint16), 8, count)
    starts = windows[:, 0].tolist()
    assert windows.dtype == np.int64
    assert len(starts) == min(count, 12)
    assert all(start % 8 == 0 for start in starts)
    gaps = np.diff([*starts, 96])
    assert gaps.min() >= 8
    assert gaps.max() - gaps.min() <= 8
