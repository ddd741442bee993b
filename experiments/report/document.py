"""What a report is made of, whatever it is written as: sections of words, lists, tables, charts, heat maps, samples."""

from typing import NamedTuple


class Cell(NamedTuple):
    """One cell of a table; `mark` says what it is, so that a page can show it: words, chosen, warning, quiet."""

    text: str
    mark: str = ""


class Table(NamedTuple):
    """A table whose first column names the rows; `folded` ones are shown closed where the medium can."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""
    folded: bool = False

    def is_words(self, column: int) -> bool:
        """Say whether a column holds words, which stand to the left."""
        return column == 0 or any("words" in row[column].mark for row in self.rows)


class Words(NamedTuple):
    """A paragraph; `mark` as for a cell."""

    text: str
    mark: str = ""


class Items(NamedTuple):
    """A list of short texts."""

    items: tuple[str, ...]
    mark: str = ""


class Point(NamedTuple):
    """The mean over seeds at one place of a curve, and its 95 % interval where there are seeds enough."""

    x: float
    mean: float
    low: float | None
    high: float | None


class Series(NamedTuple):
    """One line of a chart; `arm_index` gives it the colour and dashes of its arm, -1 those of a line of reference."""

    name: str
    arm_index: int
    points: tuple[Point, ...]


class Chart(NamedTuple):
    """Lines with bands; `name` is that of its file."""

    name: str
    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    note: str = ""
    doubling: bool = False  # x in powers of two
    marked: float | None = None  # an x to mark: the training length
    ceiling: float | None = None  # cut above this


class HeatMap(NamedTuple):
    """Numbers by row and column; None is shown as undefined."""

    name: str
    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: tuple[tuple[float | None, ...], ...]
    note: str = ""


class Writing(NamedTuple):
    """What one arm wrote behind a prompt."""

    arm: str
    text: str


class SideBySide(NamedTuple):
    """What the arms wrote behind the same prompt, from the same seed."""

    prompt: str
    seed: int
    writings: tuple[Writing, ...]


Block = Table | Words | Items | Chart | HeatMap | SideBySide


class Section(NamedTuple):
    """A heading and what stands under it."""

    title: str
    blocks: tuple[Block, ...]


class Document(NamedTuple):
    """A whole report."""

    title: str
    question: str
    sections: tuple[Section, ...]
