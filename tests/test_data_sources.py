"""Tables and data sets: the text column, limits, long files, and the presets on a stand-in of what they read."""

import gc
import json
import os
import random
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data import corpus as corpus_module
from data import hub
from data.config import CorpusConfig, DataConfig, FilesConfig, HubConfig
from data.corpus import LONG, REACHED, Document, read_documents
from data.prepare import prepare
from data.split import SPLITS
from model.errors import UserError
from training.config import load

AWKWARD = [
    'a "quoted" text',
    "two\nlines\r\nand more",
    "NA",
    "null",
    "007",
    "1,5",
    "  spaces  ",
    "é🎉 \u2028 ▁",
    "=1+1",
]


# `datasets` leaves the tables open that it has read; the collector closes them, and must do so here.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")


@pytest.fixture(autouse=True)
def tables_are_closed() -> Iterator[None]:
    yield
    gc.collect()


def quiet(_: str) -> None:
    """Say nothing."""


def texts(corpus: CorpusConfig, counts: "Counter[str] | None" = None) -> list[str]:
    return [document.text for document in read_documents(corpus, counts)]


def files(*paths: Path, **fields: object) -> FilesConfig:
    return FilesConfig(paths=tuple(map(str, paths)), **fields)  # type: ignore[arg-type]


def write_table(path: Path, columns: dict[str, list[object]]) -> Path:
    import pyarrow
    import pyarrow.csv
    import pyarrow.parquet

    table = pyarrow.table(columns)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path)
    elif path.suffix == ".csv":
        pyarrow.csv.write_csv(table, path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    return path


WORDS = ["quick", "brown", "foxes", "jump", "over", "lazy", "dogs", "while", "odd"]
KINDS = [".jsonl", ".csv", ".parquet"]


# --- Tables ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", KINDS)
def test_the_rows_of_a_table_are_documents_to_the_byte(tmp_path: Path, suffix: str) -> None:
    columns = {"n": list(range(len(AWKWARD))), "text": AWKWARD, "other": ["x"] * len(AWKWARD)}
    path = write_table(tmp_path / f"[a] table{suffix}", columns)
    found = list(read_documents(files(path)))
    assert [each.text for each in found] == AWKWARD
    assert found[2].name == f"{path}/2"


@pytest.mark.parametrize("suffix", KINDS)
@pytest.mark.parametrize(
    ("names", "asked", "taken"),
    [(["story"], None, "story"), (["body"], None, "body"), (["title", "content"], None, "content"),
     (["text", "content"], None, "text"), (["text", "title"], "title", "title")],
)  # fmt: skip
def test_the_column_is_found_by_its_name_or_as_the_only_one_or_is_given(
    tmp_path: Path, suffix: str, names: list[str], asked: str | None, taken: str
) -> None:
    path = write_table(tmp_path / f"a{suffix}", {"n": [1, 2], **{name: [f"{name} a", "b"] for name in names}})
    assert texts(files(path, text_column=asked)) == [f"{taken} a", "b"]


@pytest.mark.parametrize("suffix", KINDS)
@pytest.mark.parametrize(
    ("columns", "asked", "message"),
    [({"one": ["a"], "two": ["b"]}, None, "one of one, two"), ({"text": ["a"]}, "body", "no column 'body'.* text"),
     ({"n": [1]}, None, "no text at all")],
)  # fmt: skip
def test_a_table_without_a_clear_column_is_one_line_that_lists_them(
    tmp_path: Path, suffix: str, columns: dict[str, list[object]], asked: str | None, message: str
) -> None:
    path = write_table(tmp_path / f"table{suffix}", columns)
    with pytest.raises(UserError, match=rf"table\{suffix} has .*{message}") as caught:
        texts(files(path, text_column=asked))
    assert "\n" not in str(caught.value)


def test_a_column_of_a_csv_that_looks_like_numbers_is_text_where_it_is_meant(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id,story,note\n1,007,\n2,1e5,x\n")
    assert texts(files(tmp_path / "a.csv")) == ["007", "1e5"]
    assert texts(files(tmp_path / "a.csv", text_column="id")) == ["1", "2"]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_rows_without_text_are_counted(tmp_path: Path, suffix: str) -> None:
    counts: Counter[str] = Counter()
    path = write_table(tmp_path / f"a{suffix}", {"text": ["a", None, "", "b"], "n": [1, 2, 3, 4]})
    assert texts(files(path), counts) == ["a", "b"]
    assert counts[hub.WITHOUT_TEXT] == 2


def test_a_folder_may_mix_texts_and_tables(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("plain")
    for suffix in KINDS:
        write_table(tmp_path / f"a{suffix}", {"text": [f"from {suffix}"]})
    (tmp_path / "empty.csv").touch()
    counts: Counter[str] = Counter()
    assert texts(files(tmp_path), counts) == ["from .csv", "from .jsonl", "from .parquet", "plain"]
    assert counts["empty files passed over"] == 1


def test_a_pipe_or_a_link_to_nothing_is_passed_over_and_counted(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "link.txt").symlink_to(tmp_path / "nowhere")
    (tmp_path / "a.txt").write_text("a")
    counts: Counter[str] = Counter()
    assert texts(files(tmp_path), counts) == ["a"]
    assert counts["files of other kinds passed over"] == 2


# --- Limits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", KINDS)
def test_limits_in_documents_and_bytes_are_kept(tmp_path: Path, suffix: str) -> None:
    path = write_table(tmp_path / f"a{suffix}", {"text": ["éé", "b" * 5, "c", "d"]})
    counts: Counter[str] = Counter()
    assert texts(files(path, limit=2), counts) == ["éé", "b" * 5]
    assert counts[REACHED] == 1
    assert texts(files(path, limit_bytes=9)) == ["éé", "b" * 5]
    assert texts(files(path, limit_bytes=8)) == ["éé"]
    assert texts(files(path, limit_bytes=3)) == []
    assert texts(files(path, limit=3, limit_bytes=9)) == ["éé", "b" * 5]
    assert texts(files(path, limit=4)) == ["éé", "b" * 5, "c", "d"]


def test_a_limit_asks_for_no_document_beyond_it() -> None:
    def rows() -> Iterator[Document]:
        yield Document("a", "a")
        pytest.fail("one more was asked for")

    assert len(list(corpus_module._limited(rows(), FilesConfig(limit=1), Counter()))) == 1


@pytest.mark.parametrize("limit", [5_000, 20_000])
def test_a_limit_in_tokens_holds_for_all_splits_together_and_keeps_their_shares(tmp_path: Path, limit: int) -> None:
    draw = random.Random(0)
    words = [" ".join(draw.choices(WORDS, k=9)) for _ in range(4000)]
    path = write_table(tmp_path / "a.jsonl", {"text": [f"{line} {index}" for index, line in enumerate(words)]})
    config = DataConfig(corpus=files(path, limit_tokens=limit), vocab_size=300, folder=str(tmp_path / "prepared"))
    prepared = prepare(config, quiet)
    sizes = {split: len(getattr(prepared, split)) for split in SPLITS}
    assert limit * 0.97 < sum(sizes.values()) <= limit
    assert sizes["validation"] == pytest.approx(0.05 * limit, rel=0.2)
    for split in SPLITS:
        entry = prepared.manifest["splits"][split]
        ids = getattr(prepared, split).ids
        assert entry["tokens"] == sizes[split]
        assert entry["documents"] == len(entry["listed"]) == int((ids == 1).sum()) or entry["documents"] > 1000
        assert entry["bytes"] == prepared.tokenizer.token_bytes()[ids].sum()


def test_a_limit_in_tokens_that_the_corpus_does_not_reach_is_told(tmp_path: Path) -> None:
    path = write_table(tmp_path / "a.jsonl", {"text": [f"a short text of number {index}" for index in range(200)]})
    said: list[str] = []
    config = DataConfig(corpus=files(path, limit_tokens=10**6), vocab_size=284, folder=str(tmp_path / "p"))
    prepare(config, said.append)
    assert any("the corpus makes" in line and "fewer than data.corpus.limit_tokens 1,000,000" in line for line in said)


def test_a_limit_in_tokens_too_small_for_a_document_is_one_line(tmp_path: Path) -> None:
    path = write_table(tmp_path / "a.jsonl", {"text": [f"a short text of number {index} " * 9 for index in range(200)]})
    config = DataConfig(corpus=files(path, limit_tokens=2000), vocab_size=284, folder=str(tmp_path / "p"))
    with pytest.raises(UserError, match=r"limit_tokens leaves 100 to the (validation|test) split, too few"):
        prepare(config, quiet)


# --- Long documents --------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(st.text(st.sampled_from("abcé🎉 \n\r\0"), min_size=70, max_size=300), st.integers(1, 40))
def test_a_long_file_is_read_in_pieces_and_none_of_it_is_lost(
    tmp_path_factory: pytest.TempPathFactory, text: str, size: int
) -> None:
    path = tmp_path_factory.mktemp("long") / "a.txt"
    path.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus_module, "LONGEST", 60)
        patch.setattr(corpus_module, "PIECE", size)
        counts: Counter[str] = Counter()
        found = texts(files(path), counts)
    assert "".join(found) == text
    assert counts[LONG] == 1
    assert all(len(piece.encode()) <= 2 * size + 3 for piece in found)


def test_a_bad_byte_far_into_a_long_file_is_told_with_its_offset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus_module, "LONGEST", 60)
    monkeypatch.setattr(corpus_module, "PIECE", 10)
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + b"line of text\n" * 10 + b"caf\xe9")
    with pytest.raises(UserError, match=r"a\.txt: byte 136 \(0xe9\)"):
        texts(files(tmp_path))
    counts: Counter[str] = Counter()
    assert "".join(texts(files(tmp_path, encoding_errors="replace"), counts)).endswith("text\ncaf\ufffd")
    assert counts["byte order marks dropped"] == 1


