"""What the positional scheme says about the next tokens, asked once for many of them.

A scheme is elementwise in positions, so the tables of 128 tokens hold the table of each: per token there is only a
slice to take. The rows' positions are compared before each token; where they did not go on by one (a row ended, a
window was read afresh), what was looked up is dropped.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from model.attention import Signal, visible, with_mask
from model.cache import Cache
from model.position.scheme import Rotation
from model.transformer import Transformer

LOOK_AHEAD = 128
# Numbers a head in a block of masks: N (used + N) of every row; so that a long past is asked about in shorter pieces.
LARGEST_MASK = 2**19


def tokens_ahead(model: Transformer, cache: Cache, positions: Sequence[int]) -> int:
    """Return how many tokens may be looked ahead: at least 1, none beyond the scheme's limit or the declared length."""
    limits = [cache.length, model.position.max_positions or cache.length]
    reach = min(limits) - max(positions)
    slots = len(positions) * (cache.used + LOOK_AHEAD)
    return max(1, min(LOOK_AHEAD, reach, LARGEST_MASK // slots))


class Ahead:
    """Tables for the next `count` tokens of every row, the first of which stand at `positions` (-1: an ended row).

    Rows that stand alike, pads included, share one table. `slots` (none: no further than the last token) is how many
    slots of the cache the masks speak of. The new positions are entered into the cache, whose `used` stays.
    """

    def __init__(self, model: Transformer, cache: Cache, positions: Sequence[int], fixed: bool = False) -> None:
        self.cache, self.positions, self.begin = cache, list(positions), cache.used
        self.count = tokens_ahead(model, cache, positions)
        device = cache.positions.device
        first = torch.tensor(positions, device=device)[:, None]
        places = torch.where(first >= 0, first + torch.arange(self.count, device=device), -1)  # B N
        model.check_reach(None, places)
        places = model.placed(places, cache.length)
        cache.enter_ahead(places)
        known = cache.all_positions if fixed else cache.all_positions[:, : self.begin + self.count]
        if bool((known == known[:1]).all()):
            places, known = places[:1], known[:1]
        dtype = torch.promote_types(model.embed_tokens.weight.dtype, torch.float32)
        self.places, self.length = places, cache.length
        self.rotation: Rotation | None = model.position.rotation(places, cache.length, dtype)
        bias = model.position.bias(places, known, dtype)
        signal = Signal(places, known, False, cache.length, self.rotation, bias)
        needs_mask = fixed or not all_visible(places, known, self.begin)
        self.silent = additive(signal._replace(bias=None), dtype) if needs_mask else None  # (1 or B, 1, N, S)
        self.bias = self.silent if bias is None else additive(signal, dtype)  # (1 or B, 1 or H, N, S), or None

    def index(self, cache: Cache, positions: Sequence[int]) -> int | None:
        """Return which of the tokens ahead comes next; None where these tables are not about it."""
        i = cache.used - self.begin
        fits = cache is self.cache and 0 <= i < self.count and len(positions) == len(self.positions)
        expected = [first if first < 0 else first + i for first in self.positions]
        return i if fits and expected == list(positions) else None

    def q_positions(self, i: int) -> Tensor:
        """Return where token i of every row stands, (1 or B, 1)."""
        return self.places[:, i : i + 1]


def all_visible(places: Tensor, known: Tensor, begin: int) -> bool:
    """Say whether token i, in slot begin + i, sees every slot up to its own: no row has pads or has ended."""
    count = places.shape[1]
    own = torch.arange(begin, begin + count, device=places.device)[:, None]
    until = torch.arange(known.shape[1], device=places.device) <= own  # N S
    return bool((visible(places, known) | ~until).all())


def additive(signal: Signal, dtype: torch.dtype) -> Tensor:
    """Return the signal's mask as what is added to the scores: the bias or 0, and -inf where nothing is visible."""
    mask = with_mask(signal, dtype).mask
    assert mask is not None
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, float("-inf"))
    return mask.contiguous()
