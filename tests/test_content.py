"""Positions by content, xPos, what lies beyond a table, log-n, still pairs, layer patterns and random positions."""

import math
from itertools import pairwise

import pytest
import torch
from pydantic import ValidationError

from model.attention import Attention, Signal
from model.cache import Cache
from model.config import ModelConfig
from model.errors import UserError
from model.position import build_scheme
from model.position.rope import log_n_factor, rotate
from model.transformer import Transformer
from tests.conftest import loud_model, random_tokens, tiny_config

EXACT = {"rtol": 0.0, "atol": 1e-12}
HEADS, KV_HEADS, WIDTH = 6, 2, 8
POSITIONS = {
    "a text": (torch.arange(9)[None], torch.arange(9)[None]),
    "a chunk after a past": (torch.arange(6, 9)[None], torch.arange(9)[None]),
    "rows padded on the left": (
        torch.tensor([[-1, -1, 0, 1], [5, 6, 7, 8]]),
        torch.tensor([[-1, -1, -1, -1, -1, -1, -1, 0, 1], list(range(9))]),
    ),
}


def random_scheme(position):
    """A scheme of a model of 6 query heads on 2 key heads of width 8, each of its parameters drawn afresh."""
    scheme = Transformer(tiny_config(position)).double().position
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in scheme.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return scheme


def random_qkv(queries, keys, rows=2):
    generator = torch.Generator().manual_seed(1)
    shapes = [(rows, HEADS, queries, WIDTH), *[(rows, KV_HEADS, keys, WIDTH)] * 2]
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]


def attention_by_loops(q, k, v, q_positions, k_positions, score):
    """softmax of score(query, keys, positions) over the keys that a query sees, which stand in order."""
    out = torch.zeros_like(q)
    for b in range(len(q)):
        here, there = (positions[b % len(positions)].tolist() for positions in (q_positions, k_positions))
        for h in range(HEADS):
            head = h // (HEADS // KV_HEADS)
            for t, i in enumerate(here):
                seen = [s for s, j in enumerate(there) if 0 <= j <= i]
                if not seen:
                    continue
                scores = score(q[b, h, t], [k[b, head, s] for s in seen], i, [there[s] for s in seen])
                weights = [math.exp(x - max(scores)) for x in scores]
                out[b, h, t] = sum(w / sum(weights) * v[b, head, s] for w, s in zip(weights, seen, strict=True))
    return out


def shaw_of_the_paper(relative_keys):
    """Shaw et al. (2018): e_ij = q_i (k_j + a_clip(i - j)) / sqrt(D)."""
    furthest = len(relative_keys) - 1

    def score(q, keys, i, places):
        return [
            (q @ (k + relative_keys[min(i - j, furthest)])).item() / math.sqrt(len(q))
            for k, j in zip(keys, places, strict=True)
        ]

    return score


def cope_of_the_paper(vectors):
    """Golovneva et al. (2024): gates sigmoid(q k), p_ij their sum from j to i, clamped; e[p] between whole numbers.

    As in the authors' code the content part is divided by sqrt(D) and q e[p] is not.
    """
    last = len(vectors) - 1

    def score(q, keys, i, places):
        content = [(q @ k).item() / math.sqrt(len(q)) for k in keys]
        gates = [1 / (1 + math.exp(-c)) for c in content]
        scores = []
        for j, c in enumerate(content):
            p = min(sum(gates[j:]), last)
            low, high = vectors[math.floor(p)], vectors[math.ceil(p)]
            share = p - math.floor(p)
            scores.append(c + (q @ (share * high + (1 - share) * low)).item())
        return scores

    return score


CONTENT = {
    "shaw": ({"kind": "shaw", "max_distance": 5}, "keys", shaw_of_the_paper),
    "cope": ({"kind": "cope", "max_position": 3}, "vectors", cope_of_the_paper),
    "cope, one vector to blend": ({"kind": "cope", "max_position": 1}, "vectors", cope_of_the_paper),
    "cope, never clamped": ({"kind": "cope", "max_position": 20}, "vectors", cope_of_the_paper),
}


