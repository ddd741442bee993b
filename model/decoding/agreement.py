"""How far a decoder agrees with the definition: in its greedy text, and in the loss that rounded weights cost."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from model.decoding.decoder import Decoder
from model.decoding.weights import rounded
from model.sampling import Reader, Row
from model.sampling_config import Precision
from model.transformer import Transformer, token_losses


class Agreement(NamedTuple):
    """What `greedy_agreement` found over a text."""

    tokens: int
    different: int
    """Tokens for which the two disagree."""
    widest_tie: float
    """How far apart the definition's two best logits are, at most, where they disagree; 0 where they never do."""
    largest_error: float
    """The largest difference of a logit, beside the largest logit."""


@torch.inference_mode()
def greedy_agreement(model: Transformer, decoder: Decoder, prompt: list[int], tokens: int = 256) -> Agreement:
    """Write the definition's greedy text, and ask the decoder at every token what it would have written.

    After a tie the two texts would part for good, so the decoder follows the definition's. For fp32 the claim is that
    `widest_tie` stays below 1e-4.
    """
    row, length = Row(list(prompt)), len(prompt) + tokens
    definition, decoded = Reader(decoder.model, length, keep=True), Reader(decoder.model, length, True, decoder)
    if decoder.precision == "fp32":
        definition = Reader(model, length, keep=True)
    different, widest, largest = 0, 0.0, 0.0
    for _ in range(tokens):
        wanted, found = definition.read([row], afresh=False)[0], decoded.read([row], afresh=False)[0]
        largest = max(largest, float((wanted - found).abs().max() / wanted.abs().max()))
        best, other = int(wanted.argmax()), int(found.argmax())
        if best != other:
            different += 1
            first, second = wanted.topk(2).values.tolist()
            widest = max(widest, first - second)
        row.tokens.append(best)
    return Agreement(tokens, different, widest, largest)


@torch.inference_mode()
def mean_loss(model: Transformer, windows: Iterable[Tensor]) -> float:
    """Return the mean of -ln p(next token) over batches of windows (B, T + 1)."""
    total, count = 0.0, 0
    for window in windows:
        losses = token_losses(model(window[:, :-1]), window[:, 1:])
        total, count = total + float(losses.sum(dtype=torch.float64)), count + losses.numel()
    return total / count


def cost_of_rounding(model: Transformer, precision: Precision, windows: list[Tensor]) -> float:
    """Return by what share of itself the loss grows when the weights are rounded: 0.005 is half a percent."""
    return mean_loss(rounded(model, precision), windows) / mean_loss(model, windows) - 1
