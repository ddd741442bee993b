"""metrics.jsonl as the record of a run, and wandb, which may fail in any way without the run noticing."""

import contextlib
import fcntl
import json
import math
import os
import pty
import random
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from model.errors import UserError
from tests.wandb_server import Server, serving
from training import tracking
from training.config import Config
from training.tracking import CLOCKS, Metrics, Tracker, read

ROOT = Path(tracking.__file__).parents[1]
NOWHERE = "http://127.0.0.1:9"
SOME_KEY = "a" * 40

# Stands for the real package in the sending process: writes down how it is called, and fails where it is told to.
FAKE_WANDB = """
import json, os, sys, time
order = json.loads(os.environ["FAKE_WANDB"])
def note(*call):
    with open(order["calls"], "a") as file:
        file.write(json.dumps(call, default=str) + "\\n")
    if order.get("fail") == call[0]:
        raise order_error(call[0])
    if order.get("hang") == call[0]:
        time.sleep(60)
    if order.get("exit") == call[0]:
        os._exit(7)
    if order.get("warn") == call[0]:
        print("wandb: WARNING Fatal error while uploading", file=sys.stderr)
        print("wandb: ERROR and more of it", file=sys.stderr)
def order_error(name):
    return {"import": ImportError, "finish": TimeoutError}.get(name, RuntimeError)("fault at\\n " + name)
note("import")
print("said on standard output, which is not meant for the run")
def Settings(**settings):
    return settings
class Run:
    step = order.get("step", 0)
    def log(self, values, step):
        note("log", step, values)
    def finish(self):
        note("finish")
def init(**arguments):
    note("init", arguments)
    return Run()
"""


def config(wandb: str) -> Config:
    return Config.model_validate({"training": {"wandb": wandb}})


@pytest.fixture(autouse=True)
def no_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test finds a key of the person who runs it, or reaches a server."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "home" / "netrc"))
    monkeypatch.setenv("WANDB_BASE_URL", NOWHERE)


class Fake:
    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls_path, self.monkeypatch = folder / "calls", monkeypatch
        (folder / "wandb.py").write_text(FAKE_WANDB)
        monkeypatch.setenv("PYTHONPATH", str(folder))
        self.told()

    def told(self, **order: Any) -> None:
        self.monkeypatch.setenv("FAKE_WANDB", json.dumps({"calls": str(self.calls_path), **order}))

    def calls(self, name: str) -> list[Any]:
        text = self.calls_path.read_text() if self.calls_path.exists() else ""
        return [call[1:] for call in map(json.loads, text.splitlines()) if call[0] == name]

    def steps(self) -> list[int]:
        return [step for step, _ in self.calls("log")]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    folder = tmp_path / "fake"
    folder.mkdir()
    return Fake(folder, monkeypatch)


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


def track(folder: Path, wandb: str, steps: range) -> None:
    tracker = Tracker(folder, config(wandb))
    try:
        for step in steps:
            tracker.log({"step": step, "loss": 1 / step})
    finally:
        tracker.close()


def steps(path: Path) -> list[int]:
    return [row["step"] for row in read(path)]


def the_line(capsys: pytest.CaptureFixture[str]) -> str:
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


# The record


