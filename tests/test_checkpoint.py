"""Checkpoints: written whole or not at all, checked when read, and nothing in them can run code."""

import errno
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from model import durable
from model.checkpoint import load_model, load_weights, save_model
from model.errors import UserError
from model.transformer import Transformer
from tests.conftest import random_tokens, tiny_config
from tests.test_position_contract import config_yaml
from tests.test_trainer import trainer_on_text
from training.run_folder import RunFolder
from training.trainer import read_state

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def folder(tmp_path):
    """A checkpoint folder of a tiny model."""
    target = tmp_path / "step-000007"
    model = Transformer(tiny_config())
    save_model(target, model, config_yaml(model), b"tokenizer")
    return target


def files_in(folder):
    return sorted(path.name for path in folder.iterdir())


# --- Writing ----------------------------------------------------------------------------------------------------------


def test_a_checkpoint_holds_weights_config_tokenizer_and_their_manifest(folder):
    assert files_in(folder) == ["config.yaml", "manifest.json", "model.safetensors", "tokenizer.model"]
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["format"] == 1
    weights = (folder / "model.safetensors").read_bytes()
    assert manifest["files"]["model.safetensors"]["bytes"] == len(weights)


def test_a_checkpoint_is_never_written_over(folder):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    model = Transformer(tiny_config(), seed=5)
    with pytest.raises(OSError, match="not empty"):
        save_model(folder, model, config_yaml(model), b"newer")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert files_in(folder.parent) == [folder.name]


@pytest.mark.parametrize("number", range(1, 6))
def test_whichever_write_fails_no_half_checkpoint_is_left(tmp_path, number, monkeypatch):
    calls, real = [], durable.sync

    def failing(path):
        calls.append(path)
        if len(calls) == number:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        real(path)

    monkeypatch.setattr(durable, "sync", failing)
    model = Transformer(tiny_config())
    with pytest.raises(OSError, match="No space left"):
        save_model(tmp_path / "step-000001", model, config_yaml(model), b"")
    assert files_in(tmp_path) == []


SAVE_FOR_EVER = """
import sys
from model.durable import Path, write_folder, write_text
folder = Path(sys.argv[1])
for number in range(100, 10_000):
    blob = str(number).encode() * 1_000_000
    write_folder(folder / f"step-{number}", {"blob": lambda path: path.write_bytes(blob)})
    write_text(folder / "last", str(number))
    print(number, flush=True)
"""


TRIALS = [*range(8), *(pytest.param(trial, marks=pytest.mark.soak) for trial in range(8, 60))]


@pytest.mark.parametrize("trial", TRIALS)
def test_killed_at_any_moment_the_last_checkpoint_is_whole(tmp_path, trial):
    command = [sys.executable, "-c", SAVE_FOR_EVER, str(tmp_path)]
    writer = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
    writer.stdout.readline()
    time.sleep(0.003 + 0.0073 * trial)
    writer.send_signal(signal.SIGKILL)
    writer.communicate()
    number = (tmp_path / "last").read_text()
    durable.check_folder(tmp_path / f"step-{number}")
    assert (tmp_path / f"step-{number}" / "blob").read_bytes() == number.encode() * 1_000_000
    for path in tmp_path.glob("step-*"):
        durable.check_folder(path)


# --- Reading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["config.yaml", "model.safetensors", "tokenizer.model"])
def test_a_flipped_byte_is_refused_with_the_files_name(folder, name):
    content = bytearray((folder / name).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / name).write_bytes(content)
    with pytest.raises(UserError, match=rf"{name} was changed after it was written"):
        load_model(folder)


@pytest.mark.parametrize("name", ["config.yaml", "model.safetensors", "tokenizer.model", "manifest.json"])
def test_a_missing_or_a_cut_file_is_refused_with_its_name(folder, name):
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match=name):
        load_model(folder)
    (folder / name).unlink()
    with pytest.raises(UserError, match=name):
        load_model(folder)


@pytest.mark.parametrize("manifest", ["[]", "{}", '{"format": 1}', '{"format": 1, "files": [1]}', "nonsense", ""])
def test_a_manifest_that_is_none_is_refused(folder, manifest):
    (folder / "manifest.json").write_text(manifest)
    with pytest.raises(UserError, match=r"manifest.json"):
        load_model(folder)


def test_a_checkpoint_of_a_later_format_is_refused_by_its_number(folder):
    manifest = json.loads((folder / "manifest.json").read_text()) | {"format": 2}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="format 2; this version of ropelab reads format 1"):
        load_model(folder)


def rewrite_weights(folder, change):
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors")


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.pop("norm.weight"),
        lambda state: state.update({"position.table": torch.zeros(3, 3)}),
        lambda state: state.update({"norm.weight": torch.zeros(3)}),
    ],
    ids=["a missing weight", "an extra weight", "another shape"],
)
def test_weights_must_agree_with_the_model_in_every_name_and_shape(folder, change):
    rewrite_weights(folder, change)
    with pytest.raises(UserError, match=r"does not fit this model in 1 weights: (norm.weight|position.table) \(wanted"):
        load_weights(Transformer(tiny_config()), folder)


def test_weights_of_one_scheme_do_not_load_into_another(folder):
    with pytest.raises(UserError, match=r"position.table \(wanted \(64, 48\), stored None\)"):
        load_weights(Transformer(tiny_config("learned")), folder)


