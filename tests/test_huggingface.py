"""The same weights in Hugging Face's LlamaForCausalLM, an implementation that is not ours."""

import pytest
import torch

from model.config import ModelConfig
from tests.conftest import loud_model, random_tokens

transformers = pytest.importorskip("transformers", reason="a test dependency: pip install -e .[dev]")


def llama_of(config: ModelConfig):
    """A Hugging Face Llama of the same shape."""
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.d_model,
            intermediate_size=config.hidden_width,
            num_hidden_layers=config.n_layers,
            num_attention_heads=config.n_heads,
            num_key_value_heads=config.kv_heads,
            max_position_embeddings=config.context,
            rms_norm_eps=config.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.position.base},
            tie_word_embeddings=config.tie_embeddings,
        )
    ).eval()


def half_layout(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Reorder each head's output rows from neighbouring pairs (2i, 2i+1) to halves (i, i + D/2)."""
    rows = weight.unflatten(0, (-1, head_dim // 2, 2))
    return rows.transpose(1, 2).flatten(0, 2)


def give_weights(llama, model) -> None:
    """Copy our weights under Hugging Face's names: a rename of nothing, and a permutation of q and k."""
    state = {}
    for name, parameter in model.named_parameters():
        value = parameter.detach().clone()
        if name.endswith(("q_proj.weight", "k_proj.weight")) and model.config.position.layout == "interleaved":
            value = half_layout(value, model.config.head_dim)
        state[name if name == "lm_head.weight" else f"model.{name}"] = value
    if model.config.tie_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    llama.load_state_dict(state, strict=True)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("layout", ["interleaved", "half"])
@pytest.mark.parametrize("base", [10000.0, 500000.0])
def test_logits_equal_those_of_hugging_faces_llama_over_the_full_context(tied, layout, base):
    config = ModelConfig(
        n_layers=3, n_heads=6, n_kv_heads=2, d_model=96, d_ff=160, vocab_size=101, context=256,
        tie_embeddings=tied, norm_eps=1e-5, position={"kind": "rope", "base": base, "layout": layout},
    )  # fmt: skip
    model = loud_model(config, dtype=torch.float32, gain=5.0)
    llama = llama_of(config)
    give_weights(llama, model)
    tokens = random_tokens(2, 256, 101)
    with torch.no_grad():
        ours, theirs = model(tokens), llama(tokens).logits
    assert theirs.std() > 0.3, "weights too small to tell a fault"
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
