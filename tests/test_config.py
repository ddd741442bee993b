"""Configuration files: what is read, what is refused, and in which words."""

from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import Field

from data.config import FilesConfig, StdlibConfig
from model.config import ModelConfig
from model.errors import UserError
from model.position import SCHEMES
from model.position.config import LearnedConfig, RoPEConfig
from model.settings import Settings
from training.config import Config, load, save, to_yaml
from training.settings_tree import build, defaults, merge

CONFIGS = Path(__file__).parent.parent / "configs"
SHIPPED = [path for path in sorted(CONFIGS.rglob("*.yaml")) if path.parent.name != "compare"]


def written(folder: Path, text: str, name: str = "x.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def refusal(folder: Path, text: str) -> str:
    with pytest.raises(UserError) as caught:
        load(written(folder, text))
    message = str(caught.value)
    assert "\n" not in message
    assert "pydantic" not in message
    assert "validation error" not in message
    return message.replace(str(folder), "")


# --- What is shipped -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_file_loads_and_says_what_it_is(path):
    load(path)
    assert path.read_text(encoding="utf-8").startswith("# ")


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_what_is_saved_loads_as_equal(path, tmp_path):
    config = load(path)
    save(config, tmp_path / "config.yaml")
    assert load(tmp_path / "config.yaml") == config


def test_every_scheme_of_the_table_has_a_file_of_its_name():
    for name in SCHEMES:
        assert load(CONFIGS / "position" / f"{name}.yaml").model.position.kind == name


def test_position_files_differ_from_the_base_in_nothing_but_position():
    base = load(CONFIGS / "base.yaml")
    for path in sorted((CONFIGS / "position").glob("*.yaml")):
        config = load(path)
        same = config.model.model_copy(update={"position": base.model.position, "random_positions": None})
        assert config.model_copy(update={"model": same}) == base, path


def test_no_two_position_files_say_the_same():
    models = [load(path).model for path in sorted((CONFIGS / "position").glob("*.yaml"))]
    positions = [(model.position, model.random_positions) for model in models]
    assert len(set(positions)) == len(positions)


def test_the_base_file_is_what_runs_without_a_file():
    assert load(CONFIGS / "base.yaml") == load() == Config()


# --- Writing and reading back ----------------------------------------------------------------------------------------

numbers = st.floats(min_value=1e-300, max_value=1e300)
words = st.text(st.characters(exclude_categories=["Cs"]))


@settings(max_examples=60, deadline=None)
@example("\x85", "\u2028", 1e-5, ["\ufeff", "# a: 'b' \"c\"\n"])
@given(words, words, numbers, st.lists(words, max_size=3))
def test_any_configuration_reads_back_as_it_was_written(tmp_path_factory, prompt, out, lr, paths):
    tree = {"optimizer": {"lr": lr}, "training": {"sample_prompt": prompt, "out": out or None}}
    config = Config.model_validate(tree | {"data": {"corpus": FilesConfig(paths=tuple(paths))}})
    if str(config.training.out).lower() in ("none", "null"):
        return  # the word for nothing
    path = tmp_path_factory.getbasetemp() / "round.yaml"
    save(config, path)
    assert load(path) == config


@pytest.mark.parametrize(
    "text", ["1e-4", "off", "no", "010", "3:30", "~", "null", "true", "", " x ", "a: b", "1_0", "="]
)
def test_text_that_looks_like_something_else_stays_text_in_both_dialects(text, tmp_path):
    config = Config.model_validate({"training": {"sample_prompt": text}})
    save(config, tmp_path / "x.yaml")
    assert load(tmp_path / "x.yaml").training.sample_prompt == text
    assert yaml.safe_load(to_yaml(config))["training"]["sample_prompt"] == text


def test_the_shape_of_the_model_can_be_read_from_its_own_part_of_the_file():
    config = load(CONFIGS / "position" / "rope_half.yaml")
    assert ModelConfig.model_validate(yaml.safe_load(to_yaml(config))["model"]) == config.model


# --- One file over another -------------------------------------------------------------------------------------------


def test_a_file_goes_over_what_it_extends_field_by_field(tmp_path):
    written(tmp_path, "model: {n_layers: 2, d_model: 96}", "low.yaml")
    written(tmp_path, "extends: low.yaml\nmodel: {n_layers: 3}", "middle.yaml")
    config = load(written(tmp_path, "extends: middle.yaml\ntraining: {steps: 5}"))
    assert (config.model.n_layers, config.model.d_model, config.training.steps) == (3, 96, 5)


def test_extends_is_relative_to_the_file_that_says_it(tmp_path):
    written(tmp_path, "model: {n_layers: 2}", "low.yaml")
    (tmp_path / "sub").mkdir()
    assert load(written(tmp_path / "sub", "extends: ../low.yaml")).model.n_layers == 2


@pytest.mark.parametrize("above", ["learned", "{kind: learned}"])
def test_another_kind_replaces_what_lies_below(above, tmp_path):
    written(tmp_path, "model: {position: {kind: rope, layers: first, base: 5.0}}", "low.yaml")
    config = load(written(tmp_path, f"extends: low.yaml\nmodel: {{position: {above}}}"))
    assert config.model.position == LearnedConfig()


def test_a_bare_word_means_that_kind_with_its_defaults_whatever_lies_below(tmp_path):
    written(tmp_path, "model: {position: {kind: rope, layout: half}}", "low.yaml")
    assert load(written(tmp_path, "extends: low.yaml\nmodel: {position: rope}")).model.position == RoPEConfig()


@pytest.mark.parametrize("above", ["{base: 5.0}", "{kind: rope, base: 5.0}"])
def test_fields_of_the_same_kind_are_merged(above, tmp_path):
    written(tmp_path, "model: {position: {kind: rope, layout: half}}", "low.yaml")
    config = load(written(tmp_path, f"extends: low.yaml\nmodel: {{position: {above}}}"))
    assert config.model.position == RoPEConfig(layout="half", base=5.0)


def test_fields_without_a_kind_go_to_the_default_kind(tmp_path):
    assert load(written(tmp_path, "model: {position: {layers: first}}")).model.position == RoPEConfig(layers="first")


def test_fields_over_a_bare_word_go_to_that_kind(tmp_path):
    written(tmp_path, "model: {position: learned}", "low.yaml")
    config = load(written(tmp_path, "extends: low.yaml\nmodel: {position: {layers: all}}"))
    assert config.model.position == LearnedConfig(layers="all")


def test_an_empty_group_changes_nothing(tmp_path):
    assert load(written(tmp_path, "model:\ndata:\n  corpus:\n")) == Config()


def test_overrides_may_be_dotted_or_nested_and_go_over_the_file(tmp_path):
    path = written(tmp_path, "optimizer: {lr: 0.5}")
    dotted = load(path, {"model.position": "learned", "model.position.layers": "all", "optimizer.lr": 0.25})
    nested = load(path, {"model": {"position": {"kind": "learned", "layers": "all"}}, "optimizer": {"lr": 0.25}})
    assert dotted == nested
    assert dotted.model.position == LearnedConfig(layers="all")
    assert dotted.optimizer.lr == 0.25


@pytest.mark.parametrize("loop", [["a.yaml"], ["b.yaml", "a.yaml"]])
def test_a_file_that_extends_itself_is_refused(loop, tmp_path):
    names = ["a.yaml", *loop]
    for name, base in pairwise(names):
        written(tmp_path, f"extends: {base}", name)
    with pytest.raises(UserError, match="extends itself"):
        load(tmp_path / "a.yaml")


def test_extends_must_be_one_name(tmp_path):
    assert "one file" in refusal(tmp_path, "extends: [a.yaml]")


# --- Unions inside unions --------------------------------------------------------------------------------------------


class Linear(Settings):
    """Linear."""

    kind: Literal["linear"] = "linear"
    factor: Annotated[float, Field(gt=0)] = 2.0


class Yarn(Settings):
    """Yarn."""

    kind: Literal["yarn"] = "yarn"
    factor: float
    ramp: tuple[int, int] = (1, 32)


Scaling = Annotated[Linear | Yarn, Field(discriminator="kind")]


class Turned(Settings):
    """Turned."""

    kind: Literal["turned"] = "turned"
    scaling: Scaling | None = None


class Still(Settings):
    """Still."""

    kind: Literal["still"] = "still"


class Toy(Settings):
    """A union inside a member of a union, and optional."""

    position: Annotated[Turned | Still, Field(discriminator="kind")] = Turned()
    depth: int = 1


def toy(*layers: dict[str, Any]) -> Toy:
    tree = defaults(Toy)
    for layer in layers:
        tree = merge(Toy, tree, layer)
    return build(Toy, tree)


def test_a_word_names_a_kind_at_any_depth():
    assert toy({"position": {"scaling": "linear"}}).position == Turned(scaling=Linear())
    assert toy({"position": {"scaling": {"kind": "yarn", "factor": 4}}}).position == Turned(scaling=Yarn(factor=4))


def test_inner_kinds_replace_and_inner_fields_merge():
    below = {"position": {"scaling": {"kind": "yarn", "factor": 4, "ramp": [2, 3]}}}
    assert toy(below, {"position": {"scaling": {"factor": 8}}}).position == Turned(scaling=Yarn(factor=8, ramp=(2, 3)))
    assert toy(below, {"position": {"scaling": "linear"}}).position == Turned(scaling=Linear())


@pytest.mark.parametrize("nothing", [None, "none", "None", "null"])
def test_none_clears_an_optional_union(nothing):
    assert toy({"position": {"scaling": "linear"}}, {"position": {"scaling": nothing}}).position == Turned()


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"position": {"scaling": {"factor": 2}}}, "position.scaling.kind: is missing; it must be one of linear, yarn"),
        ({"position": {"scaling": "linaer"}}, "position.scaling.kind: 'linaer' is refused"),
        ({"position": {"scaling": "linaer"}}, "perhaps you meant linear"),
        ({"position": {"scaling": {"kind": "linear", "factor": 0}}}, "position.scaling.factor: 0 is refused"),
        ({"position": {"scaling": "yarn"}}, "position.scaling.factor: is missing"),
        ({"position": {"kind": "still", "scaling": "linear"}}, "position.scaling: unknown setting"),
        ({"position": {"scaling": {"kind": "linear", "factr": 2}}}, "position.scaling.factr: unknown setting"),
    ],
)
def test_mistakes_inside_are_named_by_their_whole_path(tree, words):
    with pytest.raises(UserError) as caught:
        toy(tree)
    assert words in str(caught.value)


