"""The command line: flags, kinds, files, help and how a mistake looks."""

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Literal

import pytest
import tyro
from pydantic import Field, ValidationError

from data.config import FilesConfig, HubConfig
from model.errors import UserError
from model.position import SCHEMES
from model.position.config import LearnedConfig, NoPEConfig, RoPEConfig, SinusoidalConfig
from model.settings import Settings
from training.command_line import exit_on_user_error, parse, parse_training
from training.config import Config, load

ROOT = Path(__file__).parent.parent
ROPE_HALF = str(ROOT / "configs" / "position" / "rope_half.yaml")


def trained(*argv: str) -> Config:
    return parse_training(argv).config


def mistake(*argv: str) -> str:
    with pytest.raises(UserError) as caught:
        parse_training(argv)
    return str(caught.value)


def box(capsys, *argv: str) -> str:
    """Return what tyro prints when it refuses."""
    with pytest.raises(SystemExit) as caught:
        parse_training(argv)
    assert caught.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "pydantic" not in printed.err
    return printed.err


def help_text(capsys, *argv: str) -> str:
    with pytest.raises(SystemExit) as caught:
        parse_training([*argv, "--help"])
    assert caught.value.code == 0
    return " ".join(capsys.readouterr().out.replace("│", " ").split())


# --- Flags -----------------------------------------------------------------------------------------------------------


def test_without_arguments_the_defaults_run():
    request = parse_training([])
    assert request.config == Config()
    assert (request.resume, request.overwrite, request.config_path) == (False, False, None)


def test_flags_go_over_the_file_and_the_file_over_the_defaults():
    request = parse_training([ROPE_HALF, "--model.n-layers", "2", "--optimizer.lr", "1e-4"])
    assert request.config_path == Path(ROPE_HALF)
    assert (request.config.model.n_layers, request.config.optimizer.lr) == (2, 1e-4)
    assert request.config.model.position == RoPEConfig(layout="half")


def test_the_configuration_is_a_plain_one_however_it_was_asked_for():
    assert type(trained("--resume")) is Config
    assert trained(ROPE_HALF) == load(ROPE_HALF)


@pytest.mark.parametrize("flag", ["--model.n-layers", "--model.n_layers"])
@pytest.mark.parametrize("joined", [True, False])
def test_hyphens_and_underscores_are_one_and_so_are_equals_and_space(flag, joined):
    assert trained(*([f"{flag}=2"] if joined else [flag, "2"])).model.n_layers == 2


@pytest.mark.parametrize(
    ("argv", "path", "value"),
    [
        (["--model.no-tie-embeddings"], "model.tie_embeddings", False),
        (["--model.tie-embeddings", "False"], "model.tie_embeddings", False),
        (["--model.tie_embeddings=no"], "model.tie_embeddings", False),
        (["--model.qk-norm", "on"], "model.qk_norm", True),
        (["--model.n-kv-heads", "3"], "model.n_kv_heads", 3),
        (["--training.out", "none"], "training.out", None),
        (["--training.out=None"], "training.out", None),
        (["--training.max-minutes", "3"], "training.max_minutes", 3.0),
        (["--optimizer.betas", "0.8", "0.9"], "optimizer.betas", (0.8, 0.9)),
        (["--training.compile", "off"], "training.compile", "off"),
        (["--training.sample-prompt="], "training.sample_prompt", ""),
        (["--training.sample-prompt=--x"], "training.sample_prompt", "--x"),
        (["--training.sample-prompt", "model.position"], "training.sample_prompt", "model.position"),
        (["--model.position.layers", "first"], "model.position.layers", "first"),
        (["--model.position.layers", "0", "2"], "model.position.layers", (0, 2)),
    ],
)
def test_a_flag_means_what_it_says(argv, path, value):
    found = trained(*argv)
    for name in path.split("."):
        found = getattr(found, name)
    assert (found, type(found)) == (value, type(value))


