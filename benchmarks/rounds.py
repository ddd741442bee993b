"""Everything that is compared is measured in turn, round by round: a slow minute of the machine hits all alike."""

import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.processes import Process


@dataclass(frozen=True)
class Case:
    """One thing to measure: its name, a function of `measured/` with its arguments, and the process it runs in.

    Cases of equal `process` share one; a case whose memory is asked for needs its own. What is `of_machine` does not
    depend on the project's code, and is measured in the first tree alone.
    """

    name: str
    function: str
    arguments: dict[str, Any]
    process: str
    of_machine: bool = False

    def trees(self, trees: dict[str, Path]) -> list[str]:
        """Return the names of the trees it is measured in."""
        return list(trees)[:1] if self.of_machine else list(trees)


@dataclass
class Result:
    """What the rounds showed of one case in one tree: `rates` has one entry a round, or there is an `error`."""

    rates: list[float] = field(default_factory=list)
    memory: int = 0
    notes: dict[str, Any] = field(default_factory=dict)
    error: str | None = None

    @property
    def rate(self) -> float:
        """The median of all rounds."""
        return statistics.median(self.rates)

    def take(self, answer: dict[str, Any], is_first: bool) -> None:
        """Take in what one request brought; the first one prepares, compiles and warms up, and is not counted."""
        if "error" in answer:
            self.error = answer["error"]
            return
        self.notes, self.memory = answer["notes"], self.memory + answer["memory"]
        if not is_first:
            self.rates.append(answer["rate"])


Results = dict[tuple[str, str], Result]
"""By the name of the tree and that of the case."""


def share(one: Result, of: Result, factor: float = 1.0) -> float:
    """Return the median over rounds of one rate / (the other's in the same round), times a factor."""
    return factor * statistics.median(a / b for a, b in zip(one.rates, of.rates, strict=True))


def measure(cases: Sequence[Case], trees: dict[str, Path], rounds: int, title: str) -> Results:
    """Measure every case in every tree, in turn, in so many rounds after one that warms up."""
    results: Results = {(tree, case.name): Result() for case in cases for tree in case.trees(trees)}
    turns = list(_turns(cases, trees, rounds))
    with ExitStack() as stack:
        processes: dict[tuple[str, str], Process] = {}
        for number, tree, case in tqdm(turns, desc=title, unit=" measurements", disable=None, leave=False):
            result = results[tree, case.name]
            if result.error is None:
                key = (tree, case.process)
                if key not in processes:
                    processes[key] = Process(trees[tree])
                    stack.callback(processes[key].close)
                result.take(processes[key].ask(case.function, case.arguments), is_first=number == 0)
    return results


def _turns(cases: Sequence[Case], trees: dict[str, Path], rounds: int) -> Iterator[tuple[int, str, Case]]:
    """Go through the trees case by case; every other round backwards, so that none always runs after the same."""
    for number in range(rounds + 1):
        turns = [(number, tree, case) for case in cases for tree in case.trees(trees)]
        yield from turns if number % 2 == 0 else reversed(turns)
