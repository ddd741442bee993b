"""What every positional scheme must keep, whatever it does: one contract, tested by being in the table."""

import math

import pytest
import torch
import yaml

from model.attention import Attention, attend_reference
from model.cache import Cache
from model.checkpoint import load_model, save_model
from model.errors import UserError
from model.position import SCHEMES
from model.position.absolute import sinusoids
from model.transformer import Transformer
from tests.conftest import ARMS, loud_model, random_tokens, tiny_config

EXACT = {"rtol": 0.0, "atol": 1e-10}


def test_every_scheme_of_the_table_is_an_arm_of_this_test():
    assert {arm["kind"] for arm in ARMS.values()} == set(SCHEMES)


def in_chunks(model, tokens, sizes, positions=None):
    """The logits of tokens read in chunks through a cache."""
    rows, length = tokens.shape
    positions = torch.arange(length).expand(rows, -1) if positions is None else positions
    cache = Cache(model.config, rows, length, torch.float64, capacity=length // 2)  # so that it must grow
    chunks = zip(tokens.split(sizes, 1), positions.split(sizes, 1), strict=True)
    return torch.cat([model(some, at, cache) for some, at in chunks], dim=1)


def test_reading_through_a_cache_equals_reading_at_once(arm):
    model, tokens = loud_model(tiny_config(arm)), random_tokens(2, 64)
    sizes = [17, 12, *[1] * 20, 7, *[1] * 8]
    torch.testing.assert_close(in_chunks(model, tokens, sizes), model(tokens), **EXACT)


def test_a_prefill_without_positions_equals_one_with_them(arm):
    model, tokens = loud_model(tiny_config(arm)), random_tokens(2, 30)
    cache = Cache(model.config, 2, 30, dtype=torch.float64)
    torch.testing.assert_close(model(tokens, None, cache), model(tokens, torch.arange(30)[None]), **EXACT)


@pytest.mark.parametrize("changed", [1, 13, 31])
def test_changing_a_token_changes_no_earlier_logit_at_all(arm, changed):
    model, tokens = loud_model(tiny_config(arm)), random_tokens(1, 32)
    other = tokens.clone()
    other[0, changed] = (other[0, changed] + 1) % 61
    before, after = model(tokens), model(other)
    assert torch.equal(before[:, :changed], after[:, :changed])
    assert not torch.equal(before[:, changed], after[:, changed])


def test_left_padded_rows_equal_rows_alone(arm):
    model = loud_model(tiny_config(arm))
    short, long = random_tokens(1, 3, seed=1), random_tokens(1, 20, seed=2)
    batch = torch.cat((torch.cat((torch.zeros(1, 17, dtype=torch.long), short), 1), long))
    positions = torch.stack((torch.cat((torch.full((17,), -1), torch.arange(3))), torch.arange(20)))
    # Alone, but of the same declared length: some schemes' angles depend on it.
    alone = model(short, None, Cache(model.config, 1, 20, torch.float64))
    for logits in (model(batch, positions), in_chunks(model, batch, [18, 1, 1], positions)):
        torch.testing.assert_close(logits[:1, 17:], alone, **EXACT)
        torch.testing.assert_close(logits[1:], model(long), **EXACT)


def test_left_padding_keeps_gradients_finite(arm):
    model = loud_model(tiny_config(arm))
    positions = torch.tensor([[-1, -1, 0, 1, 2]])
    model(random_tokens(1, 5), positions)[:, 2:].square().mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.isfinite().all(), name


def reference_logits(model, monkeypatch, *inputs):
    """The logits with every attention layer computed by the definition."""

    def attend(self, q, k, v, signal, position):
        if position.reads_content:
            return real(self, q, k, v, signal, position)
        return attend_reference(q, k, v, signal)

    real = Attention.attend

    with monkeypatch.context() as patch:
        patch.setattr(Attention, "attend", attend)
        return model(*inputs)


@pytest.mark.parametrize("positions", [None, torch.arange(24)[None], torch.tensor([[-1] * 4 + list(range(20))])])
def test_the_fast_path_equals_the_definition(arm, positions, monkeypatch):
    model, tokens = loud_model(tiny_config(arm)), random_tokens(1, 24)
    fast, slow = model(tokens, positions), reference_logits(model, monkeypatch, tokens, positions)
    seen = slice(None) if positions is None else positions[0] >= 0
    torch.testing.assert_close(fast[:, seen], slow[:, seen], **EXACT)


def test_beyond_the_training_length_logits_are_finite_or_refused_in_words(arm):
    model, tokens = loud_model(tiny_config(arm)), random_tokens(1, 200)
    if model.position.max_positions is None or model.position.max_positions >= 200:
        assert model(tokens).isfinite().all()
        return
    with pytest.raises(UserError, match=r"'learned' is defined for 64 positions, but 200 are needed"):
        model(tokens)


def test_a_limited_scheme_refuses_the_first_position_past_its_limit_through_the_cache_too():
    model, tokens = loud_model(tiny_config("learned")), random_tokens(1, 65)
    assert model(tokens[:, :64]).isfinite().all()
    cache = Cache(model.config, 1, 65, dtype=torch.float64)
    model(tokens[:, :64], None, cache)
    with pytest.raises(UserError, match="65 are needed"):
        model(tokens[:, 64:], torch.tensor([[64]]), cache)


def test_saving_and_loading_gives_bitwise_equal_logits(arm, tmp_path):
    model = loud_model(tiny_config(arm), dtype=torch.float32)
    save_model(tmp_path / "step-000001", model, config_yaml(model), b"tokenizer")
    loaded = load_model(tmp_path / "step-000001")
    tokens = random_tokens(2, 40)
    assert torch.equal(loaded.model(tokens), model(tokens))
    assert loaded.tokenizer == b"tokenizer"
    assert not loaded.model.training


def config_yaml(model):
    return yaml.safe_dump({"model": model.config.model_dump(mode="json")})


@pytest.mark.parametrize("tied", [True, False])
def test_equal_seeds_give_bitwise_equal_shared_weights_in_every_scheme(arm, tied):
    one = dict(Transformer(tiny_config("rope", tie_embeddings=tied), seed=7).named_parameters())
    other = dict(Transformer(tiny_config(arm, tie_embeddings=tied), seed=7).named_parameters())
    shared = [name for name in one if not name.startswith("position.")]
    assert {name for name in other if not name.startswith("position.")} == set(shared)
    assert all(torch.equal(one[name], other[name]) for name in shared)


def test_other_seeds_give_other_weights(arm):
    one, other = (dict(Transformer(tiny_config(arm), seed).named_parameters()) for seed in (1, 2))
    assert not any(torch.equal(one[name], other[name]) for name in one if one[name].dim() >= 2)


def test_parameters_are_counted_in_three_groups_and_the_trunk_is_the_same_for_every_scheme(arm):
    count = Transformer(tiny_config(arm)).count_parameters()
    reference = Transformer(tiny_config("nope")).count_parameters()
    assert count.non_embedding == reference.non_embedding
    assert count.total == count.non_embedding + count.positional + 61 * 48
    # learned: a row of 48 a position; t5: 8 buckets of 6 heads; kerple: 2 numbers a head; fire: 32 units with weight,
    # offset and 6 weights out, and two numbers; shaw: 17 keys of 8 in 3 layers; cope: 9 vectors of 8 in 3 layers.
    sizes = {
        "learned": 64 * 48,
        "t5": 8 * 6,
        "kerple": 2 * 6,
        "fire": 32 * 8 + 2,
        "shaw": 17 * 8 * 3,
        "cope": 9 * 8 * 3,
    }
    assert count.positional == sizes.get(ARMS[arm]["kind"], 0)


def only_layer(model, kept):
    """Take every other block out of the network: its two projections into the residual stream become zero."""
    with torch.no_grad():
        for layer, block in enumerate(model.layers):
            if layer != kept:
                block.self_attn.o_proj.weight.zero_()
                block.mlp.down_proj.weight.zero_()
    return model


AT_THE_INPUT = {"learned", "sinusoidal", "rope_input"}
NOT_CLAIMED = {"rope_first": {1, 2}, "rope_and_nope": {1}}


@pytest.mark.parametrize("layer", range(3))
@pytest.mark.parametrize(
    "name", [n for n, scheme in ARMS.items() if scheme["kind"] not in {*AT_THE_INPUT, "nope", "cope"}]
)
def test_stretched_positions_change_what_a_claimed_layer_does_and_no_other(name, layer):
    """A scheme whose settings never reach a layer is a fault that no loss curve shows."""
    model = only_layer(loud_model(tiny_config(name)), layer)
    tokens = random_tokens(1, 12)
    difference = model(tokens, 3 * torch.arange(12)[None]) - model(tokens, torch.arange(12)[None])
    assert (difference.abs().max() > 1e-4) == (layer not in NOT_CLAIMED.get(name, ()))


@pytest.mark.parametrize("layer", range(3))
@pytest.mark.parametrize("name", [name for name, scheme in ARMS.items() if scheme["kind"] != "nope"])
def test_swapping_two_earlier_tokens_changes_the_logits_in_each_claimed_layer(name, layer):
    """One layer alone cannot see order without positions, so what changes here is the scheme's doing."""
    model = only_layer(loud_model(tiny_config(name)), layer)
    tokens = random_tokens(1, 12)
    swapped = tokens[:, [0, 1, 5, 3, 4, 2, 6, 7, 8, 9, 10, 11]]
    difference = (model(swapped) - model(tokens))[:, -1].abs().max()
    assert (difference > 1e-4) == (layer not in NOT_CLAIMED.get(name, ()))


def test_swapping_two_earlier_tokens_without_positions_changes_nothing_in_a_layer_alone():
    model = only_layer(loud_model(tiny_config("nope")), 1)
    tokens = random_tokens(1, 12)
    swapped = tokens[:, [0, 1, 5, 3, 4, 2, 6, 7, 8, 9, 10, 11]]
    torch.testing.assert_close(model(swapped)[:, -1], model(tokens)[:, -1], **EXACT)


@pytest.mark.parametrize(
    ("name", "times"), [("learned", 1), ("learned_all", 3), ("sinusoidal", 1), ("sinusoidal_all", 3)]
)
def test_an_additive_scheme_is_added_once_before_each_claimed_block(name, times):
    model = only_layer(loud_model(tiny_config(name)), None)
    model.norm = torch.nn.Identity()
    tokens, positions = random_tokens(1, 5), torch.arange(5)[None]
    once = model.position.embed(torch.zeros(1, 5, 48, dtype=torch.float64), positions, 0, 5)
    signal = model.signal(5, positions, None, tokens.device)
    added = model.blocks(model.embed_tokens(tokens), signal) - model.embed_tokens(tokens)
    torch.testing.assert_close(added, times * once, **EXACT)


def test_sinusoids_are_those_of_the_paper():
    # Vaswani et al. (2017): PE(pos, 2i) = sin(pos / 10000^(2i/d)), PE(pos, 2i+1) = cos of the same, here pos 3, d 4.
    vectors = sinusoids(torch.tensor([3]), 4, 10000.0, torch.float64)[0]
    expected = [math.sin(3), math.cos(3), math.sin(0.03), math.cos(0.03)]
    assert vectors.tolist() == pytest.approx(expected, abs=1e-12)