# --- The file among the flags ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "before",
    [
        [],
        ["--resume"],
        ["--model.no-qk-norm"],
        ["--model.tie-embeddings", "no"],
        ["--model.n-layers", "2"],
        ["--model.n-layers=2"],
        ["--model.position", "rope"],
        ["--optimizer.betas", "0.8", "0.9"],
        ["--data.corpus", "files", "--data.corpus.paths", "a.yaml", "b.yaml", "--resume"],
    ],
)
def test_the_file_may_stand_after_any_flag_that_has_its_words(before):
    assert parse_training([*before, ROPE_HALF]).config_path == Path(ROPE_HALF)


def test_words_that_belong_to_a_list_are_no_configuration_file():
    request = parse_training(["--data.corpus", "files", "--data.corpus.paths", "a.yaml", "b.yaml"])
    assert request.config_path is None
    assert request.config.data.corpus == FilesConfig(paths=("a.yaml", "b.yaml"))


def test_two_files_are_one_too_many():
    assert "one configuration file at a time, not a.yaml and b.yaml" in mistake("a.yaml", "b.yaml")


def test_a_mistake_in_the_file_is_told_before_any_help(tmp_path):
    (tmp_path / "x.yaml").write_text("model: {n_layer: 3}", encoding="utf-8")
    assert "x.yaml: model.n_layer: unknown setting" in mistake(str(tmp_path / "x.yaml"), "--help")


# --- Kinds -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "argv",
    [
        ["--model.position", "learned", "--model.position.layers", "all"],
        ["--model.position=learned", "--model.position.layers=all"],
        ["--model.position.kind", "learned", "--model.position.layers", "all"],
        ["--model.position.kind=learned", "--model.position.layers", "all"],
        ["--model.position.layers", "all", "--model.position", "learned"],
        ["--model.position", "nope", "--model.position.layers", "all", "--model.position", "learned"],
    ],
)
def test_a_kind_is_chosen_by_its_name_wherever_the_flag_stands(argv):
    assert trained(*argv).model.position == LearnedConfig(layers="all")


def test_every_scheme_of_the_table_can_be_chosen():
    for name, entry in SCHEMES.items():
        assert trained("--model.position", name).model.position == entry.config()


def test_a_chosen_kind_replaces_what_the_file_says_even_of_the_same_kind():
    assert trained(ROPE_HALF, "--model.position", "rope").model.position == RoPEConfig()
    assert trained(ROPE_HALF, "--model.position", "sinusoidal").model.position == SinusoidalConfig()
    assert trained(ROPE_HALF, "--model.position.base", "5").model.position == RoPEConfig(layout="half", base=5)


def test_corpora_are_chosen_the_same_way():
    files = trained("--data.corpus", "files", "--data.corpus.paths", "a.txt", "b.txt")
    assert files.data.corpus == FilesConfig(paths=("a.txt", "b.txt"))
    hub = trained("--data.corpus.name", "a/b", "--data.corpus", "hub", "--data.corpus.limit", "5")
    assert hub.data.corpus == HubConfig(name="a/b", limit=5)


def test_flags_may_mend_what_a_chosen_kind_would_refuse(tmp_path):
    odd = tmp_path / "odd.yaml"
    odd.write_text("model: {d_model: 195, n_heads: 3, position: nope}", encoding="utf-8")
    assert "head_dim 65" in mistake(str(odd), "--model.position", "rope")
    mended = trained(str(odd), "--model.position", "rope", "--model.d-model", "192")
    assert mended.model.position == RoPEConfig()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--model.position", "rop"], "--model.position rop: it must be one of nope, learned, sinusoidal, rope"),
        (["--model.position", "rop"], "perhaps you meant rope"),
        (["--model.position"], "--model.position needs a name: nope, learned"),
        (["--model.position", "--resume"], "--model.position needs a name: nope, learned"),
        (["--model.position="], "--model.position needs a name"),
        (["--model.position", "none"], "it must be one of nope"),
        (["--data.corpus", "file"], "perhaps you meant files"),
        (
            ["--model.position", "learned", "--model.position.base", "5"],
            "base belongs to sinusoidal, rope, xpos, sandwich, rope_input",
        ),
        (["--model.position", "learned", "--model.position.base=5"], "but --model.position is learned"),
        (["--data.corpus.paths", "a.txt"], "--data.corpus.paths belongs to files, but --data.corpus is stdlib"),
    ],
)
def test_a_kind_that_cannot_be_meant_is_refused_in_words(argv, words):
    assert words in mistake(*argv)


