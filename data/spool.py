"""Documents on the disk in the order of their hash: a corpus of any size in the memory that a part of it needs.

The texts are spread over 64 files by the first bits of their SHA-256. Read file after file, each sorted by itself, they
come in the order of their hash, whatever order they were written in; and two equal texts meet in one file, so no memory
of all hashes is needed to drop one of them.
"""

import hashlib
import struct
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import numpy as np

from data.corpus import Document
from data.split import HELD_OUT, SPLITS, ranges
from model.errors import UserError

BUCKETS = 64
# SHA-256 of the text, where name and text start in the file, bytes of the name and of the text, characters of the text
_RECORD = struct.Struct("<32sQIII")
ENTRY = np.dtype([("key", "S32"), ("start", "<u8"), ("name", "<u4"), ("text", "<u4"), ("characters", "<u4")])


class Portion(NamedTuple):
    """Some documents of one file of the spool, in the order of their hash."""

    bucket: int
    entries: np.ndarray


class Writer:
    """Takes documents in any order, and counts them; OSError where the disk is full."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._files = ExitStack()
        self._texts = [self._files.enter_context(_texts(folder, bucket).open("wb")) for bucket in range(BUCKETS)]
        self._records = [self._files.enter_context(_records(folder, bucket).open("wb")) for bucket in range(BUCKETS)]
        self._ends = [0] * BUCKETS
        self.documents = 0

    def __enter__(self) -> "Writer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.__exit__(kind, error, trace)

    def add(self, document: Document) -> int:
        """Write a document down and return the bytes of its text; UserError: it is no text that UTF-8 can write."""
        name, text = document.name.encode(errors="surrogatepass"), _utf8(document)
        key = hashlib.sha256(text).digest()
        bucket = key[0] * BUCKETS // 256
        record = _RECORD.pack(key, self._ends[bucket], len(name), len(text), len(document.text))
        self._texts[bucket].write(name + text)
        self._records[bucket].write(record)
        self._ends[bucket] += len(name) + len(text)
        self.documents += 1
        return len(text)


def _utf8(document: Document) -> bytes:
    try:
        return document.text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{document.name}: character {error.start} (U+{ord(document.text[error.start]):04X}) is half of a "
            "surrogate pair: such a text is not valid Unicode"
        ) from error


class Spool:
    """What was written, each text once, and which split it belongs to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._sizes, self.characters, self._below = list[int](), 0, [0, 0]
        for bucket in range(BUCKETS):
            some = entries(folder, bucket)
            self._sizes.append(len(some))
            self.characters += int(some["characters"].sum())
            self._below = [self._below[0] + _below(some, HELD_OUT), self._below[1] + _below(some, 2 * HELD_OUT)]
        self.documents = sum(self._sizes)

    def read(self) -> Iterator[Document]:
        """Read every document, in the order of the hashes."""
        return documents(self.folder, self._portions(range(self.documents)))

    def split(self, name: str) -> Iterator[Portion]:
        """Yield the documents of a split, in the order of their hashes; UserError: fewer than three in all."""
        return self._portions(self.ranges()[name])

    def ranges(self) -> dict[str, range]:
        """Return the places, in the order of hashes, of each split."""
        return ranges(self.documents, *self._below)

    def bytes(self) -> dict[str, int]:
        """Return the bytes of text in each split."""
        return {name: sum(int(some.entries["text"].sum()) for some in self.split(name)) for name in SPLITS}

    def _portions(self, places: range) -> Iterator[Portion]:
        first = 0
        for bucket, size in enumerate(self._sizes):
            start, stop = max(places.start - first, 0), min(places.stop - first, size)
            if start < stop:
                yield Portion(bucket, entries(self.folder, bucket)[start:stop])
            first += size


def entries(folder: Path, bucket: int) -> np.ndarray:
    """Return what one file of texts holds, sorted by hash; of equal texts the first that was written."""
    found = np.fromfile(_records(folder, bucket), dtype=ENTRY)
    _, first = np.unique(found["key"], return_index=True)
    return found[first]


def documents(folder: Path, portions: Iterable[Portion]) -> Iterator[Document]:
    """Read the documents of portions, one after the other."""
    for bucket, some in portions:
        with _texts(folder, bucket).open("rb", buffering=0) as file:
            for start, name, text in zip(*(some[field].tolist() for field in ("start", "name", "text")), strict=True):
                file.seek(start)
                data = file.read(name + text)
                yield Document(data[:name].decode(errors="surrogatepass"), data[name:].decode())


def cut(portions: Iterable[Portion], size: int) -> Iterator[Portion]:
    """Cut portions into such of about `size` bytes of text, at least one document each."""
    for bucket, some in portions:
        ends = np.cumsum(some["text"], dtype=np.int64) // size
        for part in np.split(some, np.flatnonzero(np.diff(ends)) + 1):
            yield Portion(bucket, part)


def key_of(entry: np.void) -> str:
    """Return the SHA-256 of a document's text in hexadecimal."""
    return bytes(entry["key"]).ljust(32, b"\0").hex()  # numpy drops zeros at the end


def _below(some: np.ndarray, share: float) -> int:
    leading = np.frombuffer(some["key"].tobytes(), dtype=">u8")[::4]
    return int(np.count_nonzero(leading < share * 2.0**64))


def _texts(folder: Path, bucket: int) -> Path:
    return folder / f"{bucket:02}.texts"


def _records(folder: Path, bucket: int) -> Path:
    return folder / f"{bucket:02}.records"
