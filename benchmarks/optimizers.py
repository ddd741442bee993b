"""AdamW against Muon on the demo: tokens and seconds to a fixed validation loss, each at a rate tuned for it.

    python -m benchmarks.optimizers               train what is not there yet, then print the tables
    python -m benchmarks.optimizers --step-time   time a step of each, in turn, for the column of seconds

Every run is kept as one file in `--out`, so a stopped experiment goes on where it was. The rule, fixed beforehand: both
optimizers are tuned on one seed over a grid of rates, a factor of 2 apart, which is extended until its best is inside;
then five other seeds run at the best rate of each. The loss to reach is that of AdamW's best tuning run plus 2 %.
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import torch

from data.loader import evaluation_windows
from data.prepare import Prepared, prepare
from experiments import statistics
from model.durable import write_text
from training.config import Config, load
from training.evaluate import evaluate
from training.loop import make_trainer
from training.trainer import Trainer

KINDS = ("adamw", "muon")
RATES = (1.75e-3, 3.5e-3, 7e-3, 1.4e-2)
TUNING_SEED, SEEDS = 100, (0, 1, 2, 3, 4)
MARGIN = 1.02
EVERY, EVALUATED = 25, 64  # steps between evaluations, and windows read by one

Context = Callable[[], AbstractContextManager[Any]]


class Arm(NamedTuple):
    """One training run: what differs between runs."""

    kind: str
    lr: float
    seed: int
    precision: str = "fp32"

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.lr:g}-seed{self.seed}-{self.precision}"


class Place(NamedTuple):
    """What all runs share, and where they are kept."""

    out: Path
    data: str
    steps: int
    threads: int

    def path(self, arm: Arm) -> Path:
        return self.out / f"{self.steps}-steps" / f"{arm.name}.json"


# --- Training ---------------------------------------------------------------------------------------------------------


def config_of(arm: Arm, place: Place) -> Config:
    """Return the demo's settings with those of the arm."""
    changes = {
        "model.vocab_size": 1024,
        "data.folder": place.data,
        "optimizer.method": arm.kind,
        "optimizer.lr": arm.lr,
        "optimizer.warmup_steps": place.steps // 10,
        "training.steps": place.steps,
        "training.max_minutes": None,
        "training.seed": arm.seed,
        "training.precision": arm.precision,
        "training.compile": "off",
        "training.device": "cpu",
    }
    return load("configs/demo.yaml", changes)


def trainer_of(arm: Arm, place: Place) -> tuple[Trainer, Prepared]:
    """Return a trainer at step 0, and the text."""
    config = config_of(arm, place)
    prepared = prepare(config.data)
    return make_trainer(config, prepared), prepared


def train(arm: Arm, place: Place, context: Context = nullcontext) -> None:
    """Train a run that is not there yet and keep its losses: validation every 25 steps, and after the last one."""
    path = place.path(arm)
    if path.exists():
        return
    torch.set_num_threads(place.threads)
    trainer, prepared = trainer_of(arm, place)
    windows = evaluation_windows(prepared.validation.ids, trainer.config.model.context, EVALUATED)
    losses: list[tuple[int, float]] = []
    with context():
        while trainer.next_step < place.steps:
            trainer.step()
            if trainer.next_step % EVERY == 0 or trainer.next_step == place.steps:
                score = evaluate(trainer.model, windows, prepared.tokenizer.token_bytes(), trainer.hardware)
                losses.append((trainer.next_step, score.loss))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps({**arm._asdict(), "skipped": trainer.skipped, "validation": losses}) + "\n")
    print(f"{arm.name}: {losses[-1][1]:.4f}", flush=True)


def losses_of(arm: Arm, place: Place) -> list[tuple[int, float]]:
    """Return (step, validation loss) of a run that is there."""
    return [(step, loss) for step, loss in json.loads(place.path(arm).read_text())["validation"]]


def final_loss(arm: Arm, place: Place) -> float:
    """Return the validation loss after the last step."""
    return losses_of(arm, place)[-1][1]


