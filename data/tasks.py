"""Synthetic tasks for length generalisation: learnt on short examples, asked on longer ones. Torch-free.

A row is BOS prompt MARK answer EOS, then PAD. All tasks share one vocabulary. Which strings are for training, for
validation and for test is decided by a hash of the string, so no test string is ever trained on. Everything is a pure
function of its arguments: a row of (seed, number), the examples of a test of (task, length).
"""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np

from model.errors import UserError

PAD, BOS, MARK, EOS = range(4)
# Raise it when the same settings would give other strings: runs on the older ones are then not reused.
FORMAT = 2
FIRST = 4  # id of the first symbol
SYMBOLS = 128  # as many as the longest example with unique symbols has
VOCAB_SIZE = FIRST + SYMBOLS
PLUS = 10  # the symbol behind the digits 0 to 9

EIGHTHS = ("test", "validation", *["train"] * 6)
# Below this number of strings an eighth of them is too few to test on, and their length would lose them in training.
FEW_STRINGS = 64
# A random string is held out with probability 1/8: so many draws for each example find them, where there are enough.
DRAWS_AN_EXAMPLE = 64
SEEDS = {"validation": 1, "test": 2}

Example = tuple[np.ndarray, np.ndarray]


class Task:
    """A rule that makes an answer of a prompt, at any size."""

    shortest = 1
    longest: int | None = None

    def draw(self, length: int, rng: np.random.Generator) -> Example:
        """Draw the symbols, numbered from 0, of a prompt and of its answer."""
        raise NotImplementedError

    def prompt_size(self, length: int) -> int:
        """Return how many symbols a prompt has."""
        return length

    def choices(self, length: int) -> tuple[int, ...]:
        """Return, for each place of the longest answer, how many symbols ever stand there."""
        raise NotImplementedError

    def forms(self, length: int) -> tuple[tuple[int, ...], ...]:
        """Return `choices` for each size that an answer may have, all equally likely; most tasks have one size."""
        return (self.choices(length),)

    def strings(self, length: int) -> int:
        """Return how many prompts there are."""
        raise NotImplementedError

    def example(self, length: int, rng: np.random.Generator) -> Example:
        """Draw the ids of a prompt and of its answer, both int64; UserError for a length that the task has not."""
        self.check(length)
        prompt, answer = self.draw(length, rng)
        return prompt + FIRST, answer + FIRST

    def check(self, length: int) -> None:
        """Refuse a length that the task is not defined for."""
        if length < self.shortest or (self.longest is not None and length > self.longest):
            most = "" if self.longest is None else f" and at most {self.longest}"
            task = type(self).__name__.lower()
            raise UserError(f"length {length} does not exist in task {task}: give at least {self.shortest}{most}")

    def width(self, length: int) -> int:
        """Return how many tokens a row of this length has without pads: 3 more than prompt and answer."""
        self.check(length)
        return self.prompt_size(length) + len(self.choices(length)) + 3


@dataclass(frozen=True)
class Copy(Task):
    """Say a word again: symbols drawn evenly from `symbols`, all different if `unique`."""

    symbols: int
    unique: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "longest", self.symbols if self.unique else None)

    def draw(self, length: int, rng: np.random.Generator) -> Example:
        word = rng.permutation(self.symbols)[:length] if self.unique else rng.integers(self.symbols, size=length)
        return word, self.answer(word)

    def answer(self, word: np.ndarray) -> np.ndarray:
        """Return the answer to a word."""
        return word

    def choices(self, length: int) -> tuple[int, ...]:
        return (self.symbols,) * length

    def strings(self, length: int) -> int:
        return math.perm(self.symbols, length) if self.unique else self.symbols**length


class Reverse(Copy):
    """Say a word backwards."""

    def answer(self, word: np.ndarray) -> np.ndarray:
        return word[::-1]


class Sort(Copy):
    """Say different symbols in the order of their numbers."""

    def answer(self, word: np.ndarray) -> np.ndarray:
        return np.sort(word)

    def choices(self, length: int) -> tuple[int, ...]:
        # The i-th smallest has i smaller ones below it, and length - 1 - i larger ones above.
        return (self.symbols - length + 1,) * length