@pytest.mark.parametrize("case", POSITIONS)
@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("name", CONTENT)
def test_attention_by_content_is_the_formula_of_its_paper(name, layer, case):
    settings, table, paper = CONTENT[name]
    scheme, (q_positions, k_positions) = random_scheme(settings), POSITIONS[case]
    q, k, v = random_qkv(q_positions.shape[1], k_positions.shape[1])
    attention = Attention(tiny_config(settings), layer)
    found = attention.attend(q, k, v, Signal(q_positions, k_positions, False, 9), scheme)
    score = paper(getattr(scheme, table)[layer].detach())
    torch.testing.assert_close(found.detach(), attention_by_loops(q, k, v, q_positions, k_positions, score), **EXACT)


@pytest.mark.parametrize("name", CONTENT)
def test_gradients_by_content_are_finite_and_reach_each_layers_table(name):
    model = loud_model(tiny_config(CONTENT[name][0]))
    model(random_tokens(1, 20)).square().mean().backward()
    (gradient,) = (parameter.grad for parameter in model.position.parameters())
    assert gradient.isfinite().all()
    assert (gradient.abs().amax(dim=(1, 2)) > 0).all()


def xpos_scores(q, k, m, n, **settings):
    """The scores of q at each of the positions m and k at each of n, (M, N)."""
    scheme = build_scheme(tiny_config({"kind": "xpos", **settings}))
    layout = settings.get("layout", "interleaved")
    (q_cos, q_sin), (k_cos, k_sin) = (
        scheme.rotation(torch.tensor([places]), 600, torch.float64)[part]
        for places, part in ((m, slice(2)), (n, slice(2, 4)))
    )
    return rotate(q, q_cos[0], q_sin[0], layout) @ rotate(k, k_cos[0], k_sin[0], layout).T


def xpos_of_the_paper(q, k, distance, gamma, scale_base, base=1e4):
    """Sun et al. (2022): Re sum of q_i conj(k_i) zeta_i^(d / scale_base) e^(i d theta_i) over the pairs."""
    total, D = 0.0, len(q)
    for i in range(D // 2):
        zeta = (i / (D / 2) + gamma) / (1 + gamma)
        angle = distance * base ** (-2 * i / D)
        z = complex(q[2 * i], q[2 * i + 1]) * complex(k[2 * i], k[2 * i + 1]).conjugate()
        total += zeta ** (distance / scale_base) * (z * complex(math.cos(angle), math.sin(angle))).real
    return total


def random_pair():
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(WIDTH, dtype=torch.float64, generator=generator) for _ in "qk"]


@pytest.mark.parametrize(("gamma", "scale_base"), [(0.4, 512.0), (0.4, 16.0), (2.0, 64.0)])
def test_a_score_of_xpos_is_the_formula_of_its_paper(gamma, scale_base):
    q, k = random_pair()
    m, n = [0, 1, 7, 300], [0, 1, 5, 299]
    found = xpos_scores(q, k, m, n, gamma=gamma, scale_base=scale_base)
    for row, i in enumerate(m):
        for column, j in enumerate(n):
            if j <= i:
                expected = xpos_of_the_paper(q, k, i - j, gamma, scale_base)
                assert found[row, column].item() == pytest.approx(expected, abs=1e-11)


def test_a_score_of_xpos_depends_on_distance_alone_and_fades_with_it():
    q, k = random_pair()
    here, later = (xpos_scores(q, k, [20 + far], [3 + far], scale_base=32.0) for far in (0, 400))
    torch.testing.assert_close(here, later, rtol=1e-10, atol=0.0)
    # Equal vectors: the fastest pair keeps 0.4 / 1.4 of its share every scale_base tokens, the slowest nearly all.
    pair = torch.eye(WIDTH, dtype=torch.float64)
    first, last = (xpos_scores(row, row, [44], [0], base=1 + 1e-9, scale_base=44.0).item() for row in pair[[0, -1]])
    assert first == pytest.approx(math.cos(44) * 0.4 / 1.4, rel=1e-6)
    assert last == pytest.approx(math.cos(44) * (0.75 + 0.4) / 1.4, rel=1e-6)


