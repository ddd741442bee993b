"""Tables in Markdown."""

from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.rounds import Result, Results, share

THIS = "this"


class Table(NamedTuple):
    """One topic: a title, what its columns are, its rows, and what a reader must know to read it."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    remark: str = ""

    def __str__(self) -> str:
        assert all(len(row) == len(self.header) for row in self.rows), f"a row of {self.title} is not whole"
        lines = [self.header, ["---", *["--:"] * (len(self.header) - 1)], *self.rows]
        table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
        return "\n\n".join(part for part in (f"## {self.title}", table, self.remark) if part)


def percent(value: float) -> str:
    """Return a share in words: 71 %."""
    return f"{value:.0%}".replace("%", " %")


def rate(result: Result, unit: float = 1.0, form: str = ",.0f") -> str:
    """Return the median rate in multiples of a unit, or why there is none."""
    return cell(result) or f"{result.rate / unit:{form}}"


def cell(*results: Result) -> str:
    """Return why the first that failed of these did; "" if none did."""
    return next((result.error.replace("|", "/") for result in results if result.error is not None), "")


def against(results: Results, baseline: str | None, name: str) -> list[str]:
    """Return the cells that compare with the baseline: none without one, else the ratio or what it cannot do."""
    if baseline is None:
        return []
    if (baseline, name) not in results:
        return ["-"]  # of the machine, not of the project
    ours, theirs = results[THIS, name], results[baseline, name]
    return [cell(ours, theirs) or f"{share(ours, theirs):.2f}"]


def against_header(baseline: str | None) -> list[str]:
    """Return the title of the column that `against` fills."""
    return [] if baseline is None else [f"times {baseline}"]
