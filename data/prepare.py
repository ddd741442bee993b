"""From documents to token files: read, drop duplicates, split, train the tokenizer, encode, write down what was done.

`python -m data.prepare [CONFIG.yaml]` does it alone; `train.py` calls `prepare` and gets what is there or what is made.
"""

import hashlib
import itertools
import json
import platform
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from data.config import CorpusConfig, DataConfig, FilesConfig, HubConfig, StdlibConfig
from data.corpus import REACHED, Document, fingerprint, read_documents, text_size
from data.encode import Encode, Encoded, encoder, process_count
from data.split import FEW_DOCUMENTS, SPLITS, pieces, shares, size_of_pieces
from data.spool import Spool, Writer, cut, documents, key_of
from data.token_file import TokenFile, open_tokens, write_tokens
from data.tokenizer import Tokenizer
from data.workplace import put_aside, workplace
from model.durable import file_digest, sync
from model.errors import UserError

# Raise it when the same text and settings would give other files: what was prepared by older rules is then not reused.
FORMAT = 2
MANIFEST, TOKENIZER = "manifest.json", "tokenizer.model"
PORTION_BYTES = 500_000
# The tokenizer learns from so much of the training split; in the order of hashes its first part is a fair sample.
SAMPLE_BYTES = 32_000_000
# The manifest names so many documents of each split, and has the hash of all.
LISTED = 1000

DUPLICATES = "duplicates dropped"
CUT = "documents cut into pieces of {} characters or up to twice that"
REPEATED_PIECES = "repeated pieces dropped"

Show = Callable[[str], object]


class Prepared(NamedTuple):
    """A corpus as a training run needs it."""

    folder: Path
    tokenizer: Tokenizer
    train: TokenFile
    validation: TokenFile
    test: TokenFile
    manifest: dict[str, Any]

    @property
    def name(self) -> str:
        """The corpus, the size of the vocabulary and the hash of both."""
        return self.folder.name


def prepare(config: DataConfig, show: Show = print) -> Prepared:
    """Return the prepared corpus: what lies there already, if it is whole and the text is still the same, or a new one.

    UserError: the corpus is not there, holds too little text, or cannot fill the vocabulary.
    """
    folder = Path(config.folder) / folder_name(config)
    if folder.exists():
        try:
            return open_prepared(folder)
        except UserError as error:
            show(f"{error}; preparing it anew")
    with _named(folder), workplace(folder, show) as hidden:
        _build(config, hidden, show)
        if folder_name(config) != folder.name:
            raise UserError(f"the corpus {_title(config.corpus)} was changed while it was read: start again")
        _take_the_place(hidden, folder)
    show(f"prepared data: {folder}")
    return open_prepared(folder)


@contextmanager
def _named(folder: Path) -> Iterator[None]:
    # Writing to an open file that the disk has no room for raises an OSError that does not say which file.
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(folder)
        raise


def open_prepared(folder: Path) -> Prepared:
    """Open prepared data; UserError names the file that is missing, damaged or belongs elsewhere."""
    manifest = _read_manifest(folder / MANIFEST)
    for name, digest in manifest["files"].items():
        if not (folder / name).is_file() or file_digest(folder / name) != digest:
            raise UserError(f"{folder / name} is missing or was changed after it was written")
    tokenizer = Tokenizer.load(folder / TOKENIZER)
    train, validation, test = (open_tokens(folder / f"{split}.tokens", tokenizer.digest) for split in SPLITS)
    return Prepared(folder, tokenizer, train, validation, test, manifest)


FILES = (TOKENIZER, *(f"{split}.tokens" for split in SPLITS))


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is missing or damaged") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise UserError(f"{path} is no manifest of format {FORMAT}")
    if not isinstance(manifest.get("files"), dict) or set(manifest["files"]) != set(FILES):
        raise UserError(f"{path} is damaged: it must have the hashes of {', '.join(FILES)}")
    return manifest


# --- Names -----------------------------------------------------------------------------------------------------------


def folder_name(config: DataConfig) -> str:
    """Return the folder's name: corpus, vocabulary, and a hash of settings and text, so that edited text is seen."""
    parts = [FORMAT, config.vocab_size, _described(config.corpus), fingerprint(config.corpus)]
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]
    return f"{_plain(_title(config.corpus))}-{config.vocab_size}-{digest}"


def _described(corpus: CorpusConfig) -> dict[str, Any]:
    settings = corpus.model_dump(mode="json", exclude={"streaming"})  # which changes how, not what is read
    return settings | ({"paths": sorted(corpus.paths)} if isinstance(corpus, FilesConfig) else {})


def _title(corpus: CorpusConfig) -> str:
    if isinstance(corpus, FilesConfig):
        return Path(min(corpus.paths)).stem
    return corpus.name if isinstance(corpus, HubConfig) else corpus.kind


