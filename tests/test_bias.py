"""Biases of the scores against loops written from their papers, and against implementations that are not ours."""

import math

import pytest
import torch

from model.attention import Attention
from model.position.bias import alibi_slopes, t5_bucket
from model.transformer import Transformer
from tests.conftest import loud_model, random_tokens, tiny_config

pytest.importorskip("transformers", reason="a test dependency: pip install -e .[dev]")
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor
from transformers.models.t5.modeling_t5 import T5Attention

HEADS = 6
BIASES = {
    "alibi": {"kind": "alibi"},
    "t5": {"kind": "t5", "buckets": 8, "max_distance": 24},
    "kerple": {"kind": "kerple"},
    "kerple_power": {"kind": "kerple", "form": "power"},
    "fire": {"kind": "fire", "width": 5, "threshold": 12.0},  # some positions below the threshold, some above
    "sandwich": {"kind": "sandwich"},
}
POSITIONS = {
    "a text": (torch.arange(28)[None], torch.arange(28)[None]),
    "a chunk after a past": (torch.tensor([[38, 39]]), torch.arange(40)[None]),
    "rows padded on the left": (
        torch.tensor([[-1, 0, 1], [35, 36, 37]]),
        torch.tensor([[-1] * 6 + [-1, 0, 1], list(range(29, 38))]),
    ),
}


def random_scheme(name):
    """The scheme of a model of 6 heads, each of its parameters drawn afresh."""
    scheme = Transformer(tiny_config(BIASES[name])).double().position
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in scheme.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return scheme


def softplus(raw) -> float:
    return math.log(1 + math.exp(raw.item()))


def alibi_of_the_paper(scheme, h, i, j):
    """Press et al. (2022): -m_h (i - j); the slopes of 6 heads as the authors' code lists them."""
    return -[2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3][h] * (i - j)


def t5_of_the_paper(scheme, h, i, j):
    """Raffel et al. (2020): 4 buckets of one distance, 4 of ever more, the last from 24 on."""
    d = i - j
    bucket = d if d < 4 else min(4 + math.floor(math.log(d / 4) / math.log(24 / 4) * 4), 7)
    return scheme.table[bucket, h].item()


def kerple_log_of_the_paper(scheme, h, i, j):
    """Chi et al. (2022): -r1 ln(1 + r2 |i - j|), r1, r2 > 0."""
    return -softplus(scheme.r1[h]) * math.log(1 + softplus(scheme.r2[h]) * (i - j))


def kerple_power_of_the_paper(scheme, h, i, j):
    """Chi et al. (2022): -r1 |i - j|^r2, r1 > 0, 0 < r2 <= 2."""
    return -softplus(scheme.r1[h]) * (i - j) ** min(softplus(scheme.r2[h]), 2.0)


def fire_of_the_paper(scheme, h, i, j):
    """Li et al. (2024): f(psi(i - j) / psi(max(L, i))), psi(x) = ln(c x + 1), f with one hidden layer of ReLU."""
    c, L = 0.1 * math.exp(scheme.log_c.item()), 12.0 * math.exp(scheme.log_threshold.item())
    x = math.log(c * (i - j) + 1) / math.log(c * max(L, i) + 1)
    hidden = [max(0.0, x * w.item() + b.item()) for w, b in zip(scheme.rise, scheme.offset, strict=True)]
    return sum(v.item() * unit for v, unit in zip(scheme.mix[h], hidden, strict=True))


def sandwich_of_the_appendix(scheme, h, i, j):
    """Chi et al. (2023), appendix: the product of two positions' sinusoids over the ratio 8 h / H, h from 1.

    Ours is 0 at distance 0: less by the product of a position with itself, which softmax does not see.
    """

    def embedded(position):
        angles = [position / 1e4 ** (2 * pair / 128) for pair in range(64)]
        return [math.sin(a) for a in angles] + [math.cos(a) for a in angles]

    product = sum(a * b for a, b in zip(embedded(i), embedded(j), strict=True))
    return (product - 64) / ((h + 1) * 8 / HEADS)


