"""Attention: what a token may see, how much it looks at each, and where position enters the scores."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.cache import LayerCache
from model.config import ModelConfig
from model.norm import RMSNorm
from model.position.rope import rotate
from model.position.scheme import PositionScheme, Rotation


class Signal(NamedTuple):
    """What one forward pass tells every layer about positions, computed once.

    `is_causal` says that the queries are exactly the keys and stand at positions 0 .. T-1, so that a kernel may use a
    causal mask of its own. A layer that the scheme does not apply to gets no rotation and no bias. `kernel` is the way
    that computes attention, and `mask` is visibility and bias in the form that the fused one reads.
    """

    q_positions: Tensor  # (1 or B, T)
    k_positions: Tensor  # (1 or B, S)
    is_causal: bool
    length: int  # declared for the whole call
    rotation: Rotation | None = None
    bias: Tensor | None = None  # (1 or B, H, T, S)
    mask: Tensor | None = None  # (1 or B, 1 or H, T, S)
    kernel: Callable[..., Tensor] | None = None


def visible(q_positions: Tensor, k_positions: Tensor) -> Tensor:
    """Say which keys each query sees, (1 or B, 1, T, S): the only rule of causality in the project.

    A key is seen from its own position on. Position -1 marks pads and empty slots, which nobody sees.
    """
    k, q = k_positions[..., None, :], q_positions[..., :, None]
    return ((k >= 0) & (k <= q)).unsqueeze(-3)


def attention_scores(q: Tensor, k: Tensor) -> Tensor:
    """Return q k^T / sqrt(D), (B, H, T, S), for q (B, H, T, D) and k (B, G, S, D), in at least float32.

    Query head h reads key head h // (H / G).
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    return q.to(wide) @ k.to(wide).mT / q.shape[-1] ** 0.5


def attention_weights(scores: Tensor, mask: Tensor) -> Tensor:
    """Return softmax over the visible keys; a query that sees no key gets weights of zero, not NaN."""
    # A row of -inf alone is NaN after softmax; the second mask makes it zero, and stops NaN on the way back too.
    return scores.masked_fill(~mask, float("-inf")).softmax(dim=-1).masked_fill(~mask, 0.0)


def attend_reference(q: Tensor, k: Tensor, v: Tensor, signal: Signal, dropout: float = 0.0) -> Tensor:
    """Return softmax(q k^T / sqrt(D) + bias) v over the visible keys, (B, H, T, D): the definition of attention.

    Vaswani et al. (2017), with grouped queries of Ainslie et al. (2023). Every fast path is tested against it.
    """
    return weigh_values(attention_scores(q, k), v, signal, dropout).to(q.dtype)


def weigh_values(scores: Tensor, v: Tensor, signal: Signal, dropout: float) -> Tensor:
    """Return the mean of the values v (B, G, S, D) under scores (B, H, T, S) and the signal's bias and mask."""
    if signal.bias is not None:
        scores = scores + signal.bias
    weights = attention_weights(scores, visible(signal.q_positions, signal.k_positions))
    v = v.repeat_interleave(scores.shape[1] // v.shape[1], dim=1)
    return F.dropout(weights, dropout) @ v.to(weights.dtype)


def with_mask(signal: Signal, dtype: torch.dtype) -> Signal:
    """Return the signal with its mask: bias and -inf where nothing is visible; without a bias, True where visible.

    `dtype` is that of the queries: cast here, once, the mask is not copied by every layer.
    None where the kernel's own causal mask says it all. Never both: PyTorch accepts a mask together with is_causal
    until the mask needs a gradient.
    """
    if signal.is_causal and signal.bias is None:
        return signal
    seen = visible(signal.q_positions, signal.k_positions)
    return signal._replace(
        mask=seen if signal.bias is None else signal.bias.masked_fill(~seen, float("-inf")).to(dtype)
    )


def attend_fused(q: Tensor, k: Tensor, v: Tensor, signal: Signal, dropout: float = 0.0) -> Tensor:
    """Return what `attend_reference` returns, by PyTorch's fused kernel."""
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=signal.mask,
        dropout_p=dropout,
        is_causal=signal.mask is None,
        enable_gqa=q.shape[1] != k.shape[1],
    )


