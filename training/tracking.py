"""The figures of a run: metrics.jsonl is the record; a process of its own copies it to Weights & Biases when asked.

wandb is never imported into the process that trains. There it would replace sys.exit and sys.excepthook, ask for a
login on a terminal, wait 90 seconds for a server, print tracebacks at exit, or take the run down with its own service
(all seen with 0.31). In another process the worst it can do is to end, which costs one line.
"""

import contextlib
import json
import math
import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from model.durable import append, remove_remains, write_bytes, write_text
from model.errors import UserError
from training.run_folder import METRICS

if TYPE_CHECKING:
    # The sending process reads this module too, and has no use for the configuration classes.
    from training.config import Config

Row = dict[str, Any]

CLOCKS = frozenset({"seconds", "tokens_per_second"})
"""Fields that measure time: the only ones that may differ between a resumed run and one that was never interrupted."""

INIT_SECONDS = 8.0
"""How long wandb may try to reach its server at the start. Training does not wait for it."""
FINISH_SECONDS = 6.0
"""How long wandb may go on uploading when the run is over."""
CLOSE_SECONDS = 10.0
"""How long the end of a run waits for the sending process before it ends it."""

WANDB_STATE = "wandb.json"
"""File in the run folder: the id of the wandb run, and the last step that was handed to it."""

_ROOT = Path(__file__).resolve().parents[1]


class Metrics:
    """The file metrics.jsonl: one row of plain values a line, each with its step."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    def log(self, row: Mapping[str, Any]) -> None:
        """Append a row; it is in the file when this returns.

        A number that is not finite becomes null. TypeError for a value that is not plain (a tensor), ValueError for
        such a number inside a list, OSError where the disk is full; none of them leaves a half line.
        """
        assert isinstance(row.get("step"), int), "a row needs a step, or no resumed run could take it back"
        line = json.dumps({name: _finite(value) for name, value in row.items()}, allow_nan=False) + "\n"
        append(self.path, line.encode())

    def rewind(self, step: float = math.inf) -> None:
        """Drop the rows after `step`, and a half line left by a kill; UserError where another line is damaged."""
        content = self.path.read_bytes() if self.path.exists() else b""
        kept = b"".join(line for line, row in _rows(self.path, content) if row["step"] <= step)
        if kept != content:
            write_bytes(self.path, kept)


def read(path: Path | str) -> list[Row]:
    """Return all rows, none where there is no file yet, without a half last line; UserError for any other damage."""
    path = Path(path)
    return [row for _, row in _rows(path, path.read_bytes())] if path.exists() else []


def _finite(value: Any) -> Any:
    # JSON knows no NaN; Python would write one all the same, and other readers would refuse the whole file.
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _rows(path: Path, content: bytes) -> Iterator[tuple[bytes, Row]]:
    whole = content[: content.rfind(b"\n") + 1]
    for number, line in enumerate(whole.splitlines(keepends=True), start=1):
        yield line, _parse(path, number, line)


def _parse(path: Path, number: int, line: bytes) -> Row:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        raise UserError(f"{path}, line {number} is damaged: remove it, or start another run with --training.out")
    return row


class Tracker:
    """Writes down the figures of one run, and sends them where the configuration says."""

    def __init__(self, folder: Path | str, config: "Config") -> None:
        self.metrics = Metrics(Path(folder) / METRICS)
        # A run that is started over in an old folder must not go on with the old wandb run, whose steps are all sent.
        if not self.metrics.path.exists():
            (self.metrics.path.parent / WANDB_STATE).unlink(missing_ok=True)
        self.metrics.rewind()
        self.metrics.path.touch()
        is_off = config.training.wandb == "off"
        self.sender = None if is_off else Sender(_order(self.metrics.path, config), tell)

    def log(self, row: Mapping[str, Any]) -> None:
        """Write down a row; OSError where the file cannot be written. wandb is told, never waited for."""
        self.metrics.log(row)
        if self.sender:
            self.sender.nudge()

    def close(self) -> None:
        """Let wandb finish, for CLOSE_SECONDS at most."""
        if self.sender:
            self.sender.close()
            self.sender = None


def tell(problem: str) -> None:
    """Say in one line on stderr what became of wandb, without tearing a bar."""
    from tqdm import tqdm

    tqdm.write(f"wandb: {problem.rstrip('.')}; the run goes on, {METRICS} has every row", file=sys.stderr)


def _order(metrics: Path, config: "Config") -> Row:
    return {
        "metrics": str(metrics.resolve()),
        "mode": config.training.wandb,
        "project": config.training.wandb_project,
        "config": config.model_dump(mode="json"),
        "init_seconds": INIT_SECONDS,
        "finish_seconds": FINISH_SECONDS,
    }


class Sender:
    """The training side of the process that talks to wandb: nudges it, and passes on the first thing it complains of.

    The process reads the rows from metrics.jsonl itself, so no row is lost or waited for while it is busy, and it
    ends by itself when its standard input is closed, be it by `close` or by the death of the run.
    """

    def __init__(self, order: Row, tell: Callable[[str], None]) -> None:
        self.tell, self.has_complained = tell, False
        self.process: subprocess.Popen[bytes] | None = None
        try:
            self.process = _start_process()
        except OSError as problem:
            self._complain(str(problem))
        self._write(json.dumps(order).encode())
        self.nudge()

    def nudge(self) -> None:
        """Say that there is a new row."""
        self._write(b"\n")
        self._listen()

    def close(self) -> None:
        """Let the process send what is left; end it when that takes too long."""
        if self.process is None:
            return
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._complain(f"not finished after {CLOSE_SECONDS:g} seconds")
        finally:
            # A second Ctrl-C comes by here as well.
            self.process.kill()
            self.process.wait()
            self._listen()
            self._stdout.close()

    @property
    def _stdout(self) -> BinaryIO:
        assert self.process is not None
        return cast(BinaryIO, self.process.stdout)

    def _write(self, data: bytes) -> None:
        # The pipe does not block: when 64 KiB of nudges lie unread, one more would say nothing new.
        if self.process is not None and self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.write(data)

    def _listen(self) -> None:
        if self.process is None:
            return
        if problem := (self._stdout.read(65536) or b"").decode(errors="replace").splitlines():
            self._complain(problem[0])
        elif self.process.poll():
            self._complain(f"its process ended with status {self.process.returncode}")

    def _complain(self, problem: str) -> None:
        if not self.has_complained:
            self.has_complained = True
            self.tell(problem)


def _start_process() -> subprocess.Popen[bytes]:
    # A session of its own: Ctrl-C is the run's alone, and without a terminal nobody can be asked for a login.
    process = subprocess.Popen(
        [sys.executable, "-m", "training.tracking"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        cwd=_ROOT,
        start_new_session=True,
    )
    for stream in (process.stdin, process.stdout):
        assert stream is not None
        os.set_blocking(stream.fileno(), False)
    return process


# From here on: the process that sends.


def main() -> None:
    """Send rows until standard input ends; say on standard output, in one line, what went wrong."""
    say = _line_to(os.dup(1))
    # Whatever wandb and its service print there is no report of ours.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.stderr = cast(Any, _Complaints(say))
    try:
        send(json.loads(sys.stdin.readline()), sys.stdin)
    except Exception as problem:
        # The one place where every exception is caught: wandb raises what it likes (its own, protobuf's, asyncio's,
        # an ImportError), and none of it is a reason to do anything but stop sending.
        say(f"{type(problem).__name__}: {problem}")
    # Past the exit handlers: with an unreachable server wandb's telemetry holds them up for 7 seconds.
    os._exit(0)


def send(order: Row, nudges: Iterable[str]) -> None:
    """Copy the rows of metrics.jsonl to one wandb run, each step once, also over several sessions."""
    metrics = Path(order["metrics"])
    with _one_at_a_time(metrics.parent / "wandb"):
        state = State(metrics.parent / WANDB_STATE)
        run = open_run(order, state.run_id)
        # The server knows best what reached it; an offline run has no server to ask.
        last = run.step - 1 if order["mode"] == "online" else state.sent
        for row in follow(metrics, nudges):
            if row["step"] > last:
                # Written down before it is sent: a kill in between costs wandb a row, but never doubles one.
                state.save(row["step"])
                run.log({name: value for name, value in row.items() if value is not None}, step=row["step"])
        run.finish()


class State:
    """What the next session must know: the id of the wandb run, and the last step that was handed to it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        remove_remains(path.parent, path.name)
        stored = json.loads(path.read_text()) if path.exists() else {}
        self.run_id: str = stored.get("id") or secrets.token_hex(4)
        self.sent: int = stored.get("sent", -1)
        self.save(self.sent)

    def save(self, sent: int) -> None:
        """Write down that everything up to step `sent` was handed over."""
        self.sent = sent
        write_text(self.path, json.dumps({"id": self.run_id, "sent": sent}))


