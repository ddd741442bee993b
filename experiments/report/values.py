"""Finding the numbers of an experiment again: by arm and measure, a value for each seed."""

from collections import defaultdict
from collections.abc import Iterable

from experiments.results import Measurement, Results

BySeed = dict[int, float | None]


class Values:
    """The measurements of an experiment, by arm and measure."""

    def __init__(self, results: Results) -> None:
        self.results = results
        self.arms = [arm.name for arm in results.arms]
        self._rows: dict[tuple[str, str], list[Measurement]] = defaultdict(list)
        for row in results.measurements:
            self._rows[row.arm, row.measure].append(row)

    def rows(self, arm: str, measure: str, **where: object) -> list[Measurement]:
        """Return the rows with these fields, those of no task unless one is named."""
        where = {"task": "", **where}
        return [row for row in self._rows[arm, measure] if all(getattr(row, key) == where[key] for key in where)]

    def by_seed(self, arm: str, measure: str, **where: object) -> BySeed:
        """Return a value for each seed, the mean over what is not named (heads, say), None for a diverged run.

        Empty where any of them is undefined: a mean over the rest would be of other things than its neighbours'.
        """
        found = {seed: _mean(values) for seed, values in self._values(arm, measure, **where).items()}
        known = {seed: value for seed, value in found.items() if seed not in self._diverged(arm, where)}
        if any(value is None for value in known.values()):
            return {}
        return known | dict.fromkeys(self._diverged(arm, where), None) if self.measured(measure, **where) else {}

    def undefined(self, arm: str, measure: str, **where: object) -> bool:
        """Say whether the arm was asked for this number and has none."""
        lost = self._diverged(arm, where)
        return any(row.value is None and row.seed not in lost for row in self.rows(arm, measure, **where))

    def measured(self, measure: str, **where: object) -> bool:
        """Say whether any arm has such a number, or is undefined there."""
        return any(self.rows(arm, measure, **where) for arm in self.arms)

    def mean(self, arm: str, measure: str, **where: object) -> float | None:
        """Return the mean over the seeds that did not diverge."""
        known = [value for value in self.by_seed(arm, measure, **where).values() if value is not None]
        return _mean(known)

    def places(self, measure: str, field: str, **where: object) -> list[int]:
        """Return the values that a field (length, layer, head) takes for this measure, in order."""
        rows = (row for arm in self.arms for row in self.rows(arm, measure, **where))
        return sorted({getattr(row, field) for row in rows} - {None})

    @property
    def training_length(self) -> int | None:
        """The first of the lengths; None where the experiment has none."""
        return self.results.lengths[0] if self.results.lengths else None

    def tasks(self) -> list[str]:
        """Return the tasks in the order in which they were measured."""
        return list(dict.fromkeys(row.task for row in self.results.measurements if row.task))

    def curve(self, arm: str, measure: str, **where: object) -> dict[int, list[tuple[float, float]]]:
        """Return (x, value) by seed, in the order of x, the mean over what is not named; diverged runs left out."""
        found: dict[int, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
        for row in self.rows(arm, measure, **where):
            if row.x is not None and row.value is not None and row.seed not in self._diverged(arm, where):
                found[row.seed][row.x].append(row.value)
        return {
            seed: [(x, sum(values) / len(values)) for x, values in sorted(points.items())]
            for seed, points in sorted(found.items())
        }

    def _values(self, arm: str, measure: str, **where: object) -> dict[int, list[float | None]]:
        found: dict[int, list[float | None]] = defaultdict(list)
        for row in self.rows(arm, measure, **where):
            found[row.seed].append(row.value)
        return found

    def _diverged(self, arm: str, where: dict[str, object]) -> list[int]:
        """Return the seeds that diverged; an arm that takes another's weights shares its fate."""
        trained_as = next((facts.trained_as for facts in self.results.arms if facts.name == arm), None)
        task = where.get("task", "")
        return [each.seed for each in self.results.diverged if each.arm in (arm, trained_as) and each.task == task]


def _mean(values: Iterable[float | None]) -> float | None:
    known = list(values)
    if not known or any(value is None for value in known):
        return None
    return sum(value for value in known if value is not None) / len(known)