def test_a_long_row_is_cut_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_module, "LONGEST", 60)
    monkeypatch.setattr(corpus_module, "PIECE", 20)
    path = write_table(tmp_path / "a.jsonl", {"text": ["line of text\n" * 10, "short"]})
    found = list(read_documents(files(path)))
    assert "".join(each.text for each in found[:-1]) == "line of text\n" * 10
    assert found[1].name == f"{path}/0#1"


# --- Lines to documents ----------------------------------------------------------------------------------------------

WIKI = ["", " = A man = \n", "", " He was . \n", " = = Life = = \n", " x = 5 \n", "", " = A town = \n", " It is . \n"]
START = " = [^=]+ = \n"


def test_lines_are_joined_to_documents_at_their_first_lines() -> None:
    found = list(hub.joined(iter(WIKI), START))
    assert found == [
        "",
        " = A man = \n\n He was . \n = = Life = = \n x = 5 \n\n",
        " = A town = \n It is . \n",
    ]


def test_a_pattern_that_never_matches_gives_documents_of_bounded_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "LONGEST_JOINED", 10)
    assert list(hub.joined(iter(["abcdef\n"] * 4), "never")) == ["abcdef\nabcdef\n"] * 2


@pytest.mark.parametrize("pattern", ["(", "[a"])
def test_a_broken_pattern_is_refused_with_its_fault(pattern: str) -> None:
    with pytest.raises(UserError, match="is no regular expression"):
        load(None, {"data.corpus": {"kind": "hub", "document_start": pattern}})


