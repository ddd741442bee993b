"""Where finished runs are kept, so that none is trained twice. Torch-free.

    runs/compare/rows/KEY.json          one training: its losses on the way, speed, hashes, machine
    runs/compare/rows/KEY-HASH.json     one evaluation of its weights: all that was measured
    runs/compare/runs/KEY/              the run folder, with its last checkpoint
    runs/compare/logs/KEY.txt           what the training said

Rows are small. Those in `also`, such as the committed ones of a shipped experiment, count as finished too.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

from model.durable import write_text
from training.run_folder import RunFolder

Row = dict[str, Any]


class Store(NamedTuple):
    """A folder that experiments share."""

    path: Path
    also: tuple[Path, ...] = ()

    def row(self, name: str) -> Row | None:
        """Return what is written down under this name; None: nothing yet."""
        for folder in (self.path / "rows", *self.also):
            file = folder / f"{name}.json"
            if file.is_file():
                row: Row = json.loads(file.read_text(encoding="utf-8"))
                return row
        return None

    def keep(self, name: str, row: Row) -> None:
        """Write a row down, whole."""
        file = self.path / "rows" / f"{name}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, json.dumps(row, allow_nan=False) + "\n")

    def folder(self, key: str) -> RunFolder:
        """Return the run folder of a training."""
        return RunFolder(self.path / "runs" / key)

    def log(self, key: str) -> Path:
        """Return the file for what a training says."""
        file = self.path / "logs" / f"{key}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        return file
