"""The figures of a report, for Weights & Biases: one wandb run an experiment, one step a seed."""

import shutil
from collections import defaultdict
from pathlib import Path
from typing import Literal

from experiments.results import Measurement, Results
from training.config import Config
from training.tracking import Tracker


def send(results: Results, base: Config, mode: Literal["offline", "online"], folder: Path) -> None:
    """Send every figure under ARM/MEASURE@LENGTH; a report that is written again is a new wandb run."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    config = base.model_copy(update={"training": base.training.model_copy(update={"wandb": mode})})
    tracker = Tracker(folder, config)
    for seed, figures in sorted(by_seed(results.measurements).items()):
        tracker.log({"step": seed, **figures})
    tracker.close()


def by_seed(measurements: tuple[Measurement, ...]) -> dict[int, dict[str, float]]:
    """Return the figures of every seed by name; points of a curve are named by their place on it."""
    figures: dict[int, dict[str, float]] = defaultdict(dict)
    for found in measurements:
        if found.value is not None:
            figures[found.seed][name_of(found)] = found.value
    return figures


def name_of(found: Measurement) -> str:
    """Return the name of a figure: rope/same_targets_loss@1024."""
    places = {"layer": found.layer, "head": found.head, "at": found.x}
    parts = [
        found.arm,
        found.task,
        found.measure,
        *(f"{name} {value:g}" for name, value in places.items() if value is not None),
    ]
    return "/".join(filter(None, parts)) + (f"@{found.length}" if found.length is not None else "")
