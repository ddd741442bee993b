"""What a run loses to kills, full disks, company and numbers that are not finite: nothing."""

import contextlib
import json
import math
import multiprocessing
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

from data.loader import Windows
from data.prepare import prepare
from model.checkpoint import load_model
from model.durable import check_folder
from model.errors import UserError
from tests.conftest import WORDS
from tests.test_run import ROOT, assert_same_results, killed_at, results, run, same
from tests.wandb_server import serving
from training import tracking
from training.config import load
from training.hardware import Hardware
from training.loop import train
from training.run_folder import RunFolder
from training.samples import record_sample, rewind_samples
from training.tracking import read
from training.trainer import Trainer

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def few_words(tmp_path_factory):
    """A corpus of so few windows that a short run reads it more than once."""
    folder = tmp_path_factory.mktemp("few") / "words"
    folder.mkdir()
    draw = random.Random(1)
    for number in range(12):
        (folder / f"{number}.txt").write_text("\n".join(" ".join(draw.choices(WORDS, k=8)) for _ in range(4)))
    return folder


@pytest.fixture
def small(few_words):
    """A run that writes often: dropout, accumulation, and 2 epochs and a half in 24 steps."""
    return {
        "model": {"n_layers": 1, "d_model": 16, "n_heads": 2, "n_kv_heads": 1, "context": 16, "dropout": 0.1},
        "data": {
            "corpus": {"kind": "files", "paths": [str(few_words)]},
            "vocab_size": 290,
            "folder": str(few_words.parent / "prepared"),
        },
        "optimizer": {"lr": 1e-2, "warmup_steps": 3},
        "training": {
            "steps": 24, "batch_size": 10, "micro_batch_size": 4, "eval_every": 3, "eval_windows": 4, "keep": 2,
            "checkpoint_every": 2, "log_every": 1, "sample_every": 4, "sample_prompt": "the", "sample_tokens": 3,
            "compile": "off",
        },
    }  # fmt: skip


VARIANTS = {
    "as it is": {},
    "without accumulation or dropout": {"training": {"micro_batch_size": None}, "model": {"dropout": 0.0}},
    "muon": {"optimizer": {"method": "muon"}},
    "learned positions": {"model": {"position": "learned"}},
    # One shape, and so one compilation.
    "compiled": {"training": {"compile": "on", "micro_batch_size": None}},
}


def varied(settings, name):
    return {group: {**values, **VARIANTS[name].get(group, {})} for group, values in settings.items()}


# --- Processes that can be killed -------------------------------------------------------------------------------------
# They are forked from one that has torch in memory: 30 kills would else be an hour of imports.

forks = multiprocessing.get_context("forkserver")
forks.set_forkserver_preload(["tests.test_survival"])


def live(folder: Path, settings: dict, die_at: int | None = None) -> None:
    """A training in a process of its own, which may kill itself at the n-th thing it does to its folder."""
    torch.set_num_threads(1)
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    write_down_reading(folder.with_suffix(".read"))
    patch = pytest.MonkeyPatch()
    if die_at is not None:
        watch(patch, folder, lambda number, what: number == die_at and os.kill(os.getpid(), signal.SIGKILL))
    train(load(None, settings), RunFolder(folder), resume=True)


def write_down_reading(path: Path) -> None:
    """Append a line for every batch: the numbers of its rows, and where their windows start."""
    real = Windows.rows

    def rows(self, numbers):
        with path.open("a") as file:
            file.write(json.dumps([numbers.tolist(), self.starts(numbers).tolist()]) + "\n")
        return real(self, numbers)

    Windows.rows = rows


def lived(folder, settings, seconds=None, die_at=None):
    """Let a training live for so long, or to its end; say whether it was killed."""
    child = forks.Process(target=live, args=(folder, settings, die_at))
    child.start()
    child.join(seconds)
    child.kill()
    child.join()
    assert child.exitcode in (0, -signal.SIGKILL)
    return child.exitcode != 0


