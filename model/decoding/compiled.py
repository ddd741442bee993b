"""The eager step under torch.compile: one graph for a block serves all blocks and all tokens.

For that no shape may change from token to token: attention reads every slot of the cache, filled or not, and the new
slot's number is a tensor. Compiling takes tens of seconds, again for each number of rows and each size of the cache.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from model.cache import Cache, LayerCache
from model.decoding.build import BuildError, first_error
from model.decoding.decoder import Decoder
from model.decoding.eager import EagerDecoder
from model.decoding.weights import Matrix, decode_weights
from model.sampling_config import Precision
from model.transformer import Transformer


class CompiledDecoder(EagerDecoder):
    """Compiled blocks that read their matrices packed (BuildError where torch.compile does not work)."""

    name = "compiled"
    fixed = True

    def __init__(self, model: Transformer, precision: Precision = "fp32") -> None:
        probe()
        Decoder.__init__(self, model, precision)
        self.eps, self.weights = self.small_number(), decode_weights(self.model, precision)
        self.slot = torch.zeros(1, dtype=torch.long, device=model.norm.weight.device)
        self.block = torch.compile(self.block, dynamic=False)  # type: ignore[method-assign]

    def read_as(self, precision: Precision) -> Precision:
        return precision

    def lay_out(self, for_one_row: bool) -> None:
        """Leave the matrices as they are: rows of memory are what the product written below reads."""

    def begin_token(self, i: int, cache: Cache) -> None:
        self.slot = torch.full_like(self.slot, cache.used)
        super().begin_token(i, cache)

    def mask_at(self, i: int, mask: Tensor | None, cache: Cache) -> Tensor | None:
        return None if mask is None else mask[:, :, i : i + 1].contiguous()

    def times(self, x: Tensor, matrix: Matrix) -> Tensor:
        if len(x) > 1:
            return F.linear(x, matrix.dequantised().to(x.dtype))
        # For one row the product as written: PyTorch's own matrix product is not threaded there.
        product = (matrix.values.float() * x).sum(dim=1)
        return (product if matrix.scales is None else product * matrix.scales).to(x.dtype)[None]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, past: LayerCache) -> Tensor:
        assert mask is not None
        keys, values = (slots.index_copy_(2, self.slot, new) for slots, new in ((past.keys, k), (past.values, v)))
        grouped = q.view(len(q), k.shape[1], -1, q.shape[-1])  # B G H/G D
        scores = (grouped.float() @ keys.float().mT / q.shape[-1] ** 0.5).flatten(1, 2)[:, :, None]
        weights = (scores + mask).softmax(dim=-1).view(*grouped.shape[:3], -1)
        return (weights @ values.float()).to(q.dtype).view_as(q)


def probe() -> None:
    """Compile something tiny: torch.compile needs a working compiler of its own (BuildError)."""
    try:
        torch.compile(torch.neg)(torch.zeros(1))
    except Exception as error:  # what a broken compiler raises has no common type
        raise BuildError(f"torch.compile does not work here: {first_error(str(error))[:200]}") from None