# --- Values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("optimizer: {lr: 1e-4}", "optimizer.lr", 1e-4),
        ("optimizer: {lr: 1.E-4}", "optimizer.lr", 1e-4),
        ("optimizer: {lr: '1e-4'}", "optimizer.lr", 1e-4),
        ("training: {compile: off}", "training.compile", "off"),
        ("training: {compile: false}", "training.compile", "off"),
        ("training: {compile: on}", "training.compile", "on"),
        ("training: {wandb: off}", "training.wandb", "off"),
        ("training: {sample_prompt: no}", "training.sample_prompt", "no"),
        ("training: {out: none}", "training.out", None),
        ("training: {out: ~}", "training.out", None),
        ("model: {n_kv_heads: none}", "model.n_kv_heads", None),
        ("model: {tie_embeddings: 'False'}", "model.tie_embeddings", False),
        ("model: {tie_embeddings: no}", "model.tie_embeddings", False),
        ("training: {steps: 010}", "training.steps", 10),
        ("training: {steps: 10_000}", "training.steps", 10000),
        ("\ufefftraining: {steps: 7}", "training.steps", 7),
    ],
)
def test_a_value_means_what_it_looks_like(text, path, value, tmp_path):
    found: Any = load(written(tmp_path, text))
    for name in path.split("."):
        found = getattr(found, name)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: {n_layers: 4.5}", "model.n_layers: 4.5 is refused; it must be a whole number, at least 1"),
        ("model: {n_layers: true}", "model.n_layers: true is refused; it must be a whole number"),
        ("model: {n_layers: }", "model.n_layers: none is refused"),
        ("model: {n_layers: -2}", "model.n_layers: -2 is refused; it must be a whole number, at least 1"),
        ("model: {n_layers: [4]}", "model.n_layers: [4] is refused"),
        ("model: {n_kv_heads: true}", "model.n_kv_heads: true is refused"),
        ("model: {dropout: true}", "model.dropout: true is refused; it must be a finite number, at least 0, below 1"),
        ("model: {tie_embeddings: maybe}", "model.tie_embeddings: 'maybe' is refused; it must be true or false"),
        ("model: {tie_embeddings: 2}", "model.tie_embeddings: 2 is refused"),
        ("model: {position: {layers: [true]}}", "model.position.layers: [True] is refused"),
        (
            "model: {position: {layers: firs}}",
            "'firs' is refused; it must be all or first or `all but every 4th` or a list",
        ),
        ("model: {position: {layers: firs}}", "perhaps you meant first"),
        (
            "model: {position: rop}",
            "model.position.kind: 'rop' is refused; it must be one of nope, learned, sinusoidal",
        ),
        ("model: {position: rop}", "perhaps you meant rope"),
        ("model: {position: {kind: [rope]}}", "model.position.kind: ['rope'] is refused"),
        ("model: {position: 5}", "model.position: 5 is refused; it must be one of nope"),
        ("model: 5", "model: 5 is refused; it must be a group of settings"),
        ("data: {corpus: file}", "perhaps you meant files"),
        ("data: {corpus: {kind: files, paths: a.txt}}", "data.corpus.paths: 'a.txt' is refused; it must be a list"),
        ("optimizer: {lr: 0}", "optimizer.lr: 0 is refused; it must be a finite number, above 0"),
        ("optimizer: {lr: fast}", "optimizer.lr: 'fast' is refused"),
        ("optimizer: {lr: .nan}", "optimizer.lr: nan is refused; it must be a finite number"),
        ("optimizer: {lr: .inf}", "optimizer.lr: inf is refused; it must be a finite number"),
        ("optimizer: {lr: 1e999}", "optimizer.lr: inf is refused"),
        ("optimizer: {betas: [0.9]}", "optimizer.betas: [0.9] is refused; it must be a list of 2"),
        ("training: {compile: yes}", "training.compile: 'yes' is refused; it must be auto or off or on"),
        ("training: {max_minutes: 3:30}", "training.max_minutes: '3:30' is refused"),
        ("training: {sample_prompt: 5}", "training.sample_prompt: 5 is refused; it must be text"),
        ("training: {batch_size: 4, micro_batch_size: 8}", "training.micro_batch_size 8 is larger than batch_size 4"),
        ("model: {d_model: 250}", "model: d_model 250 is not divisible by n_heads 6"),
        ("model: {vocab_size: 300}", "model.vocab_size 300 differs from data.vocab_size 2048"),
    ],
)
def test_a_value_that_cannot_be_meant_is_refused_in_words(text, words, tmp_path):
    assert words in refusal(tmp_path, text)