def test_xpos_with_an_endless_gamma_is_rope():
    tokens = random_tokens(1, 64)
    xpos, rope = (loud_model(tiny_config(p)) for p in ({"kind": "xpos", "gamma": 1e15}, "rope"))
    torch.testing.assert_close(xpos(tokens), rope(tokens), rtol=0, atol=1e-9)
    assert (loud_model(tiny_config("xpos"))(tokens) - rope(tokens)).abs().max() > 1e-3


ROWS = 64


def learned(beyond, **changes):
    return loud_model(tiny_config({"kind": "learned", "init_std": 1.0, "beyond": beyond}, **changes))


def added(model, positions, length):
    """What the scheme adds to a token vector of zeros, (T, C)."""
    zeros = torch.zeros(1, len(positions), 48, dtype=torch.float64)
    return model.position.embed(zeros, torch.tensor([positions]), 0, length)[0].detach()


def place_in_the_table(beyond, position, length):
    """Where a position stands in a table of 64 rows, as a fraction of rows."""
    if beyond == "clamp":
        return min(position, ROWS - 1)
    if beyond == "wrap":
        return position % ROWS
    return position * (ROWS - 1) / (length - 1)


@pytest.mark.parametrize("length", [65, 100, 127, 500])
@pytest.mark.parametrize("beyond", ["clamp", "wrap", "interpolate"])
def test_positions_past_a_learned_table_are_read_as_their_name_says(beyond, length):
    model = learned(beyond)
    table = model.position.table.detach()
    found = added(model, list(range(length)), length)
    for position in range(length):
        place = place_in_the_table(beyond, position, length)
        below, share = math.floor(place), place - math.floor(place)
        expected = (1 - share) * table[below] + share * table[min(below + 1, ROWS - 1)]
        torch.testing.assert_close(found[position], expected, **EXACT)


@pytest.mark.parametrize("length", [65, 100, 127, 500, 4097])
def test_a_stretched_table_begins_and_ends_with_its_own_first_and_last_row(length):
    model = learned("interpolate")
    ends = added(model, [0, length - 1], length)
    assert torch.equal(ends, model.position.table[[0, -1]])


def test_a_stretched_table_in_bfloat16_is_read_at_the_same_places_as_in_float64():
    narrow, wide = (learned("interpolate").to(torch.bfloat16) for _ in range(2))
    wide = wide.double()
    zeros, positions = torch.zeros(1, 500, 48), torch.arange(500)[None]
    found = narrow.position.embed(zeros, positions, 0, 500)
    exact = wide.position.embed(zeros.double(), positions, 0, 500)
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=1e-6)


@pytest.mark.parametrize("beyond", ["clamp", "wrap", "interpolate"])
def test_within_the_table_every_way_beyond_it_is_the_same(beyond):
    tokens = random_tokens(1, ROWS)
    assert torch.equal(learned(beyond)(tokens), learned("error")(tokens))


def test_a_text_longer_than_the_table_is_still_refused_by_default():
    with pytest.raises(UserError, match="'learned' is defined for 64 positions, but 65 are needed"):
        learned("error")(random_tokens(1, 65))


@pytest.mark.parametrize("beyond", ["clamp", "wrap", "interpolate"])
def test_past_the_table_a_cached_read_equals_an_uncached_one_and_pads_stay_finite(beyond):
    model, tokens = learned(beyond), random_tokens(1, 90)
    cache = Cache(model.config, 1, 90, torch.float64)
    places = torch.arange(90)[None].split([50, 20, 20], 1)
    pieces = [model(some, at, cache) for some, at in zip(tokens.split([50, 20, 20], 1), places, strict=True)]
    torch.testing.assert_close(torch.cat(pieces, 1), model(tokens), rtol=0, atol=1e-10)
    assert added(model, [-1, 0, 1], 90).isfinite().all()


def test_a_query_grows_by_the_logarithm_of_how_many_keys_it_sees():
    positions = torch.tensor([-1, 0, 100, 255, 256, 1023, 65535])
    factor = log_n_factor(positions, 256, torch.float64)
    expected = [1, 1, 1, 1, math.log(257) / math.log(256), 1.25, 2.0]
    assert factor.tolist() == pytest.approx(expected, abs=1e-12)