# --- Another command's options: unions inside unions, a positional argument ------------------------------------------


class Linear(Settings):
    """Positions are divided by a factor."""

    kind: Literal["linear"] = "linear"
    factor: Annotated[float, Field(gt=0)] = 2.0
    """What they are divided by."""


class Yarn(Settings):
    """Frequencies are divided by a ramp."""

    kind: Literal["yarn"] = "yarn"
    factor: float
    """Its height."""


Scaling = Annotated[Linear | Yarn, Field(discriminator="kind")]


class Turned(Settings):
    """Turned."""

    kind: Literal["turned"] = "turned"
    scaling: Scaling | None = None
    """How far it reaches."""


class Still(Settings):
    """Not turned."""

    kind: Literal["still"] = "still"
    scaling: float = 1.0
    """A number here, a union in the other kind."""


class Toy(Settings):
    """A toy command."""

    run: tyro.conf.Positional[str]
    """Run folder."""
    position: Annotated[Turned | Still, Field(discriminator="kind")] = Turned()
    """Where it is."""
    prompt: str = ""
    """First words."""
    stop: tuple[str, ...] = ()
    """Texts to stop at."""
    reach: Scaling | None = Linear()
    """How far it is read."""
    temperature: Annotated[float, Field(ge=0)] = 0.8
    """Zero is greedy."""


def toy(*argv: str) -> Toy:
    return parse(Toy, ["runs/x", *argv])


def test_any_settings_class_can_be_read_and_take_a_positional_argument():
    assert toy() == Toy(run="runs/x")
    told = toy("--prompt", "def ", "--stop", "a", "b c", "--temperature", "0")
    assert told == Toy(run="runs/x", prompt="def ", stop=("a", "b c"), temperature=0)


def test_a_missing_positional_argument_is_named(capsys):
    with pytest.raises(SystemExit) as caught:
        parse(Toy, [])
    assert caught.value.code == 2
    assert "RUN" in capsys.readouterr().err.upper()


@pytest.mark.parametrize(
    "argv",
    [
        ["--position.scaling", "linear", "--position.scaling.factor", "4"],
        ["--position.scaling.factor=4", "--position.scaling.kind=linear"],
        ["--position.scaling", "linear", "--position.scaling.factor", "4", "--position", "turned"],
    ],
)
def test_a_kind_inside_a_kind_is_chosen_after_the_outer_one(argv):
    assert toy(*argv).position == Turned(scaling=Linear(factor=4))


def test_none_clears_an_optional_kind():
    start = Toy(run="runs/x", position=Turned(scaling=Linear()))
    assert parse(Toy, ["runs/y"], start).position == Turned(scaling=Linear())
    assert parse(Toy, ["runs/y", "--position.scaling", "none"], start).position == Turned()
    assert parse(Toy, ["runs/y", "--position.scaling.kind=None"], start).position == Turned()
    assert toy("--reach", "none").reach is None


def test_the_same_flag_may_be_a_number_in_one_kind_and_a_kind_in_another():
    assert toy("--position", "still", "--position.scaling", "3").position == Still(scaling=3)


def test_flags_of_a_kind_that_was_not_chosen_are_refused():
    with pytest.raises(UserError, match=r"factor belongs to linear, yarn, but --position.scaling is none"):
        toy("--position.scaling.factor", "4")