PAPERS = {
    "alibi": alibi_of_the_paper,
    "t5": t5_of_the_paper,
    "kerple": kerple_log_of_the_paper,
    "kerple_power": kerple_power_of_the_paper,
    "fire": fire_of_the_paper,
    "sandwich": sandwich_of_the_appendix,
}


def every_seen_place(q_positions, k_positions):
    """Each row, query and key of which the query sees the key, and their positions."""
    for b in range(len(q_positions)):
        for t, i in enumerate(q_positions[b].tolist()):
            for s, j in enumerate(k_positions[b].tolist()):
                if 0 <= j <= i:
                    yield b, t, s, i, j


@pytest.mark.parametrize("case", POSITIONS)
@pytest.mark.parametrize("name", BIASES)
def test_a_bias_is_the_formula_of_its_paper(name, case):
    scheme, (q_positions, k_positions) = random_scheme(name), POSITIONS[case]
    found = scheme.bias(q_positions, k_positions, torch.float64).detach()
    assert found.shape == (len(q_positions), HEADS, q_positions.shape[1], k_positions.shape[1])
    assert found.dtype == torch.float64
    assert found.isfinite().all()
    for b, t, s, i, j in every_seen_place(q_positions, k_positions):
        expected = [PAPERS[name](scheme, h, i, j) for h in range(HEADS)]
        assert found[b, :, t, s].tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12), (i, j)


FINER = [0.70710678, 0.35355339, 0.17677670, 0.08838835]


@pytest.mark.parametrize(
    ("heads", "slopes"),
    [
        (1, [0.00390625]),
        (6, [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]),
        (8, [0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, 0.0078125, 0.00390625]),
        (12, [0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, 0.0078125, 0.00390625, *FINER]),
    ],
)
def test_the_slopes_of_alibi_are_the_authors_in_their_order(heads, slopes):
    assert alibi_slopes(heads) == pytest.approx(slopes, rel=1e-7)


@pytest.mark.parametrize("heads", range(1, 21))
def test_alibi_is_that_of_bloom_and_mpt_for_every_number_of_heads(heads):
    """Both list key positions alone or distances to the last query: the same up to a number a query."""
    config = tiny_config("alibi", n_heads=heads, n_kv_heads=None, d_model=8 * heads)
    positions = torch.arange(30)[None]
    last_query = Transformer(config).position.bias(positions, positions, torch.float32)[0, :, -1]
    bloom = build_alibi_tensor(torch.ones(1, 30), heads, torch.float32)[:, 0]
    mpt = build_mpt_alibi_tensor(heads, 30)[:, 0]
    torch.testing.assert_close(last_query, bloom - bloom[:, -1:], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(last_query, mpt, rtol=1e-5, atol=1e-6)


def test_the_buckets_of_t5_are_the_measured_ones():
    distance = torch.tensor([0, 15, 16, 18, 19, 31, 63, 127, 1000])
    assert t5_bucket(distance, 32, 128).tolist() == [0, 15, 16, 16, 17, 21, 26, 31, 31]


@pytest.mark.parametrize(("buckets", "max_distance"), [(32, 128), (8, 24), (64, 1000), (2, 5)])
def test_the_buckets_of_t5_are_those_of_hugging_face(buckets, max_distance):
    distance = torch.arange(2001)
    theirs = T5Attention._relative_position_bucket(-distance, False, buckets, max_distance)
    assert torch.equal(t5_bucket(distance, buckets, max_distance), theirs)


def test_the_heads_of_sandwich_reach_further_the_higher_their_number():
    positions = torch.arange(40)[None]
    bias = random_scheme("sandwich").bias(positions, positions, torch.float64)[0, :, -1, 0]
    assert (bias < 0).all()
    assert (bias.diff() > 0).all()
    assert (bias[0] / bias[-1]).item() == pytest.approx(HEADS)


def test_the_exponent_of_kerple_stops_at_2_where_the_kernels_domain_ends():
    scheme, positions = random_scheme("kerple_power"), torch.arange(9)[None]
    with torch.no_grad():
        scheme.r2.fill_(3.0)  # softplus 3.05
    found = scheme.bias(positions, positions, torch.float64)[0, :, -1]
    expected = [[-softplus(r1) * d**2 for d in range(8, -1, -1)] for r1 in scheme.r1]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0.0)


