"""Text to tokens in several processes: each reads its documents itself and hands back ids as they will lie on the disk.

The order and the ids are those of one process: work is handed out in order and taken back in order.
"""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data.spool import Portion, documents
from data.token_file import dtype_for
from data.tokenizer import Tokenizer
from model.errors import UserError

MOST_PROCESSES = 16
# Below this much text for each, starting processes takes longer than they save.
BYTES_A_PROCESS = 4_000_000


class Encoded(NamedTuple):
    """Tokens of some documents, BOS before each of them."""

    ids: np.ndarray
    lengths: np.ndarray
    """Tokens of each document, its BOS among them."""
    bytes: np.ndarray
    """Bytes of text of each document."""


Encode = Callable[[Iterable[Portion]], Iterator[Encoded]]


def process_count(asked: int | None, size: int) -> int:
    """Return how many processes are worth starting for so many bytes of text."""
    return min(asked or min(MOST_PROCESSES, _cores()), 1 + size // BYTES_A_PROCESS)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def encode_portion(tokenizer: Tokenizer, spool: Path, portion: Portion) -> Encoded:
    """Return the ids of some documents, BOS before each: exactly one stands at every boundary."""
    bos = np.array([tokenizer.bos], dtype=np.int32)
    texts = [document.text for document in documents(spool, [portion])]
    parts = [np.concatenate([bos, ids]) for ids in tokenizer.encode_batch(texts)]
    ids = np.concatenate(parts).astype(dtype_for(tokenizer.vocab_size))  # the tokenizer's own ids: none is too large
    return Encoded(ids, np.array([len(part) for part in parts]), portion.entries["text"].astype(np.int64))


@contextmanager
def encoder(spool: Path, tokenizer: Tokenizer, processes: int) -> Iterator[Encode]:
    """Give a function that encodes portions in order; UserError: a process was killed."""
    if processes == 1:
        yield lambda portions: (encode_portion(tokenizer, spool, portion) for portion in portions)
        return
    # Forked, a process would inherit the threads of a library half-way through their work.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, context, _start, (spool, tokenizer.model_bytes))
    try:
        yield lambda portions: _in_order(pool, portions, 2 * processes)
    except BrokenProcessPool as error:
        raise UserError(
            "a process that turned text into tokens was killed, perhaps for want of memory: lower data.processes "
            f"(now {processes})"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _in_order(pool: ProcessPoolExecutor, portions: Iterable[Portion], ahead: int) -> Iterator[Encoded]:
    waiting = deque[Future[Encoded]]()
    for portion in portions:
        waiting.append(pool.submit(_work, portion))
        if len(waiting) > ahead:  # what is done and not yet written lies in memory
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


# --- In the other processes ------------------------------------------------------------------------------------------

_here: tuple[Tokenizer, Path]


def _start(spool: Path, model_bytes: bytes) -> None:
    global _here
    # Ctrl-C reaches every process of a terminal; only the first one answers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _here = Tokenizer.from_bytes(model_bytes), spool


def _end_with_parent() -> None:
    # A parent that is killed cannot say so, and its pool would wait for work for ever.
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work(portion: Portion) -> Encoded:
    return encode_portion(*_here, portion)
