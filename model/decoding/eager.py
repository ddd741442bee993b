"""A token's way through the blocks in PyTorch, with as few operations as will do."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from model.cache import Cache, LayerCache
from model.decoding.decoder import Decoder
from model.decoding.weights import BlockWeights, DecodeWeights, Matrix, decode_weights
from model.position.rope import join_pairs, split_pairs
from model.position.scheme import Rotation
from model.sampling_config import Precision
from model.transformer import Transformer


class Turn(NamedTuple):
    """A rotation as x * cos + x[partner] * sin: each channel beside the one it is paired with.

    Written so, one rule serves every layout, a head that turns in part, and queries and keys in one piece.
    """

    cos: Tensor  # (1 or B, N, H + G, D), 1 where a channel stands still
    sin: Tensor  # (1 or B, N, H + G, D), negative in the first channel of a pair
    partner: Tensor  # (D,)

    def at(self, i: int) -> "Turn":
        """Return the tables of token i, (1 or B, H + G, D)."""
        return Turn(self.cos[:, i], self.sin[:, i], self.partner)

    def __call__(self, x: Tensor) -> Tensor:
        """Turn x (B, H + G, D): queries and keys."""
        wide = x.to(self.cos.dtype)
        return torch.addcmul(wide * self.cos, wide.index_select(-1, self.partner), self.sin).to(x.dtype)


def turn_of(rotation: Rotation, heads: int, kv_heads: int, head_dim: int) -> Turn:
    """Rewrite a rotation's tables (1 or B, N, P) of queries and keys."""
    turned = 2 * rotation.q_cos.shape[-1]
    still = torch.arange(turned, head_dim, device=rotation.q_cos.device)
    first, second = split_pairs(torch.arange(turned, device=still.device), rotation.layout)
    partner = torch.cat((join_pairs(second, first, rotation.layout), still))

    def of_heads(q: Tensor, k: Tensor, fill: float, sign: float) -> Tensor:
        wide = [F.pad(join_pairs(sign * t, t, rotation.layout), (0, head_dim - turned), value=fill) for t in (q, k)]
        return torch.cat([t[:, :, None].expand(-1, -1, n, -1) for t, n in zip(wide, (heads, kv_heads), strict=True)], 2)

    cos = of_heads(rotation.q_cos, rotation.k_cos, 1.0, 1.0)
    return Turn(cos, of_heads(rotation.q_sin, rotation.k_sin, 0.0, -1.0), partner)


class Moment(NamedTuple):
    """What a block is told about the new token."""

    turn: Turn | None
    mask: Tensor | None  # (1 or B, 1 or H, 1, S), added to the scores; None: every key is visible


def in_pieces(matrix: Matrix) -> Matrix:
    """Return a matrix (R, C) as N pieces (N, C, R / N), one for each thread as far as R can be shared out.

    MKL multiplies a matrix by a single row of x on one thread, but a batch of matrices on all: 1.2 to 1.9 times as
    fast. A matrix with more rows than columns is also laid out column after column in memory, which is as much again.
    """
    rows, columns = matrix.values.shape
    count = next(n for n in range(torch.get_num_threads(), 0, -1) if rows % n == 0)
    pieces = matrix.values.unflatten(0, (count, -1)).mT
    return matrix._replace(values=pieces.contiguous() if rows > columns else pieces)


def whole(matrix: Matrix) -> Matrix:
    """Undo `in_pieces`."""
    return matrix._replace(values=matrix.values.mT.flatten(0, 1))