def attend_in_blocks(q: Tensor, k: Tensor, v: Tensor, signal: Signal, dropout: float = 0.0) -> Tensor:
    """Return what `attend_reference` returns, for a causal signal: four blocks of queries, each with the keys up to it.

    Three eighths of the scores are never computed, because nobody sees them. Products are rounded to the precision of
    the queries, which the definition's are not; bias, mask and softmax are computed in float32.
    """
    size = max(SMALLEST_BLOCK, -(-q.shape[2] // 4))
    ends = range(size, q.shape[2] + size, size)
    return torch.cat([_attend_block(q, k, v, signal, dropout, end - size, end) for end in ends], dim=2)


def _attend_block(q: Tensor, k: Tensor, v: Tensor, signal: Signal, dropout: float, begin: int, end: int) -> Tensor:
    q, k, v = q[:, :, begin:end], k[:, :, :end], v[:, :, :end]
    groups = q.unflatten(1, (k.shape[1], -1)).flatten(2, 3)  # B H T D -> B G (H/G T) D
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (groups @ k.mT).view(*q.shape[:3], -1).to(wide) / q.shape[-1] ** 0.5
    if signal.bias is not None:
        scores = scores + signal.bias[:, :, begin:end, :end]
    unseen = ~visible(signal.q_positions[:, begin:end], signal.k_positions[:, :end])
    weights = F.dropout(scores.masked_fill(unseen, float("-inf")).softmax(dim=-1), dropout).to(v.dtype)
    return (weights.view(*groups.shape[:3], -1) @ v).view_as(q)


SMALLEST_BLOCK = 64  # queries: below it, small matrix products cost more than the scores that they save


def with_kernel(signal: Signal, dtype: torch.dtype, device: torch.device) -> Signal:
    """Choose how attention is computed, for queries of this dtype: the one place where a fast path is picked.

    On a CPU the fused kernel is slow with a bias, above all where the bias learns, and in bfloat16; compiled, the
    blocks are faster there. Elsewhere it is the fused kernel.
    """
    compiled_bf16 = dtype == torch.bfloat16 and torch.compiler.is_compiling()
    if device.type == "cpu" and signal.is_causal and (signal.bias is not None or compiled_bf16):
        return signal._replace(kernel=attend_in_blocks)
    return with_mask(signal, dtype)._replace(kernel=attend_fused)


class Attention(nn.Module):
    """Causal self-attention with grouped queries; queries and keys turn after their projection."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        self.dropout = config.dropout
        self.q_proj = nn.Linear(config.d_model, config.n_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(config.d_model, config.kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(config.d_model, config.kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.n_heads * config.head_dim, config.d_model, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None

    def heads(self, x: Tensor) -> Tensor:
        """Split (B, T, heads * D) into (B, T, heads, D)."""
        return x.unflatten(-1, (-1, self.head_dim))

    def forward(self, x: Tensor, signal: Signal, position: PositionScheme, cache: LayerCache | None = None) -> Tensor:
        q, k, v = self.heads(self.q_proj(x)), self.heads(self.k_proj(x)), self.heads(self.v_proj(x))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if signal.rotation is not None:
            q_cos, q_sin, k_cos, k_sin, layout = signal.rotation
            q = rotate(q, q_cos.unsqueeze(-2), q_sin.unsqueeze(-2), layout)
            k = rotate(k, k_cos.unsqueeze(-2), k_sin.unsqueeze(-2), layout)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # B T H D -> B H T D
        if cache is not None:
            k, v = cache.append(k, v)  # keys are stored already turned
        mixed = self.attend(q, k, v, signal, position)
        return self.o_proj(mixed.transpose(1, 2).flatten(-2))  # B H T D -> B T C

    def attend(self, q: Tensor, k: Tensor, v: Tensor, signal: Signal, position: PositionScheme) -> Tensor:
        """Mix the values, by the signal's kernel, or by the definition where the scheme reads content."""
        # Functional attention drops whatever the module's mode is, so the mode is asked here.
        dropout = self.dropout if self.training else 0.0
        if position.reads_content and position.applies_to(self.layer):
            scores = position.scores(q, attention_scores(q, k), self.layer, signal)
            return weigh_values(scores, v, signal, dropout).to(q.dtype)
        assert signal.kernel is not None, "with_kernel comes before the first layer"
        return signal.kernel(q, k, v, signal, dropout)
