"""The far end of `processes.py`: measures what it is asked for, with the network and training of a given tree.

python served.py TREE, then one JSON request a line on stdin, one JSON answer a line on stdout.
"""

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

Request = dict[str, Any]


def find_modules(tree: Path) -> None:
    """Let `benchmarks` be that of this file, and all else that of the tree: an old revision has no such rooms."""
    here = str(Path(__file__).resolve().parents[1])
    sys.path[0] = here
    importlib.import_module("benchmarks")
    # What the other tree lacks must not be found in this one, where it was installed from.
    sys.path[:] = [str(tree), *(path for path in sys.path if path != here)]
    sys.meta_path[:] = [finder for finder in sys.meta_path if not finder.__module__.startswith("__editable__")]
    model = importlib.import_module("model")
    assert Path(str(model.__file__)).is_relative_to(tree), "another tree would be measured"


def answer(request: Request, prepared: dict[str, Any]) -> dict[str, Any]:
    """Measure once; what was prepared for an earlier request of the same kind is used again."""
    room, name = request["function"].split(":")
    function = getattr(importlib.import_module(room), name)
    from benchmarks.measured.memory import peak_bytes

    key = json.dumps(request, sort_keys=True)
    before = peak_bytes()
    if key not in prepared:
        prepared[key] = function(**request["arguments"])
    rate = prepared[key].rate()
    return {"rate": rate, "notes": prepared[key].notes, "memory": peak_bytes() - before}


def reason(error: Exception) -> str:
    """Return what went wrong, in one line."""
    text = " ".join(str(error).split())
    if isinstance(error, ImportError):
        return f"not there: {text.split(' (')[0]}"
    return text if type(error).__name__ == "UserError" else f"{type(error).__name__}: {text}"


def serve(answers: int) -> None:
    """Answer requests until there are no more."""
    prepared: dict[str, Any] = {}
    for line in sys.stdin:
        try:
            said = answer(json.loads(line), prepared)
        except Exception as error:  # one measurement that fails is a cell, not the end of the others
            said = {"error": reason(error)}
        os.write(answers, (json.dumps(said) + "\n").encode())


if __name__ == "__main__":
    answers = os.dup(1)
    os.dup2(2, 1)  # what libraries print must not be taken for an answer
    find_modules(Path(sys.argv[1]).resolve())
    serve(answers)
