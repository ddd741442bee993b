"""One run, described whole: model, data, optimizer, training. Torch-free.

First the classes, then how a tree of settings is merged, checked and explained, then its YAML files.
"""

import re
import types
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, BeforeValidator, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from data.config import DataConfig
from model.config import ModelConfig
from model.errors import UserError
from model.settings import Settings

Count = Annotated[int, Field(ge=1)]
CountOr0 = Annotated[int, Field(ge=0)]


class OptimizerConfig(Settings):
    """AdamW and its learning rate over time (Loshchilov and Hutter, 2019)."""

    lr: Annotated[float, Field(gt=0)] = 3e-3
    """Peak learning rate."""
    warmup_steps: CountOr0 = 50
    """Steps over which the rate rises to its peak."""
    min_lr_fraction: Annotated[float, Field(ge=0, le=1)] = 0.1
    """The cosine ends at this share of the peak."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    """Decay rates of the two moments."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the root of the second moment."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Decay of matrices; gains and positional parameters have none."""
    clip_norm: Annotated[float, Field(ge=0)] = 1.0
    """Gradients are scaled down to this norm; 0: never."""


def _yaml_reads_off_as_false(value: object) -> object:
    return {False: "off", True: "on"}.get(value, value) if isinstance(value, bool) else value


class TrainingConfig(Settings):
    """How long, in what portions and where a run trains, and what it writes down."""

    out: str | None = None
    """Run folder; none: runs/ and the configuration file's name."""
    seed: CountOr0 = 0
    """Seed of the weights, the order of windows and dropout."""
    steps: Count = 1000
    """Number of optimizer steps."""
    max_minutes: Annotated[float, Field(gt=0)] | None = None
    """Ceiling on training time: a short measurement at the start cuts steps to fit, and the run folder keeps them."""
    batch_size: Count = 16
    """Windows a step."""
    micro_batch_size: Count | None = None
    """Windows a forward pass; gradients are accumulated over the step; none: batch_size."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """auto: bf16 where the hardware multiplies it fast (CUDA, avx512_bf16, AMX), else fp16 on CUDA, else fp32."""
    compile: Annotated[Literal["off", "on"], BeforeValidator(_yaml_reads_off_as_false)] = "off"
    """Compile the blocks with torch.compile; pays on runs of more than a few minutes."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """auto: cuda, else mps, else cpu."""
    log_every: Count = 10
    """Steps between lines in metrics.jsonl."""
    eval_every: Count = 200
    """Steps between evaluations; the last step is always evaluated."""
    eval_windows: Count = 64
    """Validation windows a evaluation reads on the way; the final figures read all of them."""
    checkpoint_every: Count = 200
    """Steps between checkpoints; the last step always gets one."""
    keep: Count = 2
    """Newest checkpoints to keep; the best one stays too."""
    sample_every: CountOr0 = 200
    """Steps between printed samples; 0: never."""
    sample_prompt: str = "def "
    """Prompt of the printed samples."""
    sample_tokens: Count = 64
    """Length of a printed sample, in tokens."""
    wandb: Annotated[Literal["off", "offline", "online"], BeforeValidator(_yaml_reads_off_as_false)] = "off"
    """Also send the metrics to Weights & Biases; never asks for a login and never stops a run."""
    wandb_project: str = "ropelab"
    """Project name at Weights & Biases."""

    @model_validator(mode="after")
    def _parts_fit_together(self) -> "TrainingConfig":
        if self.micro_batch_size is not None and self.micro_batch_size > self.batch_size:
            raise ValueError(
                f"training.micro_batch_size {self.micro_batch_size} is larger than batch_size {self.batch_size}"
            )
        return self


class Config(Settings):
    """One run, described whole."""

    model: ModelConfig = ModelConfig()
    """The network."""
    data: DataConfig = DataConfig()
    """The text."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """The optimizer."""
    training: TrainingConfig = TrainingConfig()
    """The run."""

    @model_validator(mode="after")
    def _vocabulary_has_one_size(self) -> "Config":
        if self.model.vocab_size not in (None, self.data.vocab_size):
            raise ValueError(
                f"model.vocab_size {self.model.vocab_size} differs from data.vocab_size {self.data.vocab_size}: "
                "set data.vocab_size alone"
            )
        return self


# --- What the classes say about a field ------------------------------------------------------------------------------
# All below finds fields, groups and unions by looking at the classes: a new setting or scheme needs no line here.

S = TypeVar("S", bound=BaseModel)
Tree = dict[str, Any]
Path_ = tuple[str, ...]

NONE_WORDS = ("none", "null")


def alternatives(annotation: Any) -> tuple[Any, ...]:
    """Return the types of a union one by one, without `Annotated`; any other type alone."""
    if get_origin(annotation) is Annotated:
        return alternatives(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(kind for part in get_args(annotation) for kind in alternatives(part))
    return (annotation,)


def _groups(annotation: Any) -> list[type[BaseModel]]:
    return [part for part in alternatives(annotation) if isinstance(part, type) and issubclass(part, BaseModel)]


def kinds(annotation: Any) -> dict[str, type[BaseModel]]:
    """Return the members of a discriminated union by name; {} for any other field.

    The house rule that makes them known: a settings class with `kind: Literal[...]` is a member of a union.
    """
    members = [group for group in _groups(annotation) if "kind" in group.model_fields]
    return {name: group for group in members for name in get_args(group.model_fields["kind"].annotation)}


def takes_none(annotation: Any) -> bool:
    """Say whether a field may be empty."""
    return type(None) in alternatives(annotation)


def group_of(annotation: Any, tree: Any) -> type[BaseModel] | None:
    """Return the class that describes this sub-tree: the group of settings, or the member of the union it names."""
    members = kinds(annotation)
    if members:
        kind = tree.get("kind") if isinstance(tree, Mapping) else None
        return members.get(kind) if isinstance(kind, str) else None
    return next(iter(_groups(annotation)), None)


def every_field(settings: type[BaseModel], path: Path_ = ()) -> Iterator[tuple[Path_, FieldInfo]]:
    """Walk all fields, those of every member of a union included; a group comes before its fields."""
    for name, field in settings.model_fields.items():
        yield (*path, name), field
        for group in _groups(field.annotation):
            yield from every_field(group, (*path, name))


# --- One tree over another -------------------------------------------------------------------------------------------


def merge(settings: type[BaseModel], below: Mapping[str, Any], above: Mapping[str, Any]) -> Tree:
    """Lay one tree of settings over another; a bare word, or another kind, replaces a union's sub-tree."""
    merged = dict(below)
    for name, value in above.items():
        field = settings.model_fields.get(name)
        merged[name] = value if field is None else _over(field.annotation, below.get(name), value)
    return merged


