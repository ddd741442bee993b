"""From documents to token files: splits without overlap, one BOS a document, files that are whole or refused."""

import hashlib
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data import prepare as prepare_module
from data.config import DataConfig, FilesConfig
from data.corpus import Document
from data.prepare import CUT, Prepared, open_prepared, prepare
from data.split import SPLITS, pieces, ranges
from data.spool import Spool, Writer, cut, documents
from data.token_file import HEADER, open_tokens, write_tokens
from data.tokenizer import Tokenizer
from model.errors import UserError

DIGEST = hashlib.sha256(b"tokenizer").hexdigest()
WORDS = "quick brown foxes jump over lazy dogs while seven wizards brew a very odd potion of herbs"


def quiet(_: str) -> None:
    """Say nothing."""


def some_text(seed: int, lines: int = 20) -> str:
    draw = random.Random(seed)
    return "".join(" ".join(draw.choices(WORDS.split(" "), k=8)) + f" {draw.random()}\n" for _ in range(lines))


def write_corpus(folder: Path, documents: int = 120) -> Path:
    folder.mkdir()
    for index in range(documents):
        (folder / f"{index:03}.txt").write_bytes(some_text(index).encode())
    return folder


def config_of(path: Path, folder: Path, vocab_size: int = 300) -> DataConfig:
    return DataConfig(corpus=FilesConfig(paths=(str(path),)), vocab_size=vocab_size, folder=str(folder))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "texts")


@pytest.fixture(scope="module")
def prepared(corpus: Path) -> Prepared:
    return prepare(config_of(corpus, corpus.parent / "prepared"), quiet)


# --- Token files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("vocab_size", "width"), [(65535, 2), (65536, 2), (65537, 4), (70001, 4)])
def test_the_largest_id_of_a_vocabulary_survives_the_file(tmp_path: Path, vocab_size: int, width: int) -> None:
    path = tmp_path / "a.tokens"
    ids = np.array([0, 1, vocab_size - 1])
    assert write_tokens(path, [ids[:1], ids[1:]], vocab_size, DIGEST) == 3
    opened = open_tokens(path, DIGEST)
    assert opened.ids.tolist() == ids.tolist()
    assert (opened.ids.itemsize, len(opened)) == (width, 3)


@pytest.mark.parametrize(
    ("vocab_size", "wrong"), [(65536, 65536), (65536, 70000), (300, 300), (70000, 70000), (70000, 2**32), (300, -1)]
)
def test_an_id_outside_the_vocabulary_is_never_written(tmp_path: Path, vocab_size: int, wrong: int) -> None:
    with pytest.raises(ValueError, match=f"token id {wrong} lies outside the vocabulary of {vocab_size}"):
        write_tokens(tmp_path / "a.tokens", [np.array([1, wrong])], vocab_size, DIGEST)
    with pytest.raises(UserError, match="not finished"):
        open_tokens(tmp_path / "a.tokens")


def test_a_file_without_ids_can_be_read(tmp_path: Path) -> None:
    write_tokens(tmp_path / "a.tokens", [], 300, DIGEST)
    assert len(open_tokens(tmp_path / "a.tokens")) == 0


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data[:-2],
        lambda data: data + b"\0",
        lambda data: data + b"\0\0",
        lambda data: data[: HEADER.size - 1],
        lambda data: b"",
        lambda data: b"GIF89a" + data[6:],
        lambda data: data[:8] + b"\x09" + data[9:],
        lambda data: data[:12] + b"\x03" + data[13:],
    ],
)
def test_a_damaged_or_foreign_token_file_is_refused_by_name(tmp_path: Path, damage: object) -> None:
    path = tmp_path / "a.tokens"
    write_tokens(path, [np.arange(10)], 300, DIGEST)
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    with pytest.raises(UserError, match=r"a\.tokens") as caught:
        open_tokens(path, DIGEST)
    assert "\n" not in str(caught.value)


def test_ids_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    write_tokens(tmp_path / "a.tokens", [np.arange(10)], 300, DIGEST)
    with pytest.raises(UserError, match="another tokenizer"):
        open_tokens(tmp_path / "a.tokens", hashlib.sha256(b"other").hexdigest())


# --- Splits ----------------------------------------------------------------------------------------------------------


def spooled(texts: list[str]) -> Spool:
    """Write texts to a spool below a folder of its own and open it; the folder goes when the test run ends."""
    folder = Path(tempfile.mkdtemp(dir=SCRATCH.name)) / "spool"
    with Writer(folder) as writer:
        for index, text in enumerate(texts):
            writer.add(Document(f"{index}", text))
    return Spool(folder)


SCRATCH = tempfile.TemporaryDirectory()


def texts_of(spool: Spool) -> dict[str, list[str]]:
    return {name: [each.text for each in documents(spool.folder, spool.split(name))] for name in SPLITS}


