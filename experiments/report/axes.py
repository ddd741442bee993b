"""What a chart needs in any medium: the palette, round tick values, and the range of the axes."""

import math

from experiments.report.document import Chart

# Okabe and Ito's palette for colour-blind readers (2008), in an order in which neighbours differ most; its black comes
# last and stands for the colour of the text, its yellow is darkened to be seen on white.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#A89B00", "#333333")
DASHES = ((), (7.0, 3.0), (2.0, 2.0), (8.0, 2.0, 2.0, 2.0))
REFERENCE = -1


def colour(index: int) -> int:
    """Return which colour of the palette an arm has."""
    return index % len(PALETTE)


def dashes(index: int) -> tuple[float, ...]:
    """Return an arm's dashes: whole lines for the first eight, another pattern for each eight more."""
    return DASHES[2] if index == REFERENCE else DASHES[index // len(PALETTE) % len(DASHES)]


def x_range(chart: Chart) -> tuple[float, float]:
    """Return the ends of the x axis."""
    xs = [point.x for line in chart.series for point in line.points]
    return _apart(min(xs), max(xs))


def y_range(chart: Chart) -> tuple[float, float]:
    """Return the ends of the y axis, bands included, cut at the chart's ceiling."""
    points = [point for line in chart.series for point in line.points]
    low = min(point.mean if point.low is None else point.low for point in points)
    high = max(point.mean if point.high is None else point.high for point in points)
    if chart.ceiling is not None:
        high = min(high, chart.ceiling)
    # A band of two seeds may be many times wider than all the lines: it is cut, so that these are still seen apart.
    means = [point.mean for point in points if chart.ceiling is None or point.mean <= chart.ceiling]
    room = max(means) - min(means)
    low, high = max(low, min(means) - room), min(high, max(means) + room)
    return _apart(low, high)


def ticks(low: float, high: float, about: int = 6) -> list[float]:
    """Return round values in a range: steps of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def spaced(places: list[float], apart: float) -> list[float]:
    """Leave out places that are closer to the one before than this, as a factor; the first one stays."""
    kept: list[float] = []
    for place in places:
        if not kept or place >= apart * kept[-1]:
            kept.append(place)
    return kept


def tick_text(value: float) -> str:
    """Write a tick: 0, 0.05, 128, 20k, 3M."""
    for from_, unit, letter in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= from_:
            return f"{value / unit:g}{letter}".replace("-", "−")
    return f"{value:.6g}".replace("-", "−")


def _apart(low: float, high: float) -> tuple[float, float]:
    """Widen a range that has no width."""
    if high > low:
        return low, high
    margin = abs(low) / 10 or 1.0
    return low - margin, low + margin
