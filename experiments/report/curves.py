"""Charts and heat maps from the measurements."""

from collections import defaultdict
from collections.abc import Iterable

import numpy as np

from experiments.report.document import Chart, HeatMap, Point, Series
from experiments.report.values import Values
from experiments.statistics import interval

MOST_POINTS = 128  # more would be finer than a line is wide

Curves = dict[int, list[tuple[float, float]]]  # (x, value) by seed


def over_x(values: Values, measure: str, **where: object) -> tuple[Series, ...]:
    """Return a line an arm over a measurement's own x: tokens seen, position, pair."""
    return _drawn((arm, i, values.curve(arm, measure, **where)) for i, arm in enumerate(values.arms))


def over_length(values: Values, measure: str, **where: object) -> tuple[Series, ...]:
    """Return a line an arm over the lengths at which it is defined."""
    return _drawn((arm, i, _by_length(values, arm, measure, **where)) for i, arm in enumerate(values.arms))


def chance_line(values: Values, task: str) -> tuple[Series, ...]:
    """Return the line of chance of a task: that of the first arm that knows it."""
    lines = (_series("chance", -1, _by_length(values, arm, "task_chance", task=task)) for arm in values.arms)
    return tuple(line for line in lines if line.points)[:1]


def heat_map(values: Values, measure: str, name: str, title: str, note: str = "") -> HeatMap:
    """Return a measure by arm and length."""
    lengths = values.places(measure, "length")
    rows = {
        arm: tuple(values.mean(arm, measure, length=length) for length in lengths)
        for arm in values.arms
        if values.rows(arm, measure)
    }
    return HeatMap(name, title, tuple(rows), tuple(map(str, lengths)), tuple(rows.values()), note)


def head_map(values: Values, measure: str, name: str, title: str, note: str = "") -> HeatMap:
    """Return a measure by arm and head, head 0 of layer 0 first."""
    found = [row for arm in values.arms for row in values.rows(arm, measure)]
    heads = sorted({(row.layer, row.head) for row in found if row.layer is not None and row.head is not None})
    rows = {
        arm: tuple(values.mean(arm, measure, layer=layer, head=head) for layer, head in heads)
        for arm in values.arms
        if values.rows(arm, measure)
    }
    columns = tuple(f"{layer}.{head}" for layer, head in heads)
    return HeatMap(name, title, tuple(rows), columns, tuple(rows.values()), note)


def ceiling(series: tuple[Series, ...]) -> float | None:
    """Return the highest mean after the first tenth of the x axis: a curve's first points would flatten the rest."""
    if not series:
        return None
    end = max(point.x for line in series for point in line.points)
    return max(point.mean for line in series for point in line.points if point.x >= end / 10)


def chart(name: str, title: str, labels: tuple[str, str], series: tuple[Series, ...], **more: object) -> list[Chart]:
    """Return the chart, or nothing where there is no line to draw."""
    return [Chart(name, title, *labels, series)._replace(**more)] if series else []  # type: ignore[arg-type]


def _drawn(curves: Iterable[tuple[str, int, Curves]]) -> tuple[Series, ...]:
    lines = (_series(arm, index, curve) for arm, index, curve in curves)
    return tuple(line for line in lines if line.points)


def _by_length(values: Values, arm: str, measure: str, **where: object) -> Curves:
    curves: Curves = defaultdict(list)
    for length in values.places(measure, "length", **where):
        for seed, value in values.by_seed(arm, measure, length=length, **where).items():
            if value is not None:
                curves[seed].append((length, value))
    return curves


def _series(name: str, index: int, curves: Curves) -> Series:
    at: dict[float, list[float]] = defaultdict(list)
    for curve in curves.values():
        for x, value in _thinned(curve):
            at[x].append(value)
    return Series(name, index, tuple(_point(x, at[x]) for x in sorted(at)))


def _point(x: float, values: list[float]) -> Point:
    low, high = interval(values) or (None, None)
    return Point(x, float(np.mean(values)), low, high)


def _thinned(curve: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Average neighbours of a long curve, seed by seed, so that the bands are those of what is drawn."""
    if len(curve) <= MOST_POINTS:
        return curve
    groups = np.array_split(np.array(curve), MOST_POINTS // 2)
    return [(float(group[:, 0].mean()), float(group[:, 1].mean())) for group in groups]
