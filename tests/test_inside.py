"""What position does inside a model: every measure against brute force, and where its value is known exactly."""

import math

import numpy as np
import pytest
import torch

from experiments.inside import (
    RIDGE,
    Look,
    distance_share,
    hidden_states,
    inside,
    moments,
    probe_r2,
    sums_of,
    watched,
)
from model.attention import Signal, attend_reference, attention_weights
from model.config import ModelConfig
from model.transformer import Transformer, token_losses
from tests.conftest import ARMS, loud_model, random_tokens, tiny_config
from training.hardware import Hardware

HERE = Hardware(torch.device("cpu"), "fp32")
EXACT = {"rtol": 0.0, "atol": 1e-9}
TURNING = [name for name, arm in ARMS.items() if arm["kind"] in ("rope", "xpos")]


def measured(model, windows, measure, **options):
    """The values of one measure by (layer, head, x)."""
    found = inside(model, windows, HERE, **options)
    return {(row.layer, row.head, row.x): row.value for row in found if row.measure == measure}


def looks(model, tokens):
    """What each layer multiplies when the model reads these tokens."""
    seen = []
    with watched(model, seen.append), torch.no_grad():
        model.hidden(tokens)
    return seen


def silent(model, *projections):
    """The model with these projections set to zero in each layer."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.split(".")[-2] in projections:
                parameter.zero_()
    return model


def centred_rows(look):
    """(window, head, query, distance, score less the mean of its row) for each visible key, by loops."""
    for b, h, t in np.ndindex(*look.scores.shape[:3]):
        row = look.scores[b, h, t, : t + 1].double().numpy()
        for s in range(t + 1):
            yield b, h, t, t - s, row[s] - row.mean()


def spy(module, index=None):
    """What a module returns in the next passes, or its input of this number."""
    kept = []
    module.register_forward_hook(
        lambda _, inputs, output: kept.append((output if index is None else inputs[index]).detach())
    )
    return kept


# --- The capture -----------------------------------------------------------------------------------------------------


def check_capture(model):
    """The softmax of the scores that are seen, applied to the values, must be what each layer passes on."""
    tokens, attentions = random_tokens(2, 40), [block.self_attn for block in model.layers]
    values, mixed = [spy(a.v_proj) for a in attentions], [spy(a.o_proj, 0) for a in attentions]
    for look in looks(model, tokens):
        weights = attention_weights(look.scores, torch.ones(40, 40, dtype=torch.bool).tril())
        v = values[look.layer][0].unflatten(-1, (2, 8)).transpose(1, 2).repeat_interleave(3, dim=1)
        ours = (weights @ v).transpose(1, 2).flatten(-2)
        torch.testing.assert_close(ours, mixed[look.layer][0], **EXACT)


def test_the_scores_that_are_seen_give_each_layers_real_output(arm):
    check_capture(loud_model(tiny_config(arm)))


@pytest.mark.parametrize("kind", ["shaw", "cope", "alibi", "rope"])
def test_so_they_do_in_layers_that_the_scheme_leaves_out(kind):
    check_capture(loud_model(tiny_config({"kind": kind, "layers": [1]}, qk_norm=True)))


def test_looking_changes_neither_the_output_nor_the_model_afterwards(arm):
    model, windows = loud_model(tiny_config(arm), dtype=torch.float32).train(), random_tokens(3, 21)
    before = model(windows)
    inside(model, windows, HERE)
    assert torch.equal(model(windows), before)
    assert model.training
    assert not any("attend" in vars(module) or module._forward_pre_hooks for module in model.modules())
    assert "applies_to" not in vars(model.position)


def test_dropout_is_off_while_a_model_is_measured():
    quiet, dropping = (loud_model(tiny_config("rope", dropout=dropout)).train() for dropout in (0.0, 0.5))
    windows = random_tokens(3, 21)
    assert inside(quiet, windows, HERE) == inside(dropping, windows, HERE)


@pytest.mark.parametrize("arm", ["learned_all", "rope_log_n", "alibi", "cope"])
def test_results_depend_neither_on_the_batch_size_nor_on_the_kind_of_array(arm):
    model, windows = loud_model(tiny_config(arm), gain=3.0), random_tokens(5, 17)
    whole = inside(model, windows, HERE, rows=5)
    for other in (inside(model, windows, HERE, rows=1), inside(model, windows.numpy(), HERE, rows=3)):
        assert [row._replace(value=0) for row in other] == [row._replace(value=0) for row in whole]
        assert [row.value for row in other] == pytest.approx([row.value for row in whole], rel=1e-7, abs=1e-9)


def test_every_row_says_layer_head_length_and_tokens():
    rows = inside(loud_model(tiny_config("rope")), random_tokens(5, 21), HERE)
    assert {row.length for row in rows} == {20}
    assert {row.count for row in rows if row.measure != "probe_r2"} == {100}
    assert {row.count for row in rows if row.measure == "probe_r2"} == {40}  # windows 1 and 3
    heads = {(layer, head) for layer in range(3) for head in range(6)}
    for measure in ("attention_distance", "attention_entropy", "attention_entropy_relative", "distance_share"):
        assert [(r.layer, r.head) for r in rows if r.measure == measure and r.x is None] == sorted(heads)
    assert [r.layer for r in rows if r.measure == "loss_without_position"] == [0, 1, 2]
    assert [r.layer for r in rows if r.measure == "probe_r2"] == [0, 1, 2, 3]


# --- Distance and entropy of attention -------------------------------------------------------------------------------


def test_uniform_attention_has_the_mean_distance_of_the_past_and_the_entropy_of_its_size():
    model, windows = silent(loud_model(tiny_config("nope")), "q_proj"), random_tokens(2, 17)
    # Query t sees t + 1 keys, on average t / 2 tokens back.
    entropy = sum(math.log(t + 1) for t in range(16)) / 16
    for name, expected in (("distance", 15 / 4), ("entropy", entropy), ("entropy_relative", 1.0)):
        values = measured(model, windows, f"attention_{name}").values()
        assert list(values) == pytest.approx([expected] * 18)


def test_a_head_that_looks_at_itself_alone_has_distance_and_entropy_zero():
    model = silent(loud_model(tiny_config("alibi")), "q_proj")
    model.position.slopes = [1e4] * 6
    for measure in ("attention_distance", "attention_entropy", "attention_entropy_relative"):
        assert set(measured(model, random_tokens(2, 17), measure).values()) == {0.0}


def test_distance_and_entropy_equal_loops_over_queries_and_keys(arm):
    model, windows = loud_model(tiny_config(arm), gain=4.0), random_tokens(2, 9)
    distance, entropy, relative = (
        measured(model, windows, f"attention_{name}") for name in ("distance", "entropy", "entropy_relative")
    )
    for look in looks(model, windows[:, :-1]):
        for head in range(6):
            d, e, r = [], [], []
            for b, t in np.ndindex(2, 8):
                p = np.exp(look.scores[b, head, t, : t + 1].numpy())
                p /= p.sum()
                d.append(sum(p[s] * (t - s) for s in range(t + 1)))
                e.append(-sum(x * math.log(x) for x in p if x > 0))
                r += [e[-1] / math.log(t + 1)] if t else []
            key = (look.layer, head, None)
            assert (distance[key], entropy[key], relative[key]) == pytest.approx((np.mean(d), np.mean(e), np.mean(r)))


# --- The share of distance -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arm", ["alibi", "t5", "kerple", "sandwich"])
def test_the_share_of_distance_is_one_for_a_bias_by_distance_without_content(arm):
    model = silent(loud_model(tiny_config(arm)), "q_proj", "k_proj")
    assert list(measured(model, random_tokens(3, 33), "distance_share").values()) == pytest.approx([1.0] * 18, abs=1e-9)


def test_the_share_of_distance_is_one_for_rope_where_all_tokens_are_the_same():
    windows = torch.zeros(3, 33, dtype=torch.long)
    shares = measured(loud_model(tiny_config("rope")), windows, "distance_share")
    assert list(shares.values()) == pytest.approx([1.0] * 18, abs=1e-9)


def test_a_constant_added_to_all_scores_of_a_query_changes_no_share():
    look = random_look(heads=4)
    other = look._replace(scores=look.scores + 5 * torch.randn(*look.scores.shape[:3], 1, dtype=torch.float64))
    torch.testing.assert_close(shares_of(other), shares_of(look), **EXACT)


def test_the_share_of_distance_is_undefined_where_all_scores_of_a_query_are_equal():
    model = silent(loud_model(tiny_config("nope")), "q_proj", "k_proj")
    assert set(measured(model, random_tokens(3, 17), "distance_share").values()) == {None}


def random_look(heads, rows=8, length=24):
    """A layer of white noise."""
    torch.manual_seed(0)
    q, k = (torch.zeros(rows, heads, length, 2) for _ in "qk")
    places = torch.arange(length)[None]
    scores = torch.randn(rows, heads, length, length, dtype=torch.float64)
    return Look(0, q, k, scores, Signal(places, places, True, length))


def shares_of(look):
    """The share of distance by head."""
    return distance_share(sums_of(look), len(look.scores))


def test_white_noise_has_the_share_of_chance():
    shares = shares_of(random_look(heads=400))
    # T - 1 effects out of N T (T - 1) / 2 degrees of freedom.
    assert shares.mean().item() == pytest.approx(2 / (8 * 24), rel=0.05)


def test_without_position_random_text_has_a_share_near_chance():
    shares = measured(loud_model(tiny_config("nope", n_layers=1)), random_tokens(64, 33), "distance_share", rows=64)
    assert max(shares.values()) < 0.01


def test_the_share_of_distance_equals_a_fit_with_an_indicator_for_each_row_and_distance(arm):
    model, windows = loud_model(tiny_config(arm), gain=2.0), random_tokens(2, 9)
    shares = measured(model, windows, "distance_share")
    for look in looks(model, windows[:, :-1]):
        cells = list(centred_rows(look))
        for head in range(6):
            here = [(b * 8 + t, distance, score) for b, h, t, distance, score in cells if h == head]
            design, scores = np.zeros((len(here), 16 + 8)), np.array([score for _, _, score in here])
            for cell, (row, distance, _) in enumerate(here):
                design[cell, row] = design[cell, 16 + distance] = 1
            left = scores - design @ np.linalg.lstsq(design, scores, rcond=None)[0]
            expected = 1 - (left @ left) / (scores @ scores)
            assert shares[look.layer, head, None] == pytest.approx(expected, abs=1e-9)


# --- The loss without position ---------------------------------------------------------------------------------------


def loss(model, windows):
    with torch.no_grad():
        return token_losses(model(windows[:, :-1]), windows[:, 1:]).mean().item()


def with_layers(model, layers):
    """A model of the same weights whose scheme acts in these layers alone."""
    settings = {**model.config.position.model_dump(), "layers": layers}
    other = Transformer(ModelConfig.model_validate({**model.config.model_dump(), "position": settings})).double().eval()
    other.load_state_dict(model.state_dict())
    return other


@pytest.mark.parametrize("arm", ["rope", "xpos", "rope_log_n", "alibi", "t5", "fire", "shaw", "cope"])
def test_a_layer_without_position_is_that_of_a_scheme_that_leaves_it_out(arm):
    model, windows = loud_model(tiny_config(arm), gain=4.0), random_tokens(4, 33)
    rises = measured(model, windows, "loss_without_position")
    for layer in range(3):
        other = with_layers(model, [kept for kept in range(3) if kept != layer])
        assert rises[layer, None, None] == pytest.approx(loss(other, windows) - loss(model, windows), abs=1e-9)
        assert abs(rises[layer, None, None]) > 1e-4


@pytest.mark.parametrize("arm", ["learned", "sinusoidal", "rope_input", "rope_first"])
def test_a_scheme_that_acts_below_the_first_block_loses_all_there_and_nothing_elsewhere(arm):
    model, windows = loud_model(tiny_config(arm), gain=4.0), random_tokens(4, 33)
    nope = loud_model(tiny_config("nope"), gain=4.0)  # equal seeds give equal trunks
    rise = loss(nope, windows) - loss(model, windows)
    expected = {(0, None, None): pytest.approx(rise, abs=1e-9), (1, None, None): 0.0, (2, None, None): 0.0}
    assert measured(model, windows, "loss_without_position") == expected
    assert abs(rise) > 1e-4


@pytest.mark.parametrize("arm", ["learned_all", "sinusoidal_all"])
def test_a_scheme_that_adds_below_every_block_loses_one_addition_at_a_time(arm):
    model, windows = loud_model(tiny_config(arm), gain=4.0), random_tokens(4, 33)
    rises = measured(model, windows, "loss_without_position")
    tokens, places = windows[:, :-1], torch.arange(32)[None]
    signal = model.signal(32, places, None, tokens.device)._replace(kernel=attend_reference)
    for layer in range(3):
        x = model.embed_tokens(tokens)
        for number, block in enumerate(model.layers):
            x = x if number == layer else model.position.embed(x, places, number, 32)
            x = block(x, signal, model.position)
        ours = token_losses(model.logits(model.norm(x)), windows[:, 1:]).mean().item()
        assert rises[layer, None, None] == pytest.approx(ours - loss(model, windows), abs=1e-9)


def test_without_a_scheme_no_layer_has_anything_to_lose():
    rises = measured(loud_model(tiny_config("nope")), random_tokens(3, 17), "loss_without_position")
    assert set(rises.values()) == {0.0}


# --- The probe -------------------------------------------------------------------------------------------------------


def test_the_hidden_states_are_what_each_block_reads_and_the_last_norm():
    model, tokens = loud_model(tiny_config("learned_all")), random_tokens(2, 9)
    read = [*(spy(block, 0) for block in model.layers), spy(model.norm, 0)]
    states = hidden_states(model, tokens)
    assert len(states) == 4
    for state, (expected,) in zip(states, read, strict=True):
        assert torch.equal(state, expected)
    torch.testing.assert_close(states[0], model.embed_tokens(tokens) + model.position.table[:9], **EXACT)


def test_the_probe_is_ridge_regression_on_standardised_channels():
    draw = np.random.default_rng(0)
    scales, drift = [1e-3, 1.0, 1.0, 30.0, 1e3], 0.3 * np.arange(10)[:, None] * draw.normal(size=5)
    fit, held_out = ((draw.normal(size=(4, 10, 5)) + drift) * scales + 7 for _ in "ab")
    x, y = fit.reshape(40, 5), np.tile(np.arange(10.0), 4)
    standard = (x - x.mean(0)) / x.std(0)
    # The penalty as further rows of the system: n RIDGE |w|^2.
    rows = np.vstack((standard, math.sqrt(40 * RIDGE) * np.eye(5)))
    w = np.linalg.lstsq(rows, np.append(y - y.mean(), np.zeros(5)), rcond=None)[0]
    guess = (held_out.reshape(40, 5) - x.mean(0)) / x.std(0) @ w + y.mean()
    expected = 1 - ((y - guess) ** 2).sum() / ((y - y.mean()) ** 2).sum()
    assert 0.05 < expected < 0.95
    ours = probe_r2(moments(torch.from_numpy(fit)), moments(torch.from_numpy(held_out)))
    assert ours == pytest.approx(expected, abs=1e-7)


def test_the_probe_reads_a_position_that_stands_in_a_channel():
    model = silent(loud_model(tiny_config("learned")), "o_proj", "down_proj", "embed_tokens")
    with torch.no_grad():
        model.position.table.copy_(torch.arange(64.0)[:, None] * torch.eye(48)[3])
    # The state is the table all the way up, and 47 channels are constant; the penalty alone keeps R^2 below 1.
    kept = pytest.approx(1 - (RIDGE / (1 + RIDGE)) ** 2, abs=1e-9)
    assert list(measured(model, random_tokens(4, 33), "probe_r2").values()) == [kept] * 4


@pytest.mark.parametrize("arm", ["nope", "rope", "alibi", "shaw"])
def test_below_the_first_block_the_probe_finds_nothing_where_nothing_is_added(arm):
    r2 = measured(loud_model(tiny_config(arm, n_layers=1)), random_tokens(200, 33), "probe_r2", rows=100)
    assert abs(r2[0, None, None]) < 0.05


def test_the_causal_mask_alone_tells_deeper_layers_where_they_are():
    model, windows = loud_model(tiny_config("nope", n_layers=1)), random_tokens(200, 33, vocab_size=60)
    windows[:, 0] = 60  # occurs nowhere else: uniform attention gives it 1 / (t + 1) of the weight
    r2 = measured(silent(model, "q_proj"), windows, "probe_r2", rows=100)
    # Knowing the first of 32 tokens alone explains 15.5^2 / 31 of a variance of (32^2 - 1) / 12.
    assert r2[0, None, None] == pytest.approx(15.5**2 / 31 / 85.25, abs=0.02)
    assert r2[1, None, None] > 0.3


def test_the_probe_is_scored_on_other_windows_than_it_was_fitted_on():
    # Two windows of 8 tokens and 48 channels: what is fitted is learned by heart, and says nothing of the other.
    r2 = measured(loud_model(tiny_config("nope")), random_tokens(2, 9), "probe_r2")
    assert r2[0, None, None] < 0.5


# --- The use of frequencies ------------------------------------------------------------------------------------------


def pairs_of(model):
    """The channels of each pair of a head of 8 channels."""
    config = model.config.position
    width = config.turned_width(8)
    if config.layout == "half":
        return [(i, i + width // 2) for i in range(width // 2)]
    return [(2 * i, 2 * i + 1) for i in range(width // 2)]


@pytest.mark.parametrize("arm", ["rope", "rope_half", "rope_partial", "rope_first", "rope_log_n", "xpos"])
def test_the_use_of_a_frequency_is_the_covariance_of_its_part_with_the_scores(arm):
    model, windows = loud_model(tiny_config(arm), gain=2.0), random_tokens(2, 9)
    uses = measured(model, windows, "frequency_use")
    turning = [layer for layer in range(3) if model.position.applies_to(layer)]
    assert set(uses) == {(layer, h, i) for layer in turning for h in range(6) for i in range(len(pairs_of(model)))}
    for look in looks(model, windows[:, :-1]):
        for head in range(6) if look.layer in turning else ():
            for number, pair in enumerate(pairs_of(model)):
                together = own = 0.0
                for b, t in np.ndindex(2, 8):
                    row = look.scores[b, head, t, : t + 1].numpy()
                    q, k = look.q[b, head, t, list(pair)].numpy(), look.k[b, head // 3, : t + 1, list(pair)].numpy()
                    part = k @ q / math.sqrt(8)
                    together += ((part - part.mean()) * (row - row.mean())).sum()
                    own += ((row - row.mean()) ** 2).sum()
                assert uses[look.layer, head, number] == pytest.approx(together / own, abs=1e-9)


@pytest.mark.parametrize("arm", ["rope", "rope_half", "xpos", "rope_log_n", "rope_still", "rope_yarn"])
def test_the_shares_of_all_pairs_add_up_to_one_where_every_channel_is_in_one(arm):
    uses = measured(loud_model(tiny_config(arm)), random_tokens(3, 17), "frequency_use")
    for layer, head in np.ndindex(3, 6):
        assert sum(uses[layer, head, pair] for pair in range(4)) == pytest.approx(1.0)


@pytest.mark.parametrize(("layout", "channels"), [("interleaved", [4, 5]), ("half", [2, 6])])
def test_a_head_that_fills_one_pair_alone_uses_one_frequency_alone(layout, channels):
    model = loud_model(tiny_config({"kind": "rope", "layout": layout}))
    with torch.no_grad():
        for block in model.layers:
            rows = block.self_attn.q_proj.weight.view(6, 8, 48)
            rows[:, [channel for channel in range(8) if channel not in channels]] = 0
    uses = measured(model, random_tokens(3, 17), "frequency_use")
    assert {pair: {round(v, 12) for (_, _, x), v in uses.items() if x == pair} for pair in range(4)} == {
        0: {0.0}, 1: {0.0}, 2: {1.0}, 3: {0.0},
    }  # fmt: skip


@pytest.mark.parametrize("arm", [name for name in ARMS if name not in TURNING])
def test_what_does_not_turn_has_no_frequencies(arm):
    assert measured(loud_model(tiny_config(arm)), random_tokens(2, 9), "frequency_use") == {}
