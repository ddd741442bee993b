"""The numbers for other programs: results.csv and results.json."""

import csv
import io
import json
from typing import Any

from experiments.results import Measurement, Results


def csv_text(results: Results) -> str:
    """Return one row a measurement, under the names of its fields; an empty field is one that has no value."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(Measurement._fields)
    writer.writerows(results.measurements)
    return out.getvalue()


def json_text(results: Results) -> str:
    """Return everything the report is made from; a value that is undefined is null."""
    return json.dumps(_plain(results), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    """Turn named tuples into objects, all the way down; json itself would write them as lists."""
    if hasattr(value, "_asdict"):
        return {name: _plain(each) for name, each in value._asdict().items()}
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value
