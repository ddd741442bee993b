"""Charts and heat maps as inline SVG. Colours are the page's variables, so that they follow light and dark."""

import math
from collections.abc import Callable
from html import escape

from experiments.report.axes import REFERENCE, colour, dashes, spaced, tick_text, ticks, x_range, y_range
from experiments.report.document import Chart, HeatMap, Point, Series
from experiments.report.numbers import number

WIDTH, HEIGHT = 640, 340
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 12, 46
CELL_WIDTH, CELL_HEIGHT = 66, 28
LETTER = 7.5  # width of a letter in a heat map's labels, about

Scale = Callable[[float], float]


def chart_svg(chart: Chart) -> str:
    """Draw a chart: bands, then lines, in the order of the arms."""
    x, y = _scales(chart)
    clip = f"clip-{escape(chart.name)}"
    parts = [
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(chart.title)}">',
        f'<clipPath id="{clip}"><rect x="{LEFT}" y="{TOP}" width="{WIDTH - LEFT - RIGHT}" '
        f'height="{HEIGHT - TOP - BOTTOM}"></rect></clipPath>',
        *_y_axis(chart, y),
        *_x_axis(chart, x),
        f'<g clip-path="url(#{clip})">',
        *(_band(line, x, y) for line in chart.series),
        *(_line(line, x, y) for line in chart.series),
        "</g></svg>",
    ]
    return "\n".join(part for part in parts if part)


def key_svg(index: int) -> str:
    """Draw the piece of line that stands in the legend."""
    return f'<svg class="key" viewBox="0 0 28 8" aria-hidden="true"><path {_stroke(index)} d="M0 4H28"></path></svg>'


def heat_svg(heat: HeatMap) -> str:
    """Draw a heat map: the number stands in each cell, the colour is its shade."""
    left = int(max(map(len, heat.rows), default=0) * LETTER) + 16
    width, height = left + CELL_WIDTH * len(heat.columns), CELL_HEIGHT * (len(heat.rows) + 1)
    label = escape(heat.title)
    head = f'<svg class="heat" viewBox="0 0 {width} {height}" width="{width}" role="img" aria-label="{label}">'
    columns = [
        _text(left + (i + 0.5) * CELL_WIDTH, CELL_HEIGHT - 9, name, "middle") for i, name in enumerate(heat.columns)
    ]
    shade = _shades(heat)
    rows = [
        part
        for i, (name, values) in enumerate(zip(heat.rows, heat.values, strict=True), start=1)
        for part in (_text(left - 8, (i + 0.65) * CELL_HEIGHT, name, "end"), *_heat_row(left, i, values, shade))
    ]
    return "\n".join([head, *columns, *rows, "</svg>"])


def _scales(chart: Chart) -> tuple[Scale, Scale]:
    (x_low, x_high), (y_low, y_high) = x_range(chart), y_range(chart)
    warp: Scale = math.log2 if chart.doubling else float
    start, end = warp(x_low), warp(x_high)

    def x(value: float) -> float:
        return LEFT + (warp(value) - start) / (end - start) * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (value - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)

    return x, y


def _y_axis(chart: Chart, y: Scale) -> list[str]:
    middle = (HEIGHT - BOTTOM + TOP) / 2
    lines = [
        f'<path class="grid" d="M{LEFT} {y(at):.1f}H{WIDTH - RIGHT}"></path>'
        + _text(LEFT - 7, y(at) + 4, tick_text(at), "end")
        for at in ticks(*y_range(chart))
    ]
    turned = f'<text transform="translate(13 {middle}) rotate(-90)" text-anchor="middle">{escape(chart.y_label)}</text>'
    return [*lines, turned]


def _x_axis(chart: Chart, x: Scale) -> list[str]:
    bottom = HEIGHT - BOTTOM
    lines = [
        f'<path class="grid" d="M{x(at):.1f} {bottom}v5"></path>{_text(x(at), bottom + 19, tick_text(at), "middle")}'
        for at in _x_ticks(chart)
    ]
    name = _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, chart.x_label, "middle")
    mark = f'<path class="mark" d="M{x(chart.marked):.1f} {TOP}V{bottom}"></path>' if chart.marked is not None else ""
    return [*lines, name, mark]