def _over(annotation: Any, below: Any, above: Any) -> Any:
    above = _spelled_out(annotation, above)
    if not isinstance(above, Mapping):
        return above
    # Merging the fields of one kind into another would hand RoPE's base to a learned table.
    kept = below if isinstance(below, Mapping) and above.get("kind", below.get("kind")) == below.get("kind") else {}
    group = group_of(annotation, {**kept, **above})
    return {**kept, **above} if group is None else merge(group, kept, above)


def _spelled_out(annotation: Any, value: Any) -> Any:
    """`none` is the empty value, a word is a kind with its defaults, and a group with nothing in it is an empty one."""
    if isinstance(value, str) and value.lower() in NONE_WORDS and takes_none(annotation):
        return None
    if isinstance(value, str) and (members := kinds(annotation)):
        return _a_kind_alone(members, value)
    return {} if value is None and _groups(annotation) and not takes_none(annotation) else value


def _a_kind_alone(members: Mapping[str, type[BaseModel]], name: str) -> Tree:
    """Return a kind with nothing but its defaults: written out, they replace what lies below."""
    return defaults(members[name]) if name in members else {"kind": name}


def defaults(settings: type[BaseModel]) -> Tree:
    """Return the tree of a class's defaults; required fields are not in it."""
    return settings.model_construct().model_dump(warnings=False)