@settings(deadline=None)
@given(st.lists(st.text("abcde", max_size=4), min_size=60, max_size=150), st.randoms())
def test_a_document_never_falls_into_two_splits_and_order_changes_nothing(
    texts: list[str], draw: random.Random
) -> None:
    spool = spooled(texts)
    assert spool.documents == len(set(texts))
    if spool.documents < 3:
        return
    splits = texts_of(spool)
    everything = [text for some in splits.values() for text in some]
    assert sorted(everything) == sorted(set(texts))
    assert all(splits.values())
    draw.shuffle(texts)
    assert texts_of(spooled(texts)) == splits


def test_documents_come_in_the_order_of_their_hashes_and_the_first_of_equal_ones_stays() -> None:
    texts = [str(index % 500) for index in range(1000)]
    found = list(spooled(texts).read())
    assert [each.text for each in found] == sorted(set(texts), key=lambda text: hashlib.sha256(text.encode()).digest())
    assert all(each.name == each.text for each in found)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=3, max_size=20, unique=True))
def test_texts_and_names_come_back_from_the_disk_as_they_were(texts: list[str]) -> None:
    with Writer(folder := Path(tempfile.mkdtemp(dir=SCRATCH.name)) / "spool") as writer:
        for text in texts:
            writer.add(Document(f"{text}\udcff", text))
    found = list(Spool(folder).read())
    assert sorted(each.text for each in found) == sorted(texts)
    assert all(each.name == f"{each.text}\udcff" for each in found)


def test_portions_are_cut_by_bytes_and_lose_no_document() -> None:
    spool = spooled([f"{index}" * (index % 50 + 1) for index in range(3000)])
    portions = list(cut(spool.split("train"), 1000))
    assert [each.text for each in documents(spool.folder, portions)] == texts_of(spool)["train"]
    sizes = [int(portion.entries["text"].sum()) for portion in portions]
    assert max(sizes) < 1000 + 200
    assert len(sizes) > 50


def test_half_a_surrogate_pair_in_a_document_is_told_with_its_name() -> None:
    with pytest.raises(UserError, match=r"^0: character 1 \(U\+D83C\)"):
        spooled(["a\ud83c"])


def test_the_shares_are_ninety_five_and_five_in_a_hundred() -> None:
    splits = spooled([str(index) for index in range(10_000)]).ranges()
    found = {name: len(places) / 10_000 for name, places in splits.items()}
    assert found == pytest.approx({"train": 0.9, "validation": 0.05, "test": 0.05}, abs=0.01)


def test_a_document_stays_in_its_split_when_others_are_added() -> None:
    few = texts_of(spooled([str(index) for index in range(500)]))
    many = texts_of(spooled([str(index) for index in range(5000)]))
    assert all(set(few[name]) <= set(many[name]) for name in SPLITS)


def test_the_splits_of_known_texts_stay_what_they_are() -> None:
    # Pinned: elsewhere, and next year, the same texts must be held out.
    splits = texts_of(spooled([str(index) for index in range(100)]))
    assert (splits["validation"], splits["test"]) == (["49", "65", "9"], ["55", "51", "39"])


@pytest.mark.parametrize("count", range(3, 30))
def test_however_few_the_documents_each_split_gets_one(count: int) -> None:
    for below_once in range(count + 1):
        for below_twice in range(below_once, count + 1):
            places = ranges(count, below_once, below_twice)
            assert all(places.values())
            assert sorted(place for some in places.values() for place in some) == list(range(count))


@pytest.mark.parametrize("count", [0, 1, 2])
def test_fewer_than_three_different_documents_are_refused(count: int) -> None:
    with pytest.raises(UserError, match=f"has {count} different documents"):
        ranges(count, 0, 0)


@settings(deadline=None)
@given(st.text("ab \n", max_size=300), st.integers(1, 40))
def test_pieces_are_the_text_and_end_at_line_ends(text: str, size: int) -> None:
    cut = list(pieces(text, size))
    assert "".join(cut) == text
    for piece in cut[:-1]:
        assert size <= len(piece) <= 2 * size
        assert piece.endswith("\n") or "\n" not in piece[size - 1 :]
        assert piece.endswith(("\n", " ")) or len(piece) == size


