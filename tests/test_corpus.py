"""Where documents come from: what is read, what is passed over and counted, and what is refused in one line."""

import socket
import subprocess
import sys
import sysconfig
import time
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data import hub
from data.config import CorpusConfig, FilesConfig, HubConfig, StdlibConfig
from data.corpus import Counts, Document, fingerprint, read_documents, stdlib_sources
from data.literals import is_mostly_literal, is_row
from model.errors import UserError


def read(corpus: CorpusConfig) -> tuple[list[Document], Counts]:
    counts: Counts = Counter()
    return list(read_documents(corpus, counts)), counts


def files(*paths: Path | str, **fields: str) -> FilesConfig:
    return FilesConfig(paths=tuple(map(str, paths)), **fields)  # type: ignore[arg-type]


# --- The standard library --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stdlib() -> tuple[list[Document], Counts]:
    return read(StdlibConfig())


def test_the_standard_library_is_text_enough_to_train_on(stdlib: tuple[list[Document], Counts]) -> None:
    documents, _ = stdlib
    names = [document.name for document in documents]
    assert names == sorted(names)
    assert {"argparse.py", "json/decoder.py", "tokenize.py", "keyword.py"} <= set(names)
    assert sum(len(document.text) for document in documents) > 6e6


def test_tables_tests_and_other_peoples_packages_are_left_out_and_counted(
    stdlib: tuple[list[Document], Counts],
) -> None:
    documents, counts = stdlib
    names = {document.name for document in documents}
    assert not {"html/entities.py", "stringprep.py", "encodings/cp437.py", "encodings/utf_8.py"} & names
    assert not [name for name in names if {"test", "tests", "site-packages"} & set(name.split("/"))]
    assert counts["files of encodings/ left out"] > 100
    assert counts["files that are mostly tables of literals left out"] >= 3


def test_what_is_counted_and_what_is_read_are_all_files_there_are(tmp_path: Path) -> None:
    for name in ("a.py", "test/b.py", "json/tests/c.py", "encodings/d.py", "site-packages/e.py", "json/f.py", "g.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = f()\n")
    counts: Counts = Counter()
    assert [source.name for source in stdlib_sources(tmp_path, counts)] == ["a.py", "json/f.py"]
    assert counts == {"files of tests left out": 2, "files of encodings/ left out": 1}


def test_a_coding_line_is_honoured_and_what_does_not_decode_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\nname = f('caf\xe9')\r\n")
    (tmp_path / "broken.py").write_bytes(b"name = f('caf\xe9')\n")
    (tmp_path / "unknown.py").write_bytes(b"# coding: nosuch\n")
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    documents, counts = read(StdlibConfig())
    assert documents == [Document("latin.py", "# -*- coding: latin-1 -*-\nname = f('café')\r\n")]
    assert counts["files that do not decode by their own coding line left out"] == 2


@pytest.mark.parametrize(
    "row",
    [
        "'amp': '\\x26',  # ampersand",
        "0x0041: 0x0391,",
        '"\\u1234" "it\'s"',
        "(1, 2.5e3, None),",
        "b'abc' + b'd',",
        "-1,",
    ],
)
def test_a_row_of_literals_is_seen(row: str) -> None:
    assert is_row(row)


@pytest.mark.parametrize(
    "row",
    [
        "",
        "])",
        "x = 5",
        "return 'a'",
        '"""Return 5."""',
        "don't say 'no'",
        "f('a'),",
        "# 'a', 'b'",
        ")  # 'a'",
        "5 apples",
    ],
)
def test_a_line_of_code_or_prose_is_no_row(row: str) -> None:
    assert not is_row(row)


def test_half_a_file_of_rows_is_a_table() -> None:
    assert is_mostly_literal("abc()\n'abc'\n")
    assert not is_mostly_literal("abcd()\n'abc'\n")
    assert is_mostly_literal("abc()\n    # much is said in a comment\n\n        'abc'\n")
    assert not is_mostly_literal("")


# --- Local files -----------------------------------------------------------------------------------------------------


