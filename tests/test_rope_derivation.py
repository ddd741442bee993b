"""The study note's derivation, read from top to bottom as a proof in float64."""

import itertools
import math

import pytest
import torch

from model.attention import visible
from model.position import derivation
from model.position.rope import rope_frequencies, rope_tables, rotate
from tests.conftest import loud_model, random_tokens, tiny_config

D = 8
EXACT = {"rtol": 0.0, "atol": 1e-12}
generator = torch.Generator().manual_seed(0)
q, k = torch.randn(2, D, dtype=torch.float64, generator=generator)
FREQUENCIES = rope_frequencies(10000.0, D)
FORMS = [
    derivation.complex_form,
    derivation.matrix_form,
    derivation.block_diagonal_form,
    derivation.elementwise_form,
]
every_form = pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)


def turn(x, position, base=10000.0, layout="interleaved"):
    """The network's own rotation of one vector."""
    positions = torch.tensor([position])
    cos, sin = rope_tables(positions, rope_frequencies(base, x.shape[-1]), torch.float64)
    return rotate(x, cos[0], sin[0], layout)


def phases(x):
    return torch.view_as_complex(x.view(-1, 2)).angle()


@every_form
def test_a_vector_at_position_0_stays_as_it_is(form):
    torch.testing.assert_close(form(q, 0, FREQUENCIES), q, **EXACT)


