"""The FLOP count against torch's own counter, and the causal half against pairs counted one by one."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from model.attention import attend_reference, visible
from model.flops import causal_pairs, forward_flops, matmul_parameters, training_flops
from model.transformer import Transformer, token_losses
from tests.conftest import tiny_config
from training.peak import measured_peak
from training.progress import Progress

SHAPES = {
    "grouped queries": {},
    "a key head for each query head": {"n_kv_heads": 6},
    "an output matrix of its own": {"tie_embeddings": False},
    "a default feed-forward width": {"d_ff": None},
    "one layer, a short window": {"n_layers": 1, "context": 5},
}


def counted_by_torch(model: Transformer, rows: int, backward: bool) -> int:
    """Count the products of one pass; attention by its definition, whose products the counter sees."""
    windows = torch.randint(model.config.vocab_size, (rows, model.config.context + 1))
    with FlopCounterMode(display=False) as counter:
        loss = token_losses(model(windows[:, :-1]), windows[:, 1:]).sum()
        if backward:
            loss.backward()
    return counter.get_total_flops()


def hidden_pairs_flops(config) -> int:
    """Return the forward FLOPs a window that products over all T x T pairs spend on what the mask hides."""
    return 4 * config.n_layers * config.n_heads * config.head_dim * (config.context**2 - causal_pairs(config.context))


@pytest.fixture
def _attention_by_definition(monkeypatch):
    monkeypatch.setattr(
        "model.attention.Attention.attend", lambda self, q, k, v, signal, position: attend_reference(q, k, v, signal)
    )


@pytest.mark.usefixtures("_attention_by_definition")
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_the_formula_counts_what_torch_counts_but_for_hidden_pairs(shape):
    config, rows = tiny_config(**shape), 2
    tokens = rows * config.context
    hidden = rows * hidden_pairs_flops(config)
    assert counted_by_torch(Transformer(config), rows, backward=False) == tokens * forward_flops(config) + hidden
    assert counted_by_torch(Transformer(config), rows, backward=True) == tokens * training_flops(config) + 3 * hidden


@pytest.mark.parametrize("context", [1, 2, 5, 64])
def test_causal_pairs_are_those_that_the_rule_of_causality_lets_see(context):
    positions = torch.arange(context)[None]
    assert causal_pairs(context) == int(visible(positions, positions).sum())


def test_a_large_model_costs_what_the_papers_say():
    # GPT-2 124M shape but for its SwiGLU: 6 N + 12 L C T of the PaLM paper, whose second half the mask hides.
    config = tiny_config(n_layers=12, n_heads=12, n_kv_heads=12, d_model=768, d_ff=2048, vocab_size=50304, context=1024)
    assert matmul_parameters(config) == 12 * (4 * 768**2 + 3 * 768 * 2048) + 768 * 50304
    palm = 6 * matmul_parameters(config) + 12 * 12 * 768 * 1024
    attention_we_leave_out = 6 * 12 * 768 * (1024 - 1)
    assert training_flops(config) == palm - attention_we_leave_out


def test_an_output_matrix_costs_the_same_tied_or_not_but_a_scheme_costs_nothing():
    assert training_flops(tiny_config()) == training_flops(tiny_config(tie_embeddings=False))
    assert training_flops(tiny_config("learned")) == training_flops(tiny_config("rope"))


def test_a_peak_is_found_in_the_time_given_for_it():
    assert measured_peak(torch.device("cpu"), "fp32", seconds=0.02) > 0


def test_the_bar_shows_the_share_of_the_peak_where_it_is_known():
    assert Progress(0, 10, peak_rate=10_282).speed(7_300) == "7,300 tokens/s, 71 % of peak"
    assert Progress(0, 10).speed(7_300) == "7,300 tokens/s"
