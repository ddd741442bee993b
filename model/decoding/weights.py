"""A model's weights, packed for decoding: fewer matrices, and if asked in fewer bits.

One sequence is decoded as fast as the weights can be read, so half the bytes are almost twice the speed. Rounding is
done once, to a copy of the model whose weights stay float32 numbers: whatever reads the prompt and whatever decodes
then compute with the same weights.
"""

import copy
from typing import NamedTuple

import torch
from torch import Tensor

from model.attention import Attention
from model.feed_forward import SwiGLU
from model.sampling_config import Precision
from model.transformer import Block, Transformer


class Matrix(NamedTuple):
    """Weights (rows, columns); with `scales` (rows,), a weight is scale[row] * value[row, column]."""

    values: Tensor
    scales: Tensor | None = None

    def dequantised(self) -> Tensor:
        """Return the weights as float32 numbers, (rows, columns)."""
        wide = self.values.float()
        return wide if self.scales is None else wide * self.scales[:, None]


class BlockWeights(NamedTuple):
    """One block: queries, keys and values in one matrix, gate and up in one."""

    qkv: Matrix
    o: Matrix
    gate_up: Matrix
    down: Matrix
    input_norm: Tensor
    post_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None


class DecodeWeights(NamedTuple):
    """What the decoding step reads: the blocks, the last norm and the output layer."""

    blocks: list[BlockWeights]
    last_norm: Tensor
    head: Matrix


def int8_rows(weight: Tensor) -> Matrix:
    """Round each row to -127 .. 127 times a scale of its own, its largest magnitude / 127; a zero row stays zero."""
    scales = weight.abs().amax(dim=1) / 127
    values = (weight / torch.where(scales > 0, scales, 1.0)[:, None]).round().to(torch.int8)
    return Matrix(values, scales)


def packed(weight: Tensor, precision: Precision) -> Matrix:
    """Return a matrix in the form in which it is read; fp32 leaves it in the model's own dtype."""
    if precision == "int8":
        return int8_rows(weight.float())
    return Matrix(weight.to(torch.bfloat16) if precision == "bf16" else weight)


@torch.no_grad()
def rounded(model: Transformer, precision: Precision) -> Transformer:
    """Return a copy of a float32 model whose matrices hold the numbers that `precision` can tell apart.

    The token embedding is rounded too, with one scale for each token. Norms and the positional scheme stay as they
    are. At fp32 there is nothing to round, and the model itself comes back.
    """
    if precision == "fp32":
        return model
    model = copy.deepcopy(model)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and not name.startswith("position."):
            parameter.copy_(packed(parameter, precision).dequantised())
    return model


@torch.no_grad()
def decode_weights(model: Transformer, precision: Precision) -> DecodeWeights:
    """Pack the weights of a model that `rounded` has returned for the same precision: nothing is lost again."""
    blocks = [block_weights(block, precision) for block in model.layers]  # type: ignore[arg-type]
    return DecodeWeights(blocks, model.norm.weight.detach(), packed(model.lm_head.weight.detach(), precision))


def block_weights(block: Block, precision: Precision) -> BlockWeights:
    """Pack one block."""
    attention: Attention = block.self_attn
    mlp: SwiGLU = block.mlp
    return BlockWeights(
        packed(torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]), precision),
        packed(attention.o_proj.weight.detach(), precision),
        packed(torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]), precision),
        packed(mlp.down_proj.weight.detach(), precision),
        block.input_layernorm.weight.detach(),
        block.post_attention_layernorm.weight.detach(),
        None if attention.q_norm is None else attention.q_norm.weight.detach(),
        None if attention.k_norm is None else attention.k_norm.weight.detach(),
    )
