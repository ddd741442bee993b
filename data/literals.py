"""Which Python files are tables and encoded blobs rather than text: those only teach a model to write hexadecimal."""

import re

MOSTLY = 0.5

_LITERAL = re.compile(
    r"""[bru]{0,2}(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""  # a string on one line
    r"|\b(?:0[xX][0-9a-fA-F]+|[0-9][0-9.eE_]*|None|True|False)\b"
)
_MARK = "\0"
_WORD = re.compile(r"\w")


def is_mostly_literal(source: str) -> bool:
    """Say whether at least half of the characters of a Python file stand in rows of literals.

    Indentation, blank lines and lines of comment count for neither side: tables are often commented row by row.
    """
    lines = [line for raw in source.split("\n") if (line := raw.strip()) and not line.startswith("#")]
    in_rows = sum(len(line) for line in lines if is_row(line))
    return in_rows >= MOSTLY * max(1, sum(map(len, lines)))


def is_row(line: str) -> bool:
    """Say whether a line holds literals and punctuation only, such as `'amp': '\\x26',  # ampersand`."""
    if '"""' in line or "'''" in line:
        return False  # a docstring on one line is prose
    code = _LITERAL.sub(_MARK, line).partition("#")[0]
    return _MARK in code and not _WORD.search(code)