def test_few_documents_are_cut_and_many_are_not(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text(some_text(0, 2000))
    one = prepare(config_of(tmp_path / "one.txt", tmp_path / "prepared"), quiet).manifest
    names = [name for split in SPLITS for name in one["splits"][split]["listed"].values()]
    assert 90 <= len(names) <= 100
    assert {f"{tmp_path}/one.txt#0", f"{tmp_path}/one.txt#1"} <= set(names)
    assert one["counts"][CUT.format(len(some_text(0, 2000)) // 100)] == 1
    for count, cut_up in ((99, True), (100, False)):
        texts = write_corpus(tmp_path / str(count), count)
        (texts / "000.txt").write_text(some_text(0, 200))
        counts = prepare(config_of(texts, tmp_path / "prepared"), quiet).manifest["counts"]
        assert any("cut into pieces" in phrase for phrase in counts) == cut_up


# --- The whole way ---------------------------------------------------------------------------------------------------


def test_the_token_files_hold_each_document_once_after_one_bos(corpus: Path, prepared: Prepared) -> None:
    texts = sorted(path.read_text() for path in corpus.iterdir())
    found = []
    for split in SPLITS:
        ids = getattr(prepared, split).ids
        starts = np.flatnonzero(ids == prepared.tokenizer.bos)
        assert starts[0] == 0
        assert not np.isin(ids, [0, prepared.tokenizer.eos]).any()
        ends = [*starts[1:], len(ids)]
        held = [prepared.tokenizer.decode(ids[a + 1 : b]) for a, b in zip(starts, ends, strict=True)]
        assert prepared.manifest["splits"][split]["documents"] == len(held)
        assert len(ids) == len(held) + sum(len(prepared.tokenizer.encode(text)) for text in held)
        found += held
    assert sorted(found) == texts


def test_the_manifest_tells_what_is_in_the_files(corpus: Path, prepared: Prepared) -> None:
    by_hash = {hashlib.sha256(path.read_bytes()).hexdigest(): path for path in corpus.iterdir()}
    listed: set[str] = set()
    for split in SPLITS:
        entry = prepared.manifest["splits"][split]
        assert entry["tokens"] == len(getattr(prepared, split))
        assert entry["bytes"] == sum(by_hash[key].stat().st_size for key in entry["listed"])
        assert all(Path(name) == by_hash[key] for key, name in entry["listed"].items())
        assert entry["bytes"] == prepared.tokenizer.token_bytes()[getattr(prepared, split).ids].sum()
        assert not listed & set(entry["listed"])
        listed |= set(entry["listed"])
    assert listed == set(by_hash)
    assert prepared.manifest["tokenizer"] == prepared.tokenizer.digest


def test_the_tokenizer_sees_the_training_split_alone(prepared: Prepared) -> None:
    texts = [Path(name).read_text() for name in prepared.manifest["splits"]["train"]["listed"].values()]
    assert Tokenizer.train(texts, 300).digest == prepared.tokenizer.digest


def test_prepared_again_or_elsewhere_it_is_the_same_to_the_byte(
    tmp_path: Path, corpus: Path, prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare_module, "PORTION_BYTES", 777)
    other = prepare(config_of(corpus, tmp_path / "elsewhere"), quiet)
    assert other.name == prepared.name
    names = sorted(path.name for path in other.folder.iterdir())
    assert names == ["manifest.json", "test.tokens", "tokenizer.model", "train.tokens", "validation.tokens"]
    assert all((other.folder / name).read_bytes() == (prepared.folder / name).read_bytes() for name in names)


def test_what_is_there_is_used_without_being_made_again(
    corpus: Path, prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare_module, "_build", lambda *_: pytest.fail("it was made again"))
    assert prepare(config_of(corpus, prepared.folder.parent), quiet).train.ids.tolist() == prepared.train.ids.tolist()


def test_duplicates_are_dropped_and_counted(tmp_path: Path, corpus: Path) -> None:
    twice = write_corpus(tmp_path / "texts")
    for path in list(twice.iterdir()):
        (twice / f"copy of {path.name}").write_bytes(path.read_bytes())
    prepared = prepare(config_of(twice, tmp_path / "prepared"), quiet)
    assert prepared.manifest["counts"]["duplicates dropped"] == 120
    assert sum(prepared.manifest["splits"][split]["documents"] for split in SPLITS) == 120


def test_an_edited_file_another_vocabulary_or_a_new_file_is_prepared_anew(tmp_path: Path) -> None:
    texts = write_corpus(tmp_path / "texts")
    names = {prepare(config_of(texts, tmp_path / "prepared"), quiet).name}
    names.add(prepare(config_of(texts, tmp_path / "prepared", 310), quiet).name)
    edited = texts / "005.txt"
    clock = edited.stat()
    edited.write_text(edited.read_text().replace("o", "0"))
    os.utime(edited, ns=(clock.st_atime_ns, clock.st_mtime_ns))  # same size, same time: only the content tells
    after = prepare(config_of(texts, tmp_path / "prepared"), quiet)
    names.add(after.name)
    (texts / "new.txt").write_text(some_text(1000))
    names.add(prepare(config_of(texts, tmp_path / "prepared"), quiet).name)
    assert len(names) == 4
    keys = {key for split in SPLITS for key in after.manifest["splits"][split]["listed"]}
    assert hashlib.sha256(edited.read_bytes()).hexdigest() in keys


def test_one_file_alone_is_enough(tmp_path: Path) -> None:
    path = tmp_path / "input.txt"
    path.write_text(some_text(3, 1000))
    said: list[str] = []
    prepared = prepare(config_of(path, tmp_path / "prepared"), said.append)
    assert prepared.name.startswith("input-300-")
    assert min(len(prepared.validation), len(prepared.test)) > 200
    assert prepared.manifest["counts"][CUT.format(1024)] == 1
    assert any(f"{CUT.format(1024)}: 1" in line for line in said)
    everything = [prepared.tokenizer.decode(getattr(prepared, split).ids) for split in SPLITS]
    assert sum(map(len, everything)) == path.stat().st_size


def test_a_text_that_only_repeats_itself_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "input.txt").write_text("the same line\n" * 10_000)
    with pytest.raises(UserError, match="train, validation and test need one each"):
        prepare(config_of(tmp_path / "input.txt", tmp_path / "prepared"), quiet)
    assert not any((tmp_path / "prepared").iterdir())


# --- Whole or not at all ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        *(
            (name, damage)
            for name in ("train.tokens", "test.tokens", "tokenizer.model")
            for damage in ("cut", "changed")
        ),
        *((name, "gone") for name in ("train.tokens", "tokenizer.model", "manifest.json")),
        ("manifest.json", "cut"),
    ],
)
def test_damaged_data_is_named_and_prepared_anew(
    tmp_path: Path, corpus: Path, prepared: Prepared, name: str, damage: str
) -> None:
    folder = tmp_path / prepared.name
    shutil.copytree(prepared.folder, folder)
    content = (folder / name).read_bytes()
    damaged = {"cut": content[:-3], "changed": content[:-1] + bytes([content[-1] ^ 1])}
    (folder / name).unlink() if damage == "gone" else (folder / name).write_bytes(damaged[damage])
    with pytest.raises(UserError, match=name):
        open_prepared(folder)
    said: list[str] = []
    prepare(config_of(corpus, tmp_path), said.append)
    assert "preparing it anew" in said[0]
    assert (folder / name).read_bytes() == content
    assert [left.name for left in tmp_path.iterdir()] == [folder.name]


