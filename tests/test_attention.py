"""Attention against loops and against the faults that others shipped."""

import math

import pytest
import torch

from model.attention import (
    Signal,
    attend_fused,
    attend_in_blocks,
    attend_reference,
    attention_scores,
    visible,
    with_kernel,
    with_mask,
)
from tests.conftest import loud_model, random_tokens, tiny_config

EXACT = {"rtol": 0.0, "atol": 1e-12}
generator = torch.Generator().manual_seed(0)


@pytest.fixture
def small(monkeypatch):
    """Blocks as small as the tensors of a test."""
    monkeypatch.setattr("model.attention.SMALLEST_BLOCK", 2)


def random_qkv(rows=2, heads=6, kv_heads=2, queries=5, keys=9, width=4, dtype=torch.float64):
    def draw(*shape):
        return torch.randn(*shape, dtype=dtype, generator=generator)

    shape = (rows, kv_heads, keys, width)
    return draw(rows, heads, queries, width), draw(*shape), draw(*shape)


def attention_by_loops(q, k, v, q_positions, k_positions, bias=None):
    """softmax(q k / sqrt(D) + bias) v with plain Python sums, key head h // (H / G)."""
    rows, heads, queries, width = q.shape
    group = heads // k.shape[1]
    out = torch.zeros_like(q)
    for b in range(rows):
        for h in range(heads):
            for t in range(queries):
                here = q_positions[b % len(q_positions)][t].item()
                places = k_positions[b % len(k_positions)].tolist()
                seen = [s for s, place in enumerate(places) if 0 <= place <= here]
                scores = [sum(q[b, h, t] * k[b, h // group, s]).item() / math.sqrt(width) for s in seen]
                if bias is not None:
                    scores = [score + bias[0, h, t, s].item() for score, s in zip(scores, seen, strict=True)]
                top = max(scores, default=0.0)
                weights = [math.exp(score - top) for score in scores]
                for weight, s in zip(weights, seen, strict=True):
                    out[b, h, t] += weight / sum(weights) * v[b, h // group, s]
    return out


def signal_for(q_positions, k_positions, bias=None, is_causal=False, dtype=torch.float64):
    return with_mask(Signal(q_positions, k_positions, is_causal, q_positions.shape[-1], bias=bias), dtype)


POSITIONS = {
    "a chunk after a past": (torch.arange(4, 9)[None], torch.arange(9)[None]),
    "one token after a past": (torch.tensor([[8]]), torch.arange(9)[None]),
    "rows padded on the left": (
        torch.tensor([[2, 3, 4, 5, 6], [4, 5, 6, 7, 8]]),
        torch.tensor([[-1, -1, 0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 5, 6, 7, 8]]),
    ),
    "queries that see no key": (
        torch.tensor([[-1, -1, 0, 1, 2]]),
        torch.tensor([[-1, -1, -1, -1, -1, -1, 0, 1, 2]]),
    ),
}


@pytest.mark.parametrize("attend", [attend_reference, attend_fused])
@pytest.mark.parametrize("case", POSITIONS)
@pytest.mark.parametrize("with_bias", [False, True])
def test_both_paths_equal_plain_loops(attend, case, with_bias):
    q_positions, k_positions = POSITIONS[case]
    q, k, v = random_qkv(queries=q_positions.shape[1])
    bias = torch.randn(1, 6, q.shape[2], 9, dtype=torch.float64, generator=generator) if with_bias else None
    got = attend(q, k, v, signal_for(q_positions, k_positions, bias))
    torch.testing.assert_close(got, attention_by_loops(q, k, v, q_positions, k_positions, bias), **EXACT)


def test_the_kernels_own_causal_mask_equals_the_definition():
    q, k, v = random_qkv(queries=9)
    positions = torch.arange(9)[None]
    fused = attend_fused(q, k, v, signal_for(positions, positions, is_causal=True))
    torch.testing.assert_close(fused, attend_reference(q, k, v, signal_for(positions, positions)), **EXACT)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 2e-6), (torch.bfloat16, 0.02)]
)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("fast", "length"), [(attend_fused, 9), (attend_in_blocks, 9), (attend_in_blocks, 16)])
def test_a_fast_path_has_the_values_and_gradients_of_the_definition(dtype, tolerance, with_bias, fast, length, small):
    positions = torch.arange(length)[None]
    inputs = [x.to(dtype).requires_grad_() for x in random_qkv(queries=length, keys=length)]
    bias = torch.randn(1, 6, length, length, generator=generator).to(torch.promote_types(dtype, torch.float32))
    bias = bias.requires_grad_() if with_bias else None
    found = []
    for attend in (fast, attend_reference):
        out = attend(*inputs, signal_for(positions, positions, bias, is_causal=True, dtype=dtype))
        leaves = [*inputs, bias] if with_bias else inputs
        found.append((out, *torch.autograd.grad(out.float().square().sum(), leaves)))
    for got, exact in zip(*found, strict=True):
        assert (got - exact).abs().max() <= tolerance * exact.abs().max()


