"""Whole runs on a small text: what is written, what a stop costs (nothing), and what is refused."""

import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from model.errors import UserError
from training.config import load
from training.loop import Interrupted, train
from training.run_folder import RunFolder
from training.tracking import CLOCKS, read
from training.trainer import Trainer, read_state

ROOT = Path(__file__).resolve().parents[1]


def run(folder, settings, resume=False, overwrite=False, **training):
    config = load(None, {**settings, "training": {**settings["training"], **training}})
    return train(config, RunFolder(folder), resume, overwrite)


def killed_at(step, monkeypatch, folder, settings, **training):
    """Start a run and let it die in the middle of a step, with no chance to save."""
    real = Trainer.advance

    def dying(self):
        if self.next_step == step:
            raise SystemError("killed")
        return real(self)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "advance", dying)
        with pytest.raises(SystemError):
            run(folder, settings, **training)


def results(folder):
    """All that a run leaves, except clocks: weights, trainer state, metrics and samples."""
    last = RunFolder(folder).checkpoint("last")
    state = read_state(last / "trainer.pt", torch.device("cpu"))
    metrics = [
        {key: value for key, value in row.items() if key not in CLOCKS} for row in read(folder / "metrics.jsonl")
    ]
    return (
        load_file(last / "model.safetensors"),
        {key: value for key, value in state.items() if key not in CLOCKS},
        metrics,
        (folder / "samples.txt").read_text() if (folder / "samples.txt").exists() else "",
        RunFolder(folder).pointed("best"),
        RunFolder(folder).steps(),
    )