def test_a_field_that_a_chosen_kind_cannot_do_without_is_asked_for(capsys):
    with pytest.raises(SystemExit):
        toy("--position.scaling", "yarn")
    assert "--position.scaling.factor" in capsys.readouterr().err
    assert toy("--position.scaling", "yarn", "--position.scaling.factor", "4").position.scaling == Yarn(factor=4)


def test_help_of_any_class_lists_the_kinds_inside_a_kind(capsys):
    with pytest.raises(SystemExit):
        toy("--help")
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "A toy command." in shown
    assert "--position.scaling {linear,yarn,none}" in shown
    assert "linear: Positions are divided by a factor." in shown


# --- Values that cannot be meant -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--model.d-model", "250"], "model: d_model 250 is not divisible by n_heads 6"),
        (["--model.vocab-size", "300"], "model.vocab_size 300 differs from data.vocab_size 2048"),
        (["--training.batch-size", "4", "--training.micro-batch-size", "8"], "is larger than batch_size 4"),
        (["--model.n-layers", "-1"], "model.n_layers: -1 is refused; it must be a whole number, at least 1"),
        (["--model.n-layers", "0"], "model.n_layers: 0 is refused"),
        (["--optimizer.lr", "nan"], "optimizer.lr: nan is refused; it must be a finite number, above 0"),
        (["--optimizer.lr", "inf"], "optimizer.lr: inf is refused"),
        (["--optimizer.lr", "-1"], "optimizer.lr: -1.0 is refused"),
        (["--model.dropout", "1"], "model.dropout: 1.0 is refused"),
        (
            ["--model.n-kv-heads", "x"],
            "model.n_kv_heads: 'x' is refused; it must be a whole number, at least 1 or none",
        ),
        (["--model.position.layers", "frist"], "model.position.layers: 'frist' is refused; it must be all or first"),
        (["--model.position.layers", "all", "1"], "model.position.layers: ('all', '1') is refused"),
        (["--optimizer.betas", "0.9", "x"], "optimizer.betas: ('0.9', 'x') is refused; it must be a list of 2"),
        (["--resume", "--overwrite"], "--resume goes on with a run and --overwrite throws it away"),
        (["no-such.yaml"], "no-such.yaml: no such file"),
    ],
)
def test_a_value_that_cannot_be_meant_is_refused_in_one_line(argv, words):
    message = mistake(*argv)
    assert words in message
    assert "\n" not in message


def test_a_misspelt_flag_brings_the_right_one_to_mind(capsys):
    shown = box(capsys, "--model.n-layer", "5")
    assert "Perhaps you meant" in shown
    assert "--model.n-layers" in shown


@pytest.mark.parametrize("argv", [["--model.n-layers", "x"], ["--model.n-layers", "4.5"], ["--model.n-layers"]])
def test_a_word_that_is_no_number_is_refused_by_tyro(argv, capsys):
    assert "--model.n-layers" in box(capsys, *argv)


def test_a_word_that_is_no_choice_is_refused_with_the_choices(capsys):
    assert "'off', 'on'" in box(capsys, "--training.compile", "maybe")


# --- Help ------------------------------------------------------------------------------------------------------------


def test_help_shows_every_kind_with_its_line_and_the_flags_of_the_chosen_one(capsys):
    shown = help_text(capsys, "--model.position", "learned")
    for name, entry in SCHEMES.items():
        assert f"{name}: {' '.join(entry.config.__doc__.splitlines()[0].split())}" in shown
    assert "--model.position.init-std" in shown
    assert "--model.position.base" not in shown
    assert "(default: learned)" in shown


def test_help_shows_the_values_of_the_file(capsys):
    assert "--model.position.layout {interleaved,half}" in help_text(capsys, ROPE_HALF)
    assert "(default: half)" in help_text(capsys, ROPE_HALF)


def test_help_comes_from_the_descriptions_of_the_fields(capsys):
    shown = help_text(capsys)
    assert "[CONFIG.yaml]" in shown
    for group, part in Config.model_fields.items():
        for name in part.annotation.model_fields:
            assert f"--{group}.{name.replace('_', '-')}" in shown
            assert part.annotation.describe(name)
            assert part.annotation.describe(name) in shown
    assert "--resume" in shown
    assert "--overwrite" in shown