@every_form
def test_the_added_phase_does_not_depend_on_the_vector(form):
    added = [torch.polar(torch.ones(D // 2).double(), phases(form(x, 5, FREQUENCIES)) - phases(x)) for x in (q, k)]
    torch.testing.assert_close(*added, **EXACT)


@every_form
def test_the_phase_grows_in_equal_steps_of_theta(form):
    ones = torch.tensor([1.0, 0.0]).double().repeat(D // 2)
    for position in range(4):
        torch.testing.assert_close(phases(form(ones, position, FREQUENCIES)) % (2 * math.pi), position * FREQUENCIES)


@pytest.mark.parametrize("position", [0, 1, 7, 300, 8191])
def test_each_form_equals_the_one_before_and_the_network_equals_the_last(position):
    results = [form(q, position, FREQUENCIES) for form in FORMS] + [turn(q, position)]
    for before, after in itertools.pairwise(results):
        torch.testing.assert_close(after, before, **EXACT)


def test_row_vectors_take_the_transposed_matrix_as_the_note_warns():
    matrix = derivation.block_diagonal_matrix(3, FREQUENCIES)
    torch.testing.assert_close(q @ matrix.T, matrix @ q, **EXACT)
    # The note writes x R(m) for rows: with R(m) of the columns that turns backwards, with the transposed one forwards.
    torch.testing.assert_close(q @ matrix, turn(q, -3), **EXACT)
    torch.testing.assert_close(q @ matrix.T, turn(q, 3), **EXACT)


def test_the_notes_frequencies_are_ours_with_k_equal_to_2i():
    d = 64
    notes = {k: 10000.0 ** (-k / d) for k in range(0, d, 2)}
    ours = rope_frequencies(10000.0, d)
    assert [notes[2 * i] for i in range(d // 2)] == pytest.approx(ours.tolist(), rel=1e-14)


def test_the_score_depends_on_the_distance_alone():
    scores = torch.stack([turn(q, m) @ turn(k, m + 3) for m in (0, 1, 10, 1000)])
    torch.testing.assert_close(scores, (q @ turn(k, 3)).expand(4), rtol=0, atol=1e-11)


def test_the_score_of_two_turned_vectors_is_that_of_one_turned_by_the_difference():
    m, n = 11, 4
    difference = derivation.block_diagonal_matrix(n - m, FREQUENCIES)
    torch.testing.assert_close(turn(q, m) @ turn(k, n), q @ (difference @ k), **EXACT)


def test_the_score_does_change_with_the_distance():
    scores = torch.stack([q @ turn(k, n) for n in range(8)])
    assert scores.std() > 0.1


def test_turning_keeps_norms():
    norms = torch.stack([turn(q, m).norm() for m in (0, 1, 17, 4096)])
    torch.testing.assert_close(norms, q.norm().expand(4), **EXACT)


def test_turning_twice_is_turning_by_the_sum():
    R = [derivation.block_diagonal_matrix(m, FREQUENCIES) for m in (2, 5, 7)]
    torch.testing.assert_close(R[0] @ R[1], R[2], **EXACT)
    torch.testing.assert_close(turn(turn(q, 2), 5), turn(q, 7), **EXACT)


def test_turning_before_the_projection_loses_the_dependence_on_distance():
    W_q, W_k = torch.randn(2, D, D, dtype=torch.float64, generator=generator)
    after = torch.stack([turn(W_q @ q, m) @ turn(W_k @ k, m + 3) for m in (0, 1, 10)])
    before = torch.stack([(W_q @ turn(q, m)) @ (W_k @ turn(k, m + 3)) for m in (0, 1, 10)])
    assert after.std() < 1e-12
    assert before.std() > 0.1


@pytest.mark.parametrize(
    ("layout", "golden"),
    [
        ("interleaved", [-1.14264, 1.922076, 2.959851, 4.0298]),
        ("half", [-1.984111, 1.959901, 2.462378, 4.0198]),
    ],
)
def test_each_layout_gives_its_published_golden_values(layout, golden):
    # Norms and shifts hold for either layout and for some mixtures of the two; only values tell them apart.
    x = torch.tensor([1.0, 2.0, 3.0, 4.0]).double()
    assert turn(x, 1, layout=layout).tolist() == pytest.approx(golden, abs=1e-6)


def test_the_base_changes_every_frequency_but_the_first():
    slow, fast = rope_frequencies(500000.0, 64), rope_frequencies(10000.0, 64)
    assert slow[0] == fast[0] == 1.0
    assert (slow[1:] < fast[1:]).all()
    assert fast[1].item() == pytest.approx(0.7498942, abs=1e-7)
    assert fast[31].item() == pytest.approx(1.333521e-4, abs=1e-10)


def causal_or_not(model, tokens, positions):
    return model(tokens, positions)[:, -1]


def test_with_all_positions_equal_everything_is_visible():
    assert visible(torch.zeros(1, 5), torch.zeros(1, 5)).all()


def test_without_positions_and_without_a_causal_mask_attention_is_blind_to_order():
    model = loud_model(tiny_config("nope"))
    tokens = random_tokens(1, 9)
    shuffled = torch.cat((tokens[:, torch.randperm(8, generator=generator)], tokens[:, 8:]), 1)
    same = torch.zeros(1, 9, dtype=torch.long)
    torch.testing.assert_close(causal_or_not(model, shuffled, same), causal_or_not(model, tokens, same), **EXACT)


@pytest.mark.parametrize(("n_layers", "blind"), [(1, True), (2, False)])
def test_with_a_causal_mask_one_layer_is_still_blind_for_the_last_token_and_two_are_not(n_layers, blind):
    model = loud_model(tiny_config("nope", n_layers=n_layers))
    tokens = random_tokens(1, 9)
    shuffled = torch.cat((tokens[:, [3, 1, 7, 0, 2, 6, 5, 4]], tokens[:, 8:]), 1)
    difference = (causal_or_not(model, shuffled, None) - causal_or_not(model, tokens, None)).abs().max()
    assert (difference < 1e-12) == blind
    assert blind or difference > 1e-3


def test_with_rope_the_last_token_sees_the_order_in_one_layer():
    model = loud_model(tiny_config("rope", n_layers=1))
    tokens = random_tokens(1, 9)
    shuffled = torch.cat((tokens[:, [3, 1, 7, 0, 2, 6, 5, 4]], tokens[:, 8:]), 1)
    assert (model(shuffled) - model(tokens))[:, -1].abs().max() > 1e-3