def _nested(overrides: Mapping[str, Any]) -> Iterator[Tree]:
    """Turn `{"model.position": "learned"}` into `{"model": {"position": "learned"}}`, one tree a key."""
    for dotted, value in overrides.items():
        *groups, name = dotted.split(".")
        tree = {name: value}
        for group in reversed(groups):
            tree = {group: tree}
        yield tree


# --- Checking a tree, and saying in one line what is wrong with it ----------------------------------------------------


def build(settings: type[S], tree: Mapping[str, Any], source: str = "") -> S:
    """Check a tree of settings; all that is wrong with it goes into one line (UserError)."""
    problems = [_refused(settings, tree, path) for path in _truth_values_for_numbers(settings, tree)]
    try:
        built = settings.model_validate(tree)
    except ValidationError as error:
        problems += explain(error, settings, tree)
    if problems:
        # A union reports each of its alternatives, and one line a field is enough.
        raise UserError("; ".join([f"{source}: " * bool(source) + problems[0], *dict.fromkeys(problems[1:])]))
    return built


def _truth_values_for_numbers(settings: type[BaseModel], tree: Any, path: Path_ = ()) -> Iterator[Path_]:
    """Find `n_layers: true`: pydantic would take it for 1."""
    for name, value in tree.items():
        field = settings.model_fields.get(name)
        group = group_of(field.annotation, value) if field else None
        if group and isinstance(value, Mapping):
            yield from _truth_values_for_numbers(group, value, (*path, name))
        elif field and _is_truth_value(value) and _wants_a_number(field.annotation):
            yield (*path, name)


def _is_truth_value(value: Any) -> bool:
    return isinstance(value, bool) or (isinstance(value, list | tuple) and any(map(_is_truth_value, value)))


def _wants_a_number(annotation: Any) -> bool:
    parts = alternatives(annotation)
    inner = [part for whole in parts if get_origin(whole) is tuple for part in get_args(whole)]
    return bool not in parts and (int in parts or float in parts or any(_wants_a_number(part) for part in inner))


def explain(error: ValidationError, settings: type[BaseModel], tree: Mapping[str, Any]) -> list[str]:
    """Put pydantic's findings in words, one a field: dotted path, value, what it must be."""
    found = [_in_words(problem, settings, tree) for problem in error.errors(include_url=False)]
    return list(dict.fromkeys(found))


def _in_words(problem: Any, settings: type[BaseModel], tree: Mapping[str, Any]) -> str:
    path = written_path(settings, problem["loc"])
    if problem["type"] == "value_error":
        return f"{'.'.join(path)}: {problem['ctx']['error']}" if path else str(problem["ctx"]["error"])
    if problem["type"] == "extra_forbidden":
        return _unknown(settings, tree, path)
    return _refused(settings, tree, path)


def written_path(settings: type[BaseModel], loc: tuple[str | int, ...]) -> Path_:
    """Return pydantic's `loc` as it was written: without union tags, names of alternatives and list indices."""
    path: Path_ = ()
    group: type[BaseModel] | None = settings
    members: dict[str, type[BaseModel]] = {}
    for part in loc:
        if members:
            group, members = members.get(str(part)), {}
        elif group is None:
            break
        else:
            path = (*path, str(part))
            field = group.model_fields.get(str(part))
            members = kinds(field.annotation) if field else {}
            group = group_of(field.annotation, None) if field else None
    return path


_ABSENT = object()


def _at(settings: type[BaseModel], tree: Any, path: Path_) -> tuple[type[BaseModel] | None, Any, Any]:
    """Follow a path: the class that holds the last name, the type of that field (None: unknown), its value."""
    group: type[BaseModel] | None = settings
    annotation: Any = None
    value = tree
    for name in path:
        holder = group
        field = holder.model_fields.get(name) if holder else None
        annotation = field.annotation if field else None
        if field and field.metadata:
            annotation = Annotated[annotation, *field.metadata]
        value = value.get(name, _ABSENT) if isinstance(value, Mapping) else _ABSENT
        group = group_of(annotation, value)
    return holder, annotation, value


