"""From documents to token files: read, drop duplicates, split, train the tokenizer, encode, write down what was done.

`python -m data.prepare [CONFIG.yaml]` does it alone; `train.py` calls `prepare` and gets what is there or what is made.
"""

import contextlib
import hashlib
import json
import os
import platform
import re
import shutil
import sys
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from data.config import CorpusConfig, DataConfig, FilesConfig, HubConfig
from data.corpus import fingerprint, read_documents
from data.split import SPLITS, Unique, enough_documents, split_by_content, unique
from data.token_file import TokenFile, open_tokens, write_tokens
from data.tokenizer import Tokenizer
from model.durable import file_digest, hidden_folder, sync
from model.errors import UserError

# Raise it when the same text and settings would give other files: what was prepared by older rules is then not reused.
FORMAT = 1
MANIFEST, TOKENIZER = "manifest.json", "tokenizer.model"
BATCH_CHARACTERS = 1_000_000
THREADS = min(8, os.cpu_count() or 1)

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
    with hidden_folder(folder) as hidden:
        _build(config, hidden, show)
        _take_the_place(hidden, folder)
    show(f"prepared data: {folder}")
    return open_prepared(folder)


def open_prepared(folder: Path) -> Prepared:
    """Open prepared data; UserError names the file that is missing, damaged or belongs elsewhere."""
    manifest = _read_manifest(folder / MANIFEST)
    for name, digest in manifest["files"].items():
        if not (folder / name).is_file() or file_digest(folder / name) != digest:
            raise UserError(f"{folder / name} is missing or was changed after it was written")
    tokenizer = Tokenizer.load(folder / TOKENIZER)
    train, validation, test = (open_tokens(folder / f"{split}.tokens", tokenizer.digest) for split in SPLITS)
    return Prepared(folder, tokenizer, train, validation, test, manifest)


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is missing or damaged") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT or "files" not in manifest:
        raise UserError(f"{path} is no manifest of format {FORMAT}")
    return manifest


# --- Names -----------------------------------------------------------------------------------------------------------


def folder_name(config: DataConfig) -> str:
    """Return the folder's name: corpus, vocabulary, and a hash of settings and text, so that edited text is seen."""
    parts = [FORMAT, config.vocab_size, config.corpus.model_dump(), fingerprint(config.corpus)]
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]
    return f"{_plain(_title(config.corpus))}-{config.vocab_size}-{digest}"


def _title(corpus: CorpusConfig) -> str:
    if isinstance(corpus, FilesConfig):
        return Path(corpus.paths[0]).stem
    return corpus.name if isinstance(corpus, HubConfig) else corpus.kind


def _plain(title: str) -> str:
    return re.sub(r"[^A-Za-z0-9_]+", "-", title).strip("-")[:40] or "text"


# --- Passes ----------------------------------------------------------------------------------------------------------


def _build(config: DataConfig, folder: Path, show: Show) -> None:
    counts = Counter[str]()
    show(f"preparing {_title(config.corpus)}, once; later runs find it")
    splits = _read_and_split(config.corpus, counts, show)
    train = (document.text for document in splits["train"].values())
    tokenizer = Tokenizer.train(train, config.vocab_size, folder / TOKENIZER, counts)
    tokens = {split: _write_split(folder, split, splits[split], tokenizer) for split in SPLITS}
    show(", ".join(f"{split} {tokens[split]:,}" for split in SPLITS) + f" tokens of {tokenizer.vocab_size} kinds")
    _write_manifest(folder, config, splits, tokens, counts, tokenizer)
    sync(folder)


def _read_and_split(corpus: CorpusConfig, counts: Counter[str], show: Show) -> dict[str, Unique]:
    documents = tqdm(read_documents(corpus, counts), desc="read", unit=" documents", disable=None, leave=False)
    whole = unique(documents, counts)
    if not whole:
        raise UserError(f"the corpus {_title(corpus)} has no text ({_told(counts) or 'nothing was passed over'})")
    splits = split_by_content(enough_documents(whole, counts))
    held = ", ".join(f"{split} {len(splits[split])}" for split in SPLITS)
    show(f"{len(whole)} documents, {sum(map(_bytes, splits.values())) / 1e6:.2f} MB; {held}")
    if told := _told(counts):
        show(told)
    return splits


def _told(counts: Counter[str]) -> str:
    return "; ".join(f"{phrase}: {count}" for phrase, count in sorted(counts.items()) if count)


def _bytes(documents: Unique) -> int:
    return sum(len(document.text.encode()) for document in documents.values())


def _write_split(folder: Path, split: str, documents: Unique, tokenizer: Tokenizer) -> int:
    texts = [document.text for document in documents.values()]
    path = folder / f"{split}.tokens"
    with tqdm(
        total=sum(map(len, texts)), desc=f"encode {split}", unit=" characters", unit_scale=True, disable=None
    ) as bar:
        ids = _document_ids(tokenizer, texts, bar.update)
        count = write_tokens(path, ids, tokenizer.vocab_size, tokenizer.digest)
    return count


def _document_ids(tokenizer: Tokenizer, texts: Iterable[str], done: Callable[[int], object]) -> Iterator[np.ndarray]:
    """Yield the ids of one document after the other, BOS before each: exactly one stands at every boundary."""
    bos = np.array([tokenizer.bos], dtype=np.int32)
    for batch in batches(texts, BATCH_CHARACTERS):
        for ids in tokenizer.encode_batch(batch, THREADS):
            yield np.concatenate([bos, ids])
        done(sum(map(len, batch)))


def batches(texts: Iterable[str], characters: int) -> Iterator[list[str]]:
    """Group texts so that each group but the last has at least so many characters."""
    batch, size = list[str](), 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= characters:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _write_manifest(
    folder: Path,
    config: DataConfig,
    splits: dict[str, Unique],
    tokens: dict[str, int],
    counts: Counter[str],
    tokenizer: Tokenizer,
) -> None:
    names = [TOKENIZER, *(f"{split}.tokens" for split in SPLITS)]
    manifest = {
        "format": FORMAT,
        "corpus": config.corpus.model_dump(),
        "vocab_size": tokenizer.vocab_size,
        "tokenizer": tokenizer.digest,
        "versions": {"python": platform.python_version(), "sentencepiece": version("sentencepiece")},
        "counts": {phrase: count for phrase, count in sorted(counts.items()) if count},
        "splits": {split: _split_entry(splits[split], tokens[split]) for split in SPLITS},
        "files": {name: file_digest(folder / name) for name in names},
    }
    path = folder / MANIFEST
    path.write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    for name in (*names, MANIFEST):
        sync(folder / name)


def _split_entry(documents: Unique, tokens: int) -> dict[str, Any]:
    listed = {key: document.name for key, document in documents.items()}
    return {"documents": len(documents), "bytes": _bytes(documents), "tokens": tokens, "listed": listed}


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
        _remove(folder)


def _is_whole(folder: Path) -> bool:
    try:
        open_prepared(folder)
    except UserError:
        return False
    return True


def _remove(folder: Path) -> None:
    # Renamed first: a folder that is being removed must not be met half empty. Another process may have done it.
    aside = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.old")
    with contextlib.suppress(FileNotFoundError):
        folder.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Prepare the data of a configuration: `python -m data.prepare [CONFIG.yaml] [--data.vocab-size 4096 ...]`."""
    from training.command_line import exit_on_user_error, parse_with_file
    from training.config import Config

    with exit_on_user_error():
        request = parse_with_file(Config, argv, "python -m data.prepare")
        prepare(request.config.data)


if __name__ == "__main__":
    main(sys.argv[1:])