# --- Data sets and presets -------------------------------------------------------------------------------------------


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Data sets with the names, configurations and columns of the real ones, in folders that `datasets` loads."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(hub, "hub_is_reachable", lambda: pytest.fail("the network was asked"))
    stories = tmp_path / "roneneldan/TinyStories/data"
    stories.mkdir(parents=True)
    draw = random.Random(0)
    names = ["Lily", "Tom", "Ben", "Mia"]
    tales = [
        f"Once upon a time, {draw.choice(names)} met {draw.choice(names)}.\n{index} times.\n" for index in range(900)
    ]
    write_table(stories / "train-00000-of-00002.parquet", {"text": tales[:500]})
    write_table(stories / "train-00001-of-00002.parquet", {"text": tales[500:]})
    write_table(stories / "validation-00000-of-00001.parquet", {"text": tales[:5]})
    wiki = tmp_path / "Salesforce/wikitext"
    for subset in ("wikitext-2-raw-v1", "wikitext-103-raw-v1"):
        (wiki / subset).mkdir(parents=True)
        lines = [""]
        for article in range(150):
            lines += [f" = Article {article} of {subset} = \n", "", f" It tells of {article} things . \n"]
        write_table(wiki / subset / "train-00000-of-00001.parquet", {"text": lines})
    configs = "\n".join(
        f"- config_name: {subset}\n  data_files:\n  - split: train\n    path: {subset}/train-*"
        for subset in ("wikitext-2-raw-v1", "wikitext-103-raw-v1")
    )
    (wiki / "README.md").write_text(f"---\nconfigs:\n{configs}\n---\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("streaming", [False, True])
def test_the_preset_of_tinystories_reads_its_training_split(stand_in: Path, streaming: bool) -> None:
    corpus = load(configs() / "tinystories.yaml", {"data.corpus.streaming": streaming}).data.corpus
    assert len(texts(corpus)) == 900


def test_the_preset_of_wikitext_makes_documents_of_articles(stand_in: Path) -> None:
    config = load(configs() / "wikitext.yaml", {"data.folder": str(stand_in / "p"), "data.vocab_size": 300})
    prepared = prepare(config.data, quiet)
    assert sum(prepared.manifest["splits"][split]["documents"] for split in SPLITS) == 150
    assert prepared.tokenizer.decode(prepared.test.ids).startswith(" = Article")
    assert prepared.name.startswith("Salesforce-wikitext-300-")


def test_a_stream_and_a_copy_give_the_same_files(stand_in: Path) -> None:
    folders = [
        prepare(DataConfig(corpus=corpus, vocab_size=300, folder=str(stand_in / name)), quiet).folder
        for name, corpus in (
            ("copy", HubConfig(name="roneneldan/TinyStories")),
            ("stream", HubConfig(name="roneneldan/TinyStories", streaming=True)),
        )
    ]
    assert folders[0].name == folders[1].name
    for path in folders[0].iterdir():
        assert path.read_bytes() == (folders[1] / path.name).read_bytes()


def test_a_stream_ends_at_its_limit(stand_in: Path) -> None:
    assert len(texts(HubConfig(name="roneneldan/TinyStories", limit=7))) == 7
    few = texts(HubConfig(name="roneneldan/TinyStories", limit_bytes=1000))
    assert 900 < sum(map(len, few)) <= 1000


def test_a_network_that_fails_half_way_is_one_line_and_leaves_nothing(
    stand_in: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(data: object, column: str) -> Iterator[str]:
        yield from ("some text", "other text")
        raise ConnectionError("the line\nis dead")

    monkeypatch.setattr(hub, "_texts", failing)
    config = DataConfig(corpus=HubConfig(name="roneneldan/TinyStories"), vocab_size=300, folder=str(stand_in / "p"))
    with pytest.raises(UserError, match=r"TinyStories.*: the line is dead$"):
        prepare(config, quiet)
    assert not any((stand_in / "p").iterdir())


def configs() -> Path:
    return Path(sys.modules["data"].__file__ or "").parents[1] / "configs"