def train_all(arms: Sequence[Arm], place: Place, processes: int, context: Context = nullcontext) -> None:
    """Train these runs, several at once."""
    prepare(config_of(arms[0], place).data)  # once, and not in each process
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        list(pool.map(partial(train, place=place, context=context), arms))


# --- The experiment ---------------------------------------------------------------------------------------------------


def tune(place: Place, processes: int) -> dict[str, dict[float, float]]:
    """Return the tuning loss of each optimizer and rate; no optimizer's best is at the edge of its rates."""
    grids = {kind: list(RATES) for kind in KINDS}
    while True:
        arms = [Arm(kind, lr, TUNING_SEED) for kind in KINDS for lr in grids[kind]]
        train_all(arms, place, processes)
        results = {kind: {arm.lr: final_loss(arm, place) for arm in arms if arm.kind == kind} for kind in KINDS}
        more = {kind: beyond_the_edge(results[kind]) for kind in KINDS}
        if not any(more.values()):
            return results
        grids = {kind: sorted([*grids[kind], *more[kind]]) for kind in KINDS}


def beyond_the_edge(results: dict[float, float]) -> list[float]:
    """Return the rate to try next where the best one is the lowest or the highest; none where it is inside."""
    best = best_rate(results)
    return {min(results): [best / 2], max(results): [best * 2]}.get(best, [])


def best_rate(results: dict[float, float]) -> float:
    """Return the rate of the lowest loss."""
    return min(results, key=lambda lr: results[lr])


