"""A tree of settings: what the classes say about a field, how trees are merged, and what is wrong with one, in words.

All of it finds fields, groups and unions by looking at the classes: a new setting or scheme needs no line here.
Torch-free.
"""

import types
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from model.errors import UserError

# --- What the classes say about a field ------------------------------------------------------------------------------

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


def nested(overrides: Mapping[str, Any]) -> Iterator[Tree]:
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
    words = "is missing" if value is _ABSENT else f"{short(value)} is refused"
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


def short(value: Any) -> str:
    """Return a value as it may stand in a message: as YAML writes it, and not too long."""
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
        if examples := [example for note in notes for example in getattr(note, "examples", None) or ()]:
            return " or ".join(f"`{example}`" for example in examples)
        return ", ".join([expected(inner), *_bounds(notes)])
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
_BOUNDS = {"ge": "at least {}", "gt": "above {}", "le": "at most {}", "lt": "below {}"}


def _a_list(parts: tuple[Any, ...]) -> str:
    if parts[-1] is Ellipsis:
        return f"a list, [a, b], each {expected(parts[0])}"
    return f"a list of {len(parts)}, [a, b], each {expected(parts[0])}"


def _bounds(notes: list[Any]) -> Iterator[str]:
    for note in notes:
        yield from _bounds(getattr(note, "metadata", []))
        yield from (words.format(getattr(note, name)) for name, words in _BOUNDS.items() if hasattr(note, name))