def test_a_folder_is_read_with_what_lies_below_it(tmp_path: Path) -> None:
    for name in ("b.txt", "a/c.MD", "a/d.py", "a/e.jpg", "empty.txt", ".git/f.txt", ".hidden.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("" if "empty" in name else name)
    documents, counts = read(files(tmp_path))
    assert [document.text for document in documents] == ["a/c.MD", "a/d.py", "b.txt"]
    assert {key: count for key, count in counts.items() if count} == {
        "files of other kinds passed over": 1,
        "empty files passed over": 1,
        "hidden files and folders passed over": 2,
    }


def test_a_file_named_twice_is_read_once_and_globs_reach_below(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/b.txt").write_text("b")
    (tmp_path / "[x].txt").write_text("x")
    documents, _ = read(files(tmp_path / "**/*.txt", tmp_path / "a/b.txt", tmp_path / "[x].txt"))
    assert [document.text for document in documents] == ["x", "b"]


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(lambda text: text[0] != "\ufeff"))
def test_a_file_is_read_byte_for_byte(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(text.encode())
    assert [document.text for document in read(files(path))[0]] == [text]


def test_line_ends_long_lines_and_nul_stay(tmp_path: Path) -> None:
    content = b"a\r\nb\rc\n\0" + b"x" * 100_000
    (tmp_path / "a.txt").write_bytes(content)
    assert read(files(tmp_path))[0][0].text.encode() == content


def test_a_byte_order_mark_is_dropped_and_counted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfa\xef\xbb\xbf")
    documents, counts = read(files(tmp_path))
    assert documents[0].text == "a\ufeff"
    assert counts["byte order marks dropped"] == 1


def test_a_bad_byte_among_many_files_is_told_with_file_and_offset(tmp_path: Path) -> None:
    for index in range(100):
        (tmp_path / f"{index:02}.txt").write_text("fine")
    (tmp_path / "37.txt").write_bytes(b"\xef\xbb\xbfcaf\xe9 and more")
    with pytest.raises(UserError, match=r"37\.txt: byte 6 \(0xe9\) is not UTF-8: .*encoding_errors"):
        read(files(tmp_path))


def test_bad_bytes_are_replaced_and_counted_where_that_is_wanted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("\ufffd".encode() + b" caf\xe9 \xff\xff")
    documents, counts = read(files(tmp_path, encoding_errors="replace"))
    assert documents[0].text == "\ufffd caf\ufffd \ufffd\ufffd"
    assert counts["invalid bytes replaced by U+FFFD"] == 3


@pytest.mark.parametrize("given", ["nowhere", "*.txt", "", "picture.jpg", "pictures", "empty.txt", "empties"])
def test_a_path_without_text_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    (tmp_path / "work/pictures").mkdir(parents=True)
    (tmp_path / "work/empties").mkdir()
    (tmp_path / "work/empties/a.txt").touch()
    (tmp_path / "work/picture.jpg").write_text("x")
    (tmp_path / "work/pictures/picture.jpg").write_text("x")
    monkeypatch.chdir(tmp_path / "work")
    if given == "empty.txt":
        Path(given).touch()
    with pytest.raises(UserError, match=f"'{given.replace('*', '.')}'"):
        read(files(given))


def test_no_paths_at_all_are_refused() -> None:
    with pytest.raises(UserError, match=r"data\.corpus\.paths is empty"):
        read(FilesConfig())


def test_the_fingerprint_follows_the_text_and_not_the_clock(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one")
    before = fingerprint(files(tmp_path))
    path.write_text("one")
    path.touch()
    assert fingerprint(files(tmp_path)) == before
    path.write_text("two")
    assert fingerprint(files(tmp_path)) != before
    path.write_text("one")
    (tmp_path / "b.txt").write_text("one")
    assert fingerprint(files(tmp_path)) != before


# --- Data sets -------------------------------------------------------------------------------------------------------


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data set of our own in a folder; the library's cache lies beside it."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "rows").mkdir()
    lines = [
        '{"text": "one", "other": "x", "n": 1}',
        '{"text": null, "other": "y", "n": 2}',
        '{"text": "three", "other": "z", "n": 3}',
    ]
    (tmp_path / "rows/train.jsonl").write_text("\n".join(lines))
    (tmp_path / "only").mkdir()
    (tmp_path / "only/train.jsonl").write_text('{"story": "a", "n": 1}\n{"story": "b", "n": 2}\n')
    (tmp_path / "two").mkdir()
    (tmp_path / "two/train.jsonl").write_text('{"question": "a", "answer": "b"}\n')
    return tmp_path


def test_a_data_set_in_a_folder_needs_no_network(rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "create_connection", lambda *_: pytest.fail("the network was asked"))
    documents, counts = read(HubConfig(name=str(rows / "rows")))
    assert [document.text for document in documents] == ["one", "three"]
    assert counts == {"rows without text passed over": 1}
    assert [document.text for document in read(HubConfig(name=str(rows / "rows"), limit=1))[0]] == ["one"]


def test_the_text_column_is_found_or_given(rows: Path) -> None:
    assert [document.text for document in read(HubConfig(name=str(rows / "only")))[0]] == ["a", "b"]
    given = HubConfig(name=str(rows / "two"), text_column="answer")
    assert [document.text for document in read(given)[0]] == ["b"]


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("two", {}, "has no column text or content or story: .* one of question, answer"),
        ("rows", {"text_column": "n"}, "has no column 'n' of strings: .* one of text, other"),
        ("rows", {"split": "nosuch"}, "split 'nosuch'.*train"),
        ("rows", {"subset": "nosuch"}, "subset nosuch.*default"),
    ],
)
def test_a_wrong_column_split_or_subset_is_one_line(
    rows: Path, name: str, fields: dict[str, str], message: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        read(HubConfig(name=str(rows / name), **fields))  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_an_edited_folder_of_a_data_set_changes_the_fingerprint(rows: Path) -> None:
    corpus = HubConfig(name=str(rows / "only"))
    before = fingerprint(corpus)
    (rows / "only/train.jsonl").write_text('{"story": "c", "n": 1}\n')
    assert fingerprint(corpus) != before


def test_an_empty_name_is_refused() -> None:
    with pytest.raises(UserError, match=r"data\.corpus\.name is empty"):
        read(HubConfig())


def a_network_that_hangs(*_: object, **__: object) -> socket.socket:
    time.sleep(30)
    raise TimeoutError  # in a thread that nobody waits for any more


def a_network_that_fails(*_: object, **__: object) -> socket.socket:
    raise socket.gaierror(-2, "Name or service not known")


@pytest.mark.parametrize("network", [a_network_that_hangs, a_network_that_fails])
def test_without_a_network_an_unknown_name_fails_within_five_seconds_in_one_line(
    rows: Path, monkeypatch: pytest.MonkeyPatch, network: object
) -> None:
    monkeypatch.setattr(socket, "create_connection", network)
    start = time.monotonic()
    with pytest.raises(UserError, match=r"stdlib, files, a data set folder") as caught:
        read(HubConfig(name="nobody/nothing", limit=5))
    assert time.monotonic() - start < 5
    assert "\n" not in str(caught.value)


def test_without_a_network_a_data_set_in_the_cache_still_loads(rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read(HubConfig(name=str(rows / "rows")))
    # A copy of what the library keeps of a download: cache/<owner>___<name>/<subset>/<version>/<commit>/.
    made = next((rows / "cache").rglob("dataset_info.json"))
    kept = rows / "cache/nobody___rows/default/0.0.0" / ("a" * 40)
    kept.mkdir(parents=True)
    for path in made.parent.iterdir():
        (kept / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(socket, "create_connection", a_network_that_fails)
    documents, _ = read(HubConfig(name="nobody/rows", limit=1))
    assert [document.text for document in documents] == ["one"]


def test_offline_mode_ends_with_the_loading(rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    monkeypatch.setattr(socket, "create_connection", a_network_that_fails)
    with pytest.raises(UserError):
        read(HubConfig(name="nobody/nothing"))
    assert before == (constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE)


def test_a_proxy_stands_for_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def connect(address: object, timeout: float) -> socket.socket:
        asked.append(address)
        return socket.socket()

    monkeypatch.setattr(socket, "create_connection", connect)
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.setenv("https_proxy", "http://proxy.invalid:3128")
    assert hub.hub_is_reachable()
    assert asked == [("proxy.invalid", 3128)]


def test_the_heavy_libraries_are_imported_only_when_they_are_needed() -> None:
    heavy = {"torch", "datasets", "sentencepiece", "numpy"}
    code = f"import sys, data.config, data.corpus; print(sorted({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