def steps_to(losses: Sequence[tuple[int, float]], target: float) -> float:
    """Return after how many steps the loss first reached the target, linear between two evaluations; inf: never."""
    reached = statistics.tokens_to(losses, target)
    return math.inf if reached is None else reached


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and half the width of its 95 % interval (Student's t)."""
    bounds = statistics.interval(values)
    assert bounds is not None, "there is more than one seed"
    return mean(values), (bounds[1] - bounds[0]) / 2


# --- Time of a step ---------------------------------------------------------------------------------------------------


def time_steps(place: Place, rounds: int = 40) -> dict[str, float]:
    """Return the median seconds of a training step of each optimizer; they take turns, and the first rounds warm up."""
    torch.set_num_threads(place.threads)
    trainers = {kind: trainer_of(Arm(kind, 3.5e-3, TUNING_SEED), place)[0] for kind in KINDS}
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(rounds + 3):
        for kind, trainer in trainers.items():
            begin = time.perf_counter()
            trainer.step()
            seconds[kind].append(time.perf_counter() - begin)
    return {kind: median(values[3:]) for kind, values in seconds.items()}


def step_time_file(place: Place) -> Path:
    """Return where the seconds of a step are kept."""
    return place.out / f"step-time-{place.threads}-threads.json"


def measure_step_time(place: Place) -> None:
    """Time a step of each optimizer, keep the result and print it."""
    seconds = time_steps(place)
    place.out.mkdir(parents=True, exist_ok=True)
    write_text(step_time_file(place), json.dumps(seconds) + "\n")
    told = ", ".join(f"{kind} {value * 1e3:.1f} ms" for kind, value in seconds.items())
    print(f"a step of {place.threads} threads: {told}; muon / adamw {seconds['muon'] / seconds['adamw']:.3f}")


# --- Tables -----------------------------------------------------------------------------------------------------------


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a Markdown table."""
    yield f"| {' | '.join(header)} |"
    yield "|" + "---|" * len(header)
    for row in rows:
        yield f"| {' | '.join(row)} |"


def tuning_table(results: dict[str, dict[float, float]]) -> Iterator[str]:
    """Yield the loss of every rate that was tried."""
    rates = sorted({lr for grid in results.values() for lr in grid})
    cells = ([f"{grid[lr]:.4f}" if lr in grid else "" for lr in rates] for grid in results.values())
    yield from table(
        ["final loss at a peak rate of", *(f"{lr:g}" for lr in rates)],
        ([f"`{kind}`", *row] for kind, row in zip(results, cells, strict=True)),
    )


def seconds_of_a_step(place: Place) -> dict[str, float] | None:
    """Return what `--step-time` measured; None: it was not run yet."""
    path = step_time_file(place)
    return json.loads(path.read_text()) if path.exists() else None


def seeds_table(best: dict[str, float], target: float, place: Place) -> Iterator[str]:
    """Yield, for every seed, final loss, tokens and seconds to the target, and the mean difference over pairs."""
    seconds = seconds_of_a_step(place)
    measures: dict[str, Callable[[Arm], float]] = {
        "final loss": lambda arm: final_loss(arm, place),
        "thousand tokens to the target": lambda arm: tokens_to(arm, target, place) / 1e3,
    }
    if seconds is not None:
        measures["seconds to the target"] = lambda arm: steps_to(losses_of(arm, place), target) * seconds[arm.kind]
    for name, measure in measures.items():
        yield ""
        yield from pairs_table(name, best, measure)


def tokens_to(arm: Arm, target: float, place: Place) -> float:
    """Return how many tokens a run read before it reached the target."""
    config = config_of(arm, place)
    return steps_to(losses_of(arm, place), target) * config.training.batch_size * config.model.context


def pairs_table(name: str, best: dict[str, float], measure: Callable[[Arm], float]) -> Iterator[str]:
    """Yield one measure for every seed: each optimizer, and their ratio, with the paired interval of the ratio."""
    values = {kind: [measure(Arm(kind, best[kind], seed)) for seed in SEEDS] for kind in KINDS}
    ratios = [muon / adamw for adamw, muon in zip(values["adamw"], values["muon"], strict=True)]
    rows = [
        *([f"`{kind}`", *cells(values[kind]), with_interval(values[kind])] for kind in KINDS),
        ["muon / adamw", *(f"{ratio:.3f}" for ratio in ratios), with_interval(ratios, ".3f")],
    ]
    yield from table([name, *(f"seed {seed}" for seed in SEEDS), "mean, 95 % interval"], rows)


def cells(values: Sequence[float]) -> list[str]:
    """Return numbers with about four digits."""
    return [f"{value:{style(value)}}" for value in values]


def style(value: float) -> str:
    """Return a format of about four digits."""
    return ".4f" if value < 10 else ".1f"


def with_interval(values: Sequence[float], form: str | None = None) -> str:
    """Return mean and half-width of the 95 % interval as text."""
    middle, half = interval(values)
    form = form or style(middle)
    return f"{middle:{form}} ± {half:{form}}"


def experiment(place: Place, processes: int) -> None:
    """Train what is not there yet, and print the tables."""
    results = tune(place, processes)
    best = {kind: best_rate(results[kind]) for kind in KINDS}
    train_all([Arm(kind, best[kind], seed) for seed in SEEDS for kind in KINDS], place, processes)
    target = MARGIN * results["adamw"][best["adamw"]]
    print("\n".join(tuning_table(results)))
    print(f"\ntarget: {target:.4f}")
    print("\n".join(seeds_table(best, target, place)))


# --- Command line -----------------------------------------------------------------------------------------------------


def command_line(description: str) -> argparse.ArgumentParser:
    """Return what both experiments may be told."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/optimizers"), help="where runs are kept")
    parser.add_argument("--data", default="prepared", help="folder of prepared data")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--processes", type=int, default=1, help="runs at once")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads of a run")
    return parser


def place_of(options: argparse.Namespace) -> Place:
    """Return what all runs share."""
    return Place(options.out, options.data, options.steps, options.threads)


def main() -> None:
    """Run the experiment, or time the steps."""
    parser = command_line(__doc__ or "")
    parser.add_argument("--step-time", action="store_true", help="only time a step of each optimizer")
    options = parser.parse_args()
    place = place_of(options)
    if options.step_time:
        measure_step_time(place)
    else:
        experiment(place, options.processes)


if __name__ == "__main__":
    main()