def test_scores_that_nobody_sees_are_not_computed_in_blocks(small, monkeypatch):
    computed = []
    softmax = torch.Tensor.softmax
    monkeypatch.setattr(torch.Tensor, "softmax", lambda x, dim: computed.append(x.shape[-2:]) or softmax(x, dim))
    q, k, v = random_qkv(queries=16, keys=16)
    positions = torch.arange(16)[None]
    attend_in_blocks(q, k, v, signal_for(positions, positions, is_causal=True))
    assert computed == [(4, 4), (4, 8), (4, 12), (4, 16)]


def test_dropout_in_blocks_drops_the_share_it_should_and_keeps_the_mean(small):
    torch.manual_seed(0)
    q, k, _ = random_qkv(rows=8, queries=64, keys=64)
    v = torch.ones(8, 2, 64, 4, dtype=torch.float64)
    positions = torch.arange(64)[None]
    out = attend_in_blocks(q, k, v, signal_for(positions, positions, is_causal=True), dropout=0.25)
    assert (out[:, :, 0, 0] == 0).double().mean() == pytest.approx(0.25, abs=0.13)  # the only weight, dropped
    assert out.mean() == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize(
    ("device", "dtype", "has_bias", "is_causal", "compiled", "kernel"),
    [
        ("cpu", torch.float32, False, True, False, attend_fused),
        ("cpu", torch.float32, False, True, True, attend_fused),
        ("cpu", torch.bfloat16, False, True, False, attend_fused),
        ("cpu", torch.bfloat16, False, True, True, attend_in_blocks),
        ("cpu", torch.float32, True, True, False, attend_in_blocks),
        ("cpu", torch.float32, True, False, False, attend_fused),
        ("cuda", torch.bfloat16, False, True, True, attend_fused),
        ("cuda", torch.bfloat16, True, True, True, attend_fused),
    ],
)
def test_a_kernel_is_chosen_by_device_precision_bias_and_compiling(
    device, dtype, has_bias, is_causal, compiled, kernel, monkeypatch
):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiled)
    positions = torch.arange(9)[None]
    bias = torch.zeros(1, 6, 9, 9) if has_bias else None
    signal = Signal(positions, positions, is_causal, 9, bias=bias)
    assert with_kernel(signal, dtype, torch.device(device)).kernel is kernel


@pytest.mark.parametrize("attend", [attend_reference, attend_fused])
def test_a_query_that_sees_no_key_gets_zeros_and_finite_gradients(attend):
    q_positions, k_positions = POSITIONS["queries that see no key"]
    q, k, v = (x.requires_grad_() for x in random_qkv(queries=5))
    out = attend(q, k, v, signal_for(q_positions, k_positions))
    assert (out[:, :, :2] == 0).all()
    out.square().sum().backward()
    assert all(x.grad.isfinite().all() for x in (q, k, v))


def test_a_key_is_visible_from_its_own_position_on_and_a_pad_never():
    seen = visible(torch.tensor([[0, 1, 2]]), torch.tensor([[-1, 0, 1, 2]]))
    assert seen[0, 0].int().tolist() == [[0, 1, 0, 0], [0, 1, 1, 0], [0, 1, 1, 1]]


def test_scores_of_a_bfloat16_model_are_computed_in_float32():
    # 512 equal products of 1 add up to 512, but a bfloat16 sum stops growing at 256.
    one = torch.ones(1, 1, 1, 512, dtype=torch.bfloat16)
    scores = attention_scores(one, one)
    assert scores.dtype == torch.float32
    assert scores.item() == pytest.approx(512**0.5)


def test_dropout_is_off_in_evaluation_whatever_its_setting():
    tokens = random_tokens(2, 20)
    dropping, plain = (loud_model(tiny_config(dropout=p)) for p in (0.2, 0.0))
    assert torch.equal(dropping(tokens), dropping(tokens))
    assert torch.equal(dropping(tokens), plain(tokens))


def test_dropout_is_on_in_training():
    model = loud_model(tiny_config(dropout=0.2)).train()
    assert not torch.equal(model(random_tokens(2, 20)), model(random_tokens(2, 20)))


@pytest.mark.parametrize("projection", ["q_proj", "k_proj"])
def test_with_qk_norm_the_size_of_queries_and_keys_does_not_matter(projection):
    tokens = random_tokens(1, 20)
    for qk_norm in (True, False):
        model = loud_model(tiny_config(qk_norm=qk_norm, norm_eps=1e-20))
        before = model(tokens)
        with torch.no_grad():
            for layer in model.layers:
                getattr(layer.self_attn, projection).weight.mul_(3.0)
        assert torch.allclose(model(tokens), before, rtol=0, atol=1e-10) == qk_norm
