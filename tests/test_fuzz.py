"""Anything at all as configuration, command line, checkpoint, record or prompt: success, or one line and status 2."""

import contextlib
import io
import itertools
import json
import math
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

import generate
import train
import training.loop
from data.loader import Windows
from data.tokenizer import Tokenizer
from model.checkpoint import load_model, load_weights
from model.durable import file_digest
from model.errors import UserError
from tests.test_generate import make_run
from training.command_line import TrainArguments
from training.config import Config, load, to_yaml
from training.hardware import Hardware
from training.run_folder import RunFolder
from training.settings_tree import every_field
from training.tracking import Metrics, read
from training.trainer import Trainer, read_state

ROOT = Path(__file__).resolve().parents[1]
SCRATCH = tempfile.TemporaryDirectory()
_numbers = itertools.count()


def new_path(suffix: str = "") -> Path:
    return Path(SCRATCH.name) / f"{next(_numbers)}{suffix}"


def examples(few: int, many: int) -> Any:
    """Few in `make test`, many in `make soak`."""
    return pytest.mark.parametrize("count", [few, pytest.param(many, marks=pytest.mark.soak)])


def tried(count: int, check: Callable[..., None], *cases: dict[str, Any], **strategies: Any) -> None:
    """Run a check on so many examples, and on these cases."""
    check = given(**strategies)(check)
    for case in cases:
        check = example(**case)(check)
    settings(max_examples=count, deadline=None)(check)()


def refused(action: Callable[[], object]) -> str | None:
    """Return the one line in which something is refused, None where it is done; any other exception is a fault."""
    try:
        action()
    except UserError as error:
        return str(error)
    except OSError as error:
        # What the command line tells in one line; without a number it would be a traceback.
        return str(error) if error.errno is not None else pytest.fail(f"{error!r}")
    return None


# --- Damage -----------------------------------------------------------------------------------------------------------

_FRAGMENTS = [
    b"", b"\0", b"\xff", b"\xed\xa0\xbc", b"\n", b"\r", b"\t", b":", b"- ", b"{", b"[", b"]", b"&a ", b"*a", b"<<: ",
    b"extends: ", b"kind: ", b"model:\n  ", b"null", b"true", b"-1", b"1e999", b".nan", b"0x10", b"9" * 5000, b"'",
    b'"', b"? ", b"---\n", b"...\n", b"%YAML 9.9\n", b"#", b"|", b'"\\ud800"', b'"\\0"', b"[" * 3000, b"a: " * 99,
    b"!!python/name:os.system ", "é🎉\u2028\u0085\ufeff".encode(),
]  # fmt: skip
fragments = st.sampled_from(_FRAGMENTS) | st.binary(min_size=1, max_size=4)
# Where (modulo the length), how much is taken out, and what is put there.
edits = st.lists(st.tuples(st.integers(0, 10**6), st.sampled_from([0, 1, 9, 10**9]), fragments), min_size=1, max_size=4)
# Where, and which of its bits is turned over.
flips = st.tuples(st.integers(0, 10**6), st.integers(0, 7))


def damaged(whole: bytes, damage: Any) -> bytes | None:
    """Return these bytes damaged; None: the whole file is gone."""
    if damage is None or isinstance(damage, tuple):
        return None if damage is None else flipped(whole, *damage)
    for place, length, fragment in damage:
        here = place % (len(whole) + 1)
        whole = whole[:here] + fragment + whole[here + length :]
    return whole


def flipped(content: bytes, place: int, bit: int) -> bytes:
    here = place % len(content)
    return content[:here] + bytes([content[here] ^ 1 << bit]) + content[here + 1 :]


# --- Configurations ---------------------------------------------------------------------------------------------------

_CONFIGS = [path.read_bytes() for path in sorted((ROOT / "configs").rglob("*.yaml"))]