def test_a_row_is_in_the_file_at_once_as_strict_json(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    Metrics(path).log({"step": 1, "loss": math.nan, "norm": -math.inf, "name": "ü", "skipped": False})
    refuse = pytest.fail
    row = json.loads(path.read_text(), parse_constant=lambda name: refuse(f"{name} is no JSON"))
    assert row == {"step": 1, "loss": None, "norm": None, "name": "ü", "skipped": False}


def test_numbers_come_back_to_the_last_bit(tmp_path: Path) -> None:
    values = [random.Random(1).uniform(-1e9, 1e9), 5e-324, 0.1 + 0.2]
    Metrics(tmp_path / "m").log({"step": 1, **{str(i): value for i, value in enumerate(values)}})
    assert [read(tmp_path / "m")[0][str(i)] for i in range(3)] == values


@pytest.mark.parametrize("row", [{"loss": 1.0}, {"step": 1.5}, {"step": None}])
def test_a_row_without_a_step_is_refused(tmp_path: Path, row: dict[str, Any]) -> None:
    with pytest.raises(AssertionError):
        Metrics(tmp_path / "m").log(row)


def test_a_tensor_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        Metrics(tmp_path / "m").log({"step": 1, "loss": torch.tensor(1.0)})
    assert read(tmp_path / "m") == []


def test_a_list_that_holds_no_number_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        Metrics(tmp_path / "m").log({"step": 1, "losses": [1.0, math.nan]})
    assert read(tmp_path / "m") == []


def test_a_half_last_line_is_left_out_wherever_it_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "m"
    for step in (1, 2):
        Metrics(path).log({"step": step, "loss": 0.5})
    content = path.read_bytes()
    first = content.index(b"\n") + 1
    for cut in range(first, len(content)):
        path.write_bytes(content[:cut])
        assert steps(path) == [1]


@pytest.mark.parametrize("damage", [b'{"step": 2', b"\0\0\0", b"[2]", b'{"loss": 1.0}', b""])
def test_a_damaged_line_is_refused_with_file_and_line(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "m"
    path.write_bytes(b'{"step": 1}\n' + damage + b'\n{"step": 3}\n')
    with pytest.raises(UserError, match=f"{path}, line 2 is damaged"):
        read(path)


def test_rewinding_drops_what_came_after_the_step_and_keeps_the_rest_byte_for_byte(tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.write_bytes(b'{"step":1,  "a":1.50}\n{"step": 3}\n{"step": 2}\n{"step": 4}\n{"st')
    Metrics(path).rewind(2)
    assert path.read_bytes() == b'{"step":1,  "a":1.50}\n{"step": 2}\n'
    assert list(tmp_path.iterdir()) == [path]


def test_rewinding_a_file_that_is_not_there_makes_none(tmp_path: Path) -> None:
    Metrics(tmp_path / "m").rewind(2)
    assert list(tmp_path.iterdir()) == []


def test_a_rewind_that_fails_leaves_the_old_file_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m"
    path.write_text('{"step": 1}\n{"step": 2}\n')

    def fails(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match="No space"):
        Metrics(path).rewind(1)
    assert steps(path) == [1, 2]
    assert list(tmp_path.iterdir()) == [path]


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_leaves_no_half_line(tmp_path: Path) -> None:
    path = tmp_path / "m"
    Metrics(path).log({"step": 1})
    with files_of_at_most(path.stat().st_size + 5), pytest.raises(OSError, match="File too large"):
        Metrics(path).log({"step": 2})
    Metrics(path).log({"step": 3})
    assert steps(path) == [1, 3]


def test_a_resumed_run_has_each_step_once(run_folder: Path) -> None:
    path = run_folder / "metrics.jsonl"
    track(run_folder, "off", range(1, 6))
    whole = path.read_bytes()
    path.write_bytes(whole[:-4])
    Metrics(path).rewind(3)
    track(run_folder, "off", range(4, 6))
    assert path.read_bytes() == whole


def test_a_run_that_is_tracked_anew_is_not_glued_to_a_half_line(run_folder: Path) -> None:
    (run_folder / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2, "lo')
    track(run_folder, "off", range(2, 3))
    assert steps(run_folder / "metrics.jsonl") == [1, 2]


def test_clocks_are_named_in_one_place() -> None:
    assert {"seconds", "tokens_per_second"} == CLOCKS


def growing(path: Path) -> Iterator[str]:
    """A nudge after each change of the file, and a last change without one."""
    for text in ('{"step": 1}\n', '{"step": 2}\n{"st', 'ep": 3}\n'):
        with path.open("a") as file:
            file.write(text)
        yield "\n"
    with path.open("a") as file:
        file.write('{"step": 4}\n{"ste')


def test_a_growing_file_is_followed_to_its_end_in_whole_rows(tmp_path: Path) -> None:
    (tmp_path / "m").touch()
    assert [row["step"] for row in tracking.follow(tmp_path / "m", growing(tmp_path / "m"))] == [1, 2, 3, 4]


# Sending


def test_off_starts_nothing(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))
    track(run_folder, "off", range(1, 3))
    assert [path.name for path in run_folder.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("mode", ["offline", "online"])
def test_every_row_is_sent_once_in_order_and_the_run_is_finished(
    run_folder: Path, fake: Fake, mode: str, capsys: pytest.CaptureFixture[str]
) -> None:
    track(run_folder, mode, range(1, 60))
    assert fake.steps() == list(range(1, 60))
    assert fake.calls("log")[3] == [4, {"step": 4, "loss": 0.25}]
    assert len(fake.calls("finish")) == 1
    assert capsys.readouterr() == ("", "")


def test_wandb_gets_the_settings_of_the_run_and_bounded_waits(run_folder: Path, fake: Fake) -> None:
    track(run_folder, "online", range(1, 2))
    [[arguments]] = fake.calls("init")
    assert arguments["mode"] == "online"
    assert arguments["project"] == "ropelab"
    assert arguments["dir"] == str(run_folder)
    assert arguments["config"]["training"]["wandb"] == "online"
    assert arguments["settings"]["init_timeout"] == tracking.INIT_SECONDS
    assert arguments["settings"]["finish_timeout"] == tracking.FINISH_SECONDS < tracking.CLOSE_SECONDS


def test_values_that_were_not_finite_are_not_sent(run_folder: Path, fake: Fake) -> None:
    tracker = Tracker(run_folder, config("offline"))
    tracker.log({"step": 1, "loss": math.inf, "lr": 0.5})
    tracker.close()
    assert fake.calls("log") == [[1, {"step": 1, "lr": 0.5}]]


def test_a_resumed_offline_run_has_the_same_id_and_sends_no_step_again(run_folder: Path, fake: Fake) -> None:
    track(run_folder, "offline", range(1, 6))
    Metrics(run_folder / "metrics.jsonl").rewind(3)
    track(run_folder, "offline", range(4, 9))
    assert fake.steps() == list(range(1, 9))
    [[first], [second]] = fake.calls("init")
    assert first["id"] == second["id"]


def test_a_resumed_online_run_goes_on_where_the_server_stopped(run_folder: Path, fake: Fake) -> None:
    track(run_folder, "offline", range(1, 6))
    fake.calls_path.unlink()
    fake.told(step=3)
    track(run_folder, "online", range(6, 8))
    assert fake.steps() == [3, 4, 5, 6, 7]
    assert fake.calls("init")[0][0]["resume"] == "allow"


def test_a_run_that_is_started_over_gets_another_id(run_folder: Path, fake: Fake) -> None:
    track(run_folder, "offline", range(1, 6))
    (run_folder / "metrics.jsonl").unlink()
    track(run_folder, "offline", range(1, 3))
    assert fake.steps() == [1, 2, 3, 4, 5, 1, 2]
    [[first], [second]] = fake.calls("init")
    assert first["id"] != second["id"]


def test_a_resumed_run_waits_until_the_sender_of_the_killed_one_is_done(run_folder: Path, fake: Fake) -> None:
    (run_folder / "wandb").mkdir()
    other = os.open(run_folder / "wandb", os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    tracker = Tracker(run_folder, config("offline"))
    tracker.log({"step": 1})
    time.sleep(0.7)
    assert fake.calls("import") == []
    os.close(other)
    tracker.close()
    assert fake.steps() == [1]


# Sending fails


@pytest.mark.parametrize("place", ["import", "init", "log", "finish"])
def test_wherever_wandb_raises_one_line_is_said_and_the_run_goes_on(
    run_folder: Path, fake: Fake, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.told(fail=place)
    track(run_folder, "online", range(1, 20))
    assert f"Error: fault at {place}; the run goes on" in the_line(capsys)
    assert steps(run_folder / "metrics.jsonl") == list(range(1, 20))


def test_a_package_that_is_missing_is_said_in_one_line(
    run_folder: Path, fake: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    (fake.calls_path.parent / "wandb.py").write_text("import wandb_that_is_not_installed")
    track(run_folder, "offline", range(1, 3))
    assert "ModuleNotFoundError: No module named 'wandb_that_is_not_installed'" in the_line(capsys)


def test_a_sending_process_that_dies_is_said_in_one_line(
    run_folder: Path, fake: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.told(exit="log")
    tracker = Tracker(run_folder, config("online"))
    tracker.log({"step": 1})
    assert tracker.sender is not None
    assert tracker.sender.process is not None
    tracker.sender.process.wait(10)
    for step in range(2, 6):
        tracker.log({"step": step})
    tracker.close()
    assert "its process ended with status 7" in the_line(capsys)
    assert steps(run_folder / "metrics.jsonl") == [1, 2, 3, 4, 5]


def test_a_process_that_cannot_be_started_is_said_in_one_line(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", str(run_folder / "no-python"))
    track(run_folder, "online", range(1, 3))
    assert "no-python" in the_line(capsys)
    assert steps(run_folder / "metrics.jsonl") == [1, 2]


def test_only_the_first_complaint_of_wandb_is_passed_on(
    run_folder: Path, fake: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.told(warn="log")
    track(run_folder, "online", range(1, 4))
    assert "Fatal error while uploading" in the_line(capsys)
    assert fake.steps() == [1, 2, 3]


@pytest.mark.parametrize("place", ["import", "init", "log", "finish"])
def test_wherever_wandb_hangs_neither_a_row_nor_the_end_waits_long(
    run_folder: Path, fake: Fake, place: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tracking, "CLOSE_SECONDS", 0.6)
    fake.told(hang=place)
    begin = time.monotonic()
    track(run_folder, "online", range(1, 200))
    assert time.monotonic() - begin < 3
    assert "not finished after 0.6 seconds" in the_line(capsys)


def test_rows_are_not_held_up_when_nobody_reads_the_nudges(
    run_folder: Path, fake: Fake, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tracking, "CLOSE_SECONDS", 0.1)
    fake.told(hang="import")
    tracker = Tracker(run_folder, config("online"))
    assert tracker.sender is not None
    begin = time.monotonic()
    for _ in range(100_000):
        tracker.sender._write(b"\n")
    assert time.monotonic() - begin < 5
    tracker.close()
    the_line(capsys)


def test_ctrl_c_on_the_terminal_of_the_run_does_not_reach_the_sending_process(run_folder: Path, fake: Fake) -> None:
    tracker = Tracker(run_folder, config("offline"))
    assert tracker.sender is not None
    assert tracker.sender.process is not None
    assert os.getsid(tracker.sender.process.pid) == tracker.sender.process.pid
    tracker.close()


def test_closing_twice_is_harmless(run_folder: Path, fake: Fake) -> None:
    tracker = Tracker(run_folder, config("offline"))
    tracker.close()
    tracker.close()


SMALL_RUN = """
import sys
from training.config import Config
from training.tracking import Tracker
tracker = Tracker(sys.argv[1], Config.model_validate({"training": {"wandb": sys.argv[2]}}))
tracker.log({"step": 1})
print("logged", flush=True)
if len(sys.argv) > 3:
    sys.stdin.read()
tracker.close()
print("closed", flush=True)
"""


def test_a_killed_run_is_still_sent_and_finished(run_folder: Path, fake: Fake) -> None:
    run = [sys.executable, "-c", SMALL_RUN, str(run_folder), "offline", "wait"]
    with subprocess.Popen(run, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"logged\n"
        process.kill()
        process.wait()
    deadline = time.monotonic() + 10
    while not fake.calls("finish") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert fake.steps() == [1]
    assert len(fake.calls("finish")) == 1


# The real wandb


def watched() -> list[Any]:
    """What a library in this process could disturb."""
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    generators = [
        random.getstate(),
        np.random.get_state(legacy=False)["state"]["key"].tolist(),
        torch.get_rng_state().tolist(),
    ]
    return [*handlers, *generators, sys.excepthook, sys.exit, os.environ.copy(), threading.active_count()]


def test_an_offline_run_is_written_and_nothing_in_this_process_is_touched(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tracking, "CLOSE_SECONDS", 60.0)
    before, modules = watched(), set(sys.modules)
    track(run_folder, "offline", range(1, 4))
    assert watched() == before
    assert not any(name.split(".")[0] == "wandb" for name in set(sys.modules) - modules)
    [written] = run_folder.glob("wandb/offline-run-*/*.wandb")
    assert json.loads((run_folder / "wandb.json").read_text()) == {"id": written.stem[4:], "sent": 3}
    assert capsys.readouterr() == ("", "")


def test_without_a_key_nobody_is_asked_on_a_terminal(run_folder: Path) -> None:
    outer, inner = pty.openpty()
    run = [sys.executable, "-c", SMALL_RUN, str(run_folder), "online"]
    with subprocess.Popen(run, cwd=ROOT, stdin=inner, stdout=inner, stderr=inner, start_new_session=True) as process:
        os.close(inner)
        said = everything_said(outer)
        assert process.wait(15) == 0
    os.close(outer)
    logged, line, closed = said.splitlines()
    assert (logged, closed) == ("logged", "closed")
    assert "No API key" in line


def everything_said(terminal: int) -> str:
    """Read a terminal until its other side is closed, or nothing comes for 15 seconds."""
    said = b""
    # Linux reports the closed other side as an error.
    with contextlib.suppress(OSError):
        while select.select([terminal], [], [], 15)[0] and (chunk := os.read(terminal, 4096)):
            said += chunk
    return said.decode()


def test_with_a_key_and_no_network_one_line_is_said(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", SOME_KEY)
    monkeypatch.setattr(tracking, "INIT_SECONDS", 1.0)
    monkeypatch.setattr(tracking, "CLOSE_SECONDS", 60.0)
    track(run_folder, "online", range(1, 4))
    assert "connection refused" in the_line(capsys)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key, and waits that are long enough on a busy machine."""
    monkeypatch.setenv("WANDB_API_KEY", SOME_KEY)
    monkeypatch.setattr(tracking, "INIT_SECONDS", 60.0)
    monkeypatch.setattr(tracking, "FINISH_SECONDS", 60.0)
    monkeypatch.setattr(tracking, "CLOSE_SECONDS", 120.0)


def wandb_id(folder: Path) -> str:
    return str(json.loads((folder / "wandb.json").read_text())["id"])


def log_as_they_are_delivered(server: Server, folder: Path, steps: range) -> None:
    """Log each step when rows before it were delivered, or were not: every 15 seconds, all but the last row."""
    tracker = Tracker(folder, config("online"))
    try:
        for step in steps:
            met, deadline = len(server.met), time.monotonic() + 60
            tracker.log({"step": step, "loss": 1 / step})
            while step > steps.start and len(server.met) == met:
                assert time.monotonic() < deadline
                time.sleep(0.01)
    finally:
        tracker.close()


@pytest.mark.parametrize(
    ("trouble", "complaint"),
    [
        ("401", "Fatal error while uploading"),
        ("hangs", "Timed out finishing"),
        pytest.param("500", "Timed out finishing", marks=pytest.mark.soak),
        pytest.param("closes", "Timed out finishing", marks=pytest.mark.soak),
        pytest.param("resets", "Timed out finishing", marks=pytest.mark.soak),
    ],
)
def test_a_server_that_fails_in_the_middle_costs_one_line(
    run_folder: Path,
    patient: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    trouble: str,
    complaint: str,
) -> None:
    monkeypatch.setattr(tracking, "FINISH_SECONDS", 3.0)
    with serving(trouble) as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        track(run_folder, "online", range(1, 4))
    assert server.met[0] == trouble
    assert complaint in the_line(capsys)
    assert steps(run_folder / "metrics.jsonl") == [1, 2, 3]


def test_connections_that_break_cost_neither_a_row_nor_a_line(
    run_folder: Path, patient: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving("closes", "resets", "cuts", "fine") as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        track(run_folder, "online", range(1, 4))
    assert server.met[:3] == ["closes", "resets", "cuts"]
    assert list(server.runs) == [wandb_id(run_folder)]
    assert server.steps(wandb_id(run_folder)) == steps(run_folder / "metrics.jsonl") == [1, 2, 3]
    assert capsys.readouterr() == ("", "")


@pytest.mark.soak
def test_between_deliveries_that_succeed_every_kind_of_failure_costs_neither_a_row_nor_a_line(
    run_folder: Path, patient: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving("fine", "closes", "cuts", "resets", "503", "fine") as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        log_as_they_are_delivered(server, run_folder, range(1, 9))
    assert server.met[:5] == ["fine", "closes", "cuts", "resets", "503"]
    assert server.steps(wandb_id(run_folder)) == steps(run_folder / "metrics.jsonl") == list(range(1, 9))
    assert capsys.readouterr() == ("", "")


@pytest.mark.soak
@pytest.mark.parametrize("trouble", ["hangs", "closes", "resets", "500"])
def test_a_server_that_is_lost_between_deliveries_costs_one_line_and_gets_the_rest_on_resume(
    run_folder: Path,
    patient: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    trouble: str,
) -> None:
    with serving("fine", trouble) as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        with monkeypatch.context() as patch:
            patch.setattr(tracking, "FINISH_SECONDS", 3.0)
            log_as_they_are_delivered(server, run_folder, range(1, 4))
        assert "Timed out finishing" in the_line(capsys)
        reached = server.steps(wandb_id(run_folder))
        assert reached == list(range(1, len(reached) + 1))
        assert 1 <= len(reached) < 3
        server.recover()
        track(run_folder, "online", range(4, 6))
        assert server.steps(wandb_id(run_folder)) == steps(run_folder / "metrics.jsonl") == [1, 2, 3, 4, 5]
    assert list(server.runs) == [wandb_id(run_folder)]