class EagerDecoder(Decoder):
    """PyTorch's own operations over packed weights and the cache, in the model's dtype, on any device.

    A matrix is read as the model holds it: weights rounded to fewer bits take as long as others.
    """

    name = "eager"

    def __init__(self, model: Transformer, precision: Precision = "fp32") -> None:
        super().__init__(model, precision)
        self.eps = self.small_number()
        self.weights, self.for_one_row = decode_weights(self.model, self.read_as(precision)), False

    def small_number(self) -> Tensor:
        """Return the norms' epsilon (1,), in the dtype of their statistics."""
        weight = self.model.norm.weight
        return weight.new_tensor([self.model.config.norm_eps], dtype=torch.promote_types(weight.dtype, torch.float32))

    def read_as(self, precision: Precision) -> Precision:
        return "fp32"

    def look_ahead(self, cache: Cache, positions: Sequence[int]) -> None:
        super().look_ahead(cache, positions)
        assert self.ahead is not None
        self.lay_out(for_one_row=len(positions) == 1)
        config, rotation = self.model.config, self.ahead.rotation
        sizes = (config.n_heads, config.kv_heads, config.head_dim)
        self.turn = None if rotation is None else turn_of(rotation, *sizes)

    def lay_out(self, for_one_row: bool) -> None:
        """Lay the matrices out as they are multiplied fastest."""
        if for_one_row == self.for_one_row or self.eps.device.type != "cpu":
            return
        laid_out, weights = in_pieces if for_one_row else whole, self.weights
        blocks = [
            block._replace(
                qkv=laid_out(block.qkv), o=laid_out(block.o), gate_up=laid_out(block.gate_up), down=laid_out(block.down)
            )
            for block in weights.blocks
        ]
        self.weights, self.for_one_row = DecodeWeights(blocks, weights.last_norm, laid_out(weights.head)), for_one_row

    def begin_token(self, i: int, cache: Cache) -> None:
        assert self.ahead is not None
        bias, silent = (self.mask_at(i, mask, cache) for mask in (self.ahead.bias, self.ahead.silent))
        self.acting = Moment(None if self.turn is None else self.turn.at(i), bias)
        self.silent = Moment(None, silent)

    def mask_at(self, i: int, mask: Tensor | None, cache: Cache) -> Tensor | None:
        """Return the mask of token i, (1 or B, 1 or H, 1, S), in the dtype of the queries."""
        return None if mask is None else mask[:, :, i : i + 1, : cache.used + 1].to(self.weights.last_norm.dtype)

    def run(self, x: Tensor, first: int, last: int, cache: Cache) -> Tensor:
        for layer in range(first, last):
            moment = self.acting if self.acts[layer] else self.silent
            x = self.block(x, self.weights.blocks[layer], moment, cache.layers[layer])
        if last < len(self.acts):
            return x
        return self.times(self.normed(x, self.weights.last_norm), self.weights.head)

    def block(self, x: Tensor, weights: BlockWeights, moment: Moment, past: LayerCache) -> Tensor:
        """Run one block on x (B, C) and store its keys and values."""
        H, G = self.model.config.n_heads, self.model.config.kv_heads
        projected = self.times(self.normed(x, weights.input_norm), weights.qkv).reshape(len(x), H + 2 * G, -1)
        qk, v = projected[:, : H + G], projected[:, H + G :]
        if weights.q_norm is not None and weights.k_norm is not None:
            qk = torch.cat((self.normed(qk[:, :H], weights.q_norm), self.normed(qk[:, H:], weights.k_norm)), dim=1)
        if moment.turn is not None:
            qk = moment.turn(qk)
        mixed = self.attend(qk[:, :H, None], qk[:, H:, None], v[:, :, None], moment.mask, past)
        x = x + self.times(mixed.view(len(x), -1), weights.o)  # B H 1 D -> B C
        gate, up = self.times(self.normed(x, weights.post_norm), weights.gate_up).chunk(2, dim=-1)
        return x + self.times(F.silu(gate) * up, weights.down)

    def normed(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm, as in model/norm.py."""
        dtype = self.eps.dtype
        wide, weight = x.to(dtype), weight.to(dtype)
        if x.device.type != "cpu":
            return F.rms_norm(wide, weight.shape, weight, self.model.config.norm_eps).to(x.dtype)
        # On a CPU `rms_norm` is ten operations; these are five.
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        factor = torch.addcmul(self.eps, norm, norm, value=1 / len(weight)).rsqrt_()
        return (wide * factor * weight).to(x.dtype)

    def times(self, x: Tensor, matrix: Matrix) -> Tensor:
        """Return x (B, columns) times the matrix's transpose, (B, rows)."""
        if x.device.type != "cpu":
            return F.linear(x, matrix.values)
        if self.for_one_row:
            return torch.bmm(x.expand(len(matrix.values), 1, -1), matrix.values).view(1, -1)
        # MKL multiplies for a few rows 1.2 to 2 times as fast in this order.
        return (matrix.values @ x.T).T

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, past: LayerCache) -> Tensor:
        """Store k and v (B, G, 1, D), and return what q (B, H, 1, D) finds among all that is stored."""
        keys, values = past.append(k, v)  # B G S D
        return F.scaled_dot_product_attention(q, keys, values, mask, enable_gqa=q.shape[1] != k.shape[1])
