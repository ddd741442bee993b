"""Where documents come from: the interpreter's own library, local files, data sets of the `datasets` library."""

import glob
import hashlib
import io
import os
import sysconfig
import tokenize
from collections import Counter
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple

from data.config import CorpusConfig, FilesConfig, HubConfig, StdlibConfig
from data.literals import is_mostly_literal
from data.split import pieces
from model.durable import file_digest
from model.errors import UserError

TEXT_SUFFIXES = (".txt", ".md", ".py")
TABLE_SUFFIXES = (".jsonl", ".csv", ".parquet")
BOM = "\ufeff"
# No document is longer, so that a file of gigabytes is read in little memory; what is cut falls into such pieces.
LONGEST = 16 * 2**20
PIECE = 2**20
CHARACTERS_A_TOKEN = 8

Counts = Counter[str]
"""How often something was passed over or changed, under a phrase that says what: "empty files passed over"."""


class Document(NamedTuple):
    """One text and where it came from."""

    name: str
    text: str


class Source(NamedTuple):
    """A file that is still to be read, and the name that its document gets."""

    name: str
    path: Path


def read_documents(corpus: CorpusConfig, counts: Counts | None = None) -> Iterator[Document]:
    """Read the documents of a corpus one after the other, and count what was passed over, cut or changed.

    UserError: the corpus is not there, is empty or is not text.
    """
    counts = Counter() if counts is None else counts
    if isinstance(corpus, StdlibConfig):
        return _read_stdlib(counts)
    read = _read_files(corpus, counts) if isinstance(corpus, FilesConfig) else _read_hub(corpus, counts)
    return _limited(_none_too_long(read, counts), corpus, counts)


def _read_hub(corpus: HubConfig, counts: Counts) -> Iterator[Document]:
    from data.hub import read_rows

    rows = read_rows(corpus, counts)
    return (Document(f"{corpus.name}/{corpus.split}/{index}", text) for index, text in rows)


LONG = f"documents of over {LONGEST / 2**20:.0f} MiB cut into pieces of about {PIECE / 2**20:.0f} MiB"


def _none_too_long(documents: Iterator[Document], counts: Counts) -> Iterator[Document]:
    for document in documents:
        if len(document.text) <= LONGEST:
            yield document
            continue
        counts[LONG] += 1
        for number, text in enumerate(pieces(document.text, PIECE)):
            yield Document(f"{document.name}#{number}", text)


REACHED = "readings that a limit ended"


def _limited(documents: Iterator[Document], corpus: FilesConfig | HubConfig, counts: Counts) -> Iterator[Document]:
    limits = (corpus.limit, corpus.limit_bytes, corpus.limit_tokens and CHARACTERS_A_TOKEN * corpus.limit_tokens)
    left = [float("inf") if limit is None else limit for limit in limits]
    for document in documents:
        size = len(document.text.encode(errors="replace")) if corpus.limit_bytes else 0
        left = [left[0] - 1, left[1] - size, left[2] - len(document.text)]
        if min(left) >= 0:
            yield document
        if min(left) < 0 or left[0] == 0:  # asking for one more might load it over the network
            counts[REACHED] += 1
            return


def fingerprint(corpus: CorpusConfig) -> str:
    """Return a hash of what a corpus holds now, as far as this machine can tell without a network.

    A file that was edited, added or renamed changes it. Of a data set on the hub only its settings are known here.
    """
    digest = hashlib.sha256()
    for source in sources(corpus, Counter()):
        digest.update(f"{source.name}\0{file_digest(source.path)}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


def sources(corpus: CorpusConfig, counts: Counts) -> list[Source]:
    """List the files of a corpus in sorted order; a data set on the hub has none here."""
    if isinstance(corpus, StdlibConfig):
        return stdlib_sources(Path(sysconfig.get_path("stdlib")), counts)
    paths = file_paths(corpus, counts) if isinstance(corpus, FilesConfig) else _all_files(corpus.name)
    return [Source(path.as_posix(), path) for path in paths]


def text_size(corpus: CorpusConfig) -> int | None:
    """Return about how many bytes of text will be read, where that is known beforehand."""
    limit = None if isinstance(corpus, StdlibConfig) else corpus.limit_bytes
    files = [source.path for source in sources(corpus, Counter())]
    if isinstance(corpus, HubConfig) or any(path.suffix.lower() in TABLE_SUFFIXES for path in files):
        return limit
    size = sum(path.stat().st_size for path in files)
    return min(size, limit or size)


def _all_files(folder: str) -> list[Path]:
    # An empty name would mean the folder that we stand in.
    return (
        sorted(path for path in Path(folder).rglob("*") if path.is_file()) if folder and Path(folder).is_dir() else []
    )


# --- The standard library --------------------------------------------------------------------------------------------

# Other people's packages lie below the standard library and are no part of it, so they are not even counted.
NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__"}
LEFT_OUT = {
    "test": "files of tests left out",
    "tests": "files of tests left out",
    "idle_test": "files of tests left out",
    "encodings": "files of encodings/ left out",
}
TABLES = "files that are mostly tables of literals left out"
UNDECODABLE = "files that do not decode by their own coding line left out"


def stdlib_sources(root: Path, counts: Counts) -> list[Source]:
    """List the Python files below `root`, without tests, `encodings/` and other people's packages."""
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in NOT_STDLIB]
        inside = Path(folder).relative_to(root)
        phrases = [LEFT_OUT[part] for part in inside.parts if part in LEFT_OUT]
        python = [inside / name for name in files if name.endswith(".py")]
        if phrases:
            counts[phrases[0]] += len(python)
        else:
            found += python
    return [Source(path.as_posix(), root / path) for path in sorted(found)]