def assert_each_window_was_read_once(folder, settings):
    """Of every step the last reading counts; a step that was read again must have been read alike."""
    starts = {}
    for line in folder.with_suffix(".read").read_text().splitlines():
        for number, start in zip(*json.loads(line), strict=True):
            assert starts.setdefault(number, start) == start
    config = load(None, settings)
    batch, context = config.training.batch_size, config.model.context
    assert sorted(starts) == list(range(config.training.steps * batch))
    windows = Windows(prepare(config.data).train.ids, context, config.training.seed)
    epochs = [windows._epoch(number) for number in range(len(starts))]
    assert max(epochs) >= 2, "the test is about several epochs"
    for epoch in range(max(epochs)):
        read_in_it = sorted(starts[number] for number in range(len(starts)) if epochs[number] == epoch)
        assert [start - read_in_it[0] for start in read_in_it] == list(range(0, context * len(read_in_it), context))
        assert len(windows.ids) - read_in_it[-1] - context - 1 < context


SMALL_FORM = [("as it is", 3)]
SOAK_FORM = [(name, 30) for name in VARIANTS]


@pytest.mark.parametrize(
    ("variant", "kills"), [*SMALL_FORM, *(pytest.param(*each, marks=pytest.mark.soak) for each in SOAK_FORM)]
)
def test_a_run_that_is_killed_again_and_again_ends_as_if_nothing_had_been(tmp_path, small, variant, kills):
    settings = varied(small, variant)
    assert not lived(tmp_path / "first", settings)  # waits for what all of them share: imports, data, a compilation
    begin = time.monotonic()
    assert not lived(tmp_path / "whole", settings)
    whole = results(tmp_path / "whole")
    draw, duration = random.Random(variant), time.monotonic() - begin
    killed = chains = 0
    while killed < kills:
        folder = tmp_path / f"{chains}"
        while killed < kills and lived(folder, settings, draw.uniform(0.1, 1.0) * duration):
            killed += 1
        lived(folder, settings)
        assert_same_results(results(folder), whole)
        assert_each_window_was_read_once(folder, settings)
        assert_clean(folder)
        chains += 1
        assert chains < 20 * kills
    print(f"{variant}: {killed} kills of {chains} runs, nothing lost")  # shown by -rP


# --- Kills of a run that Weights & Biases follows ---------------------------------------------------------------------


def followed(folder: Path, settings: dict, environment: dict[str, str]) -> None:
    """A training in a process of its own, with a real wandb beside it and seconds enough to finish."""
    os.environ.update(environment)
    tracking.INIT_SECONDS = tracking.FINISH_SECONDS = tracking.CLOSE_SECONDS = 60.0
    live(folder, settings)


def ended_by(number: int | None, at_step: int, *given) -> int:
    """Let a training live to its end, or send it a signal when it has written down a step; return its exit status."""
    folder = given[0]
    child = forks.Process(target=followed, args=given)
    child.start()
    while number is not None and not any(row["step"] >= at_step for row in read(folder / "metrics.jsonl")):
        assert child.is_alive()
        time.sleep(0.01)
    if number is not None:
        os.kill(child.pid, number)
    child.join()
    return child.exitcode


def test_a_run_that_is_killed_and_stopped_is_one_run_with_each_step_once_in_wandb_too(tmp_path, small):
    less = {"steps": 12, "eval_every": 6, "checkpoint_every": 3, "sample_every": 0, "wandb": "online"}
    settings = {**small, "training": {**small["training"], **less}}
    folder = tmp_path / "r"
    with serving("fine") as server:
        given = folder, settings, {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": "a" * 40}
        assert ended_by(signal.SIGKILL, 4, *given) == -signal.SIGKILL
        assert ended_by(signal.SIGTERM, 7, *given) == 1  # a stop that was asked for: Interrupted
        assert ended_by(None, 0, *given) == 0
    steps = [row["step"] for row in read(folder / "metrics.jsonl")]
    assert steps == list(range(1, 13))
    assert list(server.runs) == [json.loads((folder / "wandb.json").read_text())["id"]]
    [rows] = server.runs.values()
    assert [json.loads(row)["step"] for row in rows] == steps
    assert server.opened == 3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tracking, "Sender", lambda *_: None)
        run(tmp_path / "whole", settings)
    assert_same_results(results(folder), results(tmp_path / "whole"))


