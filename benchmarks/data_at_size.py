"""Preparing a corpus of any size: seconds, MB/s and the memory of all processes; and encoding beside SentencePiece.

python -m benchmarks.data_at_size --megabytes 2000 --folder /tmp/data_at_size

The corpus is made here, the same each time: rows of lines drawn from the standard library, one row in twenty twice.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from data.config import StdlibConfig
from data.corpus import Document, read_documents
from data.encode import encoder
from data.prepare import PORTION_BYTES, open_prepared
from data.split import SPLITS
from data.spool import Spool, Writer, cut
from data.token_file import write_tokens
from data.tokenizer import Tokenizer

FILE_BYTES = 50_000_000
CORES = len(os.sched_getaffinity(0))


# --- The corpus ------------------------------------------------------------------------------------------------------


def rows() -> Iterator[str]:
    """Yield documents of 10 to 120 lines of the standard library without end; one in twenty is an earlier one."""
    lines = [line for each in read_documents(StdlibConfig()) for line in each.text.splitlines(keepends=True)]
    draw, earlier = random.Random(0), [""] * 100
    for number in range(sys.maxsize):
        text = draw.choice(earlier) if draw.random() < 0.05 else "".join(draw.choices(lines, k=draw.randint(10, 120)))
        earlier[number % 100] = text
        yield text


def make_corpus(folder: Path, size: int) -> None:
    """Write `size` bytes of .jsonl files of 50 MB, unless they are there."""
    if (folder / "whole").exists() and (folder / "whole").read_text() == f"{size}":
        return
    folder.mkdir(parents=True, exist_ok=True)
    found = rows()
    for number, start in enumerate(range(0, size, FILE_BYTES)):
        with (folder / f"{number:04}.jsonl").open("w", encoding="utf-8") as file:
            while file.tell() < min(FILE_BYTES, size - start):
                file.writelines(json.dumps({"text": text}) + "\n" for text in islice(found, 100))
    (folder / "whole").write_text(f"{size}")


# --- Memory ----------------------------------------------------------------------------------------------------------


def memory_of_tree(process: int) -> tuple[int, int]:
    """Return the bytes of memory of a process and all below it: beyond mapped files, and with them."""
    beyond, whole = 0, 0
    for each in (process, *descendants(process)):
        try:
            status = dict(line.split(":", 1) for line in Path(f"/proc/{each}/status").read_text().splitlines())
        except OSError:
            continue  # it has just ended
        if "VmRSS" in status:
            whole += kilobytes(status["VmRSS"])
            beyond += kilobytes(status["RssAnon"]) + kilobytes(status["RssShmem"])
    return beyond * 1024, whole * 1024


def descendants(process: int) -> Iterator[int]:
    """Yield the processes below one."""
    try:
        tasks = [path.read_text().split() for path in Path(f"/proc/{process}/task").glob("*/children")]
    except OSError:
        return
    for child in (int(each) for some in tasks for each in some):
        yield child
        yield from descendants(child)


def kilobytes(value: str) -> int:
    """Read "  1234 kB"."""
    return int(value.split()[0])


def watched(command: list[str]) -> tuple[float, int, int]:
    """Run a command and return its seconds and the most memory that its processes had together."""
    begin, most = time.perf_counter(), (0, 0)
    process = subprocess.Popen(command)
    while process.poll() is None:
        found = memory_of_tree(process.pid)
        most = max(most[0], found[0]), max(most[1], found[1])
        time.sleep(0.1)
    assert process.returncode == 0, f"{command} ended with {process.returncode}"
    return time.perf_counter() - begin, *most


# --- Encoding --------------------------------------------------------------------------------------------------------


def compare_encoding(tokenizer: Tokenizer, folder: Path, size: int, rounds: int) -> dict[str, float]:
    """Return MB/s of SentencePiece alone and of ours on the same documents, medians of alternating rounds."""
    with Writer(folder / "spool") as writer:
        written, found = 0, rows()
        while written < size:
            written += writer.add(Document("", next(found)))
    spool = Spool(folder / "spool")
    texts = [each.text for each in spool.read()]
    size = sum(len(text.encode()) for text in texts)
    lists = [texts[start : start + 300] for start in range(0, len(texts), 300)]
    with (
        ProcessPoolExecutor(CORES, get_context("spawn"), start_alone, (tokenizer.model_bytes,)) as pool,
        encoder(spool.folder, tokenizer, CORES) as encode,
    ):

        def ours() -> None:
            for split in SPLITS:
                ids = (some.ids for some in encode(cut(spool.split(split), PORTION_BYTES)))
                write_tokens(folder / f"{split}.tokens", ids, tokenizer.vocab_size, tokenizer.digest)

        ways: dict[str, Callable[[], object]] = {
            f"SentencePiece alone, lists of documents, {CORES} threads": lambda: [alone(some, CORES) for some in lists],
            f"SentencePiece alone, {CORES} processes, ids thrown away": lambda: list(pool.map(alone, lists)),
            f"ropelab, {CORES} processes: read, encode, BOS, token files": ours,
        }
        start_alone(tokenizer.model_bytes)
        return {way: size / 1e6 / seconds for way, seconds in medians(ways, rounds).items()}


def medians(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Time each way in turn and return median seconds; a first round warms up."""
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds + 1):
        for way, run in ways.items():
            begin = time.perf_counter()
            run()
            seconds[way].append(time.perf_counter() - begin)
    return {way: statistics.median(values[1:]) for way, values in seconds.items()}


