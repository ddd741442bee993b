"""From `sys.argv` to checked settings, and from a mistake to one line; torch-free, so that `--help` is instant.

Every command describes its options as a settings class and calls `parse`. The flags, their help and their choices
are made from that class by tyro; the checks and their messages are those of the files (`training.settings_tree`).
"""

import errno
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import inf
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Generic,
    Literal,
    NamedTuple,
    NoReturn,
    TypeVar,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

# pydantic looks through all installed packages for plugins, at the first class; here that is 0.1 s of each `--help`.
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")

import tyro
from pydantic import BaseModel, ValidationError, model_validator
from pydantic.fields import FieldInfo
from tyro.constructors import (
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

from model.errors import UserError
from model.settings import Settings
from training.config import Config, load
from training.settings_tree import (
    NONE_WORDS,
    alternatives,
    build,
    every_field,
    group_of,
    kinds,
    nearest,
    takes_none,
)

S = TypeVar("S", bound=Settings)
C = TypeVar("C", bound=Config)
Names = tuple[str, ...]


# --- The commands ----------------------------------------------------------------------------------------------------


class TrainArguments(Config):
    """Train one configuration: the defaults, under CONFIG.yaml, under the flags."""

    resume: bool = False
    """Go on where the run's last checkpoint ends."""
    overwrite: bool = False
    """Replace an existing run folder; without this flag it is never touched."""

    @model_validator(mode="after")
    def _one_or_the_other(self) -> "TrainArguments":
        if self.resume and self.overwrite:
            raise ValueError("--resume goes on with a run and --overwrite throws it away: give one of them")
        return self


class Request(NamedTuple, Generic[C]):
    """What a command was asked to do: the configuration, all its arguments, and the file they started from."""

    config: Config
    arguments: C
    config_path: Path | None

    @property
    def resume(self) -> bool:
        """Say whether to go on with the run that is there."""
        return bool(getattr(self.arguments, "resume", False))

    @property
    def overwrite(self) -> bool:
        """Say whether to replace the run that is there."""
        return bool(getattr(self.arguments, "overwrite", False))


def parse_training(argv: Sequence[str] | None = None, prog: str = "python train.py") -> Request[TrainArguments]:
    """Read the arguments of `train.py`: `[CONFIG.yaml] [--resume] [--overwrite] [--model.n-layers 4 ...]`."""
    return parse_with_file(TrainArguments, argv, prog)


def parse_with_file(arguments: type[C], argv: Sequence[str] | None = None, prog: str | None = None) -> Request[C]:
    """Read a command line that may name a configuration file; the flags go over what it says."""
    file, flags = split_file(arguments, sys.argv[1:] if argv is None else argv)
    path = None if file is None else Path(file)
    # Cast: mypy's pydantic plugin takes `type[C]` for Config itself.
    start = cast(C, arguments.model_construct(**({} if path is None else dict(load(path)))))
    given = parse(arguments, flags, start, prog and f"{prog} [CONFIG.yaml]")
    config = Config.model_validate({name: getattr(given, name) for name in Config.model_fields})
    return Request(config, given, path)


def parse(
    settings: type[S],
    argv: Sequence[str] | None = None,
    default: S | None = None,
    prog: str | None = None,
    description: str | None = None,
) -> S:
    """Read a command line into a settings class: flags over `default` (none: the class's own defaults).

    `default` is not checked by itself, so a flag can mend what two other flags broke.
    """
    start = settings.model_construct() if default is None else default
    chosen, flags = choose_kinds(start, plain_words(settings, sys.argv[1:] if argv is None else argv))
    _refuse_what_another_kind_has(chosen, flags)
    tree: Any = tyro.cli(
        _Group,
        prog=prog,
        description=description or settings.__doc__,
        args=flags,
        default=_Group(chosen),
        registry=_as_trees(),
    )
    return build(settings, tree)


# --- The words of a command line -------------------------------------------------------------------------------------

_SWITCH_WORDS = {"true": True, "on": True, "yes": True, "false": False, "off": False, "no": False}


def split_file(settings: type[BaseModel], argv: Sequence[str]) -> tuple[str | None, list[str]]:
    """Take the configuration file out of the arguments: the one word that no flag has a claim to."""
    widths = {flag: _width(parts) for flag, parts in _flags(settings).items()}
    claimed, files, flags = 0.0, [], []
    for word in plain_words(settings, argv):
        if word.startswith("--") or word == "-h":
            claimed = 0 if "=" in word or word == "-h" else widths.get(_hyphens(word), 1)
        elif claimed > 0:
            claimed -= 1
        else:
            files.append(word)
            continue
        flags.append(word)
    if len(files) > 1:
        raise UserError(f"one configuration file at a time, not {' and '.join(files)}; one file can extend another")
    return (files[0] if files else None), flags


def plain_words(settings: type[BaseModel], argv: Sequence[str]) -> list[str]:
    """Rewrite `--tie False` into `--no-tie`: else it would be a switch turned on, and a stray word after it."""
    parts, plain, words = _flags(settings), [], list(argv)
    while words:
        word = words.pop(0)
        flag, joined, value = word.partition("=")
        value = value if joined else "".join(words[:1])
        rewritten = _rewritten(flag, parts.get(_hyphens(flag), []), value.lower())
        if rewritten and not joined:
            words.pop(0)
        plain += rewritten or [word]
    return plain


def _rewritten(flag: str, parts: list[Any], value: str) -> list[str]:
    if parts != [bool] or value not in _SWITCH_WORDS:
        return []
    return [flag if _SWITCH_WORDS[value] else _off(flag)]


def _off(flag: str) -> str:
    group, dot, name = flag.removeprefix("--").rpartition(".")
    return f"--{group}{dot}no-{name}"


def _flags(settings: type[BaseModel]) -> dict[str, list[Any]]:
    """Return every flag there can be, whichever kinds are chosen, with the types that it takes."""
    flags: dict[str, list[Any]] = {}
    for path, field in every_field(settings):
        flags.setdefault(_flag(path), []).extend(alternatives(field.annotation))
    return flags | {_off(flag): [bool] for flag, parts in flags.items() if bool in parts}


def _width(parts: list[Any]) -> float:
    """Return how many words may follow a flag."""
    lists = [get_args(part) for part in parts if get_origin(part) is tuple]
    return max([0 if bool in parts else 1, *(inf if Ellipsis in inner else len(inner) for inner in lists)])


def _flag(path: Names) -> str:
    return "--" + _hyphens(".".join(path))


def _hyphens(flag: str) -> str:
    """tyro takes `--model.n_layers` and `--model.n-layers` alike, and so does what stands before it."""
    return flag.replace("_", "-")


# --- Kinds: what tyro cannot do --------------------------------------------------------------------------------------


def choose_kinds(default: S, argv: Sequence[str]) -> tuple[S, list[str]]:
    """Take `--a.b NAME` and `--a.b.kind NAME` out of the arguments and put that kind, with its defaults, in its place.

    tyro makes flags from the members that stand in the default and cannot change them. An outer kind goes first,
    whatever the order of the flags: it decides which unions there are inside.
    """
    rest, seen = list(argv), set[Names]()
    while waiting := [(path, field) for path, field in unions(default) if path not in seen]:
        path, field = waiting[0]
        seen.add(path)
        names, rest = _take(rest, path, field)
        for name in names[-1:]:
            default = _replaced(default, path, _member(path, field, name))
    return default, rest


def unions(settings: BaseModel, path: Names = ()) -> Iterator[tuple[Names, FieldInfo]]:
    """Walk the discriminated unions of these settings, an outer one before those inside its present member."""
    for name, field in type(settings).model_fields.items():
        if kinds(field.annotation):
            yield (*path, name), field
        value = getattr(settings, name, None)
        if isinstance(value, BaseModel):
            yield from unions(value, (*path, name))


def _take(argv: Sequence[str], path: Names, field: FieldInfo) -> tuple[list[str], list[str]]:
    spellings = (_flag(path), _flag((*path, "kind")))
    names, rest, words = [], [], iter(argv)
    for word in words:
        flag, given, name = word.partition("=")
        if _hyphens(flag) not in spellings:
            rest.append(word)
            continue
        name = name if given else next(words, "")
        if not name or name.startswith("-"):
            raise UserError(f"{flag} needs a name: {', '.join(_choices(field))}")
        names.append(name)
    return names, rest


def _choices(field: FieldInfo) -> list[str]:
    return [*kinds(field.annotation), *["none"] * takes_none(field.annotation)]


def _member(path: Names, field: FieldInfo, name: str) -> BaseModel | None:
    members = kinds(field.annotation)
    if name in members:
        return members[name].model_construct()
    if name.lower() in NONE_WORDS and takes_none(field.annotation):
        return None
    choices = _choices(field)
    raise UserError(f"{_flag(path)} {name}: it must be one of {', '.join(choices)}{nearest(name, choices)}")


def _refuse_what_another_kind_has(settings: BaseModel, argv: Sequence[str]) -> None:
    """Say of `--model.position.base` under `learned` whose it is; tyro, not knowing it, could only guess."""
    for path, union in unions(settings):
        members = kinds(union.annotation)
        present = _kind_at(settings, path)
        for name in dict.fromkeys(name for member in members.values() for name in member.model_fields):
            owners = [kind for kind, member in members.items() if name in member.model_fields]
            if present not in owners and any(_hyphens(word.partition("=")[0]) == _flag((*path, name)) for word in argv):
                flag, owned = _flag((*path, name)), ", ".join(owners)
                raise UserError(f"{flag} belongs to {owned}, but {_flag(path)} is {present}")


def _kind_at(settings: Any, path: Names) -> str:
    for name in path:
        settings = getattr(settings, name, None)
    return str(getattr(settings, "kind", "none"))


def _replaced(settings: S, path: Names, value: BaseModel | None) -> S:
    """Return these settings with one sub-tree exchanged; not checked, since other flags may still follow."""
    name, *inside = path
    if inside:
        value = _replaced(getattr(settings, name), tuple(inside), value)
    return settings.model_copy(update={name: value})


# --- tyro ------------------------------------------------------------------------------------------------------------


class _Group:
    """A group of settings as tyro sees it: an ordinary class.

    Given the settings class itself, tyro imports a type checker to compare it with its default (0.1 s of each
    `--help`), builds each group by itself, and shows pydantic's own words for what is wrong.
    """

    def __init__(self, present: Settings) -> None:
        self.present = present


def _as_trees() -> ConstructorRegistry:
    """Let tyro read flags into plain trees, which are checked once, as a whole, by the code that checks the files."""
    registry = ConstructorRegistry()
    registry.struct_rule(_tree_rule)
    return registry


def _tree_rule(info: StructTypeInfo) -> StructConstructorSpec | None:
    if info.type is not _Group:
        return None
    present = info.default.present
    hints = get_type_hints(type(present), include_extras=True)
    fields = [spec for name in type(present).model_fields for spec in _specs(present, name, hints[name])]
    return StructConstructorSpec(instantiate=_tree_maker(type(present), present), fields=tuple(fields))


def _tree_maker(settings: type[BaseModel], present: BaseModel) -> Any:
    fixed = {"kind": present.kind} if is_member(settings) else {}  # type: ignore[attr-defined]
    empty = {name: None for name, field in settings.model_fields.items() if kinds(field.annotation)}

    def tree(**flags: Any) -> dict[str, Any]:
        return fixed | empty | {name: value for name, value in flags.items() if not name.endswith(_CHOICE)}

    tree.__doc__ = settings.__doc__
    return tree


def is_member(settings: type[BaseModel]) -> bool:
    """Say whether a class is one kind of something: its `kind` is chosen by the flag above it."""
    return bool(kinds(settings))


_CHOICE = " kind"


def _specs(present: Settings, name: str, annotation: Any) -> Iterator[StructFieldSpec]:
    """Return the flags of one field; of a union: the flag that chooses its kind, then those of the present kind."""
    field = type(present).model_fields[name]
    default = getattr(present, name, tyro.MISSING)
    group = None if takes_none(field.annotation) else group_of(field.annotation, None)
    if default is tyro.MISSING and group:
        default = group.model_construct()
    if kinds(field.annotation):
        choice: Any = Annotated[Literal[tuple(_choices(field))], tyro.conf.arg(name=name)]
        shown = "\n".join([type(present).describe(name), *_what_there_is(field)])
        yield StructFieldSpec(name + _CHOICE, choice, getattr(default, "kind", "none"), shown)
    if isinstance(default, Settings):
        yield StructFieldSpec(name, _Group, _Group(default), type(default).__doc__)
    elif not kinds(field.annotation) and not (name == "kind" and is_member(type(present))):
        yield StructFieldSpec(name, _as_words(annotation), default, type(present).describe(name))


def _as_words(annotation: Any) -> Any:
    """Let tyro hand on lists and unions as the words that were typed: `build` turns them into values and checks them.

    tyro could read them, but it imports a type checker for that, and its box would show the inside of our classes.
    """
    parts = alternatives(annotation)
    lists = [get_args(part) for part in parts if get_origin(part) is tuple]
    if not lists and len(parts) == 1:
        return annotation
    reader = PrimitiveConstructorSpec(
        nargs=1 if not lists else "*" if Ellipsis in lists[0] else len(lists[0]),
        metavar="|".join(map(_metavar, parts)),
        instance_from_str=partial(_from_words, parts, bool(lists)),
        is_instance=lambda value: True,
        str_from_instance=_to_words,
    )
    notes = get_args(annotation)[1:] if get_origin(annotation) is Annotated else ()
    return Annotated[(object, reader, *notes)]


def _from_words(parts: tuple[Any, ...], is_list: bool, given: list[str]) -> Any:
    if len(given) == 1 and type(None) in parts and given[0].lower() in NONE_WORDS:
        return None
    literals = [word for part in parts if get_origin(part) is Literal for word in get_args(part)]
    # Where text is allowed beside a list of numbers, a word that is no number is that text.
    may_be_text = str in parts and not _is_number(given[0]) if len(given) == 1 else False
    a_word_alone = len(given) == 1 and (not is_list or given[0] in literals or may_be_text)
    return given[0] if a_word_alone else tuple(given)


def _is_number(word: str) -> bool:
    return word.lstrip("-").isdigit()


def _to_words(value: Any) -> list[str]:
    if isinstance(value, tuple):
        return [str(part) for part in value]
    return ["none" if value is None else str(value)]


def _metavar(part: Any) -> str:
    if get_origin(part) is Literal:
        return f"{{{','.join(map(str, get_args(part)))}}}"
    if get_origin(part) is tuple:
        return " ".join("..." if inner is Ellipsis else _metavar(alternatives(inner)[0]) for inner in get_args(part))
    return "none" if part is type(None) else str(part.__name__.upper())


def _what_there_is(field: FieldInfo) -> list[str]:
    return [f"{name}: {_first_line(member)}" for name, member in kinds(field.annotation).items()]


def _first_line(settings: type[BaseModel]) -> str:
    return (settings.__doc__ or "").strip().partition("\n")[0]


# --- What a mistake looks like ---------------------------------------------------------------------------------------


@contextmanager
def exit_on_user_error() -> Iterator[None]:
    """Turn a mistake into one line on stderr and exit status 2; a fault of ours keeps its traceback.

    Also a decorator: `@exit_on_user_error()` above a command's `main`.
    """
    try:
        try:
            with _in_one_line():
                yield
        finally:
            # Flushed here, after `--help` too, so that a closed pipe is noticed before the interpreter's last breath.
            sys.stdout.flush()
    except BrokenPipeError:
        _leave_quietly()


@contextmanager
def _in_one_line() -> Iterator[None]:
    try:
        yield
    except UserError as error:
        _fail(str(error))
    except ValidationError as error:
        _fail("; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()))
    except OSError as error:
        if error.errno is None or isinstance(error, BrokenPipeError):
            raise
        _fail(_told(error))
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _told(error: OSError) -> str:
    what = error.strerror or str(error)
    where = f"{error.filename}: " if error.filename is not None else ""
    return f"{where}{what}" + (" (free some space, then go on)" if error.errno == errno.ENOSPC else "")


def _fail(message: str) -> NoReturn:
    print("error:", " ".join(message.split()), file=sys.stderr)
    raise SystemExit(2)


def _leave_quietly() -> NoReturn:
    """The reader of the pipe is gone (`| head`): what is still unwritten has nowhere to go."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise SystemExit(128 + 13)
