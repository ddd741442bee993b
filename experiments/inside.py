"""What position does inside a trained model, by layer: where heads look, and how much of that distance decides.

Everything is read off forward passes over windows of text, in evaluation mode and without autocast: scores are at least
float32, sums float64. Layers, heads and pairs count from 0, distances in tokens. The rows:

- `attention_distance` (layer, head): how far back a query looks, the mean of the distance under its attention weights;
  the mean over all queries, (T - 1) / 4 for uniform attention over T tokens.
- `attention_entropy` (layer, head): of these weights, in nats, the mean over all queries; `attention_entropy_relative`:
  divided by ln(visible keys), so 1 is uniform; without the first query, which has no choice.
- `distance_share` (layer, head): see `distance_share`. White noise gives 2 / (N T) for N windows.
- `loss_without_position` (layer): by how much the mean loss rises, in nats a token, when this layer alone loses what
  the scheme does there: no rotation, no bias, no rule of its own on scores, nothing added below it. What lower layers
  have put into the hidden state stays. Exactly 0 where the scheme does not act. So a table that is added once loses
  all at layer 0 and nothing elsewhere; one that is added below every block loses one of its additions at a time.
- `probe_r2` (layer; the number of layers stands for the state after the last): how well a linear probe reads a token's
  absolute position from what the block reads, R^2 on windows that it was not fitted on; it may be below 0. About 0 at
  layer 0 wherever nothing is added to the token vectors, by construction. It may rise with depth under any scheme,
  even none: with a causal mask a token sees as many keys as it has predecessors (Haviv et al., 2022).
- `frequency_use` (layer, head, x = pair): see `pair_covariances`; only in layers whose queries and keys turn.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from model.attention import Attention, Signal, attention_scores, attention_weights, visible
from model.position.rope import split_pairs
from model.position.scheme import PositionScheme
from model.sampling import evaluating
from model.transformer import Transformer, token_losses
from training.hardware import Hardware

# The probe's penalty, for channels of variance 1: it steadies what is nearly collinear, and costs next to nothing.
RIDGE = 1e-3


class Inside(NamedTuple):
    """One number about the inside of one model: a measurement that lacks only the run's arm and seed."""

    measure: str
    value: float | None  # None: a share of a variance that is 0
    length: int
    count: int  # type: ignore[assignment]  # tokens that it was measured on; hides tuple's own method
    layer: int
    head: int | None = None
    x: float | None = None


Row = Callable[..., Inside]


@torch.no_grad()
def inside(model: Transformer, windows: np.ndarray | Tensor, hardware: Hardware, rows: int = 4) -> list[Inside]:
    """Measure a model on windows (N, T + 1) of token ids, N >= 2, `rows` of them at a time.

    Memory grows with rows * H * T^2; the results do not depend on `rows` but for rounding.
    """
    assert len(windows) > 1, "the probe is scored on other windows than it is fitted on"
    batches = torch.as_tensor(windows, device=hardware.device).split(rows)
    row = partial(Inside, length=windows.shape[1] - 1, count=sum(batch[:, 1:].numel() for batch in batches))
    with evaluating([*model.modules()]):
        return [found for rows_of in (attention_rows, loss_rows, probe_rows) for found in rows_of(model, batches, row)]


def wide(x: Tensor) -> Tensor:
    """Return x in float64, on the CPU: not every device has it."""
    return x.cpu().double()


@contextmanager
def replaced(module: nn.Module, name: str, method: Callable[..., Any]) -> Iterator[None]:
    """Let another function stand in for a method of this one module."""
    setattr(module, name, method)
    try:
        yield
    finally:
        delattr(module, name)


# --- Attention -------------------------------------------------------------------------------------------------------


class Look(NamedTuple):
    """One attention layer in one pass: what it multiplies, and the scores that its softmax reads."""

    layer: int
    q: Tensor  # (B, H, T, D), normalised and turned
    k: Tensor  # (B, G, T, D), normalised and turned
    scores: Tensor  # (B, H, T, T), with all that the scheme adds, in at least float32
    signal: Signal