def gradients(scheme, q_positions, k_positions):
    bias = scheme.bias(q_positions, k_positions, torch.float64)
    weights = torch.randn(bias.shape, dtype=bias.dtype, generator=torch.Generator().manual_seed(1))
    return torch.autograd.grad((bias * weights).sum(), list(scheme.parameters()))


LEARNED = [name for name in BIASES if name not in ("alibi", "sandwich")]


@pytest.mark.parametrize("name", LEARNED)
def test_gradients_reach_every_number_that_a_bias_learns(name):
    scheme = random_scheme(name)
    with torch.no_grad():
        if name == "fire":  # units of ReLU that are all at work
            scheme.rise.abs_()
            scheme.offset.abs_()
    for gradient in gradients(scheme, *POSITIONS["a text"]):
        assert gradient.isfinite().all()
        assert (gradient != 0).all()


@pytest.mark.parametrize("positions", [[0], [7], [-1], [-1, -1, 0, 1], [3, 3, 3]])
@pytest.mark.parametrize("name", LEARNED)
def test_gradients_are_finite_at_distance_0_and_for_pads(name, positions):
    places = torch.tensor([positions])
    assert all(gradient.isfinite().all() for gradient in gradients(random_scheme(name), places, places))


def test_the_units_of_fire_start_at_bends_of_their_own():
    """With all offsets 0 a unit that falls is off at every distance, for good, and the others are one straight line."""
    scheme = Transformer(tiny_config("fire")).double().position
    falling = scheme.rise < 0
    rise, offset, mix, *_ = gradients(scheme, *POSITIONS["a text"])
    assert ((rise != 0) & falling).any()
    assert ((offset != 0) & falling).any()
    assert ((mix != 0) & falling).any(dim=-1).all()


def counted(monkeypatch, kind, name):
    """Count the calls of a method, and keep what it returns."""
    returned, method = [], getattr(kind, name)

    def watched(*inputs):
        returned.append(method(*inputs))
        return returned[-1]

    monkeypatch.setattr(kind, name, watched)
    return returned


@pytest.mark.parametrize("name", BIASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_bias_is_computed_once_a_forward_and_at_least_in_float32(name, dtype, monkeypatch):
    model = loud_model(tiny_config(BIASES[name]), dtype=dtype)
    returned = counted(monkeypatch, type(model.position), "bias")
    model(random_tokens(2, 20))
    assert [bias.dtype for bias in returned] == [torch.float32]
    assert returned[0].shape == (1, HEADS, 20, 20), "rows of a batch stand at equal positions"


@pytest.mark.parametrize("name", BIASES)
def test_a_bias_in_a_bfloat16_model_keeps_the_precision_of_float32(name):
    wide = Transformer(tiny_config(BIASES[name])).to(torch.bfloat16).double().position
    narrow = Transformer(tiny_config(BIASES[name])).to(torch.bfloat16).position
    positions = torch.arange(60)[None]
    exact = wide.bias(positions, positions, torch.float64)
    torch.testing.assert_close(
        narrow.bias(positions, positions, torch.float32), exact.float(), rtol=1e-5, atol=1e-5 * exact.abs().max().item()
    )


@pytest.mark.parametrize("name", BIASES)
@pytest.mark.parametrize("part", ["bias", "mask"])
def test_all_layers_are_given_the_same_bias_and_mask(name, part, monkeypatch):
    """So a bias costs one (B, H, T, S) tensor a forward, not one a layer; the mask is that of a fused kernel."""
    seen, attend = [], Attention.attend

    def watched(self, q, k, v, signal, position):
        seen.append(getattr(signal, part))
        return attend(self, q, k, v, signal, position)

    monkeypatch.setattr(Attention, "attend", watched)
    positions = torch.arange(20)[None] if part == "mask" else None
    loud_model(tiny_config(BIASES[name]))(random_tokens(1, 20), positions)
    assert len(seen) == 3
    assert seen[0].shape == (1, HEADS, 20, 20)
    assert all(other is seen[0] for other in seen)
