"""The one base of all configuration classes, and what their unions have in common."""

import ast
import sys
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, BeforeValidator, ConfigDict


class Settings(BaseModel):
    """A group of settings: frozen, unknown keys refused, the string below a field is its description."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, allow_inf_nan=False)

    @classmethod
    def describe(cls, field: str) -> str:
        """Return the string that stands below a field in the class that declares it.

        Read when it is asked for: pydantic's own `use_attribute_docstrings` searches the source of every class as it is
        made, which took a fifth of the time of every `--help` and every error.
        """
        home = next(base for base in cls.__mro__ if field in vars(base).get("__annotations__", {}))
        return _strings_below(Path(str(sys.modules[home.__module__].__file__))).get((home.__name__, field), "")


@cache
def _strings_below(path: Path) -> dict[tuple[str, str], str]:
    """Return the string below each annotated name of each class in a source file, by class and name."""
    strings = {}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef):
            for field, below in zip(node.body, node.body[1:], strict=False):
                match field, below:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                        strings[node.name, name] = " ".join(text.split())
    return strings


def _spelled_out(value: Any) -> Any:
    return {"kind": value} if isinstance(value, str) else value


A_WORD_IS_A_KIND = BeforeValidator(_spelled_out)
"""Lets `position: alibi` stand for `position: {kind: alibi}`."""