def loads_or_is_refused(path: Path) -> None:
    loaded: list[Config] = []
    line = refused(lambda: loaded.append(load(path)))
    assert line is None or "\n" not in line, line
    for config in loaded:
        again = new_path(".yaml")
        again.write_text(to_yaml(config), encoding="utf-8")
        assert load(again) == config


@examples(100, 5000)
def test_a_configuration_file_of_any_bytes_is_read_or_refused_in_one_line(count):
    def check(content: bytes) -> None:
        path = new_path(".yaml")
        path.write_bytes(content)
        loads_or_is_refused(path)

    cases = [
        {"content": each}
        for each in (b'extends: "a\\0b"', b'extends: "\\ud800"', b"extends: " + b"x" * 5000, b"extends: .", b"{" * 5000)
    ]
    shipped = st.builds(damaged, st.sampled_from(_CONFIGS), edits | flips)
    tried(count, check, *cases, content=shipped | st.lists(fragments).map(b"".join))


_FIELDS = [path for path, _ in every_field(Config)]
odd_values = (
    st.sampled_from([None, True, False, 0, 1, -1, 3, 10**30, 1.5, -0.0, 1e-320, 1e308, math.nan, math.inf, "", " "])
    | st.sampled_from(["none", "auto", "on", "off", "rope", "learned", "alibi", "yarn", "files", "all", "\0", "é"])
    | st.just("x" * 300)
    | st.text(max_size=5)
)  # fmt: skip
odd_trees = st.recursive(
    odd_values,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(sorted({name for path in _FIELDS for name in path})) | st.text(), inner)
    ),
    max_leaves=6,
)


@examples(100, 5000)
def test_any_values_of_any_settings_are_taken_or_refused_in_one_line(count):
    def check(chosen: list[tuple[tuple[str, ...], Any]]) -> None:
        tree: dict[str, Any] = {}
        for path, value in chosen:
            group = tree
            for name in path[:-1]:
                group = group.setdefault(name, {}) if isinstance(group.get(name, {}), dict) else {}
            group[path[-1]] = value
        path = new_path(".yaml")
        path.write_text(yaml.safe_dump(tree), encoding="utf-8")
        loads_or_is_refused(path)

    tried(count, check, chosen=st.lists(st.tuples(st.sampled_from(_FIELDS), odd_trees), min_size=1, max_size=4))


# --- Command lines ----------------------------------------------------------------------------------------------------


def outcome(command: Callable[[], object], typed: bytes = b"") -> tuple[int, str, str]:
    """Run a command here; return its status, and what it writes. It raises nothing but SystemExit."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", errors="backslashreplace") for _ in "ab")
    status = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed), "utf-8"))
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                command()
            except SystemExit as end:
                status = int(end.code or 0)
    written = [stream.flush() or stream.buffer.getvalue().decode() for stream in (out, err)]  # type: ignore[func-returns-value]
    return status, *written


def is_told(status: int, err: str) -> None:
    """A mistake is one line of ours, or tyro's box; both end with status 2."""
    assert status in (0, 2)
    if status == 2:
        assert "Traceback" not in err
        assert "╭" in err or (err.startswith("error: ") and err.count("\n") == 1), err


odd_words = st.sampled_from(
    ["", "-", "--", "-h", "--help", "=", "1", "-1", "0", "1e400", "nan", "inf", "true", "no", "none", "auto", "on",
     "off", "rope", "learned", "yarn", "\0", "\udcff", "é🎉", "a b", "[1]", "1,2", "9" * 5000, ".", "/", "no/such",
     "configs", "configs/demo.yaml"]
) | st.text(max_size=6)  # fmt: skip


def command_words(flags: list[str]) -> st.SearchStrategy[list[str]]:
    flag = st.sampled_from(flags) | st.sampled_from(flags).map(lambda name: name[:-1])
    joined = st.tuples(flag, odd_words).map("=".join)
    pair = st.tuples(flag, odd_words).map(list)
    return st.lists(pair | st.one_of(flag, joined, odd_words).map(lambda word: [word]), max_size=4).map(
        lambda parts: list(itertools.chain(*parts))
    )


