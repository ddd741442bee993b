"""An experiment under way: which runs are whose, which are done, how long the rest takes, and the end of it."""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from experiments.config import Changes, ExperimentFile
from experiments.laboratory import laboratory_of
from experiments.plan import Plan, Run
from experiments.rows import evaluation_name
from experiments.store import Store
from experiments.tuning import Place, Tuned, publish, tuned_by, untuned
from model.durable import write_text
from model.errors import UserError
from training.machine import now, revision

WAIT = 5.0  # seconds between looks at what other shards have done


class Shard(NamedTuple):
    """Which share of the runs is done here: every `of_all`-th, beginning with this number, counted from 1."""

    number: int = 1
    of_all: int = 1

    def of(self, runs: Sequence[Run]) -> list[Run]:
        """Return the runs of this share."""
        return list(runs[self.number - 1 :: self.of_all])


def shard_from(word: str) -> Shard:
    """Read `2/8` (UserError)."""
    index, slash, count = word.partition("/")
    if not (slash and index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
        raise UserError(f"--shard {word}: it must be K/N with K from 1 to N, such as 2/8")
    return Shard(int(index), int(count))


class Campaign:
    """One experiment, its plan and its store."""

    def __init__(self, file: ExperimentFile, store: Store, out: Path) -> None:
        self.file, self.store, self.out = file, store, out
        self.laboratory = laboratory_of(file, store)
        self.plan = Plan(file, self.laboratory.facts)

    def declare(self) -> None:
        """Write down the experiment's hash before its first run; a later change of it adds a line."""
        self.out.mkdir(parents=True, exist_ok=True)
        declared = self.declared()
        if not declared or declared[-1]["hash"] != self.file.digest:
            declared.append({"hash": self.file.digest, "date": now(), "revision": revision()})
            write_text(self.out / "declared.json", json.dumps(declared, indent=1) + "\n")

    def declared(self) -> list[dict[str, str]]:
        """Return the hashes that the experiment has had since its first run, here or where its rows were published."""
        files = [file for file in (self.out / "declared.json", *self.published()) if file.exists()]
        return json.loads(files[0].read_text()) if files else []

    def published(self) -> list[Path]:
        """Return the declarations that were committed together with the experiment's rows."""
        files = [rows.parent / self.file.name / "declared.json" for rows in self.store.also]
        return [file for file in files if file.exists()]

    def other_data(self) -> str:
        """Say so where none of the published runs counts here, because they read other data; "" where some do."""
        runs = self.measured() or []
        if not self.published() or not runs or any(self.store.row(run.key) for run in runs):
            return ""
        return (
            f"the published runs of {self.file.name} are of other data than those here "
            f"({self.laboratory.facts.data}; {self.laboratory.facts.precision}), so all are trained anew"
        )

    # --- What there is to do ---

    def tuned(self) -> dict[Place, Tuned | None]:
        """Return what tuning found so far."""
        return tuned_by(self.plan, self.store.row)

    def measured(self) -> list[Run] | None:
        """Return the runs that are measured; None before all tuning is done."""
        chosen = settings_of(self.tuned())
        return None if chosen is None else self.plan.measured(chosen)

    def is_done(self, run: Run) -> bool:
        """Say whether a run is trained and, if it is no tuning run, measured."""
        row = self.store.row(run.key)
        if row is None or run.is_tuning or row["status"] == "diverged":
            return row is not None
        schemes = self.plan.evaluated_as(run).values()
        return all(self.store.row(evaluation_name(run, scheme, self.plan.experiment)) for scheme in schemes)

    # --- Doing it ---

    def go(self, shard: Shard) -> None:
        """Do this shard's runs: those of the tuning, then, when all shards have done theirs, the others."""
        self.declare()
        self._do("tuning", shard.of(untuned(self.plan)))
        while (runs := self.measured()) is None:
            self._wait(shard)
        if self.plan.experiment.tune:
            publish(self.plan, self.tuned(), self.out / "tuned.yaml")
        self._do("measured", shard.of(runs))

    def _do(self, what: str, runs: list[Run]) -> None:
        waiting = [run for run in runs if not self.is_done(run)]
        begin = time.perf_counter()
        with tqdm(total=len(waiting), desc=what, unit="run", disable=not sys.stderr.isatty()) as bar:
            for number, run in enumerate(waiting, start=1):
                outcome = self.run(run)
                left = (time.perf_counter() - begin) / number * (len(waiting) - number)
                bar.update()
                bar.write(f"{what} {number}/{len(waiting)}  {run.label}: {outcome}; {hours(left)} left", sys.stdout)
                sys.stdout.flush()

    def run(self, run: Run) -> str:
        """Train and measure one run; say in words what came out."""
        row = self.laboratory.train(run)
        if row["status"] == "diverged":
            return f"diverged ({row['why']})"
        if not run.is_tuning:
            for scheme in self.plan.evaluated_as(run).values():
                self.laboratory.measure(run, scheme)
        return f"validation loss {row['validation_loss']:.4f}"

    def _wait(self, shard: Shard) -> None:
        assert shard.of_all > 1, "one shard does all tuning runs, so none can be left"
        left = sum(self.store.row(run.key) is None for run in untuned(self.plan))
        print(f"waiting for {left} tuning runs of other shards", flush=True)
        time.sleep(WAIT)


def settings_of(tuned: dict[Place, Tuned | None]) -> dict[Place, Changes] | None:
    """Return the chosen settings of every arm and task; None where some are still to be found."""
    found = {place: each.settings for place, each in tuned.items() if each is not None}
    return found if len(found) == len(tuned) else None


def hours(seconds: float) -> str:
    """Return a duration in hours and minutes, 1 h 05 min; below an hour in minutes."""
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 60 else f"{minutes} min"