def open_run(order: Row, run_id: str) -> Any:
    """Open the wandb run with this id, new or not; whatever wandb raises where it cannot."""
    import wandb

    # Without a key, init asks for one on a terminal. This process has none, so there it raises a UsageError at once.
    # wandb.login(prompt=False) would ask for the key too, but then spends 5 seconds on an unreachable server.
    folder = Path(order["metrics"]).parent
    return wandb.init(
        project=order["project"],
        name=folder.name,
        id=run_id,
        resume="allow" if order["mode"] == "online" else None,
        mode=order["mode"],
        dir=str(folder),
        config=order["config"],
        settings=wandb.Settings(
            console="off",
            silent=True,
            init_timeout=order["init_seconds"],
            finish_timeout=order["finish_seconds"],
            finish_timeout_raises=True,
            # The button on the web page would interrupt this process, which is not the one that trains.
            stop_fn=lambda: None,
            x_stats_pid=os.getppid(),
        ),
    )


def follow(path: Path, nudges: Iterable[str]) -> Iterator[Row]:
    """Yield the rows of a growing file: those that are there, those that each nudge brings, and the rest at the end."""
    with path.open("rb") as file:
        for _ in nudges:
            yield from _next_rows(file)
        yield from _next_rows(file)


def _next_rows(file: BinaryIO) -> Iterator[Row]:
    while (line := file.readline()).endswith(b"\n"):
        yield json.loads(line)
    file.seek(-len(line), os.SEEK_CUR)


@contextlib.contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    # The sender of a killed run may still be uploading when the resumed run starts its own.
    import fcntl

    folder.mkdir(exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _line_to(handle: int) -> Callable[[str], None]:
    def say(text: str) -> None:
        # One write of less than a pipe's atomic size: the reader sees all of the line or nothing. The run may be dead.
        with contextlib.suppress(BrokenPipeError):
            os.write(handle, (" ".join(text.split())[:400] + "\n").encode())

    return say


class _Complaints:
    """Stands for stderr: that wandb gave up uploading is printed there and said nowhere else."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say

    def write(self, text: str) -> int:
        """Pass on warnings and errors; drop the rest."""
        if "WARNING" in text or "ERROR" in text:
            self.say(text.replace("wandb: ", "", 1))
        return len(text)

    def flush(self) -> None:
        """Do nothing: there is nothing kept back."""

    def isatty(self) -> bool:
        """Say that nobody is there to be asked."""
        return False


if __name__ == "__main__":
    main()
