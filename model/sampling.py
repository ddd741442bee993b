"""From logits to the next token, and from prompts to text: sampling.

The filters act in this order, each on what the one before left:

    repetition penalty, temperature, top-k, top-p, min-p, draw

At temperature 0 the draw is an argmax, which top-k, top-p and min-p cannot change.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor, nn

from model.cache import Cache
from model.errors import UserError
from model.initialisation import parameter_generator
from model.sampling_config import PastContext, SamplingSettings
from model.transformer import Transformer

if TYPE_CHECKING:
    from model.decoding.decoder import Decoder

# Prompts are read in pieces of this many tokens, so that the mask of a long one does not grow with its square.
PIECE = 512
# Slots for new tokens in a new cache. It grows when they are full, so a large limit on new tokens costs nothing.
ROOM = 256

Ending = Literal["stop", "context", "length"]


class Step(NamedTuple):
    """What one step of `generate` adds to each row.

    `tokens` holds None where the row had already ended. `ended` says how a row ended, in this step or before, and is
    None while it goes on: stop (the token is one of `stop_ids`), context (the positional scheme has no position for
    the token, so nothing can follow it) or length (all new tokens asked for are there).
    """

    tokens: list[int | None]
    ended: list[Ending | None]


# --- Filters: logits (..., V) in, logits of the same shape out; -inf marks a token that cannot be drawn. ---


def penalise_repetition(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Return logit / penalty for seen tokens with a positive logit, logit * penalty for those with a negative one.

    `seen` (..., V) is True for ids that stand in the text; a mask, so that an id counts once however often it stands
    there. Keskar et al. (2019, "CTRL"), whose plain division would make a negative logit larger.
    """
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def apply_temperature(logits: Tensor, temperature: float) -> Tensor:
    """Return (logits - max) / temperature, for a temperature above 0.

    Without the subtraction, which no probability notices, a tiny temperature sends the largest logit to infinity.
    """
    # A temperature below the smallest number of the dtype would round to 0, and 0 / 0 is NaN.
    floor = torch.finfo(logits.dtype).tiny
    return (logits - logits.amax(dim=-1, keepdim=True)) / max(temperature, floor)


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """Keep the k largest logits; 0, or k beyond the vocabulary, keeps all.

    Of equal ones at the edge all stay: which of them `topk` picks is not defined, and differs between devices.
    """
    if k == 0 or k >= logits.shape[-1]:
        return logits
    edge = logits.topk(k, dim=-1).values[..., -1:]
    return logits.masked_fill(logits < edge, float("-inf"))


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """Keep each token for which the likelier ones sum to less than p, and always the likeliest.

    So the token that crosses p is kept, and with it all that are just as likely. Holtzman et al. (2020), "nucleus
    sampling".
    """
    if p == 1:  # rounded sums reach 1 before the last token
        return logits
    probabilities = logits.softmax(dim=-1)
    ordered = descending(probabilities)
    kept = (ordered.cumsum(dim=-1) - ordered < p).sum(dim=-1, keepdim=True).clamp(min=1)
    return logits.masked_fill(probabilities < ordered.gather(-1, kept - 1), float("-inf"))


def descending(numbers: Tensor) -> Tensor:
    """Return the numbers (..., V) from the largest to the smallest."""
    if numbers.device.type == "cpu":  # numpy takes a twelfth of PyTorch's time
        return torch.from_numpy(np.sort(numbers.numpy(force=True), axis=-1)).flip(-1)
    return numbers.sort(dim=-1, descending=True).values


def keep_min_p(logits: Tensor, min_p: float) -> Tensor:
    """Keep tokens of probability >= min_p * the largest one (Nguyen et al., 2024).

    In logits: logit >= max + ln(min_p), without a softmax.
    """
    if min_p == 0:
        return logits
    bound = logits.amax(dim=-1, keepdim=True) + torch.tensor(min_p, dtype=logits.dtype).log().item()
    return logits.masked_fill(logits < bound, float("-inf"))