def flags_of(arguments: Any) -> list[str]:
    return sorted({f"--{'.'.join(path)}".replace("_", "-") for path, _ in every_field(arguments)})


@examples(40, 3000)
def test_any_command_line_of_train_is_understood_or_refused(count, monkeypatch):
    asked: list[Config] = []
    monkeypatch.setattr(training.loop, "train", lambda config, *_: asked.append(config))
    monkeypatch.chdir(ROOT)

    def check(words: list[str]) -> None:
        asked.clear()
        monkeypatch.setattr(sys, "argv", ["train.py", *words])
        status, out, err = outcome(train.main)
        is_told(status, err)
        # Neither silence without a training, nor a training beside a complaint.
        assert len(asked) == (status == 0 and "usage:" not in out)

    tried(count, check, words=command_words(flags_of(TrainArguments)))


@pytest.fixture(scope="module")
def a_run(tmp_path_factory):
    tokenizer = Tokenizer.train(["def hello(world):\n    return 'the cat sat on the mat: 你好 🎉'\n" * 3], 300)
    return str(make_run(tmp_path_factory.mktemp("runs") / "rope", tokenizer))


_SHORT = ["--max-new-tokens", "2", "--decoder", "model"]
# What these ask for may take as long, or as much memory, as they say; `compiled` and `native` build something.
_LEFT_OUT = {"--samples", "--max-new-tokens", "--decoder", "--run"}
_GENERATE = [flag for flag in flags_of(generate.GenerateArguments) if flag not in _LEFT_OUT]
_POSITION = [
    f"--position{rest}" for rest in ("", ".kind", ".base", ".scaling", ".scaling.kind", ".scaling.factor", ".log-n")
]


@examples(40, 3000)
def test_any_command_line_of_generate_is_understood_or_refused(count, a_run):
    def check(words: list[str]) -> None:
        status, _, err = outcome(lambda: generate.main([a_run, *_SHORT, *words]), b"a\n\xff\n\n")
        is_told(
            status, "\n".join(line for line in err.splitlines() if not line.startswith("note: ")) + "\n" * bool(err)
        )

    tried(count, check, words=command_words([*_GENERATE, *_POSITION]))


@examples(40, 2000)
def test_any_prompt_comes_back_with_a_continuation_or_is_refused(count, a_run):
    def check(prompt: str) -> None:
        status, out, err = outcome(lambda: generate.main([a_run, *_SHORT, "--prompt", prompt]))
        is_told(status, err)
        assert (status == 0) == all(not 0xD800 <= ord(letter) < 0xE000 for letter in prompt)
        assert status == 2 or out.startswith(prompt)

    characters = st.characters() | st.characters(categories=["Cs"]) | st.sampled_from("\0\r\n\t\u2581\ufeff\u0301🎉")
    tried(count, check, {"prompt": "--temperature"}, {"prompt": "</s>"}, prompt=st.text(characters, max_size=30))


# --- Checkpoints ------------------------------------------------------------------------------------------------------

CHECKPOINT = ROOT / "tests" / "data" / "checkpoint-1"
FILES = ["config.yaml", "manifest.json", "model.safetensors", "tokenizer.model", "trainer.pt"]


@pytest.fixture(scope="module")
def trainer():
    config = load(CHECKPOINT / "config.yaml")
    windows = Windows(np.arange(2000) % 280, config.model.context, 0)
    return Trainer(config, windows, Hardware(torch.device("cpu"), "fp32"))


def copy_with(name: str, content: bytes | None) -> Path:
    folder = new_path()
    shutil.copytree(CHECKPOINT, folder)
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content)
    return folder


