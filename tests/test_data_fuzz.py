"""Any bytes at all, as a corpus or as prepared data: success or one line, never a traceback or a silent change."""

import gc
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from data.config import DataConfig, FilesConfig
from data.corpus import BOM, read_documents
from data.prepare import Prepared, open_prepared, prepare
from data.split import SPLITS
from data.token_file import open_tokens
from data.tokenizer import STRETCH, Tokenizer, stretches
from model.errors import UserError

# `datasets` leaves the tables open that it has read; the collector closes them, and must do so here.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")


@pytest.fixture(autouse=True)
def tables_are_closed() -> Iterator[None]:
    yield
    gc.collect()


SCRATCH = tempfile.TemporaryDirectory()
FRAGMENTS = [
    b"\xef\xbb\xbf", b"\0", b"\r\n", b"\n", b"\r", b"\xff", b"\xc3", b"\xed\xa0\xbc", b"\xf0\x9f\x8e", b'"', b",",
    b'{"text": "a"}\n', b'{"text": 1}\n', b'{"text": null}\n', b'{"text": ["a"]}\n', b'{"text": {"b": "c"}}\n',
    b'{"text": "\\ud83c"}\n', b'{"story": "b"}\n', b"text,n\n", b"text\na\n", b'"open\n', b"PAR1", b"word " * 40,
    b"x" * 9000, "é🎉▁\u2028\u0085".encode(), b"some lines of text\n" * 30, b"{", b"[", b" " * 99,
]  # fmt: skip
some_bytes = st.lists(st.sampled_from(FRAGMENTS) | st.binary(max_size=8), max_size=12).map(b"".join)
suffixes = st.sampled_from([".txt", ".md", ".py", ".jsonl", ".csv", ".parquet"])


def quiet(_: str) -> None:
    """Say nothing."""


def in_a_file(content: bytes, suffix: str) -> Path:
    path = Path(tempfile.mkdtemp(dir=SCRATCH.name)) / f"a{suffix}"
    path.write_bytes(content)
    return path


def one_line(error: UserError, name: str = "") -> None:
    assert "\n" not in str(error)
    assert name in str(error)
    assert str(error)


@settings(deadline=None, max_examples=150)
@given(some_bytes, suffixes, st.sampled_from(["strict", "replace"]))
@example(b"", ".txt", "strict")
@example(b"\xef\xbb\xbf", ".txt", "strict")
@example(b'{"text": "\\ud83c"}\n', ".jsonl", "strict")
@example(b'{"text": "caf\xe9"}\n', ".jsonl", "strict")
@example(b"text\ncaf\xe9\n", ".csv", "strict")
def test_a_file_of_any_bytes_is_read_or_refused_in_one_line(content: bytes, suffix: str, errors: str) -> None:
    counts: Counter[str] = Counter()
    path = in_a_file(content, suffix)
    try:
        found = list(read_documents(FilesConfig(paths=(str(path),), encoding_errors=errors), counts))  # type: ignore[arg-type]
    except UserError as error:
        return one_line(error)
    if suffix in (".txt", ".md", ".py"):
        text = content.decode(errors=errors).removeprefix(BOM)
        assert [each.text for each in found] == ([text] if text else [])


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(some_bytes, suffixes), min_size=1, max_size=4))
@example([(b"x" * 300_000, ".txt")])
@example([(b'{"text": "' + b"ab " * 100_000 + b'"}\n', ".jsonl")])
def test_a_corpus_of_any_bytes_is_prepared_whole_or_not_at_all(contents: list[tuple[bytes, str]]) -> None:
    folder = Path(tempfile.mkdtemp(dir=SCRATCH.name))
    (folder / "texts").mkdir()
    for number, (content, suffix) in enumerate(contents):
        (folder / f"texts/{number}{suffix}").write_bytes(content)
    corpus = FilesConfig(paths=(str(folder / "texts"),), encoding_errors="replace")
    try:
        prepared = prepare(DataConfig(corpus=corpus, vocab_size=270, folder=str(folder / "p")), quiet)
    except UserError as error:
        one_line(error)
        assert not (folder / "p").exists() or not any((folder / "p").iterdir())
        return
    written = "".join(prepared.tokenizer.decode(getattr(prepared, split).ids) for split in SPLITS)
    assert len(written.encode()) == sum(entry["bytes"] for entry in prepared.manifest["splits"].values())


