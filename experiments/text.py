"""How well a model predicts text at several lengths, with the same target tokens at each.

A span is a stretch of test text as long as the longest length (at least 1.5 training lengths), and the token behind it.
Its targets are the last half training length of tokens: at every length the model reads just the tokens that end there,
from position 0 on, so a longer text gains nothing from having fewer early tokens (Press et al., 2022, call that the
early token curse).
"""

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from data.loader import evaluation_windows
from model.transformer import Transformer, token_losses
from training.hardware import Hardware

TOKENS_AT_ONCE = 8192
BINS = 32  # of positions, in the loss by position


class Found(NamedTuple):
    """A mean loss in nats a token over `count` targets; None where the scheme is not defined for so long a text."""

    measure: str
    value: float | None
    length: int
    count: int  # type: ignore[assignment]  # hides tuple.count
    x: float | None = None


class Amount(NamedTuple):
    """How much text is scored: spans, how many of them are also cut into windows, and of targets every so many."""

    spans: int
    window_spans: int
    control_every: int


def text_measures(
    model: Transformer, ids: np.ndarray, lengths: tuple[int, ...], amount: Amount, hardware: Hardware
) -> Iterator[Found]:
    """Yield the three views of a model at several lengths, on evenly spread spans of these ids, and the control.

    `lengths[0]` is the training length L. `same_targets_loss`: windows that slide, the last L / 2 tokens of each span;
    `by_position_loss`: all tokens of the spans, by position; `windows_loss`: spans cut into windows without overlap;
    `same_targets_subset_loss` and `control_loss`: every so many of the targets, the latter with exactly L tokens before
    each.
    """
    trained, longest = lengths[0], max(lengths)
    # Every target needs the training length before it, for the control.
    span = max(longest, trained + trained // 2)
    texts = evaluation_windows(ids, span, amount.spans, "test")
    fewer = evaluation_windows(ids, span, amount.window_spans, "test")
    losses = partial(losses_of, model, hardware=hardware)
    subset = slice(amount.control_every - 1, None, amount.control_every)
    for length in lengths:
        if not reaches(model, length):
            for measure in ("same_targets_loss", "same_targets_subset_loss", "windows_loss"):
                yield Found(measure, None, length, 0)
            continue
        last = None if length == longest else trained // 2
        read = losses(texts[:, span - length :], last=last)
        yield from binned("by_position_loss", read, length) if last is None else ()
        by_target = read[:, -(trained // 2) :]
        yield mean_of("same_targets_loss", by_target, length)
        yield mean_of("same_targets_subset_loss", by_target[:, subset], length)
        yield mean_of("windows_loss", losses(cut(fewer, length)), length)
    contexts = each_with_its_context(texts, trained, trained // 2)[:, subset].reshape(-1, trained + 1)
    yield mean_of("control_loss", losses(contexts, last=1), trained)


def reaches(model: Transformer, length: int) -> bool:
    """Say whether the model's positions are defined for a text of this length."""
    limits = (model.position.max_positions, model.config.random_positions)
    return all(limit is None or length <= limit for limit in limits)


def cut(texts: np.ndarray, length: int) -> np.ndarray:
    """Cut texts (N, S + 1) into the windows (n, length + 1) without overlap that fit; what is left over is unread."""
    starts = range(0, texts.shape[1] - length, length)
    return np.concatenate([texts[:, start : start + length + 1] for start in starts])


def each_with_its_context(texts: np.ndarray, context: int, count: int) -> np.ndarray:
    """Return, for each of the last `count` tokens of texts (N, S + 1), it and the `context` tokens before it.

    The result is (N, count, context + 1).
    """
    windows = np.lib.stride_tricks.sliding_window_view(texts, context + 1, axis=1)
    return windows[:, -count:]


@torch.no_grad()
def losses_of(model: Transformer, texts: np.ndarray, hardware: Hardware, last: int | None = None) -> np.ndarray:
    """Return -ln p of the last targets (None: of all) of texts (N, T + 1), each read from position 0, as float64."""
    model.eval()
    rows = max(1, TOKENS_AT_ONCE // texts.shape[1])
    batches = (torch.from_numpy(texts[start : start + rows]) for start in range(0, len(texts), rows))
    return np.concatenate([_losses(model, batch.to(hardware.device), hardware, last) for batch in batches])


def _losses(model: Transformer, batch: Tensor, hardware: Hardware, last: int | None) -> np.ndarray:
    behind = slice(None) if last is None else slice(-last, None)
    with hardware.autocast():
        # Logits of what is not scored would cost as much as a layer.
        logits = model.logits(model.hidden(batch[:, :-1])[:, behind])
        losses = token_losses(logits, batch[:, 1:][:, behind].contiguous())
    return losses.cpu().double().numpy()


def mean_of(measure: str, losses: np.ndarray, length: int) -> Found:
    """Return the mean of the losses: the sum over all targets by their number."""
    return Found(measure, float(losses.mean()), length, losses.size)


def binned(measure: str, losses: np.ndarray, length: int) -> Iterator[Found]:
    """Yield the mean loss at ranges of positions, from losses (N, T); x is the first position of the range."""
    edges = np.unique(np.linspace(0, losses.shape[1], BINS + 1).round().astype(int))
    for begin, end in pairwise(edges):
        part = losses[:, begin:end]
        yield Found(measure, float(part.mean()), length, part.size, float(begin))


def tokens_read(lengths: tuple[int, ...], amount: Amount) -> int:
    """Return how many tokens `text_measures` reads at most, for an estimate of its time."""
    trained, longest = lengths[0], max(lengths)
    control = trained * (trained // 2 // amount.control_every)
    return amount.spans * (sum(lengths) + control) + amount.window_spans * longest * len(lengths)
