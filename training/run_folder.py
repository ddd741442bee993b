"""A run folder: where a run keeps its settings, metrics, samples and checkpoints. Torch-free."""

import re
import shutil
from pathlib import Path

from model.durable import MANIFEST, write_text
from model.errors import UserError

CONFIG, METRICS, SAMPLES, TOKENIZER = "config.yaml", "metrics.jsonl", "samples.txt", "tokenizer.model"
_STEP = re.compile(r"step-(\d{6,})")


def checkpoint_folder(path: Path, which: str = "best") -> Path:
    """Return the checkpoint that a path means: itself, if it is one, or one of a run folder."""
    return path if (path / MANIFEST).is_file() else RunFolder(path).checkpoint(which)


class RunFolder:
    """The folder of one run.

    `checkpoints/best` and `checkpoints/last` are small files that hold the name of a checkpoint beside them.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.config, self.metrics = self.path / CONFIG, self.path / METRICS
        self.samples, self.tokenizer = self.path / SAMPLES, self.path / TOKENIZER
        self.checkpoints = self.path / "checkpoints"

    def exists(self) -> bool:
        """Say whether a run was started here."""
        return self.config.exists()

    def step_folder(self, step: int) -> Path:
        """Return where the checkpoint of a step lies."""
        return self.checkpoints / f"step-{step:06d}"

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, in order."""
        names = (_STEP.fullmatch(path.name) for path in self.checkpoints.glob("step-*"))
        return sorted(int(match[1]) for match in names if match)

    def point(self, name: str, step: int) -> None:
        """Let `best` or `last` stand for the checkpoint of a step."""
        write_text(self.checkpoints / name, self.step_folder(step).name + "\n")

    def pointed(self, name: str) -> int | None:
        """Return the step that `best` or `last` stands for; None where there is none."""
        pointer = self.checkpoints / name
        match = _STEP.fullmatch(pointer.read_text(encoding="utf-8").strip()) if pointer.is_file() else None
        return int(match[1]) if match else None

    def checkpoint(self, which: str = "best") -> Path:
        """Return the folder of a checkpoint: best, last or step-000500; UserError where there is none."""
        if not self.path.is_dir():
            raise UserError(
                f"run folder {self.path} does not exist: train one first, python train.py configs/demo.yaml"
            )
        if which in ("best", "last"):
            step = self.pointed(which)
            # Killed before the first evaluation, a run has a last checkpoint but no best one yet.
            step = self.pointed("last") if step is None and which == "best" else step
            folder = None if step is None else self.step_folder(step)
        else:
            folder = self.checkpoints / which
        if folder is None or not folder.is_dir():
            steps = ", ".join(f"step-{step:06d}" for step in self.steps()) or "none yet"
            raise UserError(f"run folder {self.path} has no checkpoint {which!r}; it has: {steps}")
        return folder

    def rotate(self, keep: int) -> None:
        """Remove all but the newest `keep` checkpoints, the best and the last."""
        kept = {*self.steps()[-keep:], self.pointed("best"), self.pointed("last")}
        for step in self.steps():
            if step not in kept:
                shutil.rmtree(self.step_folder(step))

    def discard_after(self, step: int) -> None:
        """Remove checkpoints later than a step, which a resumed run writes anew, and what a kill left half-written."""
        for later in self.steps():
            if later > step:
                shutil.rmtree(self.step_folder(later))
        for remains in self.checkpoints.glob(".*.tmp"):
            shutil.rmtree(remains) if remains.is_dir() else remains.unlink()

    def create(self) -> None:
        """Make the folder, empty of an older run; UserError where it cannot be."""
        try:
            self.clear()
            self.checkpoints.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"training.out {self.path} cannot be made: {error.strerror}; name another folder"
            ) from error

    def clear(self) -> None:
        """Remove what a run wrote here, and nothing else."""
        for folder in (self.checkpoints, self.path / "wandb"):
            shutil.rmtree(folder, ignore_errors=True)
        for path in (self.metrics, self.samples, self.tokenizer, self.config):
            path.unlink(missing_ok=True)