def _refused(settings: type[BaseModel], tree: Mapping[str, Any], path: Path_) -> str:
    _, annotation, value = _at(settings, tree, path)
    members = kinds(annotation)
    if members and isinstance(value, Mapping):
        path, value = (*path, "kind"), value.get("kind", _ABSENT)
    words = "is missing" if value is _ABSENT else f"{_short(value)} is refused"
    return f"{'.'.join(path)}: {words}; it must be {expected(annotation)}{nearest(value, _words(annotation))}"


def _unknown(settings: type[BaseModel], tree: Mapping[str, Any], path: Path_) -> str:
    holder, _, _ = _at(settings, tree, path)
    here = [name for name in holder.model_fields if name != "kind"] if holder else []
    elsewhere = {names[-1]: ".".join(names) for names, _ in every_field(settings)}
    hint = nearest(path[-1], here) or nearest(path[-1], elsewhere, elsewhere)
    return f"{'.'.join(path)}: unknown setting{hint or '; known here: ' + (', '.join(here) or 'none')}"


def nearest(word: Any, words: Any, shown: Mapping[str, str] | None = None) -> str:
    """Return a hint for a misspelt word, or nothing."""
    close = get_close_matches(str(word), list(words), n=1)
    return f"; perhaps you meant {(shown or {}).get(close[0], close[0])}" if close else ""


