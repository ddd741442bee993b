"""How speed and memory grow with the model's width and the length of its window, beside the FLOPs they should cost.

python -m benchmarks.cost           prints the table
python -m benchmarks.cost --write   also writes docs/results/cost.md and its plot
"""

import argparse
import itertools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

from benchmarks.processes import Process
from benchmarks.report import Table, percent
from benchmarks.workloads import ROOT, Settings
from model.config import ModelConfig
from model.durable import write_text
from model.errors import UserError
from model.flops import training_flops
from training.command_line import exit_on_user_error
from training.machine import machine

WIDTHS, CONTEXTS = (128, 256, 384, 512, 768), (128, 256, 512, 1024, 2048)
HEAD_DIM, LAYERS, VOCABULARY = 64, 4, 4096
KINK = 0.75
RESULTS = ROOT / "docs/results/cost.md"

Place = tuple[int, int]
"""d_model and context."""


@dataclass
class Cell:
    """One size: what each fresh process showed of it."""

    settings: Settings
    rates: list[float] = field(default_factory=list)
    peaks: list[float] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    error: str = ""

    @property
    def flops(self) -> float:
        """FLOPs a token."""
        return training_flops(ModelConfig.model_validate(self.settings["model"]))

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return statistics.median(self.rates)

    @property
    def gib(self) -> float:
        """Peak memory in GiB."""
        return statistics.median(self.memory) / 2**30

    @property
    def speed(self) -> float:
        """FLOP/s that count."""
        return self.rate * self.flops

    @property
    def utilisation(self) -> float:
        """The share of the peak of matrix products, measured in the same process: a slow minute slows both."""
        return self.flops * statistics.median(a / b for a, b in zip(self.rates, self.peaks, strict=True))


