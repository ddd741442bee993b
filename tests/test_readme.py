"""Every command of the README is run here, or by `make demo`; a short run stands in for a long one."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import compare
import data.prepare
import generate
import train
from tests.test_run import ROOT, run

README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = [
    line.partition("#")[0].strip()
    for block in re.findall(r"^```bash\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    for line in block.splitlines()
]
# The set-up is what `make` does before any test can run.
SET_UP = ("python3 -m venv", "pip install", "pytest")


def python_commands(script):
    return [command for command in COMMANDS if command.startswith(f"python {script}")]


def test_the_readme_has_commands_of_each_kind_and_no_other():
    known = ("make ", "python train.py", "python generate.py", "python compare.py", "python -m model.position", *SET_UP)
    assert all(command.startswith(known) for command in COMMANDS)
    assert len(python_commands("train.py")) >= 5
    assert len(python_commands("generate.py")) >= 2
    assert len(python_commands("compare.py")) >= 2


@pytest.mark.parametrize("command", sorted({command for command in COMMANDS if command.startswith("make ")}))
def test_each_make_target_is_there(command):
    result = subprocess.run(["make", "--dry-run", *command.split()[1:]], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def small(words, corpus, folder):
    """The same command at a size for a test: two steps, a small text where it names none, a run folder of its own."""
    words = [str(folder.parent / "demo") if word == "runs/demo" else word for word in words]
    words = [word for word in words if not word.startswith("runs/") and word != "--training.out"]
    text = [] if "--data.corpus" in words else ["--data.corpus", "files", "--data.corpus.paths", str(corpus)]
    size = "--training.steps 2 --training.max-minutes none --training.batch-size 2 --training.eval-windows 1"
    vocabulary = "300" if text else "512"
    return [*words, *text, "--data.vocab-size", vocabulary, "--data.folder", str(corpus / "p"), *size.split(),
            "--model.context", "24", "--training.out", str(folder)]  # fmt: skip


@pytest.mark.parametrize("command", python_commands("train.py"))
def test_each_training_command_trains(command, corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    if "--training.init-from" in command:
        monkeypatch.setattr("sys.argv", small(["train.py", "configs/demo.yaml"], corpus, tmp_path / "demo"))
        train.main()
    monkeypatch.setattr("sys.argv", small(shlex.split(command)[1:], corpus, tmp_path / "r"))
    train.main()
    assert (tmp_path / "r" / "checkpoints" / "last").read_text() == "step-000002\n"


@pytest.mark.parametrize("command", python_commands("generate.py"))
def test_each_sampling_command_samples(command, settings, tmp_path, monkeypatch, capsys):
    run(tmp_path / "demo", settings, steps=2)
    capsys.readouterr()
    words = [str(tmp_path / "demo") if word == "runs/demo" else word for word in shlex.split(command)[1:]]
    monkeypatch.setattr("sys.argv", [*words, "--max-new-tokens", "5"])
    generate.main()
    out = capsys.readouterr().out
    prompt = words[words.index("--prompt") + 1] if "--prompt" in words else ""
    assert prompt in out


def small_experiment(file, corpus, folder):
    """The same experiment on a small text: two seeds, three steps a run."""
    tree = yaml.safe_load(file.read_text()) | {"base": "small.yaml", "seeds": [0, 1], "lengths": [24, 36]}
    tree |= {"evaluation": {"test_windows": 4, "spans": 2, "window_spans": 1, "control_every": 4, "sample_tokens": 4}}
    tree.pop("tune", None)
    small = {"context": 24, "n_layers": 1, "n_heads": 2, "d_model": 16}
    text = {"corpus": {"kind": "files", "paths": [str(corpus)]}, "vocab_size": 300, "folder": str(corpus / "p")}
    steps = {"steps": 3, "batch_size": 2, "eval_windows": 1}
    (folder / "small.yaml").write_text(yaml.safe_dump({"model": small, "data": text, "training": steps}))
    (folder / file.name).write_text(yaml.safe_dump(tree))
    return folder / file.name


@pytest.mark.parametrize("command", python_commands("compare.py"))
def test_each_comparing_command_compares(command, corpus, tmp_path, monkeypatch, capsys):
    words = shlex.split(command)[1:]
    file = small_experiment(ROOT / words[1], corpus, tmp_path)
    place = ["--store", str(tmp_path / "store"), "--out", str(tmp_path / "out")]
    monkeypatch.setattr("sys.argv", [words[0], str(file), *words[2:], *place])
    compare.main()
    is_plan = "--dry-run" in words
    assert ("are to be done" if is_plan else "report.html") in capsys.readouterr().out
    assert (tmp_path / "out" / "report.html").exists() != is_plan


def test_the_table_of_schemes_can_be_printed():
    command = [sys.executable, "-m", "model.position"]
    assert "Su et al., 2021" in subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_the_corpus_can_be_prepared_alone(corpus, tmp_path, monkeypatch, capsys):
    config = tmp_path / "c.yaml"
    config.write_text(f"data: {{corpus: {{kind: files, paths: [{corpus}]}}, vocab_size: 300, folder: {tmp_path}}}\n")
    data.prepare.main([str(config)])
    assert "prepared data" in capsys.readouterr().out


def test_every_file_that_the_readme_names_is_there():
    names = re.findall(r"`((?:configs|model|data|training|experiments|tests)/[\w/.]+\.\w+)`", README)
    assert names
    assert all(Path(ROOT / name).exists() for name in names)