def same(a, b):
    """Say whether two nested results are equal to the last bit."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def assert_same_results(one, other):
    for what, a, b in zip(("weights", "state", "metrics", "samples", "best", "steps"), one, other, strict=True):
        assert same(a, b), what


# --- Going on ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("died_at", [3, 7, 9, 10, 19])
def test_a_killed_run_goes_on_as_if_never_interrupted(tmp_path, settings, monkeypatch, died_at):
    run(tmp_path / "whole", settings)
    killed_at(died_at, monkeypatch, tmp_path / "killed", settings)
    run(tmp_path / "killed", settings, resume=True)
    assert_same_results(results(tmp_path / "killed"), results(tmp_path / "whole"))


def test_a_killed_compiled_run_goes_on_as_if_never_interrupted(tmp_path, settings, monkeypatch):
    settings["model"].update(n_layers=1)
    settings["training"].update(micro_batch_size=None)  # one shape, and so one compilation
    run(tmp_path / "whole", settings, compile="on")
    killed_at(9, monkeypatch, tmp_path / "killed", settings, compile="on")
    run(tmp_path / "killed", settings, resume=True, compile="on")
    assert_same_results(results(tmp_path / "killed"), results(tmp_path / "whole"))


def test_watching_more_closely_changes_no_bit_of_what_is_learned(tmp_path, settings):
    run(tmp_path / "a", settings)
    run(tmp_path / "b", settings, eval_every=3, log_every=1, sample_every=4, checkpoint_every=5, eval_windows=3)
    a, b = results(tmp_path / "a"), results(tmp_path / "b")
    assert same(a[0], b[0])
    assert same(a[1]["optimizer"], b[1]["optimizer"])


def test_what_changes_nothing_may_be_changed_on_resume(tmp_path, settings, monkeypatch):
    killed_at(9, monkeypatch, tmp_path / "r", settings)
    run(tmp_path / "r", settings, resume=True, log_every=1)
    assert [row["step"] for row in read(tmp_path / "r" / "metrics.jsonl")] == [2, 4, 6, *range(8, 21)]


def test_a_finished_run_can_be_made_longer(tmp_path, settings):
    run(tmp_path / "r", settings)
    run(tmp_path / "r", settings, resume=True, steps=24)
    assert read(tmp_path / "r" / "metrics.jsonl")[-1]["step"] == 24


def test_resuming_a_finished_run_says_its_result_again_and_changes_nothing(tmp_path, settings):
    first = run(tmp_path / "r", settings)
    before = results(tmp_path / "r")
    assert run(tmp_path / "r", settings, resume=True) == first
    assert_same_results(results(tmp_path / "r"), before)


def test_resuming_where_nothing_is_starts_a_run_and_says_so(tmp_path, settings, capsys):
    run(tmp_path / "r", settings, resume=True, steps=2)
    assert "nothing to resume" in capsys.readouterr().out
    assert RunFolder(tmp_path / "r").pointed("last") == 2


def test_another_model_is_refused_on_resume_with_the_fields_that_differ(tmp_path, settings):
    run(tmp_path / "r", settings, steps=2)
    other = {**settings, "model": {**settings["model"], "position": "learned", "dropout": 0.0}}
    with pytest.raises(UserError, match=r"model.dropout \(run: 0.1, asked: 0.0\), model.position.kind"):
        run(tmp_path / "r", other, resume=True, steps=2)


def test_changed_data_are_refused_on_resume(tmp_path, settings, corpus, monkeypatch):
    killed_at(9, monkeypatch, tmp_path / "r", settings)
    extra = corpus / "extra.txt"
    extra.write_text("one more document of other words")
    try:
        with pytest.raises(UserError, match="are not those that run"):
            run(tmp_path / "r", settings, resume=True)
    finally:
        extra.unlink()


# --- Never lost -------------------------------------------------------------------------------------------------------


def test_an_existing_run_is_never_overwritten_without_being_told(tmp_path, settings):
    run(tmp_path / "r", settings, steps=2)
    before = results(tmp_path / "r")
    with pytest.raises(UserError, match=r"--resume, start again with --overwrite"):
        run(tmp_path / "r", settings, steps=2)
    assert_same_results(results(tmp_path / "r"), before)
    run(tmp_path / "r", settings, overwrite=True, steps=3)
    assert RunFolder(tmp_path / "r").steps() == [3]


@pytest.mark.parametrize("inside", ["", "deeper/still"])
def test_a_run_folder_that_is_a_file_or_lies_in_one_is_refused(tmp_path, settings, inside):
    (tmp_path / "r").write_text("mine")
    with pytest.raises(UserError, match="r is a file: name a folder"):
        run(tmp_path / "r" / inside, settings)


@pytest.mark.parametrize("name", ["model.safetensors", "trainer.pt"])
@pytest.mark.parametrize("steps", [7, 20])
def test_a_damaged_checkpoint_is_never_gone_on_with(tmp_path, settings, name, steps):
    run(tmp_path / "r", settings, steps=steps)
    path = RunFolder(tmp_path / "r").checkpoint("last") / name
    content = bytearray(path.read_bytes())
    content[len(content) - 100] ^= 1
    path.write_bytes(content)
    way_out = "start again with --overwrite" if steps == 7 else r"write the name of an earlier one \(step-000014"
    with pytest.raises(UserError, match=rf"{name} was changed after it was written.*{way_out}"):
        run(tmp_path / "r", settings, resume=True, steps=30)
    if steps == 20:
        (tmp_path / "r" / "checkpoints" / "last").write_text("step-000014\n")
        run(tmp_path / "r", settings, resume=True)
        run(tmp_path / "whole", settings)
        assert_same_results(results(tmp_path / "r"), results(tmp_path / "whole"))


def test_a_step_that_reads_the_text_hundreds_of_times_is_refused(tmp_path, settings):
    with pytest.raises(UserError, match=r"batch_size 100000000 is over 100 times the \d+ windows"):
        run(tmp_path / "r", settings, batch_size=100_000_000, micro_batch_size=1)
    assert not (tmp_path / "r").exists()


def test_weights_that_are_not_finite_are_never_saved(tmp_path, settings):
    with pytest.raises(UserError, match="not finite 5 times in a row"):
        run(tmp_path / "r", {**settings, "optimizer": {"lr": 1e30, "clip_norm": 0.0}}, checkpoint_every=1)
    for checkpoint in (tmp_path / "r" / "checkpoints").glob("step-*"):
        assert all(weight.isfinite().all() for weight in load_file(checkpoint / "model.safetensors").values())


def test_a_disk_that_is_full_ends_the_run_and_leaves_the_last_checkpoint_whole(tmp_path, settings, monkeypatch):
    real, saved = Path.write_bytes, []

    def full_after_two(path, content):
        saved.extend([path] if path.name == "trainer.pt" else [])
        if len(saved) > 2:
            raise OSError(28, "No space left on device")
        return real(path, content)

    monkeypatch.setattr(Path, "write_bytes", full_after_two)
    with pytest.raises(OSError, match="No space left") as failure:
        run(tmp_path / "r", settings)
    monkeypatch.undo()
    assert failure.value.filename == str(tmp_path / "r" / "checkpoints" / "step-000014" / "trainer.pt")
    names = {path.name for path in (tmp_path / "r" / "checkpoints").iterdir()}
    assert names == {"best", "last", "step-000007", "step-000010"}
    run(tmp_path / "r", settings, resume=True)
    run(tmp_path / "whole", settings)
    assert_same_results(results(tmp_path / "r"), results(tmp_path / "whole"))


def test_a_disk_that_is_really_full_is_one_line(tmp_path, settings):
    """The command runs under a limit on the size of files: too little for the second file of a checkpoint."""
    process = start_command(tmp_path / "r", settings, tmp_path / "c.yaml", limit=200_000)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "Traceback" not in errors
    assert re.search(r"^error: .*step-000007.*File too large$", errors, re.MULTILINE), errors
    assert list((tmp_path / "r" / "checkpoints").iterdir()) == []


# --- As a person meets it ---------------------------------------------------------------------------------------------


def test_the_ceiling_on_time_is_turned_into_steps_once_and_kept(tmp_path, settings, capsys):
    run(tmp_path / "r", settings, steps=20, max_minutes=60.0)
    stored = load(tmp_path / "r" / "config.yaml").training
    assert (stored.steps, stored.max_minutes) == (20, None)
    assert "20 of 20 steps fit into 60 minutes" in capsys.readouterr().out
    run(tmp_path / "short", settings, steps=10_000_000, max_minutes=0.02)
    assert load(tmp_path / "short" / "config.yaml").training.steps < 5000
    run(tmp_path / "whole", settings)
    assert_same_results(results(tmp_path / "r"), results(tmp_path / "whole"))


def limited(size):
    """Refuse, in a child process, to write more than `size` bytes to a file: EFBIG instead of a signal."""

    def prepare():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    return prepare


def start_command(folder, settings, config, *flags, limit=None):
    import yaml

    config.write_text(yaml.safe_dump(settings))
    command = [sys.executable, "train.py", str(config), "--training.out", str(folder), *flags]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1,
                            env={**os.environ, "OMP_NUM_THREADS": "1"},
                            preexec_fn=limited(limit) if limit else None)  # fmt: skip


def wait_for_step(folder, step, process):
    while not (folder / "metrics.jsonl").exists() or f'"step": {step},' not in (folder / "metrics.jsonl").read_text():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path, settings, number):
    settings["training"].update(steps=100_000, checkpoint_every=100_000)
    process = start_command(tmp_path / "r", settings, tmp_path / "c.yaml")
    wait_for_step(tmp_path / "r", 4, process)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "again to stop at once" in errors
    assert "--resume goes on" in errors.splitlines()[-1]
    assert "Traceback" not in errors
    assert RunFolder(tmp_path / "r").pointed("last") >= 4


KILLS = [11, *(pytest.param(step, marks=pytest.mark.soak) for step in range(1, 50, 2) if step != 11)]


@pytest.mark.parametrize("step", KILLS)
def test_kill_9_costs_nothing(tmp_path, settings, step):
    settings["training"].update(steps=60, log_every=1)
    process = start_command(tmp_path / "killed", settings, tmp_path / "c.yaml")
    wait_for_step(tmp_path / "killed", step, process)
    process.kill()
    process.communicate()
    torch.set_num_threads(1)
    run(tmp_path / "killed", settings, resume=True)
    run(tmp_path / "whole", settings)
    assert_same_results(results(tmp_path / "killed"), results(tmp_path / "whole"))


def test_a_run_leaves_what_generate_and_compare_read(tmp_path, settings, capsys):
    final = run(tmp_path / "r", settings)
    names = {path.name for path in (tmp_path / "r").iterdir()}
    assert names == {"config.yaml", "metrics.jsonl", "tokenizer.model", "samples.txt", "checkpoints"}
    assert load(tmp_path / "r" / "config.yaml").model.vocab_size == 300
    rows = read(tmp_path / "r" / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(2, 21, 2))
    assert rows[-1]["final_loss"] == final.loss
    out = capsys.readouterr().out
    for words in ("validation loss", "perplexity", "bits per byte", "python generate.py", "metrics.jsonl"):
        assert words in out


def test_interruption_is_not_an_error_of_the_run():
    assert not issubclass(Interrupted, UserError)
