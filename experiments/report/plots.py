"""The same charts and heat maps as PNG files, by matplotlib."""

import io
from typing import Any

from experiments.report.axes import PALETTE, REFERENCE, colour, dashes, spaced, tick_text, y_range
from experiments.report.document import Chart, HeatMap, Series
from experiments.report.numbers import number


def png(drawing: Chart | HeatMap) -> bytes:
    """Draw a chart or a heat map."""
    from matplotlib.figure import Figure  # a second to import, and only reports need it

    figure = Figure(_inches(drawing), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(drawing.title, fontsize=11)
    _draw_heat(axes, drawing) if isinstance(drawing, HeatMap) else _draw_chart(axes, drawing)
    out = io.BytesIO()
    figure.savefig(out, format="png", metadata={"Software": None})
    return out.getvalue()


def _inches(drawing: Chart | HeatMap) -> tuple[float, float]:
    if isinstance(drawing, Chart):
        return 8.0, 4.8
    return 3.0 + 0.75 * len(drawing.columns), 1.2 + 0.36 * len(drawing.rows)


def _draw_chart(axes: Any, chart: Chart) -> None:
    for line in chart.series:
        _draw_line(axes, line)
    if chart.doubling:
        every = sorted({point.x for line in chart.series for point in line.points})
        places = spaced(every, (every[-1] / every[0]) ** (1 / 12))
        axes.set_xscale("log", base=2)
        axes.set_xticks(places, [tick_text(place) for place in places])
        axes.minorticks_off()
    if chart.marked is not None:
        axes.axvline(chart.marked, color="0.5", linewidth=0.8, linestyle=":")
    low, high = y_range(chart)
    margin = (high - low) / 30
    axes.set(xlabel=chart.x_label, ylabel=chart.y_label, ylim=(low - margin, high + margin))
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)


def _draw_line(axes: Any, line: Series) -> None:
    tint = "0.5" if line.arm_index == REFERENCE else PALETTE[colour(line.arm_index)]
    style: Any = (0, dashes(line.arm_index)) if dashes(line.arm_index) else "-"
    xs, means = [point.x for point in line.points], [point.mean for point in line.points]
    marker = "o" if len(xs) == 1 else None
    axes.plot(xs, means, color=tint, linestyle=style, label=_literal(line.name), linewidth=1.6, marker=marker)
    banded = [point for point in line.points if point.low is not None]
    low, high = [point.low for point in banded], [point.high for point in banded]
    if marker:
        axes.vlines([point.x for point in banded], low, high, color=tint, linewidth=1.6)
    axes.fill_between([point.x for point in banded], low, high, color=tint, alpha=0.15, linewidth=0)


def _draw_heat(axes: Any, heat: HeatMap) -> None:
    known = [value for row in heat.values for value in row if value is not None]
    rows = [[float("nan") if value is None else value for value in row] for row in heat.values]
    axes.imshow(rows, cmap="Oranges", aspect="auto", vmin=min(known, default=0.0), vmax=_top(known))
    axes.set_xticks(range(len(heat.columns)), heat.columns, fontsize=8)
    axes.set_yticks(range(len(heat.rows)), [_literal(name) for name in heat.rows], fontsize=8)
    for i, row in enumerate(heat.values):
        for j, value in enumerate(row):
            text = "undefined" if value is None else number(value)
            axes.text(j, i, text, ha="center", va="center", fontsize=6 if value is None else 8)


def _top(known: list[float]) -> float:
    """Return the value of the deepest colour: beyond the highest, so that black text can be read on every cell."""
    low, high = min(known, default=0.0), max(known, default=1.0)
    return high + (high - low) / 2 if high > low else high + 1


def _literal(name: str) -> str:
    """Write a name so that matplotlib takes no $ in it for mathematics."""
    return name.replace("$", r"\$")
