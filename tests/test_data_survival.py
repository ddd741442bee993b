"""Preparation under fire: kills, full disks, company, other orders and other numbers of processes."""

import contextlib
import errno
import gc
import io
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from data import encode as encode_module
from data import prepare as prepare_module
from data import spool as spool_module
from data import workplace as workplace_module
from data.config import DataConfig, FilesConfig
from data.corpus import Document
from data.encode import Encoded, encoder, process_count
from data.prepare import Prepared, open_prepared, prepare, within
from data.split import SPLITS
from data.spool import Spool, Writer, cut
from data.tokenizer import Tokenizer
from data.workplace import remove_leftovers, workplace
from model.errors import UserError

WORDS = ["quick", "brown", "foxes", "jump", "over", "lazy", "dogs", "while", "seven", "wizards", "brew"]


def quiet(_: str) -> None:
    """Say nothing."""


def some_text(seed: int, lines: int = 12) -> str:
    draw = random.Random(seed)
    return "".join(" ".join(draw.choices(WORDS, k=8)) + f" {draw.randint(0, 99)}\n" for _ in range(lines))


def config_of(corpus: Path, folder: Path, vocab_size: int = 300, processes: int | None = 1) -> DataConfig:
    files = FilesConfig(paths=(str(corpus),))
    return DataConfig(corpus=files, vocab_size=vocab_size, folder=str(folder), processes=processes)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus") / "texts"
    folder.mkdir()
    for index in range(110):
        (folder / f"{index:03}.txt").write_text(some_text(index))
    return folder


@pytest.fixture(scope="module")
def prepared(corpus: Path) -> Prepared:
    return prepare(config_of(corpus, corpus.parent / "prepared"), quiet)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# --- The same input, the same files ----------------------------------------------------------------------------------


@pytest.mark.parametrize("processes", [2, 3])
def test_the_number_of_processes_changes_no_file(
    tmp_path: Path, corpus: Path, prepared: Prepared, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encode_module, "BYTES_A_PROCESS", 1000)
    monkeypatch.setattr(prepare_module, "PORTION_BYTES", 2000)
    other = prepare(config_of(corpus, tmp_path, processes=processes), quiet)
    assert content(other.folder) == content(prepared.folder)
    assert not multiprocessing.active_children()


def test_processes_are_no_more_than_asked_for_or_than_the_text_is_worth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode_module, "_cores", lambda: 64)
    assert [process_count(None, size) for size in (0, 10**6, 9 * 10**6, 10**10)] == [1, 1, 3, 16]
    assert [process_count(asked, 10**10) for asked in (1, 2, 40)] == [1, 2, 40]


