"""Text to token ids and back, byte for byte: SentencePiece BPE with LLaMA's settings.

SentencePiece writes a space as U+2581 and reads that character back as a space, so by itself it loses U+2581.
Here it never sees one: the character is encoded as its three bytes, and ids are turned into text by our own table of
the bytes that each id stands for. So every text comes back as it was; only lone surrogates, which are no text that
UTF-8 can write, are refused.
"""

import codecs
import hashlib
import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from model.errors import UserError

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor

UNK, BOS, EOS = 0, 1, 2
SPACE_MARK = "\u2581"
# The trainer drops a whole line, without a word, that holds U+2585, and reads U+2581 as a space.
_SPLIT_BEFORE_TRAINING = re.compile("[\u2581\u2585]")
# The trainer drops lines of more bytes than its limit with no more than a log line; no character has over 4 bytes.
LONGEST_LINE = 4192
# A piece has spaces only before its letters, and no line end, since the trainer sees lines and splits them at spaces.
# So a text cut at such a place has the ids of the whole; and the library is slower the longer a text is.
_SEAM = re.compile(rb"(?<=\n)|(?<=[^ ])(?= )")
STRETCH = 4096
_LONGEST_CHUNK = LONGEST_LINE // 4
CUT_LINES = f"lines of over {LONGEST_LINE} bytes cut to train the tokenizer"

_PROBE = " a\t\r\n\0 é🎉  \u2581</s> "


class Tokenizer:
    """A SentencePiece vocabulary that gives every text back as it was."""

    def __init__(self, model_bytes: bytes, source: str = "tokenizer") -> None:
        self.model_bytes = model_bytes
        self._processor = _processor(model_bytes, source)
        self.vocab_size = int(self._processor.get_piece_size())
        try:
            self._bytes = [_bytes_of(self._processor, index) for index in range(self.vocab_size)]
        except ValueError as error:  # a piece that is no UTF-8, or a byte's that names none
            raise UserError(f"{source} is a damaged SentencePiece model: one of its pieces is no text") from error
        self._has_seams = not any(0 < seam.start() < len(of) for of in self._bytes for seam in _SEAM.finditer(of))
        self._mark = [self._processor.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE_MARK.encode()]
        if self.decode(self.encode(_PROBE)) != _PROBE or self._processor.bos_id() != BOS:
            raise UserError(f"{source} is a SentencePiece model, but not one that gives text back byte for byte")

    @property
    def bos(self) -> int:
        """The id that stands before every document, and so also after every one."""
        return BOS

    @property
    def eos(self) -> int:
        """The id that LLaMA ends a text with; the token files never hold it."""
        return EOS

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of the model file: equal digests, equal ids."""
        return hashlib.sha256(self.model_bytes).hexdigest()

    @classmethod
    def train(
        cls, texts: Iterable[str], vocab_size: int, path: Path | None = None, counts: Counter[str] | None = None
    ) -> "Tokenizer":
        """Train a vocabulary on texts, and save it where a path is given; the same texts give the same file.

        UserError: no text, or a vocabulary size that the texts cannot fill or that cannot hold their characters.
        """
        tokenizer = cls(_train(texts, vocab_size, Counter() if counts is None else counts))
        if path is not None:
            path.write_bytes(tokenizer.model_bytes)
        return tokenizer

    @classmethod
    def load(cls, path: Path | str) -> "Tokenizer":
        """Read a model file; UserError names it where it is missing, damaged or made by other rules."""
        path = Path(path)
        if not path.is_file():
            raise UserError(f"{path} is missing: no tokenizer can be read from it")
        return cls(path.read_bytes(), str(path))

    @classmethod
    def from_bytes(cls, model_bytes: bytes) -> "Tokenizer":
        """Read a model that a checkpoint has kept."""
        return cls(model_bytes)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without BOS; UserError: it holds a lone surrogate."""
        ids: list[int] = self.encode_batch([text])[0].tolist()
        return ids

    def encode_batch(self, texts: Sequence[str], threads: int = 1) -> list[np.ndarray]:
        """Return the ids (int32) of each text; how many threads share the work changes nothing in them."""
        cut = [stretches(_utf8(text), STRETCH) if self._has_seams else [_utf8(text)] for text in texts]
        encoded = iter(self._encode([stretch for some in cut for stretch in some], threads))
        return [_one([next(encoded) for _ in some]) for some in cut]

    def _encode(self, texts: list[bytes], threads: int) -> list[np.ndarray]:
        parts = [text.split(SPACE_MARK.encode()) for text in texts]
        flat = [part for some in parts for part in some]
        encoded = iter(self._processor.encode(flat, num_threads=threads, return_type="numpy"))
        return [self._joined([next(encoded) for _ in some]) for some in parts]

    def _joined(self, parts: list[np.ndarray]) -> np.ndarray:
        between = np.array(self._mark, dtype=np.int32)
        return _one([piece for part in parts for piece in (between, part)][1:])

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids; bytes that are no UTF-8 become U+FFFD, control symbols nothing."""
        return self.to_bytes(ids).decode(errors="replace")

    def to_bytes(self, ids: Iterable[int]) -> bytes:
        """Return the bytes that ids stand for; an id outside the vocabulary is an IndexError."""
        return b"".join([self._bytes[_checked(index)] for index in ids])

    def token_bytes(self) -> np.ndarray:
        """Return how many bytes of text each id stands for (int64); 0 for control symbols."""
        return np.array([len(text) for text in self._bytes], dtype=np.int64)

    def stream_decoder(self) -> "StreamDecoder":
        """Return a decoder for ids that come one at a time."""
        return StreamDecoder(self)


class StreamDecoder:
    """Turns ids into text as they come: the chunks put together are what `decode` makes of all ids.

    It holds back at most the three bytes of an unfinished character, so a token costs the same however long the text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Iterable[int]) -> str:
        """Take in ids and return the text that is complete by now."""
        return self._decoder.decode(self._tokenizer.to_bytes(ids))

    def flush(self) -> str:
        """Return what was held back; an unfinished character becomes U+FFFD."""
        return self._decoder.decode(b"", final=True)