def filtered(logits: Tensor, seen: Tensor | None, settings: SamplingSettings) -> Tensor:
    """Return the logits after all filters, in the stated order and in at least float32."""
    if logits.dtype not in (torch.float32, torch.float64):
        logits = logits.float()
    if seen is not None:
        logits = penalise_repetition(logits, seen, settings.repetition_penalty)
    if settings.temperature == 0:
        return logits
    logits = apply_temperature(logits, settings.temperature)
    return keep_min_p(keep_top_p(keep_top_k(logits, settings.top_k), settings.top_p), settings.min_p)


# --- The draw ---


def gumbel_noise(generators: Sequence[torch.Generator], vocabulary: int) -> Tensor:
    """Return -ln(-ln(u)) for uniform u, (B, V) in float64 on the CPU; row b draws from generator b alone."""
    uniform = [torch.rand(vocabulary, generator=generator, dtype=torch.float64) for generator in generators]
    # u = 0 would give -inf, also to the only token that the filters left.
    return torch.stack(uniform).clamp_(min=1e-300).log_().neg_().log_().neg_()


def pick(logits: Tensor, noise: Tensor | None) -> list[int]:
    """Return argmax(logits + noise) of each row: a draw from softmax(logits) if the noise is Gumbel's, greedy without.

    A token at -inf is never drawn, which rounding in a cumulative sum could not promise. -1 where a logit is NaN.
    Gumbel (1954); Maddison et al. (2014). The one place that waits for the device.
    """
    if noise is not None:
        logits = logits + noise.to(logits.device, logits.dtype)
    if logits.device.type == "cpu":  # numpy takes a fifth of PyTorch's time: a small model's step would notice
        values = logits.numpy(force=True)
        best = values.argmax(axis=-1).tolist()
        return [-1 if math.isnan(row[i]) else i for row, i in zip(values, best, strict=True)]
    largest = logits.max(dim=-1)  # NaN counts as the largest, for numpy too
    tokens: list[int] = largest.indices.masked_fill(largest.values.isnan(), -1).tolist()
    return tokens


class Sampler:
    """Chooses the next token of every row; each row has a random stream of its own.

    The stream depends on the seed and the row's number: not on how many rows there are, on the device, or on
    anything that other code draws.
    """

    def __init__(self, settings: SamplingSettings, rows: int) -> None:
        self.settings = settings
        self.generators = [parameter_generator(settings.seed, f"sample/{row}") for row in range(rows)]

    def __call__(self, logits: Tensor, seen: Tensor | None) -> list[int]:
        """Return the next token of each row for logits (B, V)."""
        noise = None if self.settings.temperature == 0 else gumbel_noise(self.generators, logits.shape[-1])
        return pick(filtered(logits, seen, self.settings), noise)


# --- Rows and the windows of them that the model reads ---