def test_the_order_in_which_files_are_given_or_listed_changes_nothing(
    tmp_path: Path, corpus: Path, prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [str(path) for path in corpus.iterdir()]
    walk = os.walk

    def shuffled(*given: object, **more: object) -> Iterator[tuple[str, list[str], list[str]]]:
        for folder, folders, names in walk(*given, **more):  # type: ignore[call-overload]
            random.shuffle(names)
            yield folder, folders, names

    monkeypatch.setattr(os, "walk", shuffled)
    assert prepare_module.folder_name(config_of(corpus, tmp_path)) == prepared.name
    found = []
    for number in range(3):
        random.shuffle(paths)
        config = DataConfig(corpus=FilesConfig(paths=tuple(paths)), vocab_size=300, folder=str(tmp_path / f"{number}"))
        found.append(prepare(config, quiet).folder)
    assert content(found[0]) == content(found[1]) == content(found[2])
    assert all((found[0] / name).read_bytes() == (prepared.folder / name).read_bytes() for name in prepare_module.FILES)


def test_other_names_of_the_same_texts_give_the_same_tokens(tmp_path: Path, corpus: Path, prepared: Prepared) -> None:
    (tmp_path / "renamed").mkdir()
    for number, path in enumerate(sorted(corpus.iterdir())):
        shutil.copy(path, tmp_path / f"renamed/{(number * 37) % 110}.md")
    other = prepare(config_of(tmp_path / "renamed", tmp_path / "prepared"), quiet)
    assert other.manifest["files"] == prepared.manifest["files"]
    assert [other.manifest["splits"][split]["sha256"] for split in SPLITS] == [
        prepared.manifest["splits"][split]["sha256"] for split in SPLITS
    ]


def test_the_manifest_of_a_large_corpus_names_some_documents_and_hashes_all(
    tmp_path: Path, corpus: Path, prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare_module, "LISTED", 10)
    few = prepare(config_of(corpus, tmp_path), quiet).manifest["splits"]["train"]
    all_of_them = prepared.manifest["splits"]["train"]
    assert list(few["listed"]) == list(all_of_them["listed"])[:10]
    assert few | {"listed": 0} == all_of_them | {"listed": 0}


def test_the_tokenizer_learns_from_a_bounded_part_of_the_training_split(
    tmp_path: Path, corpus: Path, prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare_module, "SAMPLE_BYTES", 20_000)
    other = prepare(config_of(corpus, tmp_path), quiet)
    sample = other.manifest["tokenizer_sample"]
    listed = list(other.manifest["splits"]["train"]["listed"].values())[: sample["documents"]]
    texts = [Path(name).read_text() for name in listed]
    assert 18_000 < sum(map(len, texts)) == sample["bytes"] < 20_000
    assert Tokenizer.train(texts, 300).digest == other.tokenizer.digest != prepared.tokenizer.digest


def test_documents_are_kept_up_to_the_first_that_does_not_fit() -> None:
    parts = [
        Encoded(np.arange(6), np.array([1, 2, 3]), np.array([1, 1, 1])),
        Encoded(np.arange(4), np.array([4]), np.array([9])),
    ]
    for most, kept in [(None, 4), (10, 4), (9, 3), (6, 3), (5, 2), (3, 2), (2, 1), (1, 1), (0, 0)]:
        found = list(within(iter(parts), most))
        assert sum(len(some.lengths) for some in found) == sum(len(some.bytes) for some in found) == kept
        assert sum(len(some.ids) for some in found) == sum(int(some.lengths.sum()) for some in found)


def test_a_corpus_that_changes_while_it_is_read_is_refused(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = tmp_path / "texts"
    shutil.copytree(corpus, mine)
    build = prepare_module._build

    def slow(*given: object) -> None:
        build(*given)  # type: ignore[arg-type]
        (mine / "late.txt").write_text("one more")

    monkeypatch.setattr(prepare_module, "_build", slow)
    with pytest.raises(UserError, match="was changed while it was read"):
        prepare(config_of(mine, tmp_path / "prepared"), quiet)
    assert not any((tmp_path / "prepared").iterdir())


# --- Kills -----------------------------------------------------------------------------------------------------------

# As in a corpus of gigabytes: many portions, two processes beside the first.
CODE = """
import sys
from pathlib import Path
from data import encode, prepare
from data.config import DataConfig, FilesConfig
encode.BYTES_A_PROCESS, prepare.PORTION_BYTES = 1000, 1000
if __name__ == "__main__":
    corpus, folder, vocab_size = sys.argv[1:]
    files = FilesConfig(paths=(corpus,))
    prepare.prepare(DataConfig(corpus=files, vocab_size=int(vocab_size), folder=folder, processes=2))
"""


def start(tmp_path: Path, corpus: Path, folder: Path, vocab_size: int = 300) -> "subprocess.Popen[bytes]":
    script = tmp_path / "preparation.py"
    script.write_text(CODE)
    command = [sys.executable, str(script), str(corpus), str(folder), str(vocab_size)]
    here = str(Path(prepare_module.__file__).parents[1])
    # A session of its own, so that we see when the last of its processes has ended.
    return subprocess.Popen(
        command, stdout=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": here}, start_new_session=True
    )


def all_ended(session: int, seconds: float = 30) -> bool:
    end = time.monotonic() + seconds
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < end:
            os.killpg(session, 0)
            time.sleep(0.02)
        os.killpg(session, signal.SIGKILL)
        return False
    return True


def killed_at(tmp_path: Path, corpus: Path, prepared: Prepared, share: float, duration: float) -> None:
    folder = tmp_path / "prepared"
    process = start(tmp_path, corpus, folder)
    time.sleep(share * duration)
    process.kill()
    process.wait()
    assert all_ended(process.pid), "a process outlived the one that started it"
    target = folder / prepared.name
    if target.exists():
        assert content(target) == content(prepared.folder)
        shutil.rmtree(target)


def survives(tmp_path: Path, corpus: Path, prepared: Prepared, kills: int) -> None:
    begin = time.monotonic()
    start(tmp_path, corpus, tmp_path / "first").wait()
    duration = time.monotonic() - begin
    for number in range(kills):
        killed_at(tmp_path, corpus, prepared, (number + 0.5) / kills, duration)
    said: list[str] = []
    made = prepare(config_of(corpus, tmp_path / "prepared"), said.append)
    assert content(made.folder) == content(prepared.folder)
    assert [path.name for path in (tmp_path / "prepared").iterdir()] == [prepared.name]


def test_a_preparation_killed_at_any_moment_is_made_anew_and_leaves_nothing(
    tmp_path: Path, corpus: Path, prepared: Prepared
) -> None:
    survives(tmp_path, corpus, prepared, kills=4)


@pytest.mark.soak
def test_a_preparation_survives_thirty_kills(tmp_path: Path, corpus: Path, prepared: Prepared) -> None:
    survives(tmp_path, corpus, prepared, kills=30)


def test_ctrl_c_ends_every_process_and_leaves_nothing_half_written(
    tmp_path: Path, corpus: Path, prepared: Prepared
) -> None:
    process = start(tmp_path, corpus, tmp_path / "prepared")
    while not any((tmp_path / "prepared").glob(".*.tmp/train.tokens")):
        assert process.poll() is None
        time.sleep(0.001)
    os.killpg(process.pid, signal.SIGINT)
    process.wait()
    assert all_ended(process.pid)
    # On a busy machine the signal may come when the folder has its name already: then it is whole.
    for left in (tmp_path / "prepared").iterdir():
        assert left.name == prepared.name
        assert content(left) == content(prepared.folder)


def test_leftovers_of_the_dead_are_removed_and_those_of_the_living_and_of_others_are_not(tmp_path: Path) -> None:
    for name in (".a-300-0123.89abcdef.tmp", ".a-300-0123.89abcdef.old"):
        (tmp_path / name / "below").mkdir(parents=True)
    others = [".hidden", "a-300-0123", ".a.tmp", "a.89abcdef.tmp"]
    for name in others:
        (tmp_path / name).mkdir()
    said: list[str] = []
    with workplace(tmp_path / "b", said.append) as alive:
        (alive / "file").touch()
        assert len(said) == 2
        assert remove_leftovers(tmp_path) == []
        assert (alive / "file").exists()
        with workplace(tmp_path / "b", said.append):
            assert (alive / "file").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(others)


def test_a_workplace_that_is_taken_for_a_leftover_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = workplace_module._lock

    def robbed(handle: int, wait: bool) -> bool:
        monkeypatch.setattr(workplace_module, "_lock", lock)
        for path in tmp_path.iterdir():
            path.rmdir()
        return lock(handle, wait)

    monkeypatch.setattr(workplace_module, "_lock", robbed)
    with workplace(tmp_path / "a", quiet) as folder:
        assert folder.is_dir()


def test_a_killed_worker_is_told_in_one_line(tmp_path: Path, prepared: Prepared) -> None:
    with Writer(tmp_path / "spool") as writer:
        for index in range(3000):
            writer.add(Document("", some_text(index)))
    spool = Spool(tmp_path / "spool")

    def encode_and_kill() -> None:
        with encoder(spool.folder, prepared.tokenizer, 2) as encode:
            for _ in encode(cut(spool.split("train"), 1000)):
                for child in multiprocessing.active_children():
                    child.kill()

    with pytest.raises(UserError, match=r"was killed, .* lower data\.processes") as caught:
        encode_and_kill()
    assert "\n" not in str(caught.value)
    gc.collect()


# --- Company ---------------------------------------------------------------------------------------------------------


def test_preparations_of_the_same_and_of_other_settings_at_once_do_not_spoil_each_other(
    tmp_path: Path, corpus: Path, prepared: Prepared
) -> None:
    (tmp_path / "at once" / f".{prepared.name}.0123abcd.tmp").mkdir(parents=True)  # all of them try to remove it
    sizes = [300, 300, 301, 302]
    processes = [start(tmp_path, corpus, tmp_path / "at once", size) for size in sizes]
    for process in processes:
        process.wait()
    assert [process.returncode for process in processes] == [0] * 4
    alone = [prepare(config_of(corpus, tmp_path / "alone", size), quiet).folder for size in sorted(set(sizes))]
    found = sorted((tmp_path / "at once").iterdir())
    assert [path.name for path in found] == sorted(path.name for path in alone)
    assert [content(path) for path in found] == [content(path) for path in sorted(alone)]


# --- A disk that fails -----------------------------------------------------------------------------------------------


class Disk:
    """Counts what reaches the disk, and fails from the n-th time on, or at that time alone."""

    def __init__(self, patch: pytest.MonkeyPatch, first: int, number: int, lasting: bool) -> None:
        self.count, self.first, self.number, self.lasting = 0, first, number, lasting
        disk = self

        class Raw(io.FileIO):
            def write(self, data: object) -> int:
                disk.use()
                return super().write(data)  # type: ignore[arg-type]

        opened = io.open

        def faulty_open(file: object, mode: str = "r", *given: object, **more: object) -> object:
            if "w" not in mode:
                return opened(file, mode, *given, **more)  # type: ignore[call-overload]
            disk.use()
            buffered = io.BufferedWriter(Raw(os.fspath(file), "w"))  # type: ignore[call-overload]
            return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding="utf-8")

        patch.setattr(io, "open", faulty_open)
        # What is read-only keeps even what is unfinished.
        removals = ("unlink", "rmdir") if number == errno.EROFS else ()
        for name in ("mkdir", "rename", "fsync", *removals):
            patch.setattr(os, name, self.counted(getattr(os, name)))

    def counted(self, call: Callable[..., object]) -> Callable[..., object]:
        def faulty(*given: object, **more: object) -> object:
            self.use()
            return call(*given, **more)

        return faulty

    def use(self) -> None:
        self.count += 1
        if self.count == self.first or (self.lasting and self.count > self.first):
            raise OSError(self.number, os.strerror(self.number))


@pytest.mark.parametrize(("number", "lasting"), [(errno.ENOSPC, True), (errno.EIO, False), (errno.EROFS, True)])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_whichever_write_fails_nothing_half_written_stays(
    tmp_path: Path, corpus: Path, prepared: Prepared, number: int, lasting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool_module, "BUCKETS", 2)
    folder, refusals = tmp_path / "prepared", list[str]()
    for first in range(1, 1000):
        with monkeypatch.context() as patch:
            disk = Disk(patch, first, number, lasting)
            try:
                made, failure = prepare(config_of(corpus, folder), quiet), None
            except OSError as error:
                failure = error
            except UserError as error:
                refusals.append(str(error))
                failure = OSError(number, "", str(folder))
        if disk.count < first:
            break
        # Only what follows the rename, forcing the name onto the disk, may fail and leave the folder: it is whole.
        assert failure is not None
        assert (failure.errno, bool(failure.filename)) == (number, True)
        if number == errno.EROFS and folder.exists():
            remove_leftovers(folder)  # as the next preparation does
        left = [path.name for path in folder.iterdir()] if folder.exists() else []
        assert left in ([], [prepared.name])
        if left:
            assert content(folder / left[0]) == content(prepared.folder)
            shutil.rmtree(folder / left[0])
    assert first > 30
    told = f"data.folder {folder} cannot be written into: {os.strerror(number)}; name another folder"
    assert set(refusals) == ({told} if number == errno.EROFS else set())
    assert content(made.folder) == content(prepared.folder)


def test_a_file_that_may_not_grow_ends_the_command_with_one_line(tmp_path: Path, corpus: Path) -> None:
    command = [sys.executable, "-m", "data.prepare", "--data.corpus", "files", "--data.corpus.paths", str(corpus)]
    here = Path(prepare_module.__file__).parents[1]
    for blocks in (1, 8, 16):
        limited = ["bash", "-c", f'ulimit -f {blocks}; exec "$@"', "_", *command, "--data.vocab-size", "300"]
        done = subprocess.run(
            [*limited, "--data.folder", str(tmp_path / "prepared")], cwd=here, capture_output=True, text=True
        )
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1
        assert "File too large" in done.stderr
        assert not any((tmp_path / "prepared").iterdir())


@pytest.mark.parametrize("change", [{"files": 3}, {"files": {"train.tokens": "x"}}, {"format": 1}, {"files": None}])
def test_a_manifest_of_another_shape_is_refused_by_name(
    tmp_path: Path, prepared: Prepared, change: dict[str, object]
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(prepared.folder, folder)
    (folder / "manifest.json").write_text(json.dumps(prepared.manifest | change))
    with pytest.raises(UserError, match=r"manifest\.json"):
        open_prepared(folder)
