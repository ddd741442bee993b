"""Documents that the `datasets` library reads: a data set on the hub, a folder of one, a local table."""

import errno
import glob
import logging
import os
import re
import socket
import threading
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from data.config import HubConfig
from model.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset  # type: ignore[import-untyped]

LOOKUP_SECONDS = 2.0
WITHOUT_TEXT = "rows without text passed over"
# Where several columns hold strings, the first of these names is taken for the text.
USUAL_COLUMNS = ("text", "content", "story")
# A document is closed at this length though its next first line has not come: the pattern may match nothing at all.
LONGEST_JOINED = 16 * 2**20

Rows = Iterator[tuple[int, str]]


def read_rows(corpus: HubConfig, counts: Counter[str]) -> Rows:
    """Yield number and text of the documents of a data set; UserError says what stops it."""
    if not corpus.name:
        raise UserError("data.corpus.name is empty: name a data set, e.g. roneneldan/TinyStories")
    where = f"data set '{corpus.name}', subset {corpus.subset or 'none'}, split '{corpus.split}'"
    data = _load(corpus, where)
    with _one_line(where):
        column = _text_column(f"data set '{corpus.name}'", corpus.text_column, _string_columns(data))
        texts = _texts(data.select_columns([column]), column)
        yield from _with_text(texts if corpus.document_start is None else joined(texts, corpus.document_start), counts)


def read_table(path: Path, text_column: str | None, counts: Counter[str]) -> Rows:
    """Yield number and text of the rows of a .jsonl, .csv or .parquet file; UserError says what stops it."""
    where = f"{path}"
    with _one_line(where):
        suffix, first = path.suffix.lower(), _load_table(path, {})
        # A .csv has no types: a column that looks like numbers is text too, where it is meant.
        named = list(next(iter(first), {})) if suffix == ".csv" else []
        column = _text_column(where, text_column, _string_columns(first), named)
        data = _load_table(path, _reading(suffix, column))
        yield from _with_text(_texts(data, column), counts)


def _texts(data: "Dataset | IterableDataset", column: str) -> Iterator[str | None]:
    rows: Iterator[Mapping[str, Any]] = iter(data)
    for index, row in enumerate(rows):
        if not isinstance(row[column], str | None):
            raise UserError(f"row {index}: column '{column}' holds {type(row[column]).__name__} instead of text")
        yield row[column]


def _with_text(texts: Iterator[str | None], counts: Counter[str]) -> Rows:
    for index, text in enumerate(texts):
        if text:
            yield index, text
        else:
            counts[WITHOUT_TEXT] += 1


def joined(lines: Iterator[str | None], start: str) -> Iterator[str]:
    """Join lines to documents: one that the pattern `start` matches begins the next; blank lines alone are no text."""
    is_start, document, size = re.compile(start).match, list[str](), 0
    for line in lines:
        line = f"{(line or '').removesuffix(chr(10))}\n"
        if document and (is_start(line) or size > LONGEST_JOINED):
            yield _unless_blank("".join(document))
            document, size = [], 0
        document.append(line)
        size += len(line)
    yield _unless_blank("".join(document))


def _unless_blank(text: str) -> str:
    return text if text.strip() else ""


def _load(corpus: HubConfig, where: str) -> "Dataset | IterableDataset":
    is_local = os.path.isdir(corpus.name)
    # The library would retry for 23 seconds without a network, so the host is looked up first.
    offline = is_local or not hub_is_reachable()
    import datasets

    with _offline_mode(offline), _one_line(where, corpus.name if offline and not is_local else None):
        # Streamed, a limit saves the download of the rest.
        streaming = corpus.streaming or any((corpus.limit, corpus.limit_bytes, corpus.limit_tokens))
        return datasets.load_dataset(corpus.name, corpus.subset, split=corpus.split, streaming=streaming)


# --- Local tables ----------------------------------------------------------------------------------------------------