def _plain(title: str) -> str:
    return re.sub(r"[^A-Za-z0-9_]+", "-", title).strip("-")[:40] or "text"


# --- Passes ----------------------------------------------------------------------------------------------------------


def _build(config: DataConfig, folder: Path, show: Show) -> None:
    counts = Counter[str]()
    show(f"preparing {_title(config.corpus)}, once; later runs find it")
    spool = _sorted_documents(config.corpus, folder / "spool", counts, show)
    tokenizer, sample = _train_tokenizer(spool, config.vocab_size, folder / TOKENIZER, counts, show)
    written = _write_splits(folder, spool, tokenizer, config)
    told = ", ".join(f"{split} {written[split].tokens:,}" for split in SPLITS)
    show(f"{told} tokens of {tokenizer.vocab_size} kinds")
    _tell_shortage(config.corpus, sum(each.tokens for each in written.values()), counts, show)
    entries = {split: _split_entry(spool, split, written[split]) for split in SPLITS}
    shutil.rmtree(folder / "spool")
    _write_manifest(folder, config, entries, sample, counts, tokenizer)
    sync(folder)


def _sorted_documents(corpus: CorpusConfig, folder: Path, counts: Counter[str], show: Show) -> Spool:
    """Read the corpus, drop texts that stand twice, cut them where they are few; in the order of their hashes."""
    folder.mkdir()
    with _bar("read", text_size(corpus)) as bar:
        spool = _spooled(read_documents(corpus, counts), folder / "documents", counts, DUPLICATES, bar.update)
    if not spool.documents:
        raise UserError(f"the corpus {_title(corpus)} has no text ({_told(counts) or 'nothing was passed over'})")
    whole = spool.documents
    if whole < FEW_DOCUMENTS:
        spool = _spooled(_cut_documents(spool, counts), folder / "pieces", counts, REPEATED_PIECES)
    held = ", ".join(f"{split} {len(places)}" for split, places in spool.ranges().items())
    show(f"{whole} documents, {sum(spool.bytes().values()) / 1e6:.2f} MB; {held}")
    if told := _told(counts):
        show(told)
    return spool


def _spooled(
    found: Iterable[Document],
    folder: Path,
    counts: Counter[str],
    repeated: str,
    done: Callable[[int], object] = lambda _: None,
) -> Spool:
    with Writer(folder) as writer:
        for document in found:
            done(writer.add(document))
    spool = Spool(folder)
    counts[repeated] += writer.documents - spool.documents
    return spool


def _cut_documents(spool: Spool, counts: Counter[str]) -> Iterator[Document]:
    """Cut documents into pieces, so that one file alone can be split three ways too."""
    size = size_of_pieces(spool.characters)
    for document in spool.read():
        texts = list(pieces(document.text, size))
        counts[CUT.format(size)] += len(texts) > 1
        for number, text in enumerate(texts):
            yield Document(f"{document.name}#{number}" if len(texts) > 1 else document.name, text)


def _told(counts: Counter[str]) -> str:
    return "; ".join(f"{phrase}: {count}" for phrase, count in sorted(counts.items()) if count)


def _bar(what: str, size: int | None) -> "tqdm[Any]":
    # Shown at a terminal alone; bytes a second, and the time left where the size is known.
    return tqdm(total=size, desc=what, unit="B", unit_scale=True, disable=None, leave=False)


class Sample(NamedTuple):
    """What the tokenizer was trained on: the first documents of the training split."""

    documents: int
    bytes: int


def _train_tokenizer(
    spool: Spool, vocab_size: int, path: Path, counts: Counter[str], show: Show
) -> tuple[Tokenizer, Sample]:
    sizes = itertools.chain.from_iterable(portion.entries["text"].tolist() for portion in spool.split("train"))
    ends = itertools.accumulate(sizes)
    kept = [next(ends), *itertools.takewhile(lambda end: end < SAMPLE_BYTES, ends)]
    sample = Sample(len(kept), kept[-1])
    if spool.characters > SAMPLE_BYTES:
        show(f"the tokenizer is trained on {sample.documents} documents of the training split")
    texts = (document.text for document in documents(spool.folder, spool.split("train")))
    return Tokenizer.train(itertools.islice(texts, sample.documents), vocab_size, path, counts), sample


class Written(NamedTuple):
    """What a token file holds."""

    documents: int
    bytes: int
    tokens: int