FLOATS = [
    f"{group}.{name}"
    for group, part in Config.model_fields.items()
    for name, field in part.annotation.model_fields.items()
    if field.annotation in (float, float | None)
]


@pytest.mark.parametrize("path", FLOATS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, True])
def test_no_number_may_be_negative_endless_or_a_truth_value(path, value):
    with pytest.raises(UserError, match=f"{path}: .* is refused"):
        load(None, {path: value})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: {n_layer: 4}", "model.n_layer: unknown setting; perhaps you meant n_layers"),
        ("modle: {n_layers: 4}", "modle: unknown setting; perhaps you meant model"),
        ("zzz: 4", "zzz: unknown setting; known here: model, data, optimizer, training"),
        ("n_layers: 4", "n_layers: unknown setting; perhaps you meant model.n_layers"),
        ("model: {lr: 4}", "model.lr: unknown setting; perhaps you meant optimizer.lr"),
        ("model: {position: {kind: rope, bas: 4}}", "model.position.bas: unknown setting; perhaps you meant base"),
        ("model: {position: {kind: learned, base: 4}}", "model.position.base: unknown setting"),
        ("resume: true", "resume: unknown setting"),
    ],
)
def test_an_unknown_key_is_refused_with_its_path_and_a_guess(text, words, tmp_path):
    assert words in refusal(tmp_path, text)


