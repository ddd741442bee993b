"""A file of token ids: a checked header, then the ids, read as they lie on the disk."""

import struct
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from model.errors import UserError

MAGIC = b"ropelab\0"
VERSION = 1
# magic, version, bytes an id, number of ids, SHA-256 of the tokenizer, room to grow
HEADER = struct.Struct("<8sIIQ32s8x")
DTYPES: dict[int, np.dtype] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}


class TokenFile(NamedTuple):
    """The ids of one split, mapped into memory, and whose ids they are."""

    path: Path
    ids: np.ndarray
    tokenizer_digest: str

    def __len__(self) -> int:
        return len(self.ids)


def dtype_for(vocab_size: int) -> np.dtype:
    """Return the smallest type that holds every id of a vocabulary."""
    return DTYPES[2 if vocab_size <= 2**16 else 4]


def write_tokens(path: Path, chunks: Iterable[np.ndarray], vocab_size: int, tokenizer_digest: str) -> int:
    """Write ids as they come and return how many there were; ValueError: an id lies outside the vocabulary."""
    dtype, count = dtype_for(vocab_size), 0
    with path.open("wb") as file:
        file.write(bytes(HEADER.size))
        for chunk in chunks:
            file.write(_narrowed(chunk, vocab_size, dtype).tobytes())
            count += len(chunk)
        # The header comes last: a file that was cut short on the way has none.
        file.seek(0)
        file.write(HEADER.pack(MAGIC, VERSION, dtype.itemsize, count, bytes.fromhex(tokenizer_digest)))
    return count


def _narrowed(ids: np.ndarray, vocab_size: int, dtype: np.dtype) -> np.ndarray:
    # astype wraps around in silence: 65536 would become 0.
    outside = (ids < 0) | (ids >= vocab_size)
    if outside.any():
        raise ValueError(f"token id {ids[outside][0]} lies outside the vocabulary of {vocab_size}")
    return ids.astype(dtype)


def open_tokens(path: Path, tokenizer_digest: str | None = None) -> TokenFile:
    """Map a token file into memory; UserError: it is missing, foreign, too short, too long or another tokenizer's."""
    if not path.is_file():
        raise UserError(f"{path} is missing")
    with path.open("rb") as file:
        head = file.read(HEADER.size)
    if len(head) < HEADER.size or not head.startswith(MAGIC):
        raise UserError(f"{path} is no token file, or one that was not finished")
    _, version, width, count, digest = HEADER.unpack(head)
    if version != VERSION or width not in DTYPES:
        raise UserError(f"{path} has format {version} with {width} bytes an id; this ropelab reads format {VERSION}")
    _check_size(path, HEADER.size + width * count)
    if tokenizer_digest not in (None, digest.hex()):
        raise UserError(f"{path} holds ids of another tokenizer: prepare the data again")
    return TokenFile(path, _mapped(path, DTYPES[width], count), digest.hex())


def _check_size(path: Path, expected: int) -> None:
    found = path.stat().st_size
    if found != expected:
        raise UserError(f"{path} has {found} bytes instead of {expected}: it was cut short or changed")


def _mapped(path: Path, dtype: np.dtype, count: int) -> np.ndarray:
    if count == 0:
        return np.zeros(0, dtype=dtype)  # nothing cannot be mapped
    return np.memmap(path, dtype=dtype, mode="r", offset=HEADER.size, shape=(count,))