loaded: list[Any] = []


def start_alone(model_bytes: bytes) -> None:
    """Load the model into SentencePiece's own class."""
    import sentencepiece

    loaded.append(sentencepiece.SentencePieceProcessor(model_proto=model_bytes))


def alone(texts: list[str], threads: int = 1) -> int:
    """Encode a list with nothing but the library, and return how many texts it had."""
    return len(loaded[-1].encode(texts, num_threads=threads, return_type="numpy"))


def main() -> None:
    """Make the corpus, prepare it, compare the encoders, and print Markdown tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--encoding-megabytes", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    size, corpus = options.megabytes * 1_000_000, options.folder / f"corpus-{options.megabytes}"
    make_corpus(corpus, size)
    prepared = options.folder / f"prepared-{time.time():.0f}"
    command = [sys.executable, "-m", "data.prepare", "--data.corpus", "files", "--data.corpus.paths", str(corpus)]
    flags = ["--data.folder", str(prepared), "--data.vocab-size", str(options.vocab_size)]
    seconds, beyond, whole = watched([*command, *flags])
    manifest = open_prepared(next(prepared.iterdir())).manifest
    splits = manifest["splits"].values()
    print("| files | text | documents | tokens | processes | seconds | MB/s | memory beyond mapped files | with them |")
    print("|---|---|---|---|---|---|---|---|---|")
    print(
        f"| {size / 1e6:,.0f} MB | {sum(each['bytes'] for each in splits) / 1e6:,.0f} MB "
        f"| {sum(each['documents'] for each in splits):,} | {sum(each['tokens'] for each in splits):,} | {CORES} "
        f"| {seconds:.0f} | {size / 1e6 / seconds:.1f} | {beyond / 2**20:,.0f} MiB | {whole / 2**20:,.0f} MiB |\n"
    )
    tokenizer = open_prepared(next(prepared.iterdir())).tokenizer
    rates = compare_encoding(tokenizer, prepared, options.encoding_megabytes * 1_000_000, options.rounds)
    best = max(rate for way, rate in rates.items() if way.startswith("SentencePiece"))
    print("| encoding | MB/s | of the best of SentencePiece alone |\n|---|---|---|")
    for way, rate in rates.items():
        print(f"| {way} | {rate:.1f} | {rate / best:.2f} |")


if __name__ == "__main__":
    main()
