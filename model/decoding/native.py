"""A token's way through the blocks in one call of the C++ kernel `native.cpp`: float32 on a CPU."""

import ctypes
from collections.abc import Sequence
from ctypes import c_double, c_int64, c_void_p
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from model.cache import Cache
from model.decoding import build
from model.decoding.decoder import Decoder
from model.decoding.weights import BlockWeights, Matrix, decode_weights
from model.sampling_config import Precision
from model.transformer import Transformer

KINDS: dict[torch.dtype, int] = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
GROUP = 16  # rows that the kernel reads together


def fields(kind: type, names: str) -> list[tuple[str, type]]:
    """Return the fields of a struct for names divided by blanks."""
    return [(name, kind) for name in names.split()]


class CMatrix(ctypes.Structure):
    """`Matrix` of native.cpp."""

    _fields_ = [*fields(c_void_p, "values scales"), *fields(c_int64, "rows columns")]


class CBlock(ctypes.Structure):
    """`Block` of native.cpp."""

    _fields_ = [
        *fields(CMatrix, "qkv o gate up down"),
        *fields(c_void_p, "input_norm post_norm q_norm k_norm keys values"),
        *fields(c_int64, "acts"),
    ]


class CStep(ctypes.Structure):
    """`Step` of native.cpp."""

    _fields_ = [
        *fields(c_int64, "rows heads kv_heads head_dim width hidden slots capacity"),
        *fields(c_int64, "kind threads first last pairs is_adjacent"),
        *fields(c_void_p, "q_cos q_sin k_cos k_sin"),
        *fields(c_int64, "rotation_stride"),
        *fields(c_void_p, "bias mask"),
        *fields(c_int64, "bias_row_stride bias_head_stride mask_row_stride"),
        *fields(c_double, "eps"),
        *fields(c_void_p, "blocks x projected mixed gated raised head last_norm logits"),
    ]


def kernel() -> ctypes.CDLL:
    """Return the kernel, built first if need be (BuildError)."""
    library = build.load()
    library.ropelab_sizes.restype = c_int64
    sizes = [ctypes.sizeof(struct) for struct in (CMatrix, CBlock, CStep)]
    assert library.ropelab_sizes() == sizes[0] * 1000000 + sizes[1] * 1000 + sizes[2], "native.cpp has other structs"
    library.ropelab_step.restype = None
    return library


def address(tensor: Tensor | None) -> int | None:
    """Return where a contiguous tensor's numbers lie."""
    assert tensor is None or tensor.is_contiguous()
    return None if tensor is None else tensor.data_ptr()