class Parity(Copy):
    """Say whether the number of ones is odd."""

    def answer(self, word: np.ndarray) -> np.ndarray:
        return word.sum(keepdims=True) % 2

    def choices(self, length: int) -> tuple[int, ...]:
        return (2,)


@dataclass(frozen=True)
class Addition(Task):
    """Add two decimal numbers of n digits, leading zeros included; the sum has n + 1 digits, the lowest one first.

    Lowest first, each digit follows from two digits and a carry (Lee et al., 2023).
    """

    def draw(self, length: int, rng: np.random.Generator) -> Example:
        a, b = rng.integers(10, size=(2, length))
        return np.concatenate([a, [PLUS], b]), self.added(a, b)

    @staticmethod
    def added(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """Return the digits of the sum, lowest first, of two numbers (n,) whose highest digit comes first."""
        digits, carry = [], 0
        for pair in (a + b)[::-1].tolist():
            carry, digit = divmod(pair + carry, 10)
            digits.append(digit)
        return np.array([*digits, carry])

    def prompt_size(self, length: int) -> int:
        return 2 * length + 1

    def choices(self, length: int) -> tuple[int, ...]:
        return (*[10] * length, 2)

    def strings(self, length: int) -> int:
        return 100**length


@dataclass(frozen=True)
class Induction(Copy):
    """A word of n different symbols, then one of them again, but the last: go on as the word did, up to its end.

    Each symbol of the answer is the one that followed the last symbol read, where that stood before (Olsson et al.,
    2022). With the first of these symbols alone for an answer, small models learnt nothing within minutes.
    """

    shortest = 2

    def draw(self, length: int, rng: np.random.Generator) -> Example:
        word, place = rng.permutation(self.symbols)[:length], int(rng.integers(length - 1))
        return np.append(word, word[place]), word[place + 1 :]

    def prompt_size(self, length: int) -> int:
        return length + 1

    def choices(self, length: int) -> tuple[int, ...]:
        return (self.symbols,) * (length - 1)

    def forms(self, length: int) -> tuple[tuple[int, ...], ...]:
        return tuple((self.symbols,) * size for size in range(1, length))

    def strings(self, length: int) -> int:
        return math.perm(self.symbols, length) * (length - 1)


@dataclass(frozen=True)
class Recall(Task):
    """n pairs of a key and a value, then a key: say its value. Keys are different, values repeat (Ba et al., 2016)."""

    keys: int
    values: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "longest", self.keys)

    def draw(self, length: int, rng: np.random.Generator) -> Example:
        keys = rng.permutation(self.keys)[:length]
        values = self.keys + rng.integers(self.values, size=length)
        asked = int(rng.integers(length))
        return np.append(np.stack([keys, values], axis=1), keys[asked]), values[asked : asked + 1]

    def prompt_size(self, length: int) -> int:
        return 2 * length + 1

    def choices(self, length: int) -> tuple[int, ...]:
        return (self.values,)

    def strings(self, length: int) -> int:
        return math.perm(self.keys, length) * self.values**length * length


@dataclass(frozen=True)
class Passkey(Task):
    """Find the only digits in n symbols of filler, wherever they stand, and say them (Mohtashami and Jaggi, 2023)."""

    digits: int
    fillers: int

    def draw(self, length: int, rng: np.random.Generator) -> Example:
        key = rng.integers(10, size=self.digits)
        filler, place = 10 + rng.integers(self.fillers, size=length), int(rng.integers(length + 1))
        return np.concatenate([filler[:place], key, filler[place:]]), key

    def prompt_size(self, length: int) -> int:
        return length + self.digits

    def choices(self, length: int) -> tuple[int, ...]:
        return (10,) * self.digits

    def strings(self, length: int) -> int:
        return 10**self.digits * (length + 1) * self.fillers**length


TASKS: dict[str, Task] = {
    "copy": Copy(SYMBOLS, unique=True),
    "copy_repeated": Copy(10),
    "reverse": Reverse(10),
    "sort": Sort(SYMBOLS, unique=True),
    "addition": Addition(),
    "parity": Parity(2),
    "induction": Induction(64, unique=True),
    "recall": Recall(keys=96, values=32),
    "passkey": Passkey(digits=5, fillers=16),
}


def find_task(name: str) -> Task:
    """Return the task of that name; UserError names those there are."""
    if name not in TASKS:
        raise UserError(f"task {name!r} is not known; there are: {', '.join(TASKS)}")
    return TASKS[name]