def _short(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "none", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _words(annotation: Any) -> list[str]:
    literals = [part for part in alternatives(annotation) if get_origin(part) is Literal]
    return [*kinds(annotation), *(str(word) for part in literals for word in get_args(part))]


def expected(annotation: Any) -> str:
    """Put a field's type in words."""
    if get_origin(annotation) is Annotated:
        inner, *notes = get_args(annotation)
        return " ".join([expected(inner), *_bounds(notes)])
    if members := kinds(annotation):
        return " or ".join([f"one of {', '.join(members)}", *["none"] * takes_none(annotation)])
    if get_origin(annotation) in (Union, types.UnionType):
        return " or ".join(expected(part) for part in get_args(annotation))
    if get_origin(annotation) is Literal:
        return " or ".join(str(word) for word in get_args(annotation))
    if get_origin(annotation) is tuple:
        return _a_list(get_args(annotation))
    return "a group of settings" if _groups(annotation) else _NAMES.get(annotation, str(annotation))


_NAMES = {
    int: "a whole number",
    float: "a finite number",
    bool: "true or false",
    str: "text (a number goes in quotes)",
    type(None): "none",
}
_BOUNDS = {"ge": "from {} up", "gt": "above {}", "le": "up to {}", "lt": "below {}"}


def _a_list(parts: tuple[Any, ...]) -> str:
    if parts[-1] is Ellipsis:
        return f"a list, [a, b], each {expected(parts[0])}"
    return f"a list of {len(parts)}, [a, b], each {expected(parts[0])}"


def _bounds(notes: list[Any]) -> Iterator[str]:
    for note in notes:
        yield from _bounds(getattr(note, "metadata", []))
        yield from (words.format(getattr(note, name)) for name, words in _BOUNDS.items() if hasattr(note, name))


# --- YAML files ------------------------------------------------------------------------------------------------------


class _Reader(yaml.SafeLoader):
    """YAML in which a word is a word and a number is a number.

    PyYAML keeps to YAML 1.1, where `off` and `no` are False, `1e-4` is text, `3:30` is 210 and `010` is 8. These are
    the rules of YAML 1.2. Refused besides: a key that stands twice (the first one would be lost without a word), and
    anchors, aliases and tags (an alias can hold itself; `extends` is our way of sharing).
    """

    yaml_implicit_resolvers: dict[Any, Any] = {}  # noqa: RUF012 (PyYAML's own way)

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) or getattr(event, "tag", None):
            problem = "a value cannot begin with & * or ! here; if it is text, put it in quotes"
            raise yaml.composer.ComposerError(None, None, problem, event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen = set()
        for key, _ in node.value:
            problem = "is no name of a setting" if key.tag != "tag:yaml.org,2002:str" else "stands here twice"
            if key.tag != "tag:yaml.org,2002:str" or key.value in seen:
                shown = key.value if isinstance(key, yaml.ScalarNode) else "a list or group"
                raise yaml.constructor.ConstructorError(None, None, f"{shown} {problem}", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


_FLOAT = r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
for _name, _pattern, _first in [
    ("null", r"~|null|Null|NULL|", [*"~nN", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", [*"tTfF"]),
    ("int", r"[-+]?[0-9]+(?:_[0-9]+)*", [*"-+0123456789"]),
    ("float", _FLOAT, [*"-+.0123456789"]),
]:
    _Reader.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(f"(?:{_pattern})\\Z"), _first)
_Reader.add_constructor("tag:yaml.org,2002:int", lambda reader, node: int(node.value))


class _Writer(yaml.SafeDumper):
    """Quotes whatever either YAML would take for something else, so any reader gets the same text back."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _quoted(writer: _Writer, text: str) -> yaml.ScalarNode:
    # Outside double quotes PyYAML folds the rarer line breaks (U+0085, U+2028) into spaces.
    style = None if text.isprintable() else '"'
    return writer.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Writer.add_representer(str, _quoted)
_Writer.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(f"(?:{_FLOAT})\\Z"), [*"-+.0123456789"])


def load(path: str | Path | None = None, overrides: Mapping[str, Any] | None = None) -> Config:
    """Read a configuration: the defaults, under its file (with what that extends), under the overrides.

    Keys of `overrides` may be dotted: `{"model.position": "learned", "optimizer.lr": 1e-3}`.
    """
    layers = [*([] if path is None else _with_what_it_extends(Path(path))), *_nested(overrides or {})]
    tree = defaults(Config)
    for layer in layers:
        tree = merge(Config, tree, layer)
    return build(Config, tree, "" if path is None else str(path))


def to_yaml(config: BaseModel) -> str:
    """Write a configuration out in full; `load` gives back an equal one."""
    tree = config.model_dump(mode="json")
    return yaml.dump(tree, Dumper=_Writer, sort_keys=False, allow_unicode=True, width=120)


def save(config: BaseModel, path: str | Path) -> None:
    """Write a configuration to a file, in full."""
    Path(path).write_text(to_yaml(config), encoding="utf-8", newline="\n")


def _with_what_it_extends(path: Path, above: tuple[Path, ...] = ()) -> list[Tree]:
    """Return the trees of a file and of the files it extends, lowest first."""
    if path.resolve() in above:
        raise UserError(f"{path}: extends itself, by way of {' -> '.join(step.name for step in above)}")
    tree = read_mapping(path)
    base = tree.pop("extends", None)
    if base is None:
        return [tree]
    if not isinstance(base, str):
        raise UserError(f"{path}: extends: {_short(base)} is refused; it must be the name of one file")
    return [*_with_what_it_extends(path.parent / base, (*above, path.resolve())), tree]


def read_mapping(path: Path) -> Tree:
    """Read the settings in a YAML file; whatever is wrong with the file is a UserError of one line."""
    try:
        tree = yaml.load(_text(path), _Reader)
    except RecursionError:
        raise UserError(f"{path}: nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path}: {_where(error)}") from None
    if tree is None:
        raise UserError(f"{path}: the file is empty; write settings in it, or leave it out to run with the defaults")
    if not isinstance(tree, dict):
        raise UserError(f"{path}: {_short(tree)} is no group of settings; write lines such as `extends: base.yaml`")
    return tree


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file{_file_meant(path)}") from None
    except IsADirectoryError:
        raise UserError(f"{path}: is a folder; name a .yaml file in it{_first_in(path)}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: byte {error.start} is not valid UTF-8; save the file as UTF-8") from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None


def _file_meant(path: Path) -> str:
    files = {str(file): file.name for file in sorted(path.parent.glob("*.yaml"))}
    files |= {str(file): file.name for file in sorted(Path("configs").rglob("*.yaml"))}
    by_name = {key: file for file, name in reversed(files.items()) for key in (name, name.removesuffix(".yaml"))}
    return nearest(path.name, by_name, by_name)


def _first_in(folder: Path) -> str:
    return "".join(f", such as {file}" for file in sorted(folder.rglob("*.yaml"))[:1])


def _where(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    words = " ".join(str(getattr(error, "problem", None) or error).split())
    return place + words + (" (indent with spaces, not tabs)" if "'\\t'" in words else "")