def in_words(values: Tensor) -> Tensor:
    """Lay out a matrix (rows, columns) as the kernel reads it, (groups, words a row, 16, columns a word).

    Rows in groups of 16, columns in words of 32 bits, the words of a group's rows beside each other; zeros fill up.
    """
    in_word = 4 // values.element_size()
    padded = F.pad(values, (0, -values.shape[1] % 4, 0, -len(values) % GROUP))
    return padded.view(-1, GROUP, padded.shape[1] // in_word, in_word).transpose(1, 2).contiguous()


class Packed(NamedTuple):
    """A matrix as the kernel reads it."""

    words: Tensor
    scales: Tensor | None
    rows: int
    columns: int

    def c_matrix(self) -> CMatrix:
        """Return the kernel's view."""
        return CMatrix(address(self.words), address(self.scales), self.rows, self.columns)


def packed(matrix: Matrix) -> Packed:
    """Lay out a matrix anew."""
    return Packed(in_words(matrix.values), matrix.scales, *matrix.values.shape)


def halves(matrix: Matrix) -> tuple[Matrix, Matrix]:
    """Divide a matrix into the upper and the lower half of its rows."""
    scales = (None, None) if matrix.scales is None else matrix.scales.chunk(2)
    upper, lower = map(Matrix, matrix.values.chunk(2), scales)
    return upper, lower


class PackedBlock(NamedTuple):
    """One block's weights as the kernel reads them."""

    matrices: list[Packed]  # qkv, o, gate, up, down
    norms: list[Tensor | None]  # input, post, q, k

    def c_block(self, acts: bool) -> CBlock:
        """Return the kernel's view, without its cache."""
        return CBlock(*(m.c_matrix() for m in self.matrices), *map(address, self.norms), None, None, int(acts))


def packed_block(weights: BlockWeights) -> PackedBlock:
    """Lay out one block's matrices anew."""
    matrices = (weights.qkv, weights.o, *halves(weights.gate_up), weights.down)
    return PackedBlock([*map(packed, matrices)], [*weights[4:]])


def stride(tensor: Tensor | None, dim: int) -> int:
    """Return how many numbers lie from one index of `dim` to the next; 0 where all share what is there once."""
    return 0 if tensor is None or tensor.shape[dim] == 1 else tensor.stride(dim)


class NativeDecoder(Decoder):
    """One call of the kernel for a stretch of blocks, threads included (BuildError where there is none)."""

    name = "native"
    prompt_tokens = 8

    def __init__(self, model: Transformer, precision: Precision = "fp32") -> None:
        assert model.norm.weight.device.type == "cpu"
        assert model.norm.weight.dtype == torch.float32
        self.library = kernel()
        super().__init__(model, precision)
        config = self.model.config
        weights = decode_weights(self.model, precision)
        self.blocks = [packed_block(block) for block in weights.blocks]
        self.head, self.last_norm = packed(weights.head), weights.last_norm
        assert self.table.is_contiguous()
        self.c_blocks = (CBlock * config.n_layers)(*map(PackedBlock.c_block, self.blocks, self.acts))
        self.c_head = self.head.c_matrix()
        self.c_head_address = ctypes.addressof(self.c_head)
        self.step = CStep(
            heads=config.n_heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            width=config.d_model,
            hidden=config.hidden_width,
            kind=KINDS[self.head.words.dtype],
            eps=config.norm_eps,
            blocks=ctypes.addressof(self.c_blocks),
            last_norm=address(self.last_norm),
        )

    def look_ahead(self, cache: Cache, positions: Sequence[int]) -> None:
        super().look_ahead(cache, positions)
        assert self.ahead is not None
        step, config, rows = self.step, self.model.config, len(positions)
        for block, layer in zip(self.c_blocks, cache.layers, strict=True):
            block.keys, block.values = address(layer.keys), address(layer.values)
        rotation, bias, mask = self.ahead.rotation, self.ahead.bias, self.ahead.silent
        self.tables = [table.contiguous() for table in rotation[:4]] if rotation else []
        self.first_angles = [table.data_ptr() for table in self.tables]
        self.masks = [
            (name, m.data_ptr(), m.shape[-1]) for name, m in (("bias", bias), ("mask", mask)) if m is not None
        ]
        step.q_cos = step.q_sin = step.k_cos = step.k_sin = step.bias = step.mask = None
        step.pairs = self.tables[0].shape[-1] if rotation else 0
        step.is_adjacent = int(rotation is not None and rotation.layout == "interleaved")
        step.rotation_stride = stride(self.tables[0], 0) if rotation else 0
        step.bias_row_stride, step.bias_head_stride = stride(bias, 0), stride(bias, 1)
        step.mask_row_stride = stride(mask, 0)
        step.rows, step.threads, step.capacity = rows, torch.get_num_threads(), cache.layers[0].keys.shape[2]
        heads, hidden = config.n_heads * config.head_dim, config.hidden_width
        widths = (heads + 2 * config.kv_heads * config.head_dim, heads + -heads % 4, *[hidden + -hidden % 4] * 2)
        self.scratch = [torch.zeros(rows, width) for width in widths]
        self.x, self.vector = torch.zeros(rows, config.d_model), 4 * config.d_model  # bytes
        step.projected, step.mixed, step.gated, step.raised = map(address, self.scratch)

    def embedded(self, tokens: Sequence[int]) -> Tensor:
        assert 0 <= min(tokens) <= max(tokens) < self.table.shape[0]
        to, table = self.x.data_ptr(), self.table.data_ptr()
        for row, token in enumerate(tokens):  # a copy of PyTorch's takes longer to be called than this
            ctypes.memmove(to + row * self.vector, table + token * self.vector, self.vector)
        return self.x

    def begin_token(self, i: int, cache: Cache) -> None:
        step, skipped = self.step, 4 * i  # bytes in a table of one number a token
        step.slots = cache.used
        if self.first_angles:
            apart = skipped * step.pairs
            step.q_cos, step.q_sin, step.k_cos, step.k_sin = [first + apart for first in self.first_angles]
        for name, first, width in self.masks:
            setattr(step, name, first + skipped * width)

    def run(self, x: Tensor, first: int, last: int, cache: Cache) -> Tensor:
        step, is_last = self.step, last == len(self.acts)
        x = x.contiguous()
        logits = torch.empty(step.rows, self.head.rows) if is_last else x
        step.first, step.last, step.x, step.logits = first, last, x.data_ptr(), logits.data_ptr()
        step.head = self.c_head_address if is_last else None
        self.library.ropelab_step(ctypes.byref(step))
        return logits