# --- Every single thing that is done to the folder of a run -----------------------------------------------------------

REMOVALS = ("unlink", "rmdir")


class Watched:
    """An open file whose writes are counted; one that fails has written the first half, as on a full disk."""

    def __init__(self, file, hit: Callable[[str], object]) -> None:
        self.file, self.hit = file, hit

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()

    def __getattr__(self, name):
        return getattr(self.file, name)

    def write(self, content):
        try:
            self.hit("write")
        except OSError:
            self.file.write(content[: len(content) // 2])
            raise
        return self.file.write(content)


def watch(patch: pytest.MonkeyPatch, folder: Path, happens: Callable[[int, str], object]) -> list[str]:
    """Call `happens(number, what)` before everything that changes something in the folder; return the growing list."""
    done: list[str] = []

    def hit(what: str, path) -> None:
        done.append(f"{what} {Path(path).name}")
        happens(len(done) - 1, what)

    def inside(path) -> bool:
        return str(path).startswith(str(folder))

    def watched(name):
        real = getattr(os, name)

        def call(path, *others, **options):
            # shutil.rmtree names what it removes by the handle of a folder: in these runs, always of ours.
            if options.get("dir_fd") is not None or inside(path):
                hit(name, path)
            return real(path, *others, **options)

        patch.setattr(os, name, call)

    for name in ("mkdir", "rename", "replace", *REMOVALS):
        watched(name)
    real_fsync, real_open = os.fsync, Path.open

    def fsync(handle):
        hit("fsync", os.readlink(f"/proc/self/fd/{handle}"))
        return real_fsync(handle)

    def opened(path, mode="r", *others, **options):
        if "r" in mode or not inside(path):
            return real_open(path, mode, *others, **options)
        hit("open", path)
        return Watched(real_open(path, mode, *others, **options), lambda what: hit(what, path))

    patch.setattr(os, "fsync", fsync)
    patch.setattr(Path, "open", opened)
    return done


def short(settings):
    """6 steps that meet everything: new best ones, rotation, samples."""
    return {**settings, "training": {**settings["training"], "steps": 6, "sample_every": 2, "keep": 1}}


def remains(folder):
    return [path.name for path in folder.rglob(".*.tmp")]


def assert_clean(folder):
    """Nothing half-written is left, and every checkpoint is whole."""
    assert remains(folder) == []
    for checkpoint in folder.glob("checkpoints/step-*"):
        check_folder(checkpoint)


def fault(number: int, words: str, what: str) -> NoReturn:
    """Raise what the system raises: a call that is given a handle knows of no name."""
    raise OSError(number, words, *([] if what in ("write", "fsync") else ["some file"]))


@contextlib.contextmanager
def failing(folder: Path, number: int, how: str) -> Iterator[None]:
    """Let the n-th change of the folder fail: by a fault of the disk, or, from there on, since it is full or read-only.

    A system makes a disk that has faults read-only while it is written to.
    """

    def fail(count: int, what: str) -> None:
        if count == number and how == "a fault":
            fault(5, "Input/output error", what)
        if count >= number and how == "full" and what not in REMOVALS:
            fault(28, "No space left on device", what)
        if count >= number and how == "read-only":
            fault(30, "Read-only file system", what)

    with pytest.MonkeyPatch.context() as patch:
        watch(patch, folder, fail)
        yield


def done_by(settings, folder):
    prepare(load(None, settings).data)  # removes folders of its own, which are not the run's
    with pytest.MonkeyPatch.context() as patch:
        done = watch(patch, folder, lambda number, what: None)
        run(folder, settings)
    return done


def test_everything_that_is_written_is_watched(tmp_path, small):
    done = done_by(short(small), tmp_path / "r")
    for name in ("config.yaml", "metrics.jsonl", "samples.txt", "tokenizer.model", "best", "last"):
        assert any(name in each for each in done), name
    for name in ("model.safetensors", "trainer.pt", "manifest.json", "config.yaml", "tokenizer.model"):
        assert done.count(f"write {name}") >= 3, name
    assert sum("rename" in each for each in done) > 3
    assert sum("unlink trainer.pt" in each for each in done) > 0, "rotation"


def assert_a_failure_costs_one_line(tmp_path, settings, whole, number, how):
    folder = tmp_path / f"{number}-{how}"
    with failing(folder, number, how), pytest.raises((OSError, UserError)) as failure:
        run(folder, settings)
    assert "\n" not in str(failure.value)
    assert isinstance(failure.value, UserError) or failure.value.filename is not None
    assert len(remains(folder)) <= (0 if how == "full" else 1), "what could not be removed"
    if (step := RunFolder(folder).pointed("last")) is not None:
        check_folder(RunFolder(folder).step_folder(step))
    run(folder, settings, resume=True)
    assert_same_results(results(folder), whole)
    assert_clean(folder)
    shutil.rmtree(folder)


@pytest.mark.parametrize("share", [0, 1, *(pytest.param(share, marks=pytest.mark.soak) for share in range(2, 20))])
@pytest.mark.parametrize("how", ["a fault", "full", pytest.param("read-only", marks=pytest.mark.soak)])
def test_whichever_write_fails_the_last_checkpoint_is_whole_and_the_run_goes_on(tmp_path, small, share, how):
    """`make soak` fails each write of a short run; `make test` some, other ones in every scenario."""
    settings = short(small)
    done = done_by(settings, tmp_path / "whole")
    whole = results(tmp_path / "whole")
    numbers = range(share, len(done), 20)
    # What can still fail after the last step's checkpoint is rotation alone, and for a full disk that is no failure.
    ends = max(i for i, each in enumerate(done) if each.split()[0] not in REMOVALS)
    numbers = [number for number in numbers if how != "full" or number <= ends]
    for number in numbers if share > 1 else numbers[share::2]:
        assert_a_failure_costs_one_line(tmp_path, settings, whole, number, how)


# Several commands in one process, below folders that nobody, not even root, can write into.
COMMANDS = """
import json, sys
import train
for arguments in json.loads(sys.argv[1]):
    sys.argv[1:] = arguments
    try:
        train.main()
        print("status 0", file=sys.stderr)
    except SystemExit as end:
        print("status", end.code, file=sys.stderr)
"""
READ_ONLY = 'for f; do mount --bind "$f" "$f" && mount -o remount,bind,ro "$f" || exit 99; done'


def run_where_folders_are_read_only(folders, *commands):
    """Return what trainings say on stderr, by lines, in a mount namespace of their own; None where there is none."""
    words = [sys.executable, "-c", COMMANDS, json.dumps(commands)]
    shell = f"{READ_ONLY}; exec {' '.join(map(shlex.quote, words))}"
    try:
        done = subprocess.run(["unshare", "-rm", "sh", "-c", shell, "sh", *map(str, folders)], cwd=ROOT,
                              capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})  # fmt: skip
    except FileNotFoundError:
        return None
    return done.stderr.splitlines() if "status" in done.stderr else None


def test_where_a_folder_is_read_only_one_line_is_said_and_nothing_is_left(tmp_path, small):
    filled = Path(small["data"]["folder"])
    prepare(load(None, small).data)
    closed, parent, empty = tmp_path / "closed", tmp_path / "parent", tmp_path / "empty"
    (parent / "r").mkdir(parents=True)
    for folder in (closed, empty):
        folder.mkdir()
    run(tmp_path / "old", small, steps=2)
    before = sorted(tmp_path.rglob("*")), results(tmp_path / "old")
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(short(small)))
    said = run_where_folders_are_read_only(
        [closed, parent, empty, filled, tmp_path / "old"],
        *(
            [str(tmp_path / "c.yaml"), "--training.out", str(out), *more]
            for out, *more in [
                (closed,), (parent / "new",), (parent / "r",), (tmp_path / "old", "--resume"),
                (tmp_path / "old", "--overwrite"), (tmp_path / "new", "--data.folder", str(empty)), (tmp_path / "good",)
            ]
        ),
    )  # fmt: skip
    if said is None:
        pytest.skip("this system lets nobody mount a folder read-only for himself")
    out = "error: training.out"
    words = "cannot be written into: name another folder"
    assert said[:12] == [
        f"{out} {closed} {words}", "status 2",
        f"{out} {parent}/new cannot be made: Read-only file system; name another folder", "status 2",
        f"{out} {parent}/r {words}", "status 2",
        f"{out} {tmp_path}/old {words}", "status 2",
        f"{out} {tmp_path}/old {words}", "status 2",
        f"error: data.folder {empty} cannot be written into: Read-only file system; name another folder", "status 2",
    ]  # fmt: skip
    assert said[-1] == "status 0", "data that are prepared need not be written"
    shutil.rmtree(tmp_path / "good")
    (tmp_path / "c.yaml").unlink()
    assert (sorted(tmp_path.rglob("*")), results(tmp_path / "old")[2:]) == (before[0], before[1][2:])


