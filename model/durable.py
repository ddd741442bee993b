"""Writing that survives a kill at any moment: a folder or a file is either the old one or the new one, whole."""

import contextlib
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from model.errors import UserError

MANIFEST = "manifest.json"
FORMAT = 1

Writer = Callable[[Path], object]


def sync(path: Path) -> None:
    """Force a file, or the list of names in a folder, onto the disk."""
    with _named(path):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_bytes(path: Path, content: bytes) -> None:
    """Replace a small file whole; OSError names it where the disk takes nothing more."""
    temporary = _hidden(path)
    try:
        with _named(path):
            temporary.write_bytes(content)
            sync(temporary)
            temporary.replace(path)
            sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Replace a small text file whole."""
    write_bytes(path, text.encode())


def append(path: Path, content: bytes) -> None:
    """Append to a file, all of it or nothing: a full disk may take the first part, and the next one be glued to it."""
    # Opened anew each time: an open handle would go on writing into the old file after another one replaced it.
    with _named(path), path.open("ab", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        try:
            while content:
                content = content[file.write(content) :]
        except OSError:
            file.truncate(end)
            raise


def write_folder(target: Path, writers: Mapping[str, Writer]) -> None:
    """Write a new folder of files whole, with a manifest of their sizes and hashes.

    The files are made in a hidden folder beside the target, forced onto the disk and renamed. Whatever fails on the
    way, the hidden folder is removed. OSError where the target is there already: a folder cannot be exchanged in one
    move, and between two a kill would leave none.
    """
    with hidden_folder(target) as folder:
        for name, write in writers.items():
            with _named(target / name):
                write(folder / name)
        manifest = {"format": FORMAT, "files": {name: _entry(folder / name) for name in writers}}
        with _named(target / MANIFEST):
            (folder / MANIFEST).write_bytes(json.dumps(manifest, indent=1).encode())
        with _named(target):
            for name in (*writers, MANIFEST):
                sync(folder / name)
            sync(folder)
            folder.rename(target)
            sync(target.parent)


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    # Writing to an open file that the disk has no room for raises an OSError that does not say which file, and a
    # hidden name would tell nobody anything.
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def _entry(path: Path) -> dict[str, int | str]:
    return {"bytes": path.stat().st_size, "sha256": file_digest(path)}


@contextlib.contextmanager
def hidden_folder(target: Path) -> Iterator[Path]:
    """Make a folder beside the target, under a name of its own, and remove it in the end, unless it was renamed."""
    folder = _hidden(target)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _hidden(target: Path) -> Path:
    return target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")


def remove_folder(path: Path) -> None:
    """Remove a folder that vanishes in one move: neither a kill nor a fault leaves a part of it under its name."""
    aside = _hidden(path)
    path.rename(aside)
    shutil.rmtree(aside)


def remove_remains(folder: Path, name: str = "*") -> None:
    """Remove what a kill left half-written or half-removed of the file or folder of this name in `folder`."""
    for remains in folder.glob(f".{name}.????????.tmp"):
        shutil.rmtree(remains) if remains.is_dir() else remains.unlink()


def check_folder(folder: Path) -> None:
    """Compare a folder with its manifest: UserError naming the file that is missing, short or changed."""
    for name, (size, digest) in _read_manifest(folder / MANIFEST).items():
        path = folder / name
        if not path.is_file():
            raise UserError(f"{path} is missing: this checkpoint is damaged, use another one")
        if path.stat().st_size != size:
            raise UserError(
                f"{path} has {path.stat().st_size} bytes instead of {size}: this checkpoint is damaged, use another one"
            )
        if file_digest(path) != digest:
            raise UserError(f"{path} was changed after it was written: this checkpoint is damaged, use another one")


def _read_manifest(path: Path) -> dict[str, tuple[int, str]]:
    """Return size and hash of each file."""
    if not path.is_file():
        raise UserError(f"{path.parent} is no checkpoint: it holds no {MANIFEST}")
    try:
        manifest = json.loads(path.read_bytes())
        version = manifest["format"]
        files = {name: (entry["bytes"], entry["sha256"]) for name, entry in manifest["files"].items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UserError(f"{path} is damaged: {type(error).__name__}; use another checkpoint") from error
    if version != FORMAT:
        raise UserError(f"{path} has format {version!r}; this version of ropelab reads format {FORMAT}")
    return files