# --- The trainer's state ----------------------------------------------------------------------------------------------


class Evil:
    """A pickle that would create a file when it is opened."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.system, (f"touch {self.path}",))


@pytest.mark.parametrize("by_torch", [True, False])
def test_an_evil_pickle_is_refused_and_never_runs(tmp_path, by_torch):
    marker, path = tmp_path / "was-run", tmp_path / "trainer.pt"
    if by_torch:
        torch.save({"next_step": Evil(marker)}, path)
    else:
        path.write_bytes(pickle.dumps(Evil(marker), protocol=2))
    with pytest.raises(UserError, match=r"trainer.pt cannot be read safely"):
        read_state(path, torch.device("cpu"))
    assert not marker.exists()


@pytest.mark.parametrize("content", [b"", b"nonsense", b"PK\x03\x04 a zip that is none"])
def test_a_trainer_state_that_is_none_is_refused_in_words(tmp_path, content):
    (tmp_path / "trainer.pt").write_bytes(content)
    with pytest.raises(UserError, match=r"trainer.pt cannot be read safely"):
        read_state(tmp_path / "trainer.pt", torch.device("cpu"))


def test_a_trainer_state_that_lacks_something_is_refused_with_its_name(tmp_path):
    trainer = trainer_on_text()
    state = {name: value for name, value in trainer.state().items() if name != "next_step"}
    files = {"trainer.pt": lambda path: torch.save(state, path)}
    save_model(tmp_path / "a", trainer.model, config_yaml(trainer.model), b"", files)
    with pytest.raises(UserError, match=r"trainer.pt lacks next_step: this checkpoint is damaged"):
        trainer.restore(tmp_path / "a")


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_the_state_of_a_run_loads_safely_and_is_restored(tmp_path, precision):
    trainer = trainer_on_text(precision=precision)
    for _ in range(3):
        trainer.step()
    if precision == "fp16":
        trainer.scaler.update(512.0)
    state = {"trainer.pt": lambda path: torch.save(trainer.state(), path)}
    save_model(tmp_path / "a", trainer.model, config_yaml(trainer.model), b"", state)
    other = trainer_on_text(precision=precision, seed=9)
    other.restore(tmp_path / "a")
    assert other.next_step == 3
    assert other.scaler.get_scale() == trainer.scaler.get_scale() == (512.0 if precision == "fp16" else 1.0)
    moments = [[s["exp_avg_sq"] for s in t.optimizer.state.values()] for t in (trainer, other)]
    assert all(torch.equal(a, b) for a, b in zip(*moments, strict=True))


def test_a_state_that_was_saved_on_a_gpu_loads_on_a_cpu(tmp_path, monkeypatch):
    state = {"next_step": 3, "optimizer": {"exp_avg": torch.ones(2)}}
    with monkeypatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
        torch.save(state, tmp_path / "trainer.pt")
    assert b"cuda:0" in (tmp_path / "trainer.pt").read_bytes()
    loaded = read_state(tmp_path / "trainer.pt", torch.device("cpu"))
    assert torch.equal(loaded["optimizer"]["exp_avg"], torch.ones(2))


# --- Run folders ------------------------------------------------------------------------------------------------------


def run_with_steps(path, *steps):
    run = RunFolder(path)
    for step in steps:
        run.step_folder(step).mkdir(parents=True)
    return run


def test_rotation_keeps_the_newest_and_the_best(tmp_path):
    run = run_with_steps(tmp_path, 100, 200, 300, 400, 1_000_000)
    run.point("best", 100)
    run.point("last", 1_000_000)
    run.rotate(keep=2)
    assert run.steps() == [100, 400, 1_000_000]


def test_best_and_last_are_found_and_a_missing_one_lists_what_there_is(tmp_path):
    run = run_with_steps(tmp_path, 100, 200)
    run.point("last", 200)
    assert run.checkpoint("last").name == "step-000200"
    assert run.checkpoint("best").name == "step-000200"  # before the first evaluation there is no best
    run.point("best", 100)
    assert run.checkpoint("best").name == "step-000100"
    assert run.checkpoint("step-000100").name == "step-000100"
    with pytest.raises(UserError, match=r"no checkpoint 'step-000300'; it has: step-000100, step-000200"):
        run.checkpoint("step-000300")
    with pytest.raises(UserError, match="does not exist"):
        RunFolder(tmp_path / "nowhere").checkpoint()


def test_what_was_written_after_the_step_of_a_resume_is_removed(tmp_path):
    run = run_with_steps(tmp_path, 100, 200)
    (run.checkpoints / ".step-000300.12345678.tmp").mkdir()
    run.discard_after(100)
    assert files_in(run.checkpoints) == ["step-000100"]


def test_clearing_a_run_leaves_what_it_did_not_write(tmp_path):
    run = run_with_steps(tmp_path, 100)
    for name in ("config.yaml", "metrics.jsonl", "notes.txt"):
        (tmp_path / name).write_text("x")
    run.clear()
    assert files_in(tmp_path) == ["notes.txt"]


def test_logits_are_the_same_after_a_move_of_the_folder(folder, tmp_path):
    tokens = random_tokens(1, 10)
    before = load_model(folder).model(tokens)
    shutil.move(folder, tmp_path / "elsewhere")
    assert torch.equal(load_model(tmp_path / "elsewhere").model(tokens), before)
