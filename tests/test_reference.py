"""The whole network against a second one, written from the papers with plain loops over layers and heads."""

import math

import pytest
import torch
from torch import Tensor

from tests.conftest import loud_model, random_tokens, tiny_config


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.stack([row / torch.sqrt((row @ row) / len(row) + eps) for row in x]) * weight


def turned(vector: Tensor, position: int, base: float) -> Tensor:
    """Each neighbouring pair as a complex number, times e^(i position theta)."""
    out = vector.clone()
    for i in range(len(vector) // 2):
        angle = position * base ** (-2 * i / len(vector))
        z = complex(vector[2 * i], vector[2 * i + 1]) * complex(math.cos(angle), math.sin(angle))
        out[2 * i], out[2 * i + 1] = z.real, z.imag
    return out


def one_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of one head, (T, D), a query at a time."""
    rows = []
    for t in range(len(q)):
        scores = torch.stack([q[t] @ k[s] / math.sqrt(q.shape[1]) for s in range(t + 1)])
        weights = torch.exp(scores - scores.max())
        rows.append((weights / weights.sum()) @ v[: t + 1])
    return torch.stack(rows)


def network(weights: dict[str, Tensor], config, tokens: Tensor) -> Tensor:
    """LLaMA with RoPE on one sequence (T,), in the weights' precision."""
    D, group = config.head_dim, config.n_heads // config.kv_heads
    x = weights["embed_tokens.weight"][tokens]
    for layer in range(config.n_layers):
        w = {name.removeprefix(f"layers.{layer}."): value for name, value in weights.items()}
        h = norm(x, w["input_layernorm.weight"], config.norm_eps)
        q, k, v = (h @ w[f"self_attn.{name}_proj.weight"].T for name in "qkv")
        heads = []
        for head in range(config.n_heads):
            mine, shared = slice(head * D, (head + 1) * D), slice(head // group * D, (head // group + 1) * D)
            q_turned = torch.stack([turned(row, m, config.position.base) for m, row in enumerate(q[:, mine])])
            k_turned = torch.stack([turned(row, m, config.position.base) for m, row in enumerate(k[:, shared])])
            heads.append(one_head(q_turned, k_turned, v[:, shared]))
        x = x + torch.cat(heads, dim=1) @ w["self_attn.o_proj.weight"].T
        h = norm(x, w["post_attention_layernorm.weight"], config.norm_eps)
        gate = h @ w["mlp.gate_proj.weight"].T
        x = x + (gate * torch.sigmoid(gate) * (h @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T
    head = weights.get("lm_head.weight", weights["embed_tokens.weight"])
    return norm(x, weights["norm.weight"], config.norm_eps) @ head.T


@pytest.mark.parametrize(("base", "tied"), [(10000.0, True), (500000.0, False)])
def test_the_network_equals_one_written_with_loops(base, tied):
    config = tiny_config({"kind": "rope", "base": base}, tie_embeddings=tied, norm_eps=1e-5)
    model, tokens = loud_model(config), random_tokens(1, 20)
    expected = network({name: p.detach() for name, p in model.named_parameters()}, config, tokens[0])
    torch.testing.assert_close(model(tokens)[0], expected, rtol=0, atol=1e-10)