def _x_ticks(chart: Chart) -> list[float]:
    low, high = x_range(chart)
    if not chart.doubling:
        return ticks(low, high, 6)
    return spaced(sorted({point.x for line in chart.series for point in line.points}), (high / low) ** (1 / 12))


def _band(line: Series, x: Scale, y: Scale) -> str:
    points = [point for point in line.points if point.low is not None and point.high is not None]
    if not points:
        return ""
    upper = [f"{x(point.x):.1f},{y(point.high or 0.0):.1f}" for point in points]
    lower = [f"{x(point.x):.1f},{y(point.low or 0.0):.1f}" for point in reversed(points)]
    return f'<polygon class="band" {_fill(line.arm_index)} points="{" ".join([*upper, *lower])}"></polygon>'


def _line(line: Series, x: Scale, y: Scale) -> str:
    name = f"<title>{escape(line.name)}</title>"
    if len(line.points) == 1:
        (only,) = line.points
        spot = f'<circle {_fill(line.arm_index)} cx="{x(only.x):.1f}" cy="{y(only.mean):.1f}" r="4">{name}</circle>'
        return spot + _whisker(line.arm_index, x(only.x), only, y)
    return f'<polyline {_stroke(line.arm_index)} points="{_path(line.points, x, y)}">{name}</polyline>'


def _whisker(arm_index: int, x: float, point: Point, y: Scale) -> str:
    if point.low is None or point.high is None:
        return ""
    return f'<path {_stroke(arm_index)} d="M{x:.1f} {y(point.low):.1f}V{y(point.high):.1f}"></path>'


def _path(points: tuple[Point, ...], x: Scale, y: Scale) -> str:
    return " ".join(f"{x(point.x):.1f},{y(point.mean):.1f}" for point in points)


def _stroke(index: int) -> str:
    pattern = " ".join(f"{length:g}" for length in dashes(index))
    dashed = f' stroke-dasharray="{pattern}"' if pattern else ""
    return f'class="line" style="stroke:{_variable(index)}"{dashed}'


def _fill(index: int) -> str:
    return f'style="fill:{_variable(index)}"'


def _variable(index: int) -> str:
    return "var(--muted)" if index == REFERENCE else f"var(--arm{colour(index)})"


def _text(x: float, y: float, text: str, anchor: str, look: str = "") -> str:
    kind = f' class="{look}"' if look else ""
    return f'<text{kind} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _shades(heat: HeatMap) -> Callable[[float], float]:
    """Return what turns a value into a strength of colour: 0 for the lowest, 1 for the highest."""
    known = [value for row in heat.values for value in row if value is not None]
    low, high = min(known, default=0.0), max(known, default=0.0)
    return lambda value: (value - low) / (high - low) if high > low else 0.5


def _heat_row(left: int, i: int, values: tuple[float | None, ...], shade: Callable[[float], float]) -> list[str]:
    return [
        _heat_cell(left + column * CELL_WIDTH, i * CELL_HEIGHT, value, shade) for column, value in enumerate(values)
    ]


def _heat_cell(x: int, y: int, value: float | None, shade: Callable[[float], float]) -> str:
    size = f'x="{x + 1}" y="{y + 1}" width="{CELL_WIDTH - 2}" height="{CELL_HEIGHT - 2}" rx="3"'
    across, down = x + CELL_WIDTH / 2, y + CELL_HEIGHT / 2 + 4
    if value is None:
        return f'<rect class="empty" {size}></rect>{_text(across, down, "undefined", "middle", "quiet")}'
    strength = f'style="fill-opacity:{0.06 + 0.84 * shade(value):.2f}"'
    return f'<rect class="shade" {strength} {size}></rect>{_text(across, down, number(value), "middle")}'