def test_all_that_is_wrong_stands_in_one_line_after_the_file(tmp_path):
    message = refusal(tmp_path, "model: {n_layers: 0, n_haeds: 6}\noptimizer: {lr: -1}")
    assert message.startswith("/x.yaml: model.")
    assert all(path in message for path in ["model.n_layers: 0", "model.n_haeds", "optimizer.lr: -1"])


# --- Files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "# only a comment\n", "---\n", "~"])
def test_an_empty_file_says_so(text, tmp_path):
    assert "the file is empty" in refusal(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- a\n", "no group of settings"),
        ("just words", "no group of settings"),
        ("model: {n_layers: 4, n_layers: 5}", "line 1, column 22: n_layers stands here twice"),
        ("model:\n  n_layers: 4\nmodel:\n  n_heads: 2", "line 3, column 1: model stands here twice"),
        ("model:\n\tn_layers: 4", "line 2, column 1: found character '\\t' that cannot start any token (indent"),
        ("model: {n_layers: 4", "line 1, column"),
        ("model: &x {n_layers: 4}\ndata: *x", "cannot begin with & * or !"),
        ("model: !!python/object:os.system {}", "cannot begin with & * or !"),
        ("1: 2", "1 is no name of a setting"),
        ("? [a, b]\n: 3", "is no name of a setting"),
        ("a: 1\n---\nb: 2", "line"),
        ("a: \x00", "line"),
        ("training: {steps: " + "9" * 5000 + "}", "integer"),
        ("[" * 800, "nested too deeply"),
    ],
)
def test_a_damaged_file_is_refused_with_the_place(text, words, tmp_path):
    if words == "line" and "\x00" in text:
        words = "special characters"
    assert words in refusal(tmp_path, text)


