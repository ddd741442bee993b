"""Text to ids: SentencePiece alone, and as `data` does it. The text is the standard library of this Python."""

import os
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path

from sentencepiece import SentencePieceProcessor

from benchmarks.measured import Measurement, repeated
from data.tokenizer import Tokenizer

BATCH_CHARACTERS = 1_000_000
THREADS = os.cpu_count() or 1
TRAINED_ON = 500_000  # bytes: how good the vocabulary is does not matter here


@cache
def texts(size: int) -> list[str]:
    """Return files of the standard library, of `size` bytes together where it has as many."""
    documents, total = [], 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if total < size and "site-packages" not in path.parts:
            documents.append(path.read_text(encoding="utf-8", errors="replace"))
            total += len(documents[-1].encode())
    return documents


@cache
def tokenizer(size: int, vocab_size: int) -> Tokenizer:
    """Return a vocabulary made from some of the text."""
    return Tokenizer.train(texts(min(size, TRAINED_ON)), vocab_size)


def batches(documents: list[str]) -> Iterator[list[str]]:
    """Group documents into lists of a million characters or a little more."""
    batch, characters = list[str](), 0
    for document in documents:
        batch.append(document)
        characters += len(document)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _measured(size: int, seconds: float, encode: Callable[[], object]) -> Measurement:
    amount = sum(len(text.encode()) for text in texts(size))
    return Measurement(repeated(encode, amount, seconds), {"bytes": amount, "threads": THREADS})


def one_by_one(size: int, vocab_size: int, seconds: float) -> Measurement:
    """Measure bytes a second of SentencePiece, one document a call."""
    alone = SentencePieceProcessor(model_proto=tokenizer(size, vocab_size).model_bytes)
    return _measured(size, seconds, lambda: [alone.encode(text, return_type="numpy") for text in texts(size)])


def in_lists(size: int, vocab_size: int, seconds: float) -> Measurement:
    """Measure bytes a second of SentencePiece over lists of documents, with all threads."""
    alone = SentencePieceProcessor(model_proto=tokenizer(size, vocab_size).model_bytes)

    def encode() -> None:
        for batch in batches(texts(size)):
            alone.encode(batch, num_threads=THREADS, return_type="numpy")

    return _measured(size, seconds, encode)


def our_lists(size: int, vocab_size: int, seconds: float) -> Measurement:
    """Measure bytes a second of the project's own tokenizer, which also gives every text back as it was."""
    ours = tokenizer(size, vocab_size)

    def encode() -> None:
        for batch in batches(texts(size)):
            ours.encode_batch(batch, THREADS)

    return _measured(size, seconds, encode)


KEPT_OPEN = ExitStack()  # the processes that encode, as long as this one


def by_preparation(size: int, vocab_size: int, seconds: float) -> Measurement:
    """Measure bytes a second of turning spooled documents into tokens as preparation does, its processes started."""
    from data.corpus import Document
    from data.encode import encoder, process_count
    from data.prepare import PORTION_BYTES
    from data.spool import Spool, Writer, cut

    folder = Path(tempfile.mkdtemp(dir=Path.cwd())) / "spool"  # the process has a folder of its own
    with Writer(folder) as writer:
        for number, text in enumerate(texts(size)):
            writer.add(Document(str(number), text))
    spool = Spool(folder)
    processes = process_count(None, size)
    encode = KEPT_OPEN.enter_context(encoder(folder, tokenizer(size, vocab_size), processes))

    def encode_all() -> None:
        for _ in encode(cut(spool.split("train"), PORTION_BYTES)):
            pass

    amount = spool.bytes()["train"]  # without duplicates and the other splits
    return Measurement(repeated(encode_all, amount, seconds), {"bytes": amount, "processes": processes})
