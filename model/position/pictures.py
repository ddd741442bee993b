"""Pictures of the schemes, one idea each, as PNG files of 1000 pixels' width; needs matplotlib.

The colours are those of Okabe and Ito (2008), which people with any colour vision tell apart; heads, which have an
order, take theirs from viridis.
"""

import math
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from model.config import ModelConfig
from model.position import SCHEMES
from model.position.overview import (
    DRAWS,
    STRETCH,
    Curves,
    never_turn,
    plain_frequencies,
    score_curves,
    stretched,
    turn_report,
)
from model.position.scaling import RULES

BLUE, ORANGE, GREEN, RED, PURPLE, SKY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9"
GREY = "#555555"
LINES: list[dict[str, Any]] = [
    {"color": BLUE, "marker": "o"},
    {"color": ORANGE, "marker": "s"},
    {"color": GREEN, "marker": "^", "linestyle": "--"},
    {"color": RED, "marker": "D"},
    {"color": PURPLE, "marker": "v"},
    {"color": SKY, "marker": "x", "linestyle": "--"},
]


def draw_all(config: ModelConfig, folder: Path) -> list[Path]:
    """Write every picture into the folder and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    figures = {f"scores-{name}": scores_figure(name, config) for name in SCHEMES}
    figures |= {"rope-wavelengths": wavelengths_figure(config), "rope-scalings": scalings_figure(config)}
    paths = [folder / f"{name}.png" for name in figures]
    for path, figure in zip(paths, figures.values(), strict=True):
        figure.savefig(path, dpi=100)
    return paths


def new_figure(title: str, note: str) -> tuple[Figure, Axes]:
    """Return an empty picture with a title, and a line that says what is drawn."""
    figure = Figure(figsize=(10, 6), layout="constrained", facecolor="white")
    axes = figure.subplots()
    figure.suptitle(title, fontsize=17)
    axes.set_title(note, fontsize=11, color=GREY)
    axes.tick_params(labelsize=12)
    axes.grid(color="#DDDDDD", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def label(axes: Axes, x: str, y: str) -> None:
    """Name both axes, and put the legend below them, where it covers nothing."""
    axes.set_xlabel(x, fontsize=13)
    axes.set_ylabel(y, fontsize=13)
    axes.figure.legend(loc="outside lower center", ncols=4, fontsize=11, frameon=False)


# --- Scores by distance ----------------------------------------------------------------------------------------------


def scores_figure(name: str, config: ModelConfig) -> Figure:
    """Draw what a scheme does to the score of two equal tokens as the distance between them grows."""
    figure, axes = new_figure(
        f"{name}: score of two equal tokens, by distance",
        f"first layer of a fresh model; keys are projected as queries are, both normalised; {DRAWS} random tokens",
    )
    curves = score_curves(name, config)
    (draw_heads if curves.by_head else draw_mean)(axes, curves)
    axes.axhline(config.head_dim**0.5, color="black", linestyle=":", label="without position")
    axes.axvline(config.context, color=GREY, linestyle="--", label=f"training length, {config.context}")
    defined, shown = curves.scores.shape[-1], 2 * config.context
    if defined < shown:
        axes.axvspan(defined, shown, facecolor="#EEEEEE", hatch="//", edgecolor="#CCCCCC", label="not defined")
    axes.set_xlim(-shown / 100, shown)
    keep_noise_small(axes)
    label(axes, "distance from query back to key, in tokens", "score before softmax")
    return figure


def draw_mean(axes: Axes, curves: Curves) -> None:
    """Draw the mean over draws and heads, and between which values four fifths of them lie."""
    flat = curves.scores.flatten(0, 1)
    low, high = (flat.quantile(share, dim=0).numpy() for share in (0.1, 0.9))
    distances = range(flat.shape[1])
    axes.fill_between(distances, low, high, color=SKY, alpha=0.35, linewidth=0, label="10 to 90 % of tokens and heads")
    axes.plot(distances, flat.mean(0).numpy(), color=BLUE, linewidth=2, label="mean")


def draw_heads(axes: Axes, curves: Curves) -> None:
    """Draw a line for each head: they differ by what the scheme adds, not by the token."""
    lines = curves.scores.mean(0).numpy()
    for head, line in enumerate(lines):
        colour = colormaps["viridis"](0.85 * head / max(1, len(lines) - 1))
        axes.plot(line, color=colour, linewidth=2, label=f"head {head + 1}")


def keep_noise_small(axes: Axes, least: float = 0.5) -> None:
    """Widen the scale of scores to a least height, so that a rounding error does not fill the picture."""
    low, high = axes.get_ylim()
    lack = max(0.0, least - (high - low)) / 2
    axes.set_ylim(low - lack, high + lack)


# --- RoPE's pairs ----------------------------------------------------------------------------------------------------


def wavelengths_figure(config: ModelConfig) -> Figure:
    """Draw how many tokens each pair needs for a full turn, against the training length."""
    frequencies = plain_frequencies(config)
    slow, numbers = never_turn(frequencies, config.context).numpy(), torch.arange(len(frequencies)).numpy()
    figure, axes = new_figure(turn_report(frequencies, config.context), "tokens that each pair needs for a full turn")
    wavelengths = (2 * math.pi / frequencies).numpy()
    kinds = {"completes a turn": (~slow, BLUE, ""), "never completes a turn": (slow, ORANGE, "//")}
    for name, (which, colour, hatch) in kinds.items():
        axes.bar(numbers[which], wavelengths[which], color=colour, hatch=hatch, edgecolor="white", label=name)
    axes.axhline(config.context, color="black", linestyle="--", label=f"training length, {config.context}")
    axes.set_yscale("log")
    axes.set_xticks(numbers)
    label(axes, "pair of channels, fastest first", "wavelength, in tokens")
    return figure


def scalings_figure(config: ModelConfig) -> Figure:
    """Draw by what each scaling divides each pair's frequency."""
    figure, axes = new_figure(
        f"Scalings of RoPE at {STRETCH} times the training length",
        f"1: the pair turns as in training; {STRETCH}: so much slower that it stays within the angles of training",
    )
    plain = plain_frequencies(config)
    for name, style in zip(RULES, cycle(LINES), strict=False):
        divisors = (plain / stretched(name, config).frequencies).numpy()
        axes.plot(divisors, label=name, markersize=8, linewidth=2, **style)
    turning = len(plain) - int(never_turn(plain, config.context).sum())
    axes.axvline(turning - 0.5, color="black", linestyle=":", label="slower pairs never complete a turn in training")
    axes.set_xticks(range(len(plain)))
    label(axes, "pair of channels, fastest first", "divisor of the frequency")
    return figure