def settings(width: int, context: int, options: argparse.Namespace) -> Settings:
    """Return a run of this size; all sizes have equally many tokens a step."""
    heads = max(1, width // HEAD_DIM)
    model = {"n_layers": LAYERS, "n_heads": heads, "d_model": width, "context": context, "vocab_size": VOCABULARY}
    training = {"batch_size": options.tokens // context}
    chosen = {name: getattr(options, name) for name in ("precision", "compile") if getattr(options, name)}
    model["position"] = options.position
    return {"model": model, "data": {"vocab_size": VOCABULARY}, "training": {**training, **chosen}}


def measure(cell: Cell, seconds: float) -> None:
    """Train a few steps in a fresh process, and measure the peak of its precision in there."""
    process = Process(ROOT)
    try:
        arguments = {"workload": cell.settings, "seconds": seconds}
        answers = [process.ask("benchmarks.measured.training:steps", arguments) for _ in range(2)]
        if error := answers[-1].get("error"):
            cell.error = error
            return
        precision = answers[-1]["notes"]["precision"]
        product = {"precision": precision, "onednn": precision == "fp32", "seconds": 0.5}
        peak = process.ask("benchmarks.measured.peaks:matmul", product)
        cell.rates.append(answers[-1]["rate"])  # the first one warms up
        cell.memory.append(sum(answer["memory"] for answer in answers))
        cell.peaks.append(peak["rate"])
    finally:
        process.close()


def neighbours(place: Place, cells: dict[Place, Cell]) -> Iterator[list[Place]]:
    """Yield the cells beside this one along each of both axes.

    The narrowest and the widest have none along the widths: narrower models always use less of the machine.
    """
    widths, contexts = (sorted({each[axis] for each in cells}) for axis in (0, 1))
    for axis, values in ((0, widths), (1, contexts)):
        at = values.index(place[axis])
        beside = [values[i] for i in (at - 1, at + 1) if 0 <= i < len(values)]
        if axis == 0 and len(beside) < 2:
            continue
        yield [(value, place[1]) if axis == 0 else (place[0], value) for value in beside]


def kinks(cells: dict[Place, Cell]) -> dict[Place, float]:
    """Return the cells whose FLOP/s are below 75 % of their neighbours' mean along an axis, and how far."""
    found = {}
    for place, cell in cells.items():
        means = [statistics.mean(cells[each].speed for each in beside) for beside in neighbours(place, cells) if beside]
        worst = min((cell.speed / mean for mean in means), default=1.0)
        if worst < KINK:
            found[place] = worst
    return found


def table(cells: dict[Place, Cell], options: argparse.Namespace) -> Table:
    """Lay the cells out, with the kinks named below."""
    header = ["d_model", "context", "MFLOP a token", "tokens/s", "GFLOP/s", "of the peak", "peak memory, GiB"]
    rows = [[str(width), str(context), *figures(cells[width, context])] for width, context in cells]
    measured = {place: cell for place, cell in cells.items() if not cell.error}
    named = [
        f"d_model {width}, context {context}: {percent(ratio)} of its neighbours"
        for (width, context), ratio in kinks(measured).items()
    ]
    remark = (
        f"{LAYERS} layers, heads {HEAD_DIM} wide, position {options.position}, vocabulary {VOCABULARY}, "
        f"{options.tokens} tokens a step in every cell; medians of {options.rounds} fresh processes. The peak is that "
        "of matrix products, measured in the same process.\n\n"
        f"Kinks, where GFLOP/s are below {percent(KINK)} of the mean of the cells beside it along a row "
        f"or a column (along the widths only between two): {'; '.join(named) or 'none'}."
    )
    return Table("Cost against size", header, rows, remark)


def figures(cell: Cell) -> Sequence[str]:
    """Return the figures of one cell, or why it has none."""
    mega = f"{cell.flops / 1e6:,.1f}"
    if cell.error:
        return [mega, cell.error, "-", "-", "-"]
    giga = f"{cell.speed / 1e9:,.1f}"
    return [mega, f"{cell.rate:,.0f}", giga, percent(cell.utilisation), f"{cell.gib:.2f}"]


def plot(cells: dict[Place, Cell], path: Path) -> None:
    """Draw tokens/s beside what the FLOPs alone would make of them, and memory, against the context."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "ropelab"  # equal figures, equal files
    figure, (speed, memory) = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    strange = kinks(cells)
    for width, group in itertools.groupby(cells, key=lambda place: place[0]):
        places = list(group)
        contexts, row = [context for _, context in places], [cells[place] for place in places]
        (line,) = speed.plot(contexts, [cell.rate for cell in row], "o-", label=f"d_model {width}")
        flops_a_second = statistics.median(cell.speed for cell in row)
        speed.plot(contexts, [flops_a_second / cell.flops for cell in row], "--", color=line.get_color(), alpha=0.6)
        memory.plot(contexts, [cell.gib for cell in row], "o-", color=line.get_color(), label=f"d_model {width}")
        marked = [place for place in places if place in strange]
        speed.plot([p[1] for p in marked], [cells[p].rate for p in marked], "x", color="black", markersize=11)
    speed.set(title="Training; dashed: constant FLOP/s, x: kink", ylabel="tokens/s", yscale="log")
    memory.set(title="Peak memory", ylabel="GiB", ylim=(0, None))
    for axes in (speed, memory):
        axes.set_xscale("log", base=2)
        axes.set_xticks(contexts, [str(context) for context in contexts])
        axes.set_xlabel("context, tokens")
        axes.grid(alpha=0.3)
    figure.legend(*memory.get_legend_handles_labels(), loc="outside right upper")
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--widths", type=int, nargs="+", default=WIDTHS, metavar="C", help=f"d_model, default {WIDTHS}")
    add("--contexts", type=int, nargs="+", default=CONTEXTS, metavar="T", help=f"default {CONTEXTS}")
    add("--tokens", type=int, default=2048, help="tokens a step, in every cell")
    add("--position", default="rope")
    add("--precision", choices=("fp32", "bf16", "fp16"), help="default: what train.py takes")
    add("--compile", choices=("off", "on", "auto"), help="default: what train.py does")
    add("--rounds", type=int, default=3, help="fresh processes a cell")
    add("--seconds", type=float, default=2.0, help="least time of one measurement")
    add("--plot", type=Path, help="draw to this file (.svg or .png)")
    add("--write", action="store_true", help=f"also write {RESULTS.relative_to(ROOT)} and its plot")
    options = parser.parse_args()
    if any(options.tokens % context for context in options.contexts):
        raise UserError(f"--tokens {options.tokens} is not a multiple of every context: a step has whole windows")
    if options.rounds < 1:
        raise UserError(f"--rounds {options.rounds} leaves nothing to measure: give 1 or more")
    return options


@exit_on_user_error()
def main() -> None:
    """Measure all sizes, round by round, and print the table."""
    options = arguments()
    places = list(itertools.product(sorted(options.widths), sorted(options.contexts)))
    cells = {place: Cell(settings(*place, options)) for place in places}
    for _, place in tqdm(list(itertools.product(range(options.rounds), places)), desc="cells", disable=None):
        if not cells[place].error:
            measure(cells[place], options.seconds)
    parts = ["# Cost", machine(), str(table(cells, options))]
    print("\n\n".join(parts))
    drawn = {place: cell for place, cell in cells.items() if not cell.error}
    if options.plot:
        plot(drawn, options.plot)
    if options.write:
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        plot(drawn, RESULTS.with_suffix(".svg"))
        write_text(RESULTS, "\n\n".join([*parts, "![tokens/s and memory against the context](cost.svg)"]) + "\n")


if __name__ == "__main__":
    main()
