"""A token's way through the blocks in one call of the C++ kernel `native.cpp`: float32 on a CPU."""

import ctypes
from collections.abc import Sequence
from ctypes import c_double, c_int64, c_void_p

import torch
from torch import Tensor

from model.cache import Cache
from model.decoding import build
from model.decoding.decoder import Decoder
from model.decoding.weights import BlockWeights, Matrix
from model.sampling_config import Precision
from model.transformer import Transformer

KINDS: dict[torch.dtype, int] = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}


def fields(kind: type, names: str) -> list[tuple[str, type]]:
    """Return the fields of a struct for names divided by blanks."""
    return [(name, kind) for name in names.split()]


class CMatrix(ctypes.Structure):
    """`Matrix` of native.cpp."""

    _fields_ = [*fields(c_void_p, "values scales"), *fields(c_int64, "rows columns")]


class CBlock(ctypes.Structure):
    """`Block` of native.cpp."""

    _fields_ = [
        *fields(CMatrix, "qkv o gate_up down"),
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
        *fields(c_void_p, "blocks x projected mixed gated scores head last_norm logits"),
    ]


def kernel() -> ctypes.CDLL:
    """Return the kernel, built first if need be (BuildError)."""
    library = build.load()
    library.ropelab_sizes.restype = c_int64
    sizes = [ctypes.sizeof(struct) for struct in (CMatrix, CBlock, CStep)]
    assert library.ropelab_sizes() == sizes[0] * 1000000 + sizes[1] * 1000 + sizes[2], "native.cpp has other structs"
    library.ropelab_read.restype = ctypes.c_float
    library.ropelab_read.argtypes = [c_void_p, c_int64, c_int64]
    library.ropelab_step.restype = None
    return library


def read_all(values: Tensor) -> float:
    """Return the sum of a float32 tensor, read by all threads: as fast as the machine's memory allows."""
    return float(kernel().ropelab_read(values.data_ptr(), values.numel(), torch.get_num_threads()))


def address(tensor: Tensor | None) -> int | None:
    """Return where a contiguous tensor's numbers lie."""
    assert tensor is None or tensor.is_contiguous()
    return None if tensor is None else tensor.data_ptr()


def c_matrix(matrix: Matrix) -> CMatrix:
    """Return the kernel's view of a matrix."""
    return CMatrix(address(matrix.values), address(matrix.scales), *matrix.values.shape)


def c_block(weights: BlockWeights, acts: bool) -> CBlock:
    """Return the kernel's view of a block, without its cache."""
    matrices = map(c_matrix, (weights.qkv, weights.o, weights.gate_up, weights.down))
    norms = map(address, (weights.input_norm, weights.post_norm, weights.q_norm, weights.k_norm))
    return CBlock(*matrices, *norms, None, None, int(acts))


def stride(tensor: Tensor | None, dim: int) -> int:
    """Return how many numbers lie from one index of `dim` to the next; 0 where all share what is there once."""
    return 0 if tensor is None or tensor.shape[dim] == 1 else tensor.stride(dim)


class NativeDecoder(Decoder):
    """One call of the kernel for a stretch of blocks, threads included (BuildError where there is none)."""

    name = "native"

    def __init__(self, model: Transformer, precision: Precision = "fp32") -> None:
        assert model.norm.weight.device.type == "cpu"
        assert model.norm.weight.dtype == torch.float32
        self.library = kernel()
        super().__init__(model, precision)
        config = self.model.config
        self.blocks = (CBlock * config.n_layers)(*map(c_block, self.weights.blocks, self.acts))
        self.head = c_matrix(self.weights.head)
        self.step = CStep(
            heads=config.n_heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            width=config.d_model,
            hidden=config.hidden_width,
            kind=KINDS[self.weights.head.values.dtype],
            eps=config.norm_eps,
            blocks=ctypes.addressof(self.blocks),
            last_norm=address(self.weights.last_norm),
        )

    def look_ahead(self, cache: Cache, positions: Sequence[int]) -> None:
        super().look_ahead(cache, positions)
        assert self.ahead is not None
        step, config, rows = self.step, self.model.config, len(positions)
        for block, layer in zip(self.blocks, cache.layers, strict=True):
            block.keys, block.values = address(layer.keys), address(layer.values)
        rotation, bias, mask = self.ahead.rotation, self.ahead.bias, self.ahead.silent
        self.tables = [table.contiguous() for table in rotation[:4]] if rotation else []
        step.pairs = self.tables[0].shape[-1] if rotation else 0
        step.is_adjacent = int(rotation is not None and rotation.layout == "interleaved")
        step.rotation_stride = stride(self.tables[0], 0) if rotation else 0
        step.bias_row_stride, step.bias_head_stride = stride(bias, 0), stride(bias, 1)
        step.mask_row_stride = stride(mask, 0)
        step.rows, step.threads, step.capacity = rows, torch.get_num_threads(), cache.layers[0].keys.shape[2]
        heads, slots = config.n_heads + 2 * config.kv_heads, cache.used + self.ahead.count
        sizes = (rows * heads * config.head_dim, rows * config.d_model, rows * 2 * config.hidden_width)
        self.scratch = [torch.empty(size) for size in (*sizes, step.threads * slots)]
        step.projected, step.mixed, step.gated, step.scores = map(address, self.scratch)

    def begin_token(self, i: int, cache: Cache) -> None:
        assert self.ahead is not None
        step, skipped = self.step, 4 * i  # bytes in a table of one number a token
        step.slots = cache.used
        if self.tables:
            places = [table.data_ptr() + skipped * step.pairs for table in self.tables]
            step.q_cos, step.q_sin, step.k_cos, step.k_sin = places
        for name, mask in (("bias", self.ahead.bias), ("mask", self.ahead.silent)):
            setattr(step, name, None if mask is None else mask.data_ptr() + skipped * mask.shape[-1])

    def run(self, x: Tensor, first: int, last: int, cache: Cache) -> Tensor:
        step, is_last = self.step, last == len(self.acts)
        x = x.contiguous()
        logits = torch.empty(len(x), self.head.rows) if is_last else x
        step.first, step.last, step.x, step.logits = first, last, x.data_ptr(), logits.data_ptr()
        step.head = ctypes.addressof(self.head) if is_last else None
        self.library.ropelab_step(ctypes.byref(step))
        return logits