def stretches(text: bytes, size: int) -> list[bytes]:
    """Cut UTF-8 at the first seam after each `size` bytes: after a line end, or before the space that ends a word."""
    found, start = list[bytes](), 0
    while start + size < len(text) and (seam := _SEAM.search(text, start + size)):
        found.append(text[start : seam.start()])
        start = seam.start()
    return [*found, text[start:]]


def _one(parts: list[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _checked(index: int) -> int:
    # A list would read -1, the mark of a pad, from its end.
    if index < 0:
        raise IndexError(f"token id {index} is negative")
    return index


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"character {error.start} (U+{ord(text[error.start]):04X}) is half of a surrogate pair: "
            "such a text is not valid Unicode and cannot be encoded"
        ) from error


def _processor(model_bytes: bytes, source: str) -> "SentencePieceProcessor":
    from sentencepiece import SentencePieceProcessor

    processor = SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(model_bytes)
    except (RuntimeError, ValueError) as error:  # the library's own message may be no UTF-8
        raise UserError(f"{source} is no SentencePiece model, or a damaged one ({len(model_bytes)} bytes)") from error
    return processor


def _bytes_of(processor: "SentencePieceProcessor", index: int) -> bytes:
    piece = processor.id_to_piece(index)
    if processor.is_control(index) or processor.is_unknown(index):
        return b""
    if processor.is_byte(index):
        return bytes([int(piece[1:-1], 16)])
    return piece.replace(SPACE_MARK, " ").encode()


# --- Training --------------------------------------------------------------------------------------------------------

_SETTINGS: dict[str, Any] = {
    "model_type": "bpe",
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "split_digits": True,
    "allow_whitespace_only_pieces": True,
    # Characters beyond this share of the text are rare: they are left to their bytes rather than fill the vocabulary.
    "character_coverage": 0.9995,
    # LLaMA puts a space before every text. Then a text that starts with a space, or is cut anywhere, cannot be told
    # from one that does not; we want the text back as it was, so nothing is put before it.
    "add_dummy_prefix": False,
    "unk_id": UNK,
    "bos_id": BOS,
    "eos_id": EOS,
    "pad_id": -1,
    # The number is written into the model file, so another one would be another digest (the pieces are the same).
    "num_threads": 2,
    "max_sentence_length": LONGEST_LINE,
    "minloglevel": 2,
}


def _train(texts: Iterable[str], vocab_size: int, counts: Counter[str]) -> bytes:
    from sentencepiece import SentencePieceTrainer

    model = io.BytesIO()
    sentences = training_lines(texts, counts)
    try:
        SentencePieceTrainer.train(sentence_iterator=sentences, model_writer=model, vocab_size=vocab_size, **_SETTINGS)
    except RuntimeError as error:
        raise UserError(_explained(str(error), vocab_size)) from error
    return model.getvalue()


def training_lines(texts: Iterable[str], counts: Counter[str]) -> Iterator[str]:
    """Cut texts into lines that the trainer will not drop; the lines that were too long are counted."""
    for text in texts:
        for line in text.split("\n"):
            if len(line) > _LONGEST_CHUNK and len(line.encode()) > LONGEST_LINE:
                counts[CUT_LINES] += 1
            yield from (chunk for part in _SPLIT_BEFORE_TRAINING.split(line) for chunk in _chunks(part))


def _chunks(line: str) -> Iterator[str]:
    if len(line) <= _LONGEST_CHUNK or len(line.encode()) <= LONGEST_LINE:
        yield from [line] if line else []
    else:
        yield from (line[start : start + _LONGEST_CHUNK] for start in range(0, len(line), _LONGEST_CHUNK))


def _explained(message: str, vocab_size: int) -> str:
    """Say in our words what the trainer of SentencePiece 0.2 says in its own."""
    if largest := re.search(r"value <= (\d+)", message):
        return (
            f"data.vocab_size {vocab_size} is too large for this corpus: at most {largest[1]} is possible; "
            f"set it to {largest[1]} or less, or bring more text"
        )
    if smallest := re.search(r"required_chars\. \d+ vs (\d+)", message):
        return (
            f"data.vocab_size {vocab_size} is too small for the characters of this corpus: set it to at least "
            f"{smallest[1]}"
        )
    if "sentences_.empty()" in message:
        return "the tokenizer has no text to train on: the training split is empty"
    return f"the tokenizer cannot be trained with data.vocab_size {vocab_size}: {' '.join(message.split())}"
