"""Loss at several lengths: each target once, the same targets at every length, against brute force in float64."""

import numpy as np
import pytest
import torch

from experiments.text import Amount, cut, each_with_its_context, losses_of, text_measures, tokens_read
from tests.conftest import loud_model, tiny_config
from training.hardware import Hardware

CPU = Hardware(torch.device("cpu"), "fp32")
LENGTHS = (8, 12, 32)
AMOUNT = Amount(spans=3, window_spans=2, control_every=2)
IDS = np.random.default_rng(0).integers(0, 61, 1000).astype(np.uint16)


def model_of(position, context=64):
    return loud_model(tiny_config(position, context=context))


def surprise(model, before, target):
    """-ln p of one token behind some others, from one forward pass of their own."""
    with torch.no_grad():
        return -model(torch.tensor([before]))[0, -1].log_softmax(-1)[target].item()


def measured(model, lengths=LENGTHS, amount=AMOUNT):
    return {(found.measure, found.length, found.x): found for found in text_measures(model, IDS, lengths, amount, CPU)}


def spans_of(count, longest=32):
    available = (len(IDS) - 1) // longest
    starts = [number * available // count * longest for number in range(count)]
    return [IDS[start : start + longest + 1].astype(int).tolist() for start in starts]


@pytest.mark.parametrize("position", ["rope", "alibi", "nope"])
@pytest.mark.parametrize("length", LENGTHS)
def test_the_same_targets_are_scored_at_every_length_behind_just_the_tokens_that_end_there(position, length):
    model = model_of(position)
    losses = []
    for span in spans_of(3):
        text = span[32 - length : 33]  # the last `length` tokens and the one behind them
        for place in range(length - 4, length):  # the last half training length of targets
            losses.append(surprise(model, text[: place + 1], text[place + 1]))
    found = measured(model)["same_targets_loss", length, None]
    assert found.count == len(losses) == 12
    assert found.value == pytest.approx(np.mean(losses), abs=1e-9)


def test_the_targets_are_the_same_tokens_at_every_length():
    texts = np.array(spans_of(3))
    targets = [texts[:, 32 - length :][:, 1:][:, -4:].tolist() for length in LENGTHS]
    assert targets[0] == targets[1] == targets[2]


def test_the_control_gives_each_target_exactly_the_training_length_of_context():
    model = model_of("alibi")
    losses = [surprise(model, span[t - 8 : t], span[t]) for span in spans_of(3) for t in (30, 32)]
    found = measured(model)["control_loss", 8, None]
    assert found.count == len(losses)
    assert found.value == pytest.approx(np.mean(losses), abs=1e-9)


def test_the_subset_has_the_targets_of_the_control():
    model = model_of("rope")
    losses = [surprise(model, span[20:t], span[t]) for span in spans_of(3) for t in (30, 32)]
    assert measured(model)["same_targets_subset_loss", 12, None].value == pytest.approx(np.mean(losses), abs=1e-9)


@pytest.mark.parametrize("length", LENGTHS)
def test_windows_without_overlap_score_each_token_once(length):
    model = model_of("rope")
    losses = []
    for span in spans_of(2):
        for start in range(0, 32 - length + 1, length):
            losses += [surprise(model, span[start : t + 1], span[t + 1]) for t in range(start, start + length)]
    found = measured(model)["windows_loss", length, None]
    assert found.count == len(losses)
    assert found.value == pytest.approx(np.mean(losses), abs=1e-9)


def test_the_loss_by_position_is_that_of_the_longest_length():
    model = model_of("nope")
    found = measured(model)
    for position in (0, 7, 31):
        losses = [surprise(model, span[: position + 1], span[position + 1]) for span in spans_of(3)]
        assert found["by_position_loss", 32, float(position)].value == pytest.approx(np.mean(losses), abs=1e-9)


def test_beyond_a_learned_table_the_loss_is_undefined_and_the_control_is_not():
    found = measured(model_of("learned", context=8))
    assert found["same_targets_loss", 8, None].value is not None
    assert all(
        found[measure, 12, None] == (measure, None, 12, 0, None) for measure in ("windows_loss", "same_targets_loss")
    )
    assert found["control_loss", 8, None].value is not None
    assert not [place for place in found if place[0] == "by_position_loss"]


def test_beyond_the_places_of_randomised_positions_the_loss_is_undefined_too():
    found = measured(loud_model(tiny_config("rope", context=8, random_positions=16)))
    assert found["same_targets_loss", 12, None].value is not None
    assert found["same_targets_loss", 32, None].value is None


def test_the_number_of_rows_at_once_changes_nothing(monkeypatch):
    model, texts = model_of("rope"), np.array(spans_of(8))
    whole = losses_of(model, texts, CPU)
    monkeypatch.setattr("experiments.text.TOKENS_AT_ONCE", 33)
    assert np.abs(losses_of(model, texts, CPU) - whole).max() < 1e-9


def test_the_control_is_there_where_no_length_is_longer_than_the_training_length():
    model = model_of("rope")
    span = [IDS[start : start + 13].astype(int).tolist() for start in (n * 83 // 3 * 12 for n in range(3))]
    losses = [surprise(model, each[t - 8 : t], each[t]) for each in span for t in (10, 12)]
    assert measured(model, (8,))["control_loss", 8, None].value == pytest.approx(np.mean(losses), abs=1e-9)


def test_text_that_no_window_covers_is_left_out():
    texts = np.arange(2 * 33).reshape(2, 33)
    assert cut(texts, 12)[:, 0].tolist() == [0, 33, 12, 45]
    assert each_with_its_context(texts, 8, 4)[0, -1].tolist() == list(range(24, 33))


def test_the_estimate_counts_the_tokens_that_are_read(monkeypatch):
    read = []
    model = model_of("rope")
    real = type(model).hidden
    monkeypatch.setattr(type(model), "hidden", lambda self, tokens: read.append(tokens.numel()) or real(self, tokens))
    measured(model, (8, 16, 32))
    assert sum(read) == tokens_read((8, 16, 32), AMOUNT)
