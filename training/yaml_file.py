"""YAML files of settings: words are words, numbers are numbers, and every mistake is one line that names the file."""

import re
from pathlib import Path
from typing import Any

import yaml

from model.errors import UserError
from training.settings_tree import Tree, nearest, short


class _Reader(yaml.SafeLoader):
    """YAML in which a word is a word and a number is a number.

    PyYAML keeps to YAML 1.1, where `off` and `no` are False, `1e-4` is text, `3:30` is 210 and `010` is 8. These are
    the rules of YAML 1.2. Refused besides: a key that stands twice (the first one would be lost without a word), and
    anchors, aliases and tags (an alias can hold itself; `extends` is our way of sharing).
    """

    yaml_implicit_resolvers: dict[Any, Any] = {}  # noqa: RUF012 (PyYAML's own way)

    def compose_node(self, parent: Any, index: Any) -> Any:
        reader: Any = self  # the stubs leave this method untyped
        event = reader.peek_event()
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


def written(tree: Tree) -> str:
    """Return a tree as YAML text, from which either YAML reads the same tree."""
    return yaml.dump(tree, Dumper=_Writer, sort_keys=False, allow_unicode=True, width=120)


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
        raise UserError(f"{path}: {short(tree)} is no group of settings; write lines such as `extends: base.yaml`")
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
