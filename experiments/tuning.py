"""Which settings of the grid each arm gets: those with the lowest validation loss, mean over the tuning seeds."""

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from experiments.config import Changes
from experiments.plan import Plan, Run, digest
from experiments.results import Trial
from experiments.store import Row
from model.durable import write_text
from model.errors import UserError
from training.yaml_file import read_mapping, written

Place = tuple[str, str]  # arm and task


class Tuned(NamedTuple):
    """What tuning found for one arm and task."""

    settings: Changes
    trials: tuple[Trial, ...]
    at_edge: bool


def tuned_by(plan: Plan, rows: Callable[[str], Row | None]) -> dict[Place, Tuned | None]:
    """Return what tuning found for every arm and task; None where its runs are not finished."""
    published = read_published(plan)
    places = [(arm, task) for arm in plan.trained for task in plan.tasks]
    return {place: published.get(place) or _found(plan, place, rows) for place in places}


def untuned(plan: Plan) -> list[Run]:
    """Return the runs of the grid whose outcome is not published."""
    published = read_published(plan)
    return [run for run in plan.tuning() if (run.arm, run.task) not in published]


def _found(plan: Plan, place: Place, rows: Callable[[str], Row | None]) -> Tuned | None:
    if plan.experiment.tune is None:
        return Tuned({}, (), False)
    runs = [run for run in plan.tuning() if (run.arm, run.task) == place]
    found = [(run, rows(run.key)) for run in runs]
    if any(row is None for _, row in found):
        return None
    trials = tuple(Trial(run.arm, run.settings, run.seed, loss_of(row or {}), run.task) for run, row in found)
    return chosen(plan.grid(), trials)


def loss_of(row: Row) -> float | None:
    """Return the validation loss of a training; None where it diverged."""
    loss: float | None = row["validation_loss"] if row["status"] == "finished" else None
    return loss


def chosen(grid: list[Changes], trials: tuple[Trial, ...]) -> Tuned:
    """Return the settings of the lowest mean loss; settings under which a seed diverged count as endlessly bad."""

    def loss(settings: Changes) -> float:
        losses = [trial.loss for trial in trials if trial.settings == settings]
        return mean(math.inf if each is None else each for each in losses)

    best = min(grid, key=loss)
    return Tuned(best, trials, at_edge(best, grid))


def at_edge(settings: Changes, grid: list[Changes]) -> bool:
    """Say whether one of the settings is the lowest or highest value that was tried of it."""
    tried = {name: sorted({each[name] for each in grid}) for name in settings}
    return any(len(values) > 1 and settings[name] in (values[0], values[-1]) for name, values in tried.items())


# --- Published ---


def identity(plan: Plan, place: Place) -> str:
    """Return what a tuning of an arm and task is valid for: its settings and the grid, on whatever data."""
    arm, task = place
    config = plan.run(arm, 0, {}, task).config.model_dump(mode="json", include={"model", "optimizer", "training"})
    shape = {name: config["training"][name] for name in ("steps", "batch_size")}
    tune = plan.experiment.tune
    return digest([config["model"], config["optimizer"], shape, task, tune.model_dump(mode="json") if tune else None])


def publish(plan: Plan, tuned: dict[Place, Tuned | None], file: Path) -> None:
    """Write down what tuning found, to be named by `tuned:` in the experiment."""
    entries = [
        {
            "arm": arm,
            "task": task,
            "identity": identity(plan, (arm, task)),
            "settings": found.settings,
            "trials": [{"settings": t.settings, "seed": t.seed, "loss": t.loss} for t in found.trials],
        }
        for (arm, task), found in tuned.items()
        if found is not None
    ]
    write_text(file, written({"found": entries}))


def read_published(plan: Plan) -> dict[Place, Tuned]:
    """Return what an earlier tuning found, as far as it is valid for this experiment."""
    name = plan.experiment.tuned
    file = plan.file.path.parent / name if name else None
    if file is None or plan.experiment.tune is None or not file.is_file():
        return {}
    return dict(_valid(plan, read_mapping(file)["found"]))


def _valid(plan: Plan, entries: Iterable[dict[str, Any]]) -> Iterable[tuple[Place, Tuned]]:
    for entry in entries:
        place = entry["arm"], entry["task"]
        if entry["arm"] in plan.trained and entry["identity"] == identity(plan, place):
            trials = tuple(Trial(place[0], t["settings"], t["seed"], t["loss"], place[1]) for t in entry["trials"])
            yield place, _checked(plan, trials, entry["settings"])


def _checked(plan: Plan, trials: tuple[Trial, ...], settings: Changes) -> Tuned:
    """Return what these trials come to; UserError where the file says otherwise, or lacks some of them."""
    tune = plan.experiment.tune
    assert tune is not None
    arm = f"{plan.experiment.tuned}: {trials[0].arm if trials else 'an arm'}"
    tried = [(t.settings, t.seed) for t in trials]
    if lacking := [(each, seed) for each in plan.grid() for seed in tune.seeds if (each, seed) not in tried]:
        raise UserError(f"{arm} lacks the trial of {lacking[0][0]} with seed {lacking[0][1]}: remove its entry")
    best = chosen(plan.grid(), trials)
    if best.settings != settings:
        raise UserError(f"{arm} has settings {settings}, but its own trials say {best.settings}: remove its entry")
    return best