# --- Prepared data ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "a.txt").write_text(
        "".join(f"line {index} of some text or other, {index * index}\n" for index in range(999))
    )
    corpus = FilesConfig(paths=(str(folder / "a.txt"),))
    return prepare(DataConfig(corpus=corpus, vocab_size=300, folder=str(folder / "p")), quiet)


@st.composite
def damages(draw: st.DrawFn, size: int = 10**6) -> "tuple[str, float, int]":
    kind = draw(st.sampled_from(["flip", "cut", "insert", "zero"]))
    return kind, draw(st.floats(0, 1, exclude_max=True) | st.just(0.0)), draw(st.integers(0, 7))


def damaged(content: bytes, damage: tuple[str, float, int]) -> bytes:
    kind, place, bit = damage
    at = int(place * len(content))
    changed = {
        "flip": content[:at] + bytes([content[at] ^ (1 << bit)]) + content[at + 1 :],
        "cut": content[:at],
        "insert": content[:at] + bytes([bit]) + content[at:],
        "zero": content[:at] + bytes(len(content) - at),
    }
    return changed[kind]


NAMES = ["manifest.json", "tokenizer.model", "train.tokens", "validation.tokens", "test.tokens"]


@settings(deadline=None, max_examples=200)
@given(st.sampled_from(NAMES), damages())
def test_damage_anywhere_in_prepared_data_is_refused_or_changes_no_token(
    prepared: Prepared, name: str, damage: tuple[str, float, int]
) -> None:
    folder = Path(tempfile.mkdtemp(dir=SCRATCH.name)) / "copy"
    shutil.copytree(prepared.folder, folder)
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(damaged(content, damage))
    try:
        opened = open_prepared(folder)
    except UserError as error:
        return one_line(error, "" if name == "manifest.json" else name)
    finally:
        shutil.rmtree(folder)
    # A digit of a number that is only told, or nothing at all, was changed.
    assert name == "manifest.json" or damaged(content, damage) == content
    assert all(np.array_equal(getattr(opened, split).ids, getattr(prepared, split).ids) for split in SPLITS)


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=80) | damages())
def test_a_token_file_of_any_bytes_is_refused_or_holds_as_many_ids_as_it_says(
    prepared: Prepared, damage: "bytes | tuple[str, float, int]"
) -> None:
    content = prepared.test.path.read_bytes()
    path = in_a_file(damage if isinstance(damage, bytes) else damaged(content, damage), ".tokens")
    try:
        opened = open_tokens(path, prepared.tokenizer.digest)
    except UserError as error:
        return one_line(error, path.name)
    assert len(opened) == (path.stat().st_size - 64) / opened.ids.itemsize


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=60) | damages())
def test_a_tokenizer_file_of_any_bytes_is_refused_or_gives_text_back(
    prepared: Prepared, damage: "bytes | tuple[str, float, int]"
) -> None:
    content = prepared.tokenizer.model_bytes
    path = in_a_file(damage if isinstance(damage, bytes) else damaged(content, damage), ".model")
    try:
        tokenizer = Tokenizer.load(path)
    except UserError as error:
        return one_line(error)
    assert tokenizer.decode(tokenizer.encode("line 7 of some é\n")) == "line 7 of some é\n"


# --- Stretches -------------------------------------------------------------------------------------------------------

WORDY = st.lists(st.sampled_from(["the", " ", "  ", "\n", "12", "a", "é", "▁", "of some", "text", "\r\n"]), max_size=80)


@settings(deadline=None, max_examples=200)
@given(WORDY.map("".join), st.integers(1, 30))
def test_the_ids_of_a_text_are_those_of_its_stretches_put_together(prepared: Prepared, text: str, size: int) -> None:
    parts = stretches(text.encode(), size)
    assert b"".join(parts) == text.encode()
    assert all(len(part) >= size for part in parts[:-1])
    # SentencePiece itself, which is given the whole.
    whole = prepared.tokenizer._processor.encode(text.replace("▁", "|"))
    some = [
        prepared.tokenizer._processor.encode(part.decode()) for part in stretches(text.replace("▁", "|").encode(), size)
    ]
    assert [index for ids in some for index in ids] == whole


def test_a_long_text_has_the_ids_that_sentencepiece_gives_the_whole(prepared: Prepared) -> None:
    text = "".join(
        f"line {index} of some text or other,  {index}\n\n" + "word " * (index % 3000) for index in range(200)
    )
    assert len(text) > 20 * STRETCH
    assert prepared.tokenizer.encode(text) == prepared.tokenizer._processor.encode(text)
