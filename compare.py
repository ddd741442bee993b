"""Compare positional schemes in an experiment: python compare.py configs/compare/positions.yaml

Plans, trains, evaluates and reports. Stopped and started again it goes on; finished runs are read, not trained again.
"""

import sys
from pathlib import Path
from typing import Annotated, Literal

import tyro
from pydantic import Field, model_validator

from experiments.config import ExperimentFile, read_experiment
from model.errors import UserError
from model.settings import Settings
from training.command_line import exit_on_user_error, parse


class CompareArguments(Settings):
    """Run an experiment, or go on with it, and write its report."""

    experiment: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="EXPERIMENT.yaml")]
    """File that describes the experiment, such as configs/compare/quick.yaml."""
    dry_run: bool = False
    """Print the plan and how long it takes, from a short measurement, and train nothing."""
    shard: str | None = None
    """K/N: do every N-th run, beginning with the K-th, counted from 1; several share the work through one store."""
    workers: Annotated[int, Field(ge=1)] = 1
    """Trainings at once on this computer, which share its cores. Small models take less time so in all."""
    gpus: str | None = None
    """Numbers of the GPUs to use, such as 0,1: one training at once on each."""
    out: str | None = None
    """Folder of the report; none: runs/compare/ and the experiment's name."""
    store: str = "runs/compare"
    """Folder of the runs, which experiments share."""
    report: bool = True
    """Write the report at the end."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Also send the report's figures to Weights & Biases."""

    @model_validator(mode="after")
    def _parts_fit_together(self) -> "CompareArguments":
        if sum((self.shard is not None, self.workers > 1, self.gpus is not None)) > 1:
            raise ValueError("shard, workers and gpus are three ways to share the runs out: give one of them")
        return self

    def folder(self, file: ExperimentFile) -> Path:
        """Return where the report goes; UserError where it would lie among the runs."""
        out = Path(self.out or f"runs/compare/{file.name}")
        if out.resolve() in {(Path(self.store) / kept).resolve() for kept in ("rows", "runs", "logs")}:
            raise UserError(f"{out} holds the runs of all experiments: give the report another folder with --out")
        return out


@exit_on_user_error()
def main() -> None:
    """Read the command line and the experiment; torch is imported once they are known to be right."""
    arguments = parse(CompareArguments, prog="python compare.py")
    file = read_experiment(Path(arguments.experiment))
    from experiments.conduct import conduct
    from training.loop import Interrupted

    try:
        conduct(file, arguments, arguments.folder(file))
    except Interrupted as stop:
        print(f"{stop.args[0].partition(';')[0]}; the same command goes on", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
