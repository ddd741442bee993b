"""The common part of every way to decode: what is looked up once for many tokens, and where `embed` interrupts."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from model.cache import Cache
from model.decoding.ahead import Ahead
from model.decoding.weights import rounded
from model.position.scheme import PositionScheme
from model.sampling import evaluating
from model.sampling_config import Precision
from model.transformer import Transformer


class Decoder(ABC):
    """Reads one new token of every row and returns the logits that follow it.

    `model` is the model to read prompts with: its weights are rounded as the decoder's are. The decoder holds weights
    of its own, so it does not notice when those of the model change later. Schemes that read content change the scores
    by rules of their own, and are left to `Transformer.forward`.
    """

    name: ClassVar[str]
    fixed: ClassVar[bool] = False
    """Whether masks speak of all slots of the cache, filled or not."""
    prompt_tokens: ClassVar[int] = 0
    """Prompts of so many tokens, those of all rows together, are read one token after another: sooner than at once."""

    def __init__(self, model: Transformer, precision: Precision = "fp32") -> None:
        assert not model.position.reads_content, "a scheme that reads content is decoded by the model itself"
        self.model, self.precision = rounded(model, precision), precision
        self.position, self.table = self.model.position, self.model.embed_tokens.weight
        self.acts = [self.position.applies_to(layer) for layer in range(len(self.model.layers))]
        self.stretches = stretches(self.model)
        self.modules = list(self.model.modules())
        self.ahead: Ahead | None = None

    def read_as(self, precision: Precision) -> Precision:
        """Return the form in which this decoder reads its matrices."""
        return precision

    def __call__(self, tokens: Sequence[int], positions: Sequence[int], cache: Cache) -> Tensor:
        """Return the logits (B, V) after `tokens`, one a row, that stand at `positions`; -1: the row has ended."""
        i = None if self.ahead is None else self.ahead.index(cache, positions)
        if i is None:
            with evaluating(self.modules):  # here alone: to ask every module before each token takes too long
                self.look_ahead(cache, positions)
            i = 0
        assert self.ahead is not None
        x = self.embedded(tokens)
        self.begin_token(i, cache)
        for first, last, embeds in self.stretches:
            if embeds:
                x = self.position.embed(x[:, None], self.ahead.q_positions(i), first, self.ahead.length)[:, 0]
            x = self.run(x, first, last, cache)
        cache.advance()
        return x

    def embedded(self, tokens: Sequence[int]) -> Tensor:
        """Return the vectors of some tokens, (B, C), that may be written into."""
        return self.table.index_select(0, torch.tensor(tokens, device=self.table.device))

    def look_ahead(self, cache: Cache, positions: Sequence[int]) -> None:
        """Ask the scheme about the next tokens."""
        self.ahead = Ahead(self.model, cache, positions, self.fixed)

    @abstractmethod
    def begin_token(self, i: int, cache: Cache) -> None:
        """Take from the look-ahead what concerns its token i."""

    @abstractmethod
    def run(self, x: Tensor, first: int, last: int, cache: Cache) -> Tensor:
        """Run x (B, C) through blocks first .. last - 1; after the last of the model, return the logits (B, V)."""


class Stretch(NamedTuple):
    """A range of blocks, and whether the scheme's `embed` is called before the first of them."""

    first: int
    last: int
    embeds: bool


def stretches(model: Transformer) -> list[Stretch]:
    """Return the ranges of blocks between which the scheme's `embed` is called; one range where it is not."""
    layers, changes_vectors = len(model.layers), type(model.position).embed is not PositionScheme.embed
    cuts = {layer for layer in range(layers) if changes_vectors and model.position.applies_to(layer)}
    return [Stretch(first, last, first in cuts) for first, last in pairwise(sorted({0, *cuts, layers}))]
