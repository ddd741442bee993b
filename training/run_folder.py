"""A run folder: where a run keeps its settings, metrics, samples and checkpoints. Torch-free."""

import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from model.durable import MANIFEST, remove_folder, remove_remains, sync, write_text
from model.errors import UserError

CONFIG, METRICS, SAMPLES, TOKENIZER = "config.yaml", "metrics.jsonl", "samples.txt", "tokenizer.model"
_STEP = re.compile(r"step-(\d{6,18})")


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

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep every other training out of this folder; UserError where one is at work in it, or no folder can be.

        The lock dies with the process. A folder that is empty in the end is removed, if it can be.
        """
        handle = self._lock()
        try:
            yield
        finally:
            # What went wrong inside is what is told, be it that nothing can be written here.
            with suppress(OSError):
                if not any(self.path.iterdir()):
                    self.path.rmdir()
            os.close(handle)

    def _lock(self) -> int:
        self._make(self.path)
        # Seen at once, not after hours of preparing data.
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise UserError(f"training.out {self.path} cannot be written into: name another folder")
        handle = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise UserError(
                f"another training is at work in run folder {self.path}: wait for its end, or name another folder with "
                "--training.out"
            ) from None
        except OSError:
            print(f"note: the file system of {self.path} knows no locks: start no second training there")
        return handle

    def _make(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            part = next((part for part in (folder, *folder.parents) if part.exists()), folder)
            raise UserError(
                f"training.out {self.path}: {part} is a file: name a folder"
                if part.is_file()
                else f"training.out {self.path} cannot be made: {error.strerror}; name another folder"
            ) from error

    def step_folder(self, step: int) -> Path:
        """Return where the checkpoint of a step lies."""
        return self.checkpoints / f"step-{step:06d}"

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, in order."""
        steps = [_step_in(path.name) for path in self.checkpoints.glob("step-*") if path.is_dir()]
        return sorted(step for step in steps if step is not None)

    def point(self, name: str, step: int) -> None:
        """Let `best` or `last` stand for the checkpoint of a step."""
        # A run that goes on from there counts on every row and sample before it.
        for record in (self.metrics, self.samples):
            if record.exists():
                sync(record)
        write_text(self.checkpoints / name, self.step_folder(step).name + "\n")

    def pointed(self, name: str) -> int | None:
        """Return the step that `best` or `last` stands for, None where there is none; UserError where it is damaged."""
        pointer = self.checkpoints / name
        if not pointer.is_file():
            # Killed right after its first checkpoint, a run has no file `last` yet.
            return next(reversed(self.steps()), None) if name == "last" else None
        step = _step_in(pointer.read_bytes().decode(errors="replace").strip())
        if step is None:
            raise UserError(f"{pointer} is damaged: write the name of a checkpoint into it ({self._listed()})")
        return step

    def _listed(self) -> str:
        return ", ".join(f"step-{step:06d}" for step in self.steps()) or "none yet"

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
            raise UserError(f"run folder {self.path} has no checkpoint {which!r}; it has: {self._listed()}")
        return folder

    def rotate(self, keep: int) -> None:
        """Remove all but the newest `keep` checkpoints, the best and the last."""
        kept = {*self.steps()[-keep:], self.pointed("best"), self.pointed("last")}
        for step in self.steps():
            if step not in kept:
                remove_folder(self.step_folder(step))

    def discard_after(self, step: int) -> None:
        """Remove checkpoints later than a step, which a resumed run writes anew, and what a kill left half-written."""
        for later in self.steps():
            if later > step:
                remove_folder(self.step_folder(later))
        self._remove_remains()

    def settle(self, best: int | None, keep: int) -> None:
        """Do what a kill may have kept from being done after the last checkpoint, which knows the best step so far."""
        if best not in self.steps():
            # Gone on from an earlier checkpoint by hand: the one that was best by then may be gone.
            (self.checkpoints / "best").unlink(missing_ok=True)
        elif best is not None and self.pointed("best") != best:
            self.point("best", best)
        self.rotate(keep)

    def _remove_remains(self) -> None:
        remove_remains(self.checkpoints)
        # Not those of wandb.json: the process that sends may outlive a killed run for a while, and still write.
        for path in (self.config, self.metrics, self.samples, self.tokenizer):
            remove_remains(self.path, path.name)

    def create(self) -> None:
        """Make the folder, empty of an older run; UserError where it cannot be."""
        try:
            self.clear()
        except OSError as error:
            raise UserError(
                f"training.out {self.path} cannot be cleared: {error.strerror}; name another folder"
            ) from error
        self._make(self.checkpoints)

    def clear(self) -> None:
        """Remove what a run wrote here, and nothing else."""
        # The settings first: without them nobody takes what a kill leaves of the rest for a run.
        for path in (self.config, self.metrics, self.samples, self.tokenizer):
            path.unlink(missing_ok=True)
        # The process that sends an older run to wandb may still be writing there; what it leaves does no harm.
        shutil.rmtree(self.path / "wandb", ignore_errors=True)
        if self.checkpoints.exists():
            shutil.rmtree(self.checkpoints)
        self._remove_remains()


def _step_in(name: str) -> int | None:
    """Return the step of a checkpoint's name; None for a name that is none, such as step-000500-mine."""
    match = _STEP.fullmatch(name)
    step = int(match[1]) if match else None
    return step if step is not None and name == f"step-{step:06d}" else None