def _write_splits(folder: Path, spool: Spool, tokenizer: Tokenizer, config: DataConfig) -> dict[str, Written]:
    sizes = spool.bytes()
    limit = None if isinstance(config.corpus, StdlibConfig) else config.corpus.limit_tokens
    most = {} if limit is None else shares(limit)
    processes = process_count(config.processes, sum(sizes.values()))
    with encoder(spool.folder, tokenizer, processes) as encode:
        return {
            split: _write_split(folder, split, spool, tokenizer, encode, sizes[split], most.get(split))
            for split in SPLITS
        }


def _write_split(
    folder: Path, split: str, spool: Spool, tokenizer: Tokenizer, encode: Encode, size: int, most: int | None
) -> Written:
    written = Written(0, 0, 0)
    with _bar(f"encode {split}", size) as bar:

        def ids() -> Iterator[np.ndarray]:
            nonlocal written
            for some in within(encode(cut(spool.split(split), PORTION_BYTES)), most):
                tokens, done = int(some.lengths.sum()), int(some.bytes.sum())
                written = Written(written.documents + len(some.lengths), written.bytes + done, written.tokens + tokens)
                bar.update(done)
                yield some.ids

        write_tokens(folder / f"{split}.tokens", ids(), tokenizer.vocab_size, tokenizer.digest)
    if not written.documents:
        raise UserError(
            f"data.corpus.limit_tokens leaves {most} to the {split} split, too few for a document: raise it"
        )
    return written


def _tell_shortage(corpus: CorpusConfig, tokens: int, counts: Counter[str], show: Show) -> None:
    if not isinstance(corpus, StdlibConfig) and corpus.limit_tokens and tokens < 0.9 * corpus.limit_tokens:
        ended = "what was read before a limit ended it" if counts[REACHED] else "the corpus"
        show(f"{ended} makes {tokens:,} tokens, fewer than data.corpus.limit_tokens {corpus.limit_tokens:,}")


def within(encoded: Iterable[Encoded], most: int | None) -> Iterator[Encoded]:
    """Yield documents up to the first that would make more than `most` tokens."""
    tokens = 0
    for some in encoded:
        ends = tokens + np.cumsum(some.lengths)
        tokens = int(ends[-1])
        if most is not None and tokens > most:
            kept = int(np.count_nonzero(ends <= most))
            if kept:
                yield Encoded(some.ids[: int(some.lengths[:kept].sum())], some.lengths[:kept], some.bytes[:kept])
            return
        yield some


def _write_manifest(
    folder: Path,
    config: DataConfig,
    splits: dict[str, dict[str, Any]],
    sample: Sample,
    counts: Counter[str],
    tokenizer: Tokenizer,
) -> None:
    manifest = {
        "format": FORMAT,
        "corpus": _described(config.corpus),
        "vocab_size": tokenizer.vocab_size,
        "tokenizer": tokenizer.digest,
        "tokenizer_sample": sample._asdict(),
        "versions": {"python": platform.python_version(), "sentencepiece": version("sentencepiece")},
        "counts": {phrase: count for phrase, count in sorted(counts.items()) if count},
        "splits": splits,
        "files": {name: file_digest(folder / name) for name in FILES},
    }
    path = folder / MANIFEST
    path.write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    for name in (*FILES, MANIFEST):
        sync(folder / name)


def _split_entry(spool: Spool, split: str, written: Written) -> dict[str, Any]:
    """Return what the manifest says of a split: its size, a hash of all its documents, and the names of the first."""
    digest, listed, left = hashlib.sha256(), dict[str, str](), written.documents
    for portion in spool.split(split):
        some = portion.entries[:left]
        left -= len(some)
        digest.update(some["key"].tobytes())
        named = some[: LISTED - len(listed)]
        names = (document.name for document in documents(spool.folder, [portion._replace(entries=named)]))
        listed.update(zip(map(key_of, named), names, strict=True))
    return {**written._asdict(), "sha256": digest.hexdigest(), "listed": listed}


# --- Whole or not at all ---------------------------------------------------------------------------------------------


def _take_the_place(hidden: Path, folder: Path) -> None:
    """Rename the finished folder; where another process was faster, its folder stays if it is whole."""
    while True:
        try:
            hidden.rename(folder)
        except OSError:
            if not folder.exists():
                raise
        else:
            return sync(folder.parent)
        if _is_whole(folder):
            return None
        put_aside(folder)


def _is_whole(folder: Path) -> bool:
    try:
        open_prepared(folder)
    except UserError:
        return False
    return True


def main(argv: Sequence[str] | None = None) -> None:
    """Prepare the data of a configuration: `python -m data.prepare [CONFIG.yaml] [--data.vocab-size 4096 ...]`."""
    from training.command_line import exit_on_user_error, parse_with_file
    from training.config import Config

    with exit_on_user_error():
        request = parse_with_file(Config, argv, "python -m data.prepare")
        prepare(request.config.data)


if __name__ == "__main__":
    main(sys.argv[1:])