def _read_stdlib(counts: Counts) -> Iterator[Document]:
    root = Path(sysconfig.get_path("stdlib"))
    for source in stdlib_sources(root, counts):
        text = _decode_python(source.path.read_bytes())
        if text is None:
            counts[UNDECODABLE] += 1
        elif not text:
            counts[EMPTY] += 1
        elif is_mostly_literal(text):
            counts[TABLES] += 1
        else:
            yield Document(source.name, text)


def _decode_python(data: bytes) -> str | None:
    # Not every file of every Python is UTF-8: a coding line (PEP 263) may say otherwise.
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        return data.decode(encoding)
    except (SyntaxError, UnicodeDecodeError):
        return None


# --- Local files -----------------------------------------------------------------------------------------------------

EMPTY = "empty files passed over"
OTHER_KINDS = "files of other kinds passed over"
HIDDEN = "hidden files and folders passed over"
BOMS = "byte order marks dropped"
REPLACED = "invalid bytes replaced by U+FFFD"


def file_paths(corpus: FilesConfig, counts: Counts) -> list[Path]:
    """List the files of texts and tables that `paths` names, each once, in sorted order.

    UserError: one of `paths` names nothing, or nothing that holds text.
    """
    if not corpus.paths:
        raise UserError("data.corpus.paths is empty: name files, folders or globs")
    found, others, hidden = set[Path](), set[Path](), set[Path]()
    for given in corpus.paths:
        every = {path for root in _roots(given) for path in _walk(root, hidden)}
        # A pipe or a link to nothing is no file: opening it would wait for ever, or fail.
        texts = {path for path in every if path.suffix.lower() in TEXT_SUFFIXES + TABLE_SUFFIXES and path.is_file()}
        _refuse_without_text(given, texts, every)
        found, others = found | texts, others | (every - texts)
    counts[OTHER_KINDS] += len(others)
    counts[HIDDEN] += len(hidden)
    return sorted(found)


def _roots(given: str) -> list[Path]:
    expanded = os.path.expanduser(given)
    # What exists is taken as it is: a name may hold the brackets of a glob.
    names = [expanded] if os.path.exists(expanded) else sorted(glob.glob(expanded, recursive=True))
    if not names:
        raise UserError(f"data.corpus.paths: '{given}' does not exist, and as a glob it matches nothing")
    return [Path(name) for name in names]


def _walk(root: Path, hidden: set[Path]) -> Iterator[Path]:
    if not root.is_dir():
        yield root
        return
    for folder, folders, files in os.walk(root, onerror=_raise):
        hidden |= {Path(folder, name) for name in (*folders, *files) if name.startswith(".")}
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name != "__pycache__")
        yield from (Path(folder, name) for name in files if not name.startswith("."))


def _raise(error: OSError) -> None:
    raise error


def _refuse_without_text(given: str, texts: set[Path], every: set[Path]) -> None:
    if not texts:
        what = f"{len(every)} of other kinds" if every else "none at all"
        raise UserError(
            f"data.corpus.paths: '{given}' has no {', '.join(TEXT_SUFFIXES + TABLE_SUFFIXES)} file ({what})"
        )
    if not any(path.stat().st_size for path in texts):
        raise UserError(f"data.corpus.paths: '{given}' is empty: it has no text")


def _read_files(corpus: FilesConfig, counts: Counts) -> Iterator[Document]:
    for source in sources(corpus, counts):
        if not source.path.stat().st_size:
            counts[EMPTY] += 1
        elif source.path.suffix.lower() in TABLE_SUFFIXES:
            yield from _read_table(corpus, source, counts)
        else:
            yield from _read_text(source, corpus.encoding_errors, counts)


def _read_table(corpus: FilesConfig, source: Source, counts: Counts) -> Iterator[Document]:
    from data.hub import read_table

    rows = read_table(source.path, corpus.text_column, counts)
    return (Document(f"{source.name}/{index}", text) for index, text in rows)


def _read_text(source: Source, errors: str, counts: Counts) -> Iterator[Document]:
    # Bytes, not text mode: that would turn every \r\n into \n.
    with source.path.open("rb") as file:
        is_long = source.path.stat().st_size > LONGEST
        counts[LONG] += is_long
        offset = 0
        for number, data in enumerate(_parts(file, PIECE) if is_long else [file.read()]):
            text = _decode_utf8(data, source.path, offset, errors, counts)
            if offset == 0 and text.startswith(BOM):
                # Some editors put it first as a mark of the encoding; it is no part of the text.
                counts[BOMS] += 1
                text = text.removeprefix(BOM)
            offset += len(data)
            if text:
                yield Document(f"{source.name}#{number}" if is_long else source.name, text)
            else:
                counts[EMPTY] += 1


def _parts(file: BufferedReader, size: int) -> Iterator[bytes]:
    """Yield a file in parts that end with the first line end past `size` bytes; anywhere where lines are long."""
    while data := file.read(size):
        data += file.readline(size)
        for _ in range(3):  # a character has at most four bytes, and all but its first are 10xxxxxx
            data += file.read(1) if file.peek(1)[:1] and file.peek(1)[0] & 0xC0 == 0x80 else b""
        yield data


def _decode_utf8(data: bytes, path: Path, offset: int, errors: str, counts: Counts) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        if errors == "strict":
            raise UserError(
                f"{path}: byte {offset + error.start} (0x{data[error.start]:02x}) is not UTF-8: "
                "convert the file, or set data.corpus.encoding_errors to replace"
            ) from error
    text = data.decode(errors="replace")
    counts[REPLACED] += text.count("\ufffd") - data.count("\ufffd".encode())
    return text
