"""The network's parts: norms, initialisation, precision, shapes that are refused."""

import math

import pytest
import torch
from pydantic import ValidationError

from model.cache import Cache, with_room
from model.config import ModelConfig
from model.errors import UserError
from model.norm import RMSNorm
from model.position.rope import RoPE, rope_frequencies
from model.transformer import IGNORED, Transformer, token_losses
from tests.conftest import loud_model, random_tokens, tiny_config


@pytest.mark.parametrize("value", [1e-3, 300.0])
def test_a_norm_takes_its_mean_square_in_float32(value):
    x = torch.full((1, 8), value)
    norm = RMSNorm(8, 1e-5)
    expected = value / math.sqrt(value**2 + 1e-5)
    assert norm(x)[0, 0].item() == pytest.approx(expected, rel=1e-5)
    half = norm.to(torch.float16)(x.to(torch.float16))
    assert half.dtype == torch.float16
    assert half[0, 0].item() == pytest.approx(expected, rel=2e-3)


def test_the_epsilon_of_the_config_reaches_every_norm():
    model = Transformer(tiny_config(norm_eps=1e-3, qk_norm=True))
    assert {m.eps for m in model.modules() if isinstance(m, RMSNorm)} == {1e-3}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("d_model", "n_layers", "vocab_size"), [(64, 2, 260), (192, 4, 2048), (512, 1, 260), (512, 1, 4096), (512, 8, 2048)]
)
def test_the_loss_at_initialisation_is_that_of_guessing(tied, d_model, n_layers, vocab_size):
    config = ModelConfig(d_model=d_model, n_layers=n_layers, n_heads=4, vocab_size=vocab_size, tie_embeddings=tied)
    tokens = random_tokens(2, 129, vocab_size)
    with torch.inference_mode():
        loss = token_losses(Transformer(config)(tokens[:, :-1]), tokens[:, 1:]).mean().item()
    assert loss == pytest.approx(math.log(vocab_size), abs=0.1)


def test_projections_into_the_residual_stream_start_smaller_by_the_root_of_their_number():
    model = Transformer(tiny_config(d_model=192, n_layers=8))
    for name, parameter in model.layers.named_parameters():
        if parameter.dim() == 2:
            shrunk = name.endswith(("o_proj.weight", "down_proj.weight"))
            assert parameter.std().item() == pytest.approx(0.02 / 4 if shrunk else 0.02, rel=0.05), name


def test_tied_embeddings_are_one_parameter():
    model = Transformer(tiny_config())
    assert model.lm_head.weight is model.embed_tokens.weight
    assert "lm_head.weight" not in dict(model.named_parameters())
    assert "lm_head.weight" in dict(Transformer(tiny_config(tie_embeddings=False)).named_parameters())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"d_model": 130, "n_heads": 4}, "d_model 130 is not divisible by n_heads 4"),
        ({"n_heads": 6, "n_kv_heads": 4}, "n_heads 6 is not divisible by n_kv_heads 4"),
        ({"d_model": 65, "n_heads": 1, "n_kv_heads": 1}, "head_dim 65 .* is odd"),
        ({"position": {"kind": "rope", "fraction": 0.3}}, "fraction 0.3 of head_dim 8 is 2.4 channels"),
        ({"position": {"kind": "rope", "layers": [0, 9]}}, r"layers \[0, 9\] must name layers from 0 to 2"),
        ({"position": {"kind": "rope", "layers": []}}, "must name layers"),
        ({"position": {"kind": "rope", "base": 1.0}}, "greater than 1"),
        ({"position": "sinusoidal", "d_model": 45, "n_heads": 1, "n_kv_heads": 1}, "d_model 45 is odd"),
        ({"position": {"kind": "rope_input", "layers": "all"}}, "Input should be 'first'"),
        ({"dropout": 1.0}, "less than 1"),
        ({"n_layers": 0}, "greater than or equal to 1"),
    ],
)
def test_a_shape_that_cannot_be_is_refused_in_words(changes, message):
    with pytest.raises(ValidationError, match=message):
        tiny_config(changes.pop("position", "rope"), **changes)


@pytest.mark.parametrize("position", [255, 1023, 8191])
def test_angles_survive_a_cast_of_the_model_to_bfloat16(position):
    scheme = RoPE(tiny_config(d_model=384)).to(torch.bfloat16)
    angles = position * rope_frequencies(10000.0, 64)
    rotation = scheme.rotation(torch.tensor([[position]]), 1, torch.float32)
    assert rotation.q_cos.dtype == torch.float32
    assert (rotation.q_cos[0, 0].double() - angles.cos()).abs().max() < 1e-3
    assert (rotation.q_sin[0, 0].double() - angles.sin()).abs().max() < 1e-3


def test_a_bfloat16_model_tells_positions_beyond_256_apart():
    # As bfloat16 numbers 256 and 257 are the same.
    model = loud_model(tiny_config()).to(torch.bfloat16)
    signal = model.signal(0, torch.tensor([[256, 257]]), None, torch.device("cpu"))
    assert not torch.equal(signal.rotation.q_cos[:, 0], signal.rotation.q_cos[:, 1])


def test_the_base_of_the_config_reaches_every_layer():
    for layer in range(3):
        layers = {"kind": "rope", "layers": [layer]}
        tokens = random_tokens(1, 20)
        near, far = (loud_model(tiny_config({**layers, "base": base}))(tokens) for base in (10000.0, 500000.0))
        torch.testing.assert_close(near[:, 0], far[:, 0], rtol=0, atol=1e-12)
        assert (near - far)[:, 1:].abs().max() > 1e-4


def test_ignored_targets_cost_nothing():
    logits = torch.randn(1, 3, 7)
    losses = token_losses(logits, torch.tensor([[2, IGNORED, 4]]))
    assert losses[0, 1] == 0
    assert losses[0, 0].item() == pytest.approx(-logits[0, 0].log_softmax(-1)[2].item(), rel=1e-6)


def test_losses_of_a_bfloat16_model_are_computed_in_float32():
    logits = torch.zeros(1, 1, 50000, dtype=torch.bfloat16)
    losses = token_losses(logits, torch.tensor([[3]]))
    assert losses.dtype == torch.float32
    assert losses.item() == pytest.approx(math.log(50000), rel=1e-6)


def test_a_model_without_a_vocabulary_is_refused():
    with pytest.raises(UserError, match="vocab_size"):
        Transformer(tiny_config(vocab_size=None))


def test_a_growing_cache_keeps_what_it_holds_in_every_row_head_and_slot():
    numbered = torch.arange(2 * 3 * 4 * 5.0).view(2, 3, 4, 5)
    grown = with_room(numbered, 5, dim=2)
    assert grown.shape == (2, 3, 8, 5)
    assert torch.equal(grown[:, :, :4], numbered)
    assert with_room(numbered, 4, dim=2) is numbered


def test_a_cache_remembers_which_positions_it_holds():
    cache = Cache(tiny_config(), batch=2, length=2, dtype=torch.float32)
    cache.append_positions(torch.tensor([[-1, 0], [0, 1]]))
    held = cache.append_positions(torch.tensor([[1], [2]]))
    assert held.tolist() == [[-1, 0, 1], [0, 1, 2]]


def test_one_batch_is_learned_by_heart():
    model = Transformer(tiny_config()).train()
    tokens = random_tokens(4, 33)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(80):
        loss = token_losses(model(tokens[:, :-1]), tokens[:, 1:]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.05