def test_log_n_scales_queries_and_not_keys():
    plain, grown = (
        build_scheme(ModelConfig(context=256, position={"kind": "rope", "log_n": log_n})) for log_n in (False, True)
    )
    positions = torch.tensor([[0, 255, 1023]])
    q_cos, q_sin, k_cos, k_sin, _ = plain.rotation(positions, 1024, torch.float64)
    found = grown.rotation(positions, 1024, torch.float64)
    factor = torch.tensor([1, 1, 1.25], dtype=torch.float64)[None, :, None]
    torch.testing.assert_close(found.q_cos, factor * q_cos, **EXACT)
    torch.testing.assert_close(found.q_sin, factor * q_sin, **EXACT)
    assert torch.equal(found.k_cos, k_cos)
    assert torch.equal(found.k_sin, k_sin)


def test_log_n_raises_the_scores_of_a_late_query_in_the_model():
    tokens = random_tokens(1, 100)
    plain, grown = (loud_model(tiny_config({"kind": "rope", "log_n": log_n})) for log_n in (False, True))
    difference = (grown(tokens) - plain(tokens))[0].abs().amax(-1)
    assert (difference[:64] == 0).all()
    assert (difference[64:] > 0).all()


@pytest.mark.parametrize(("share", "turning"), [(0.25, 8), (0.5, 16), (0.75, 24), (1.0, 32)])
def test_the_slowest_pairs_stand_still_and_the_others_turn_as_before(share, turning):
    """Barbero et al. (2025), p-RoPE: the frequencies are those of the whole head, the lowest become 0."""
    position = {"kind": "rope", "turning_pairs": share}
    scheme = build_scheme(ModelConfig(n_heads=1, d_model=64, position=position))
    expected = [1e4 ** (-2 * i / 64) if i < turning else 0.0 for i in range(32)]
    assert scheme.frequencies(10).frequencies.tolist() == pytest.approx(expected, rel=1e-12, abs=0.0)
    rotation = scheme.rotation(torch.tensor([[0, 5, 10**6]]), 10, torch.float64)
    assert (rotation.q_cos[..., turning:] == 1).all()
    assert (rotation.k_sin[..., turning:] == 0).all()


@pytest.mark.parametrize("scaling", ["linear", "dynamic_ntk", "yarn"])
def test_a_pair_that_stands_still_stands_still_when_scaled(scaling):
    position = {"kind": "rope", "turning_pairs": 0.5, "scaling": scaling}
    frequencies = build_scheme(tiny_config(position)).frequencies(500).frequencies
    assert (frequencies[2:] == 0).all()
    assert (frequencies[:2] > 0).all()


@pytest.mark.parametrize(
    ("pattern", "left_out"),
    [
        ("all but every 4th", [3, 7, 11]),  # as SmolLM3's no_rope_layers, NoPE in every 4th layer
        ("all but every 2nd", [1, 3, 5, 7, 9, 11]),
        ("all but every 3rd", [2, 5, 8, 11]),
        ("all but every 12th", [11]),
        ("first", list(range(1, 12))),
        ([0, 5], [1, 2, 3, 4, 6, 7, 8, 9, 10, 11]),
        ("all", []),
    ],
)
def test_a_pattern_says_in_which_layers_a_scheme_acts(pattern, left_out):
    config = ModelConfig(n_layers=12, position={"kind": "rope", "layers": pattern})
    assert [layer for layer in range(12) if not build_scheme(config).applies_to(layer)] == left_out


def test_smollm3_leaves_out_the_same_layers():
    config = pytest.importorskip("transformers").SmolLM3Config(num_hidden_layers=12)
    position = {"kind": "rope", "layers": f"all but every {config.no_rope_layer_interval}th"}
    scheme = build_scheme(ModelConfig(n_layers=12, position=position))
    assert [int(scheme.applies_to(layer)) for layer in range(12)] == config.no_rope_layers


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("every 4th", "all but every"),
        ("all but every other", "all but every"),
        ("all but every 4th layer", "all but every"),
        ("all but every 0th", "all but every"),
        ("all but every 1st", "leaves out all 4 layers"),
        ([], "must name layers from 0 to 3"),
        ([1, 4], "must name layers from 0 to 3"),
        ([-1], "greater than or equal to 0"),
    ],
)
def test_a_pattern_that_names_no_layers_is_refused_in_words(pattern, words):
    with pytest.raises(ValidationError, match=words):
        ModelConfig(n_layers=4, position={"kind": "rope", "layers": pattern})


