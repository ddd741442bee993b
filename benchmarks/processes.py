"""Processes that measure: each has a memory of its own, and may run another revision of the project."""

import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.workloads import ROOT
from model.errors import UserError

SERVED = Path(__file__).with_name("served.py")


class Process:
    """A process that measures with the code of a tree, as often as it is asked."""

    def __init__(self, tree: Path) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="ropelab-measured-")
        self.log = (Path(self.folder.name) / "stderr").open("w+b")
        # As a user has it: idle threads of OpenMP spin for a moment, then sleep, and disturb nobody.
        environment = {**os.environ, "PYTHONPATH": str(tree)}
        self.process = subprocess.Popen(
            [sys.executable, str(SERVED), str(tree)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            env=environment,
            cwd=self.folder.name,  # what it writes goes with the folder
            start_new_session=True,  # Ctrl-C is for the parent, which ends this process
        )

    def ask(self, function: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Measure once; {"error": ...} where it cannot be done."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write((json.dumps({"function": function, "arguments": arguments}) + "\n").encode())
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = b""
        answer: dict[str, Any] = json.loads(line) if line else {"error": self.last_words()}
        return answer

    def last_words(self) -> str:
        """Say how a process ended that gives no answer."""
        status = self.process.wait()
        self.log.seek(0)
        lines = self.log.read().decode(errors="replace").split("\n")
        return f"the process ended with status {status}: {next((line for line in reversed(lines) if line), '')}"

    def close(self) -> None:
        """End the process, whatever it does."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # those that it started too
        self.process.communicate()
        self.log.close()
        self.folder.cleanup()


@contextmanager
def revision(name: str) -> Iterator[Path]:
    """Lay out another revision of this repository in a folder that is gone afterwards; git itself keeps no note of it.

    UserError: there is no such revision.
    """
    archive = subprocess.run(["git", "archive", "--format=tar", name], cwd=ROOT, capture_output=True)
    if archive.returncode:
        raise UserError(f"--baseline {name} cannot be read: {archive.stderr.decode().strip()}")
    with tempfile.TemporaryDirectory(prefix="ropelab-baseline-") as folder:
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
            files.extractall(folder, filter="data")
        yield Path(folder).resolve()