def scores_of(layer: int, q: Tensor, k: Tensor, signal: Signal, position: PositionScheme) -> Tensor:
    """Return the scores (B, H, T, S) that the softmax of a layer reads, its positional signal included."""
    scores = attention_scores(q, k)
    if position.applies_to(layer):
        scores = position.scores(q, scores, layer, signal)
    return scores if signal.bias is None else scores + signal.bias


@contextmanager
def watched(model: Transformer, see: Callable[[Look], None]) -> Iterator[None]:
    """Call `see` from every attention layer of each pass, between the turning of queries and keys and the softmax."""
    with ExitStack() as stack:
        for attention in model.modules():
            if isinstance(attention, Attention):
                stack.enter_context(replaced(attention, "attend", _seen_by(see, attention.layer, attention.attend)))
        yield


def _seen_by(see: Callable[[Look], None], layer: int, attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def look_and_attend(q: Tensor, k: Tensor, v: Tensor, signal: Signal, position: PositionScheme) -> Tensor:
        see(Look(layer, q, k, scores_of(layer, q, k, signal, position), signal))
        return attend(q, k, v, signal, position)

    return look_and_attend


class AttentionSums(NamedTuple):
    """Sums over windows, queries and keys of one layer, in float64."""

    distance: Tensor  # (H,)
    entropy: Tensor  # (H,)
    relative_entropy: Tensor  # (H,)
    squares: Tensor  # (H,), of the centred scores
    by_distance: Tensor  # (H, T), of the centred scores
    by_pair: Tensor  # (H, P), of centred scores times what a pair adds to them; P = 0 where nothing turns


def token_distances(length: int) -> Tensor:
    """Return how many tokens each key lies before each query, (T, T); 0 where it does not lie before it."""
    places = torch.arange(length)
    return (places[:, None] - places).clamp(min=0)


def row_centred(scores: Tensor, seen: Tensor) -> Tensor:
    """Return scores (B, H, T, S) less the mean of each row over its visible keys; 0 where a key is not visible.

    The softmax of a row does not depend on what is added to all of it.
    """
    mean = scores.masked_fill(~seen, 0).sum(-1, keepdim=True) / seen.sum(-1, keepdim=True)
    return (scores - mean).masked_fill(~seen, 0)


def sums_of(look: Look) -> AttentionSums:
    """Return what one pass adds to the sums of a layer."""
    scores, seen = wide(look.scores), visible(look.signal.q_positions, look.signal.k_positions).cpu()
    weights, centred = attention_weights(scores, seen), row_centred(scores, seen)
    entropy = torch.special.entr(weights).sum(-1)  # (B, H, T)
    apart = token_distances(scores.shape[-1])
    by_distance = torch.zeros(scores.shape[1:3], dtype=scores.dtype)
    return AttentionSums(
        distance=(weights * apart).sum((0, 2, 3)),
        entropy=entropy.sum((0, 2)),
        relative_entropy=(entropy / seen.sum(-1).log())[..., 1:].sum((0, 2)),
        squares=centred.square().sum((0, 2, 3)),
        by_distance=by_distance.index_add(1, apart.flatten(), centred.sum(0).flatten(1)),
        by_pair=pair_covariances(look, centred),
    )


def pair_covariances(look: Look, centred: Tensor) -> Tensor:
    """Return the sums over queries and keys of centred scores times what each pair of channels adds, (H, P).

    A score is a sum over channels, so its variance is the sum of the covariances of its parts with it. Divided by the
    sum of squares this is the share of the variance of scores (row mean removed) that a pair brings: the shares of all
    pairs and of the channels that stand still add up to 1. A pair that works against the others has a negative one.
    Unlike |q_pair| |k_pair|, it leaves out what a pair adds to all keys of a query alike, which attention cannot see.
    """
    rotation = look.signal.rotation
    if rotation is None:
        return centred.new_zeros(centred.shape[1], 0)
    q, k = wide(look.q), wide(look.k).repeat_interleave(look.q.shape[1] // look.k.shape[1], dim=1)
    # A row of `centred` adds up to 0, so the part of a channel, q k / sqrt(D), need not be centred.
    by_channel = (q * (centred @ k)).sum((0, 2)) / q.shape[-1] ** 0.5
    first, second = split_pairs(by_channel[:, : 2 * rotation.q_cos.shape[-1]], rotation.layout)
    return first + second


def attention_sums(model: Transformer, batches: tuple[Tensor, ...]) -> list[AttentionSums]:
    """Return the sums of each layer over all windows (N, T + 1)."""
    found: dict[int, AttentionSums] = {}

    def see(look: Look) -> None:
        new = sums_of(look)
        old = found.get(look.layer)
        found[look.layer] = new if old is None else AttentionSums(*(a + b for a, b in zip(old, new, strict=True)))

    with watched(model, see):
        for batch in batches:
            model.hidden(batch[:, :-1])
    return [found[layer] for layer in sorted(found)]


def distance_gram(length: int) -> Tensor:
    """Return Z'Z, (T, T), of the indicators of distance over one window's visible keys, each row's mean removed.

    A query at t sees the distances 0 .. t, so (Z'Z)_de = [d = e] (T - d) - sum over t >= max(d, e) of 1 / (t + 1).
    """
    keys = torch.arange(1, length + 1, dtype=torch.float64)
    tails = (1 / keys).flip(0).cumsum(0).flip(0)  # sum over t >= d of 1 / (t + 1)
    distances = torch.arange(length)
    return torch.diag(keys.flip(0)) - tails[torch.maximum(distances[:, None], distances)]


def distance_share(sums: AttentionSums, windows: int) -> Tensor:
    """Return, (H,), which share of the variance of scores within rows the distance of query and key explains.

    The least-squares fit score = row + f(distance), over all visible keys of all windows, with one f for each head:
    its drop in squared error against score = row, over the squared error of score = row. f and the rows are fitted
    together because rows are unequal: a row at t holds the distances 0 .. t alone, so its mean says something about f,
    and one-way analysis of centred scores would give less than 1 to scores that are a function of distance. With rows
    of equal distances the two are the same. NaN where all rows are constant.
    """
    # f(0) = 0: a constant belongs to the rows. The first row, a single key, adds nothing to either sum.
    gram, sums_by_distance = windows * distance_gram(sums.by_distance.shape[1])[1:, 1:], sums.by_distance[:, 1:]
    effects = torch.linalg.solve(gram, sums_by_distance.T).T
    return (effects * sums_by_distance).sum(-1) / sums.squares


def attention_rows(model: Transformer, batches: tuple[Tensor, ...], row: Row) -> Iterator[Inside]:
    """Yield what each head does: distance, entropy, the share of distance, the use of frequencies."""
    windows, length = sum(map(len, batches)), batches[0].shape[1] - 1
    for layer, sums in enumerate(attention_sums(model, batches)):
        by_head = {
            "attention_distance": sums.distance / (windows * length),
            "attention_entropy": sums.entropy / (windows * length),
            "attention_entropy_relative": sums.relative_entropy / (windows * (length - 1)),
            "distance_share": distance_share(sums, windows),
        }
        for measure, values in by_head.items():
            for head, value in enumerate(values.tolist()):
                yield row(measure, defined(value), layer=layer, head=head)
        for head, shares in enumerate((sums.by_pair / sums.squares[:, None]).tolist()):
            for pair, share in enumerate(shares):
                yield row("frequency_use", defined(share), layer=layer, head=head, x=pair)


def defined(value: float) -> float | None:
    """Return None for 0/0: a share of a variance that is 0."""
    return None if np.isnan(value) else value


# --- Loss ------------------------------------------------------------------------------------------------------------


def mean_loss(model: Transformer, batches: tuple[Tensor, ...]) -> float:
    """Return the mean loss over all targets of the windows, in nats."""
    sums = [wide(token_losses(model(batch[:, :-1]), batch[:, 1:])).sum().item() for batch in batches]
    return sum(sums) / sum(batch[:, 1:].numel() for batch in batches)


@contextmanager
def without_position(model: Transformer, layer: int) -> Iterator[None]:
    """Let the scheme act in every layer that it acts in, but this one.

    The network asks `applies_to` wherever position may enter, so one answer takes away all of it.
    """
    acts = model.position.applies_to
    with replaced(model.position, "applies_to", lambda other: other != layer and acts(other)):
        yield


def loss_without_position(model: Transformer, batches: tuple[Tensor, ...], layer: int) -> float:
    """Return the mean loss of a model one of whose layers is told nothing about positions."""
    with without_position(model, layer):
        return mean_loss(model, batches)


def loss_rows(model: Transformer, batches: tuple[Tensor, ...], row: Row) -> Iterator[Inside]:
    """Yield the rise of the loss when one layer alone loses its positional signal."""
    whole = mean_loss(model, batches)
    for layer in range(model.config.n_layers):
        acts = model.position.applies_to(layer)
        rise = loss_without_position(model, batches, layer) - whole if acts else 0.0
        yield row("loss_without_position", rise, layer=layer)


# --- Probe -----------------------------------------------------------------------------------------------------------


def hidden_states(model: Transformer, tokens: Tensor) -> list[Tensor]:
    """Return the hidden states (B, T, C) that each block reads, and the one after the last block."""
    states: list[Tensor] = []
    modules = [*model.layers, model.norm]
    hooks = [module.register_forward_pre_hook(lambda _, inputs: states.append(inputs[0])) for module in modules]
    try:
        model.hidden(tokens)
    finally:
        for hook in hooks:
            hook.remove()
    return states


def moments(states: Tensor) -> Tensor:
    """Return the sums of z z', (C + 2, C + 2), z = (1, hidden state, position), over the tokens of states (B, T, C)."""
    rows, length, _ = states.shape
    positions = torch.arange(length, dtype=torch.float64).expand(rows, -1)[..., None]
    z = torch.cat((torch.ones_like(positions), wide(states), positions), dim=-1).flatten(0, 1)
    return z.T @ z


def probe_r2(fit: Tensor, held_out: Tensor) -> float:
    """Return R^2 of position on the tokens behind the moments `held_out`, by a ridge regression on those behind `fit`.

    Channels are standardised first: it minimises the mean squared error + RIDGE |w|^2 in closed form.
    """
    mean = fit[0] / fit[0, 0]
    covariance = fit / fit[0, 0] - mean.outer(mean)
    spread = covariance.diag().clamp(min=0).sqrt()[1:-1]
    spread = torch.where(spread > 0, spread, 1.0)  # a constant channel gets weight 0
    correlation = covariance[1:-1, 1:-1] / spread.outer(spread)
    penalty = RIDGE * torch.eye(len(spread), dtype=spread.dtype)
    w = torch.linalg.solve(correlation + penalty, covariance[1:-1, -1] / spread) / spread
    intercept = mean[-1] - w @ mean[1:-1]
    error = torch.cat((-intercept[None], -w, torch.ones(1, dtype=w.dtype)))  # error . z = position - prediction
    variation = held_out[-1, -1] - held_out[0, -1] ** 2 / held_out[0, 0]
    return (1 - error @ held_out @ error / variation).item()


def hidden_moments(model: Transformer, batches: tuple[Tensor, ...]) -> Tensor:
    """Return the moments (L + 1, C + 2, C + 2) of the state before each block and after the last, over all tokens."""
    total = torch.zeros((), dtype=torch.float64)
    for tokens in batches:
        total = total + torch.stack([moments(states) for states in hidden_states(model, tokens)])
    return total


def probe_rows(model: Transformer, batches: tuple[Tensor, ...], row: Row) -> Iterator[Inside]:
    """Yield how well a linear probe reads position: fitted on every second window, scored on the others."""
    windows = torch.cat(batches)
    rows = len(batches[0])
    fit, held_out = (hidden_moments(model, windows[first::2, :-1].split(rows)) for first in (0, 1))
    for layer, (one, other) in enumerate(zip(fit, held_out, strict=True)):
        yield row("probe_r2", probe_r2(one, other), layer=layer, count=int(other[0, 0]))