def test_what_failed_is_told_and_not_that_the_empty_folder_cannot_be_removed_either(tmp_path, small):
    prepare(load(None, small).data)
    (tmp_path / "r").mkdir()
    with failing(tmp_path / "r", 0, "read-only"), pytest.raises(UserError, match="cannot be cleared: Read-only"):
        run(tmp_path / "r", small)


@pytest.mark.parametrize("share", [0, *(pytest.param(share, marks=pytest.mark.soak) for share in range(1, 40))])
def test_killed_before_whichever_change_of_its_folder_a_run_loses_nothing(tmp_path, small, share):
    settings = short(small)
    done = done_by(settings, tmp_path / "whole")
    whole = results(tmp_path / "whole")
    for number in range(share, len(done), 40):
        folder = tmp_path / f"{number}"
        assert lived(folder, settings, die_at=number)
        run(folder, settings, resume=True)
        assert_same_results(results(folder), whole)
        assert_clean(folder)


def test_between_a_checkpoint_and_its_name_as_the_best_a_kill_loses_neither(tmp_path, small):
    settings = short(small)
    done = done_by(settings, tmp_path / "whole")
    best = [number for number, each in enumerate(done) if each.startswith("open .best")]
    assert len(best) > 1
    folder = tmp_path / "killed"
    assert lived(folder, settings, die_at=best[-1])
    run(folder, settings, resume=True)
    assert_same_results(results(folder), results(tmp_path / "whole"))