def test_a_byte_that_is_no_utf_8_is_named(tmp_path):
    (tmp_path / "x.yaml").write_bytes(b"training: {out: caf\xe9}")
    with pytest.raises(UserError, match="byte 19 is not valid UTF-8"):
        load(tmp_path / "x.yaml")


def test_a_missing_file_brings_the_nearest_one_to_mind(tmp_path):
    written(tmp_path, "extends: bas.yaml", "demo.yaml")
    written(tmp_path, "model: {}", "base.yaml")
    for wrong, meant in [("dmo.yaml", "demo.yaml"), ("demo", "demo.yaml"), ("demo.yml", "demo.yaml")]:
        with pytest.raises(UserError, match=rf"{wrong}: no such file; perhaps you meant .*{meant}"):
            load(tmp_path / wrong)
    with pytest.raises(UserError, match=r"bas.yaml: no such file; perhaps you meant .*base.yaml"):
        load(tmp_path / "demo.yaml")


def test_a_missing_file_is_looked_for_among_the_shipped_ones(monkeypatch):
    monkeypatch.chdir(CONFIGS.parent)
    with pytest.raises(UserError, match=r"rope_half: no such file; perhaps you meant configs.position.rope_half.yaml"):
        load("rope_half")


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(UserError, match=r"is a folder; name a .yaml file in it$"):
        load(tmp_path)


def test_a_file_in_the_place_of_a_folder_is_told_in_one_line(tmp_path):
    written(tmp_path, "model: {}")
    with pytest.raises(UserError, match="Not a directory"):
        load(tmp_path / "x.yaml" / "y.yaml")


def test_what_a_field_may_be_covers_every_field():
    """No type of a field is shown by its Python name."""
    from training.settings_tree import every_field, expected

    for path, field in every_field(Config):
        assert not any(sign in expected(field.annotation) for sign in "<>'"), path


def test_corpora_are_words_too(tmp_path):
    assert load(written(tmp_path, "data: {corpus: stdlib}")).data.corpus == StdlibConfig()