@pytest.mark.parametrize(
    "stage", ["_sorted_documents", "_train_tokenizer", "_write_split", "_write_manifest", "_take_the_place"]
)
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_a_preparation_that_stops_leaves_nothing_behind(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, stage: str, error: type[BaseException]
) -> None:
    def stop(*_: object) -> None:
        raise error

    monkeypatch.setattr(prepare_module, stage, stop)
    with pytest.raises(error):
        prepare(config_of(corpus, tmp_path / "prepared"), quiet)
    assert list((tmp_path / "prepared").iterdir()) == []


def test_a_preparation_that_is_killed_is_never_taken_for_whole(
    tmp_path: Path, corpus: Path, prepared: Prepared
) -> None:
    code = (
        "import os, sys; from data import prepare as p; from data.config import *\n"
        "p._write_manifest = lambda *_: os._exit(9)\n"
        "p.prepare(DataConfig(corpus=FilesConfig(paths=(sys.argv[1],)), vocab_size=300, folder=sys.argv[2]))"
    )
    command = [sys.executable, "-c", code, str(corpus), str(tmp_path)]
    assert subprocess.run(command, stdout=subprocess.DEVNULL).returncode == 9
    assert not (tmp_path / prepared.name).exists()
    assert prepare(config_of(corpus, tmp_path), quiet).train.ids.tolist() == prepared.train.ids.tolist()


def prepare_there(corpus: Path, folder: Path) -> int:
    return len(prepare(config_of(corpus, folder), quiet).train)


def test_preparations_at_once_do_not_spoil_each_other(tmp_path: Path, corpus: Path, prepared: Prepared) -> None:
    (tmp_path / prepared.name).mkdir()  # and a damaged one lies there already
    (tmp_path / prepared.name / "manifest.json").write_text("{")
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        lengths = pool.starmap(prepare_there, [(corpus, tmp_path)] * 3)
    assert lengths == [len(prepared.train)] * 3
    assert [path.name for path in tmp_path.iterdir()] == [prepared.name]


# --- The command -----------------------------------------------------------------------------------------------------


def test_the_command_prepares_and_says_a_mistake_in_one_line(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = ["--data.corpus", "files", "--data.vocab-size", "300", "--data.corpus.paths"]
    prepare_module.main([*flags, str(corpus)])
    assert (tmp_path / "prepared").is_dir()
    assert "tokens of 300 kinds" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped:
        prepare_module.main([*flags, "nowhere"])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