# --- Pointers, strangers and company ----------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [b"", b"step-", b"\xff\xfe", b"step-000004-mine\n"])
def test_a_damaged_pointer_is_refused_and_no_checkpoint_is_removed(tmp_path, small, content):
    run(tmp_path / "r", small, steps=4)
    (tmp_path / "r" / "checkpoints" / "last").write_bytes(content)
    with pytest.raises(UserError, match=r"last is damaged: write the name of a checkpoint into it \(step-0"):
        run(tmp_path / "r", small, resume=True, steps=6)
    assert RunFolder(tmp_path / "r").steps()[-1] == 4


def test_a_run_without_the_file_last_goes_on_from_its_newest_checkpoint(tmp_path, small, capsys):
    run(tmp_path / "r", small, steps=4)
    (tmp_path / "r" / "checkpoints" / "last").unlink()
    run(tmp_path / "r", small, resume=True, steps=6)
    assert "after step 4" in capsys.readouterr().out


def test_rotation_leaves_what_the_run_did_not_write(tmp_path, small):
    run(tmp_path / "r", small, steps=2)
    checkpoints = tmp_path / "r" / "checkpoints"
    shutil.copytree(checkpoints / "step-000002", checkpoints / "step-000002-mine")
    (checkpoints / "step-000001").write_text("a file of that name")
    (checkpoints / "notes.txt").write_text("mine")
    run(tmp_path / "r", small, resume=True)
    kept = {path.name for path in checkpoints.iterdir()}
    assert {"step-000002-mine", "step-000001", "notes.txt", "best", "last", "step-000022", "step-000024"} <= kept
    assert "step-000002" not in kept
    assert len(kept) <= 8