# --- Chance -----------------------------------------------------------------------------------------------------------


class Chance(NamedTuple):
    """What guessing brings: the probability of a whole answer, and the mean share of its tokens, EOS included."""

    exact: float
    token: float


def chance(task: Task, length: int) -> Chance:
    """Return what somebody gets right who knows the form of the answer and nothing of the prompt.

    Each symbol is drawn evenly from the c_i that ever stand at its place, and EOS is known: the whole answer is right
    with probability prod 1/c_i, a token with (1 + sum 1/c_i) / (1 + number of symbols); over answers of several sizes
    it is the mean of the first, and of the second the mean over all their tokens.
    """
    forms = [[1 / count for count in form] for form in task.forms(length)]
    right, tokens = sum(1 + sum(shares) for shares in forms), sum(1 + len(shares) for shares in forms)
    return Chance(sum(math.prod(shares) for shares in forms) / len(forms), right / tokens)


# --- Which string is in which split -----------------------------------------------------------------------------------


@cache
def has_few_strings(name: str, length: int) -> bool:
    """Say whether a length has fewer than 64 strings in all: then each of them is for training and none is tested."""
    return TASKS[name].strings(length) < FEW_STRINGS


def split_of(name: str, length: int, prompt: np.ndarray) -> str:
    """Return train, validation or test, by a hash of the whole prompt; where a length has few strings, always train."""
    if has_few_strings(name, length):
        return "train"
    digest = hashlib.blake2b(name.encode() + prompt.astype("<u2").tobytes(), digest_size=1).digest()
    return EIGHTHS[digest[0] % len(EIGHTHS)]


def rows_of(examples: list[Example], width: int) -> np.ndarray:
    """Write examples as rows (n, width) of ids, int64: BOS prompt MARK answer EOS, then PAD."""
    rows = np.full((len(examples), width), PAD, dtype=np.int64)
    for row, (prompt, answer) in zip(rows, examples, strict=True):
        row[: len(prompt) + len(answer) + 3] = np.concatenate([[BOS], prompt, [MARK], answer, [EOS]])
    return rows


class TaskWindows:
    """Training rows of a task, of lengths drawn evenly from its shortest to `length`, in an order that never ends.

    They take the place of `data.loader.Windows`: rows are numbered over the whole run, and a row depends on
    (seed, number) alone. `context` is what a model needs to read the longest one.
    """

    def __init__(self, name: str, length: int, seed: int) -> None:
        self.name, self.task, self.length, self.seed = name, find_task(name), length, seed
        self.context = self.task.width(length) - 1

    def rows(self, numbers: np.ndarray) -> np.ndarray:
        """Return these rows of the run, (len(numbers), context + 1), as int64."""
        return rows_of([self.example(int(number)) for number in numbers], self.context + 1)

    def example(self, number: int) -> Example:
        """Draw the example of a row: a length, and then strings of it until one is for training."""
        rng = np.random.default_rng([self.seed, number])
        length = int(rng.integers(self.task.shortest, self.length, endpoint=True))
        while True:
            prompt, answer = self.task.example(length, rng)
            if split_of(self.name, length, prompt) == "train":
                return prompt, answer


def held_out(name: str, length: int, count: int, split: str = "test") -> np.ndarray:
    """Return rows (n, width) of different strings of this length that are never trained on: the same for everybody.

    n is `count`, or less where there are not that many such strings: 0 where a length has fewer than 64 in all.
    """
    task = find_task(name)
    found = {prompt.tobytes(): (prompt, answer) for prompt, answer in _drawn(name, task, length, count, split)}
    return rows_of(list(found.values()), task.width(length))


def _drawn(name: str, task: Task, length: int, count: int, split: str) -> Iterator[Example]:
    """Yield strings of the split until `count` different ones were there, or many draws brought no more."""
    task.check(length)
    rng, seen = np.random.default_rng([SEEDS[split], length]), set()
    for _ in range(DRAWS_AN_EXAMPLE * count * (not has_few_strings(name, length))):
        prompt, answer = task.example(length, rng)
        if split_of(name, length, prompt) == split:
            seen.add(prompt.tobytes())
            yield prompt, answer
        if len(seen) == count:
            return
