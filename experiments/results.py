"""What an experiment found out: the types that evaluation fills, statistics reads and the report shows. Torch-free."""

from typing import Any, NamedTuple


class Measurement(NamedTuple):
    """One number about one run: a row of results.csv. `value` None: undefined there, such as beyond a learned table.

    `length` is in tokens of text, or the size of a task; `x` is what a curve runs over (tokens seen, position, pair).
    """

    arm: str
    seed: int
    measure: str
    value: float | None
    length: int | None = None
    x: float | None = None
    layer: int | None = None
    head: int | None = None
    task: str = ""
    count: int | None = None  # type: ignore[assignment]  # scored tokens, or examples


class Trial(NamedTuple):
    """One run of the tuning grid, and its validation loss (None: it diverged)."""

    arm: str
    settings: dict[str, Any]
    seed: int
    loss: float | None
    task: str = ""


class Diverged(NamedTuple):
    """A run whose loss ceased to be finite, and what it said."""

    arm: str
    seed: int
    why: str
    task: str = ""


class ArmFacts(NamedTuple):
    """What is known of an arm beside its measurements."""

    name: str
    declared: dict[str, Any]  # the settings in which it differs from the base
    trained_as: str | None  # the arm whose weights it takes, where it only differs after training
    after_training: dict[str, Any]  # settings changed for evaluation
    settings: dict[str, Any]  # those found by tuning
    at_edge: bool  # whether they lie at the edge of the tuning grid
    seeds: tuple[int, ...]  # planned
    total: int  # parameters
    positional: int
    non_embedding: int
    backend: str  # how attention was computed


class Check(NamedTuple):
    """One condition of a fair comparison, and whether it holds (None: not known yet)."""

    name: str
    holds: bool | None
    detail: str


class Sample(NamedTuple):
    """What a run writes behind a prompt that all arms get."""

    arm: str
    seed: int
    prompt: str
    text: str


class Results(NamedTuple):
    """All that the report is made from."""

    name: str
    title: str
    question: str  # what the experiment asks, in a sentence or two
    reference: str  # the arm that differences are against
    lengths: tuple[int, ...]  # the first is the training length
    arms: tuple[ArmFacts, ...]
    trials: tuple[Trial, ...]
    diverged: tuple[Diverged, ...]
    missing: tuple[tuple[str, int], ...]  # (arm, seed) that are not measured yet
    measurements: tuple[Measurement, ...]
    checks: tuple[Check, ...]
    samples: tuple[Sample, ...]
    provenance: dict[str, str]  # hash of the experiment file, commit, machine, versions, command
    notes: tuple[str, ...] = ()
