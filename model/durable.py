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
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_text(path: Path, text: str) -> None:
    """Replace a small text file whole."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        sync(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)


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
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        for name in (*writers, MANIFEST):
            sync(folder / name)
        sync(folder)
        folder.rename(target)
        sync(target.parent)


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    # Writing to an open file that the disk has no room for raises an OSError that does not say which file.
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def _entry(path: Path) -> dict[str, int | str]:
    return {"bytes": path.stat().st_size, "sha256": file_digest(path)}


@contextlib.contextmanager
def hidden_folder(target: Path) -> Iterator[Path]:
    """Make a folder beside the target, under a name of its own, and remove it in the end, unless it was renamed."""
    folder = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def check_folder(folder: Path) -> None:
    """Compare a folder with its manifest: UserError naming the file that is missing, short or changed."""
    for name, entry in _read_manifest(folder).items():
        path = folder / name
        if not path.is_file():
            raise UserError(f"{path} is missing: this checkpoint is damaged, use another one")
        if path.stat().st_size != entry["bytes"]:
            raise UserError(
                f"{path} has {path.stat().st_size} bytes instead of {entry['bytes']}: "
                "this checkpoint is damaged, use another one"
            )
        if file_digest(path) != entry["sha256"]:
            raise UserError(f"{path} was changed after it was written: this checkpoint is damaged, use another one")


def _read_manifest(folder: Path) -> dict[str, dict[str, int | str]]:
    path = folder / MANIFEST
    if not path.is_file():
        raise UserError(f"{folder} is no checkpoint: it holds no {MANIFEST}")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        version, files = manifest["format"], dict(manifest["files"])
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path} is damaged: {type(error).__name__}; use another checkpoint") from error
    if version != FORMAT:
        raise UserError(f"{path} has format {version!r}; this version of ropelab reads format {FORMAT}")
    return files
