"""Documents from a data set of the `datasets` library: a name on the hub, or a local folder of one."""

import os
import socket
import threading
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from data.config import HubConfig
from model.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset  # type: ignore[import-untyped]

LOOKUP_SECONDS = 2.0
WITHOUT_TEXT = "rows without text passed over"


def read_rows(corpus: HubConfig, counts: Counter[str]) -> Iterator[tuple[int, str]]:
    """Yield number and text of the rows that have text, at most `limit` rows; UserError says what stops it."""
    if not corpus.name:
        raise UserError("data.corpus.name is empty: name a data set, e.g. roneneldan/TinyStories")
    data = _load(corpus)
    with _one_line(corpus):
        column = _text_column(corpus, data)
        rows: Iterator[Mapping[str, Any]] = iter(data)
        for index, row in enumerate(islice(rows, corpus.limit)):
            if row[column]:
                yield index, row[column]
            else:
                counts[WITHOUT_TEXT] += 1


def _load(corpus: HubConfig) -> "Dataset | IterableDataset":
    is_local = os.path.isdir(corpus.name)
    # The library would retry for 23 seconds without a network, so the host is looked up first.
    offline = is_local or not hub_is_reachable()
    import datasets

    with _offline_mode(offline), _one_line(corpus, offline and not is_local):
        # Streamed, a limit saves the download of the rest.
        streaming = corpus.limit is not None
        return datasets.load_dataset(corpus.name, corpus.subset, split=corpus.split, streaming=streaming)


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
def _one_line(corpus: HubConfig, offline: bool = False) -> Iterator[None]:
    """Turn whatever the library raises into one line; it raises nearly anything for a name, subset or split."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if offline and isinstance(error, ConnectionError):
            raise UserError(
                f"data set '{corpus.name}' is not in the cache and the hub cannot be reached: without a network use "
                "data.corpus stdlib, files, a data set folder, or a data set that was loaded before"
            ) from error
        where = f"data set '{corpus.name}', subset {corpus.subset or 'none'}, split '{corpus.split}'"
        raise UserError(f"{where}: {' '.join(str(error).split()) or type(error).__name__}") from error


def _text_column(corpus: HubConfig, data: "Dataset | IterableDataset") -> str:
    strings = _string_columns(data)
    wanted = corpus.text_column or ("text" if "text" in strings else None)
    if wanted in strings:
        return wanted
    if wanted is None and len(strings) == 1:
        return strings[0]
    fault = f"has no column '{wanted}' of strings" if wanted else "has no column `text`"
    choices = f"set data.corpus.text_column to one of {', '.join(strings)}" if strings else "it has no text at all"
    raise UserError(f"data set '{corpus.name}' {fault}: {choices}")


def _string_columns(data: "Dataset | IterableDataset") -> list[str]:
    if data.features is None:  # a streamed data set may not know them before its first row
        first: Mapping[str, Any] = next(iter(data), {})
        return [name for name, value in first.items() if isinstance(value, str | None)]
    return [name for name, kind in data.features.items() if getattr(kind, "dtype", None) in ("string", "large_string")]