# --- Mistakes --------------------------------------------------------------------------------------------------------


def outcome(capsys, error: BaseException) -> tuple[object, str]:
    with pytest.raises(SystemExit) as caught, exit_on_user_error():
        raise error
    return caught.value.code, capsys.readouterr().err


def test_a_mistake_is_one_line_whatever_is_in_it(capsys):
    assert outcome(capsys, UserError("a: 1\n  is  wrong\r\n")) == (2, "error: a: 1 is wrong\n")


def test_a_finding_of_pydantic_is_one_line_without_its_address(capsys):
    with pytest.raises(ValidationError) as found:
        NoPEConfig(layer="all")
    code, line = outcome(capsys, found.value)
    assert code == 2
    assert line == "error: layer: Extra inputs are not permitted\n"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.ENOENT, errno.EISDIR, errno.EROFS])
def test_a_fault_of_the_disk_is_one_line_with_the_file(number, capsys):
    code, line = outcome(capsys, OSError(number, os.strerror(number), "runs/x/last"))
    assert code == 2
    assert line.startswith(f"error: runs/x/last: {os.strerror(number)}")
    assert line.count("\n") == 1


def test_a_fault_of_the_disk_without_a_file_is_told_too(capsys):
    assert outcome(capsys, OSError(errno.ENOSPC, "No space left on device"))[1].startswith("error: No space left")


@pytest.mark.parametrize("error", [ValueError("x"), AssertionError(), KeyError("x"), OSError("a library's own")])
def test_a_fault_of_ours_keeps_its_traceback(error):
    with pytest.raises(type(error)), exit_on_user_error():
        raise error


def test_control_c_is_quiet(capsys):
    assert outcome(capsys, KeyboardInterrupt()) == (130, "")


def test_a_command_can_be_decorated(capsys):
    @exit_on_user_error()
    def main() -> None:
        raise UserError("told")

    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().err == "error: told\n"


def test_an_exit_goes_through_as_it_is():
    with pytest.raises(SystemExit) as caught, exit_on_user_error():
        raise SystemExit(3)
    assert caught.value.code == 3


# --- From outside ----------------------------------------------------------------------------------------------------

COMMAND = """
import sys
from training.command_line import exit_on_user_error, parse_training
with exit_on_user_error():
    try:
        parse_training(sys.argv[1:])
    finally:
        heavy = {"torch", "numpy", "datasets", "sentencepiece", "wandb", "typeguard", "asyncio"} & set(sys.modules)
        print(*sorted(heavy), file=sys.stderr, end="")
"""


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", COMMAND, *argv], cwd=ROOT, text=True, capture_output=True, timeout=60)


def test_help_and_mistakes_import_nothing_heavy():
    assert run("--help").stderr == ""
    refused = run("--model.d-model", "250")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == "error: model: d_model 250 is not divisible by n_heads 6\n"


ENDLESS = """
from training.command_line import exit_on_user_error
with exit_on_user_error():
    while True:
        print("x" * 1000)
"""


SHORT = """
from training.command_line import exit_on_user_error
with exit_on_user_error():
    print("x")
"""


@pytest.mark.parametrize("command", [COMMAND, ENDLESS, SHORT], ids=["help", "endless", "short"])
def test_a_closed_pipe_is_no_mistake(command):
    """What `| head` does; a short output fits into the buffer, so it breaks only when that is flushed."""
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    argv, pipe = [sys.executable, "-c", command, "--help"], subprocess.PIPE
    with subprocess.Popen(argv, cwd=ROOT, stdout=pipe, stderr=pipe, text=True, env=buffered) as writer:
        assert writer.stdout is not None
        assert writer.stderr is not None
        writer.stdout.close()
        assert writer.stderr.read() == ""
    assert writer.returncode == 141