BUILDERS = {".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}


def _load_table(path: Path, options: Mapping[str, Any]) -> "IterableDataset":
    import datasets

    # Streamed, so that no copy of the file is made; the path is no glob, whatever brackets it holds.
    name = glob.escape(str(path.absolute()))
    builder = BUILDERS[path.suffix.lower()]
    with _offline_mode(True):
        return datasets.load_dataset(builder, data_files=name, split="train", streaming=True, **options)


def _reading(suffix: str, column: str) -> dict[str, Any]:
    """Return how to read one column of a table in little memory, and as it is written."""
    from datasets import Features, Value

    if suffix == ".csv":
        # Left to itself the reader takes the text "NA" for nothing, and "007" for a number.
        return {"features": Features({column: Value("string")}), "keep_default_na": False, "chunksize": 500}
    return {"columns": [column], "batch_size": 1000} if suffix == ".parquet" else {}


# --- Without a network -----------------------------------------------------------------------------------------------


def hub_is_reachable(seconds: float = LOOKUP_SECONDS) -> bool:
    """Say whether the hub's host (or the proxy before it) takes a connection; False after `seconds` at the latest."""
    from huggingface_hub import constants

    if constants.is_offline_mode():
        return False
    answers: list[bool] = []
    # A thread, since a name lookup knows no timeout; a daemon, since Python waits for other threads when it exits.
    lookup = threading.Thread(target=lambda: answers.append(_connects(constants.ENDPOINT, seconds)), daemon=True)
    lookup.start()
    lookup.join(seconds)
    return answers == [True]


def _connects(endpoint: str, seconds: float) -> bool:
    url = urlsplit(endpoint)
    host = url.hostname or ""
    proxy = None if urllib.request.proxy_bypass(host) else urllib.request.getproxies().get(url.scheme)
    if proxy:
        url = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    port = url.port or (443 if url.scheme == "https" else 80)
    try:
        socket.create_connection((url.hostname or "", port), timeout=seconds).close()
    except OSError:
        return False
    return True


@contextmanager
def _offline_mode(wanted: bool) -> Iterator[None]:
    """Let both libraries use their caches alone for a while; each reads its own constant, made when it was imported."""
    import datasets.config  # type: ignore[import-untyped]
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    if wanted:
        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before


@contextmanager
def _one_line(where: str, not_cached: str | None = None) -> Iterator[None]:
    """Turn whatever the library raises into one line; it raises nearly anything for a name, subset, split or file."""
    log = logging.getLogger("datasets")
    level = log.level
    log.setLevel(logging.CRITICAL)  # it also writes what it raises
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise
        raise _told(error, where, not_cached) from error
    except UserError as error:
        raise UserError(f"{where}: {error}" if str(error).startswith("row ") else str(error)) from error
    except Exception as error:
        raise _told(error, where, not_cached) from error
    finally:
        log.setLevel(level)


def _told(error: Exception, where: str, not_cached: str | None) -> UserError:
    if not_cached is not None and isinstance(error, ConnectionError):
        return UserError(
            f"data set '{not_cached}' is not in the cache and the hub cannot be reached: without a network use "
            "data.corpus stdlib, files, a data set folder, or a data set that was loaded before"
        )
    return UserError(f"{where}: {' '.join(str(error).split()) or type(error).__name__}")


def _text_column(where: str, asked: str | None, strings: Sequence[str], named: Sequence[str] = ()) -> str:
    possible = {*strings, *named}
    wanted = asked or next((name for name in USUAL_COLUMNS if name in possible), None)
    if wanted in possible:
        return wanted
    if wanted is None and len(strings) == 1:
        return strings[0]
    fault = f"has no column '{wanted}' of strings" if wanted else f"has no column {' or '.join(USUAL_COLUMNS)}"
    choices = f"set data.corpus.text_column to one of {', '.join(strings)}" if strings else "it has no text at all"
    raise UserError(f"{where} {fault}: {choices}")


def _string_columns(data: "Dataset | IterableDataset") -> list[str]:
    if data.features is None:  # a streamed data set may not know them before its first row
        first: Mapping[str, Any] = next(iter(data), {})
        return [name for name, value in first.items() if isinstance(value, str | None)]
    return [name for name, kind in data.features.items() if getattr(kind, "dtype", None) in ("string", "large_string")]