@pytest.mark.parametrize("position", ["rope", "alibi", "learned", "shaw", {"kind": "rope", "scaling": "dynamic_ntk"}])
def test_random_positions_are_the_same_for_a_text_read_at_once_and_in_pieces(position):
    model = loud_model(tiny_config(position, random_positions=300))
    tokens = random_tokens(2, 60)
    cache = Cache(model.config, 2, 60, torch.float64)
    places = torch.arange(60).expand(2, -1).split([40, 1, 19], 1)
    pieces = [model(some, at, cache) for some, at in zip(tokens.split([40, 1, 19], 1), places, strict=True)]
    torch.testing.assert_close(torch.cat(pieces, 1), model(tokens), rtol=0, atol=1e-10)


def placed(model, length, positions=None):
    return model.signal(length, positions, None, torch.device("cpu")).q_positions


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("length", "reach"), [(1, 64), (64, 64), (64, 65), (50, 300)])
def test_random_positions_are_ordered_distinct_and_below_their_bound(length, reach, training):
    """Ruoss et al. (2023): a sorted draw without repetition."""
    model = Transformer(tiny_config(random_positions=reach)).train(training)
    places = placed(model, length)[0].tolist()
    assert len(places) == length
    assert all(0 <= place < reach for place in places)
    assert all(low < high for low, high in pairwise(places))


def test_random_positions_reach_all_over_their_range():
    torch.manual_seed(0)
    model = Transformer(tiny_config(random_positions=300)).train()
    drawn = torch.cat([placed(model, 60)[0] for _ in range(40)])
    assert len(drawn.unique()) > 290
    assert drawn.double().mean().item() == pytest.approx(149.5, abs=10)


def test_random_positions_in_training_change_from_step_to_step_and_follow_the_seed():
    model = Transformer(tiny_config(random_positions=300)).train()

    def two_draws(seed):
        torch.manual_seed(seed)
        return torch.stack([placed(model, 60), placed(model, 60)])

    first = two_draws(0)
    assert torch.equal(first, two_draws(0))
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first, two_draws(1))


def test_random_positions_in_evaluation_are_fixed_and_leave_the_global_generator_alone():
    model = Transformer(tiny_config(random_positions=300)).eval()
    torch.manual_seed(0)
    before = torch.get_rng_state()
    places = placed(model, 60)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    assert torch.equal(placed(model, 60), places)


def test_random_positions_leave_pads_where_they_are():
    model = Transformer(tiny_config(random_positions=300)).eval()
    padded = placed(model, 6, torch.tensor([[-1, -1, 0, 1, 2, 3]]))
    assert torch.equal(padded[0, 2:], placed(model, 6)[0, :4])
    assert padded[0, :2].tolist() == [-1, -1]


def test_random_positions_fewer_than_the_context_are_refused_in_words():
    with pytest.raises(ValidationError, match="random_positions 63 is smaller than context 64"):
        tiny_config(random_positions=63)


def test_a_text_longer_than_the_random_positions_is_refused_in_words():
    model = Transformer(tiny_config(random_positions=70))
    with pytest.raises(UserError, match="70 are fewer than the 71 tokens"):
        model(random_tokens(1, 71))


@pytest.mark.parametrize("beyond", ["error", "clamp", "wrap", "interpolate"])
def test_a_learned_table_has_a_row_for_each_random_position(beyond):
    model = learned(beyond, random_positions=300).train()
    torch.manual_seed(0)
    assert model(random_tokens(1, 64)).isfinite().all()
    places = placed(model, 64)[0].tolist()
    assert max(places) > 64
    assert torch.equal(added(model, places, 64), model.position.table[places])