@examples(60, 5000)
def test_a_damaged_checkpoint_is_refused_by_name_whichever_byte_it_is(count, trainer):
    def check(name: str, damage: Any) -> None:
        whole = (CHECKPOINT / name).read_bytes()
        content = damaged(whole, damage)
        folder = copy_with(name, content)
        for action in (lambda: load_model(folder), lambda: trainer.restore(folder)):
            line = refused(action)
            if content == whole:
                assert line is None
            elif name == "manifest.json" and line is None:
                assert means_the_same(content)
            else:
                assert line is not None
                assert name == "manifest.json" or str(folder / name) in line
        shutil.rmtree(folder)

    cases = [{"name": name, "damage": None} for name in FILES]
    tried(count, check, *cases, name=st.sampled_from(FILES), damage=edits | flips)


def means_the_same(manifest: bytes | None) -> bool:
    """Say whether a changed manifest, a space more or less, still says the same of the files."""
    whole = (CHECKPOINT / "manifest.json").read_bytes()
    return manifest is not None and json.loads(manifest) == json.loads(whole)


@examples(40, 5000)
def test_a_checkpoint_whose_manifest_vouches_for_the_damage_is_read_or_refused(count):
    """Somebody wrote it so: nothing in it may end in a traceback."""

    def check(name: str, damage: Any) -> None:
        content = damaged((CHECKPOINT / name).read_bytes(), damage)
        assert content is not None
        folder = copy_with(name, content)
        manifest = json.loads((folder / "manifest.json").read_bytes())
        manifest["files"][name] = {"bytes": len(content), "sha256": file_digest(folder / name)}
        (folder / "manifest.json").write_text(json.dumps(manifest))
        refused(lambda: Tokenizer.from_bytes(load_model(folder).tokenizer))
        refused(lambda: read_state(folder / "trainer.pt", torch.device("cpu")))
        shutil.rmtree(folder)

    vouched = [name for name in FILES if name != "manifest.json"]
    tried(count, check, name=st.sampled_from(vouched), damage=edits | flips)


@examples(30, 2000)
def test_weights_of_any_bytes_are_refused_or_are_those_of_the_model(count, trainer):
    def check(content: bytes) -> None:
        folder = copy_with("model.safetensors", content)
        refused(lambda: load_weights(trainer.model, folder))
        shutil.rmtree(folder)

    tried(count, check, content=st.binary(max_size=40))


# --- Records ----------------------------------------------------------------------------------------------------------

_ROWS = b'{"step": 1, "loss": 0.5}\n{"step": 2, "loss": null}\n{"step": 3}\n'


@examples(100, 5000)
def test_metrics_of_any_bytes_are_read_or_refused_by_line_and_never_half_rewound(count):
    def check(content: bytes) -> None:
        path = new_path()
        path.write_bytes(content)
        line = refused(lambda: read(path))
        assert line is None or "is damaged" in line
        assert refused(lambda: Metrics(path).rewind(2)) == line
        if line is None:
            assert all(row["step"] <= 2 for row in read(path))
        else:
            assert path.read_bytes() == content

    cases = [{"content": b"[" * 100_000 + b"\n"}, {"content": b'{"step": ' + b"9" * 5000 + b"}\n"}]
    tried(
        count,
        check,
        *cases,
        content=st.builds(damaged, st.just(_ROWS), edits | flips) | st.lists(fragments).map(b"".join),
    )


@examples(40, 2000)
def test_a_pointer_of_any_bytes_names_a_step_or_is_refused(count, tmp_path):
    run = RunFolder(tmp_path)
    run.step_folder(20).mkdir(parents=True)

    def check(content: bytes) -> None:
        (run.checkpoints / "last").write_bytes(content)
        line = refused(lambda: run.pointed("last"))
        named = content.strip()
        digits = named[5:] if named.startswith(b"step-") else b""
        is_a_step = digits.isdigit() and (len(digits) == 6 or (6 < len(digits) <= 18 and digits[:1] != b"0"))
        assert (line is None) == is_a_step

    tried(count, check, content=st.builds(damaged, st.just(b"step-000020\n"), edits | flips) | st.binary(max_size=9))