@dataclass
class Row:
    """One text: its tokens, prompt and new; the model reads those from `start` on, at positions 0, 1, ..."""

    tokens: list[int]
    start: int = 0
    ended: Ending | None = None

    @property
    def window(self) -> list[int]:
        """The tokens that the model reads; none, once the row has ended."""
        return [] if self.ended else self.tokens[self.start :]

    @property
    def newest(self) -> list[int]:
        """The last token that the model reads; none, once the row has ended."""
        return [] if self.ended else self.tokens[-1:]

    @property
    def reach(self) -> int:
        """How many tokens the model reads: the newest stands one position before."""
        return 0 if self.ended else len(self.tokens) - self.start

    def shorten(self, limit: int | None) -> bool:
        """Start the window afresh at the last half of `limit` tokens if it no longer fits; say whether it moved."""
        if self.ended or limit is None or len(self.tokens) - self.start <= limit:
            return False
        self.start = len(self.tokens) - max(1, limit // 2)
        return True


def left_padded(pieces: list[list[int]], ends: list[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return tokens and positions, (B, T) each, of pieces that end before the positions `ends`; pads have -1."""
    width = max(map(len, pieces))
    tokens = [[0] * (width - len(piece)) + piece for piece in pieces]
    positions = [
        [-1] * (width - len(piece)) + list(range(end - len(piece), end))
        for piece, end in zip(pieces, ends, strict=True)
    ]
    return torch.tensor(tokens, device=device), torch.tensor(positions, device=device)


@contextmanager
def evaluating(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Put modules into eval mode, and afterwards each back into the mode it was in.

    `model.eval()` at every step would take a tenth of a small model's time.
    """
    training = [module for module in modules if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


class Reader:
    """Reads the rows' windows and returns the logits that follow; keeps what it has read, if told to.

    `length` is the declared length of the whole call. Without a cache every step reads whole windows, into a new cache
    of the same declared length: angles that depend on the length are then the same both ways.
    """

    def __init__(self, model: Transformer, length: int, keep: bool, decoder: "Decoder | None" = None) -> None:
        self.model, self.length, self.keep, self.decoder = model, length, keep, decoder
        self.modules = list(model.modules())
        self.device, self.dtype = model.norm.weight.device, model.norm.weight.dtype
        self.past: Cache | None = None

    def empty(self, rows: int, width: int) -> Cache:
        """Return a cache with room for `width` slots and some more."""
        capacity = min(width + ROOM, max(width, self.length))
        return Cache(self.model.config, rows, self.length, self.dtype, self.device, capacity)

    def read(self, rows: list[Row], afresh: bool) -> Tensor:
        """Return the logits (B, V) after each row's last token; `afresh` drops what was read before."""
        if afresh or not self.keep or self.past is None:
            self.past = None  # its memory is free for the next one
            return self.read_windows(rows)
        return self.read_newest(rows, self.past)

    def read_windows(self, rows: list[Row]) -> Tensor:
        """Read every row's window into a new cache."""
        windows = [row.window for row in rows]
        ends = [len(window) for window in windows]
        self.past = self.empty(len(rows), max(ends))
        if self.decoder is not None and self.keep and short(ends, self.decoder.prompt_tokens):
            return self.read_by_token(windows, self.past, self.decoder)
        return self.forward(windows, ends, self.past)

    def read_by_token(self, windows: list[list[int]], past: Cache, decoder: "Decoder") -> Tensor:
        """Read windows of equal length by the decoder, one token of each after another."""
        for position, tokens in enumerate(zip(*windows, strict=True)):
            logits = decoder(tokens, [position] * len(windows), past)
        return logits

    def read_newest(self, rows: list[Row], past: Cache) -> Tensor:
        """Read every row's last token, by the decoder if there is one."""
        if self.decoder is None:
            return self.forward([row.newest for row in rows], [row.reach for row in rows], past)
        tokens = [0 if row.ended else row.tokens[-1] for row in rows]
        return self.decoder(tokens, [row.reach - 1 for row in rows], past)

    def forward(self, pieces: list[list[int]], ends: list[int], past: Cache) -> Tensor:
        """Read pieces of the rows that end before the positions `ends`."""
        tokens, positions = left_padded(pieces, ends, self.device)
        with evaluating(self.modules):
            for piece, places in zip(tokens.split(PIECE, dim=1), positions.split(PIECE, dim=1), strict=True):
                hidden = self.model.hidden(piece, places, past)
            return self.model.logits(hidden[:, -1])  # B C -> B V


def short(ends: Sequence[int], tokens: int) -> bool:
    """Say whether windows are equally long and hold no more than so many tokens together."""
    return 0 < sum(ends) <= tokens and min(ends) == max(ends)


# --- Generation ---


def check_request(model: Transformer, prompts: list[list[int]], max_new_tokens: int, past_context: PastContext) -> None:
    """Refuse, before any token is produced, what cannot be generated from (UserError)."""
    if max_new_tokens < 0:
        raise UserError(f"max_new_tokens {max_new_tokens} is negative")
    if past_context not in get_args(PastContext):
        raise UserError(f"past_context {past_context!r} is neither 'stop' nor 'reread'")
    vocabulary, limit = model.embed_tokens.num_embeddings, model.position.max_positions
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise UserError(f"prompt {number} has no token: an empty text starts from BOS")
        if not 0 <= min(prompt) <= max(prompt) < vocabulary:
            raise UserError(f"prompt {number} holds a token outside 0 .. {vocabulary - 1}, the model's vocabulary")
        if limit is not None and len(prompt) > limit and past_context == "stop":
            raise UserError(
                f"the prompt has {len(prompt)} tokens, but position {model.config.position.kind!r} is defined for "
                f"{limit}: shorten it, or let past_context be reread to read its last {max(1, limit // 2)}"
            )


def seen_tokens(rows: list[Row], vocabulary: int, stop_ids: frozenset[int], device: torch.device) -> Tensor:
    """Return a mask (B, V) of the ids that stand in each row.

    Ids that end a text are left out: each text begins with BOS, and a penalty on it would keep texts from ending.
    """
    seen = torch.zeros(len(rows), vocabulary, dtype=torch.bool)
    for mask, row in zip(seen, rows, strict=True):
        mask[list(set(row.tokens) - stop_ids)] = True
    return seen.to(device)


def generate(
    model: Transformer,
    prompts: list[list[int]],
    settings: SamplingSettings | None = None,
    max_new_tokens: int = 256,
    stop_ids: Sequence[int] = (),
    past_context: PastContext = "stop",
    cache: bool = True,
    decoder: "Decoder | None" = None,
) -> Iterator[Step]:
    """Continue each prompt token by token; yields a `Step` for every token, until all rows have ended.

    Prompts of unequal length form one batch, padded on the left; a row's text does not depend on the others (up to
    the rounding of larger matrix products). The same text comes with and without `cache`, which only saves time.

    Past the positions that the scheme is defined for, a row ends (`past_context` stop), or the last half of them is
    read afresh from position 0 (reread; so is the end of a longer prompt). Unlimited schemes go on.

    A `decoder` (`model.decoding.choose`), made from this model, reads the new tokens faster than the model itself, and
    with the weights rounded as it was told to.

    The model's mode, its gradients and the global random state stay as they were. Raises UserError, before any token,
    for an empty prompt, an unknown token, or a prompt beyond the scheme's limit under stop.
    """
    check_request(model, prompts, max_new_tokens, past_context)
    rows = [Row(list(prompt)) for prompt in prompts]
    limit = model.position.max_positions
    length = max((len(row.tokens) for row in rows), default=0) + max_new_tokens
    length = length if limit is None else min(length, limit)
    reader = Reader(model if decoder is None else decoder.model, length, cache, decoder)
    return _steps(reader, rows, settings or SamplingSettings(), max_new_tokens, frozenset(stop_ids), past_context)


def _steps(
    reader: Reader,
    rows: list[Row],
    settings: SamplingSettings,
    max_new_tokens: int,
    stop_ids: frozenset[int],
    past_context: PastContext,
) -> Iterator[Step]:
    limit = reader.model.position.max_positions
    sampler, inference = Sampler(settings, len(rows)), torch.inference_mode()
    seen = None
    if settings.repetition_penalty != 1:
        seen = seen_tokens(rows, reader.model.embed_tokens.num_embeddings, stop_ids, reader.device)
    for left in reversed(range(max_new_tokens if rows else 0)):
        # One row that no longer fits makes all be read afresh: the others come out as they were.
        moved = [row.shorten(limit) for row in rows]
        with inference:  # not in the caller's code between two steps
            drawn = sampler(reader.read(rows, afresh=any(moved)), seen)
        tokens = [None if row.ended else token for row, token in zip(rows, drawn, strict=True)]
        for row, token in zip(rows, tokens, strict=True):
            if token is not None:
                extend(row, token, left, stop_ids, limit if past_context == "stop" else None)
        if seen is not None:
            mark_seen(seen, tokens, stop_ids)
        yield Step(tokens, [row.ended for row in rows])
        if all(row.ended for row in rows):
            return


def extend(row: Row, token: int, left: int, stop_ids: frozenset[int], limit: int | None) -> None:
    """Add a token to a row, and say how the row ended if it did."""
    if token < 0:
        raise UserError("the model's output is not a number (NaN): its weights are damaged, or its training diverged")
    row.tokens.append(token)
    if token in stop_ids:
        row.ended = "stop"
    elif left == 0:
        row.ended = "length"
    elif limit is not None and len(row.tokens) > limit:
        row.ended = "context"


def mark_seen(seen: Tensor, tokens: list[int | None], stop_ids: frozenset[int]) -> None:
    """Add each row's new token to the mask of seen ids (B, V), in place."""
    for mask, token in zip(seen, tokens, strict=True):
        if token is not None and token not in stop_ids:
            mask[token] = True