def test_a_second_training_in_the_same_folder_is_refused_and_spoils_nothing(tmp_path, small):
    run(tmp_path / "whole", small)
    real = Trainer.advance
    refusals = []

    def with_company(self):
        if self.next_step == 5:
            for flags in ({"resume": True}, {"overwrite": True}, {}):
                with pytest.raises(UserError, match="another training is at work in run folder") as refusal:
                    run(tmp_path / "r", small, **flags)
                refusals.append(refusal)
        return real(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "advance", with_company)
        run(tmp_path / "r", small)
    assert len(refusals) == 3
    assert_same_results(results(tmp_path / "r"), results(tmp_path / "whole"))


def test_a_folder_is_locked_from_before_it_holds_anything_and_freed_by_death(tmp_path, small):
    folder = tmp_path / "new" / "r"
    with RunFolder(folder).locked():
        with pytest.raises(UserError, match="another training is at work"):
            run(folder, small)
        child = forks.Process(target=live, args=(folder, small))
        child.start()
        child.join()
        assert child.exitcode == 1
    assert not folder.exists()
    assert lived(folder, small, die_at=30)
    run(folder, small, resume=True)


def test_two_trainings_that_start_at_once_end_as_one(tmp_path, small):
    children = [forks.Process(target=live, args=(tmp_path / "r", small)) for _ in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    # The second one was refused, or came when the first had ended and had nothing to do.
    assert 0 in [child.exitcode for child in children]
    run(tmp_path / "whole", small)
    assert_same_results(results(tmp_path / "r"), results(tmp_path / "whole"))


# --- Numbers that are not finite, in a whole run ----------------------------------------------------------------------


def poisoned(patch, steps):
    """Let the gradient of these steps hold a NaN."""
    real = Trainer.accumulate

    def accumulate(self, *given):
        loss = real(self, *given)
        if self.next_step in steps:
            self.parameters[-1].grad.view(-1)[0] = math.nan
        return loss

    patch.setattr(Trainer, "accumulate", accumulate)


def test_skipped_steps_are_counted_in_the_metrics_also_over_a_resume(tmp_path, small, monkeypatch):
    poisoned(monkeypatch, {3, 4, 9})
    run(tmp_path / "whole", small)
    rows = {row["step"]: row for row in read(tmp_path / "whole" / "metrics.jsonl")}
    assert [rows[step]["skipped_steps"] for step in (3, 4, 5, 6, 9, 10, 24)] == [0, 1, 2, 2, 2, 3, 3]
    assert rows[4]["grad_norm"] is None
    killed_at(8, monkeypatch, tmp_path / "killed", small)
    poisoned(monkeypatch, {3, 4, 9})
    run(tmp_path / "killed", small, resume=True)
    assert_same_results(results(tmp_path / "killed"), results(tmp_path / "whole"))


def test_a_run_that_stays_not_finite_stops_with_step_and_parameter_and_sound_checkpoints(tmp_path, small, monkeypatch):
    with monkeypatch.context() as patch:
        poisoned(patch, range(7, 100))
        with pytest.raises(UserError, match=r"step 12: the gradient of .*weight was not finite 5 times in a row"):
            run(tmp_path / "r", small)
    assert_clean(tmp_path / "r")
    # What the last checkpoint counts is part of the run: gone on with, it stops there again, unless the cause is gone.
    run(tmp_path / "r", small, resume=True)
    assert read(tmp_path / "r" / "metrics.jsonl")[-1]["skipped_steps"] == 3


def test_weights_that_overflow_in_the_step_itself_are_never_saved(tmp_path, small):
    """The gradient is finite, but the rate is so high that the decay alone leaves the range of float32."""
    high = {**small, "optimizer": {"lr": 1e25, "warmup_steps": 0, "weight_decay": 1e10, "min_lr_fraction": 1.0}}
    with pytest.raises(UserError, match="not finite"):
        run(tmp_path / "r", high, checkpoint_every=1, sample_every=0)
    assert_clean(tmp_path / "r")
    for checkpoint in (tmp_path / "r" / "checkpoints").glob("step-*"):
        assert all(weight.isfinite().all() for weight in load_file(checkpoint / "model.safetensors").values())


# --- Samples ----------------------------------------------------------------------------------------------------------


def test_rewound_samples_are_those_of_a_run_that_never_went_further_whatever_a_model_writes(tmp_path):
    texts = ["=== step 99, 3 bytes\nabc", "=== step 99\n", "é\r\n\r", "", "\n\n=== step 1, 999 bytes\n", "🎉"]
    for kept in range(len(texts) + 1):
        one, other = tmp_path / f"a{kept}", tmp_path / f"b{kept}"
        one.touch()
        for step, text in enumerate(texts):
            record_sample(other, step, text)
            if step < kept:
                record_sample(one, step, text)
        rewind_samples(other, kept - 1)
        assert other.read_bytes() == one.read_bytes()


def test_a_sample_that_does_not_fit_on_the_disk_leaves_no_half_of_it(tmp_path, monkeypatch):
    record_sample(tmp_path / "samples.txt", 1, "é" * 10)
    before = (tmp_path / "samples.txt").read_bytes()
    watch(monkeypatch, tmp_path, lambda number, what: what == "write" and exec('raise OSError(28, "full")'))
    with pytest.raises(OSError, match=r"full: .*samples.txt"):
        record_sample(tmp_path / "samples.txt", 2, "é" * 10)
    assert (tmp_path / "samples.txt").read_bytes() == before


# --- A checkpoint of format 1, which must load for ever ---------------------------------------------------------------

OLD = HERE / "data" / "checkpoint-1"


def recorded():
    """Return figures of this checkpoint, computed once in float64 by the network of tests/test_reference.py."""
    return json.loads((HERE / "data" / "checkpoint-1.json").read_text())


def test_a_checkpoint_of_format_1_loads_and_gives_its_recorded_logits():
    loaded = load_model(OLD)
    logits = loaded.model(torch.tensor([recorded()["tokens"]]))[0, recorded()["positions"]]
    torch.testing.assert_close(logits, torch.tensor(recorded()["logits"]), rtol=0, atol=2e-6)
    assert len(loaded.tokenizer) == (OLD / "tokenizer.model").stat().st_size


def test_a_checkpoint_of_format_1_is_gone_on_with():
    config = load(OLD / "config.yaml", {"model.dropout": 0.0})
    windows = Windows(np.arange(2000) * 7919 % 280, config.model.context, 0)
    trainer = Trainer(config, windows, Hardware(torch.device("cpu"), "fp32"))
    trainer.restore(OLD)
    assert trainer.next_step == 10
    moments = [state["exp_avg_sq"] for state in trainer.optimizer.state.values()]
    assert all(moment.abs().sum() > 0 for moment in moments)
    assert len(moments) == len(trainer.parameters)
    assert trainer.step().loss == pytest.approx(recorded()["loss_of_step_11"], abs=2e-6)
    assert trainer.step().loss < recorded()["loss_of_step_11"] + 1


def test_more_of_everything_that_watches_changes_no_bit_under_muon_either(tmp_path, small):
    settings = varied(small, "muon")
    run(tmp_path / "a", settings, eval_every=24, sample_every=0, checkpoint_every=24, log_every=24)
    run(tmp_path / "b", settings, eval_every=1, sample_every=1, checkpoint_every=1, log_every=1)
    a, b = results(tmp_path / "a"), results(tmp_path / "b")
    assert same(a[0], b[0])
    assert same(a[1]["optimizer"], b[1]["optimizer"])
