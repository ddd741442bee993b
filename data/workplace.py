"""A hidden folder to work in, which a living process is never robbed of and a dead one never leaves for good."""

import contextlib
import errno
import fcntl
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from model.errors import UserError

_LEFTOVER = re.compile(r"\..+\.[0-9a-f]{8}\.(tmp|old)")
# What says that nothing can be written here at all; a full or failing disk is told as what it is.
_CLOSED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST, errno.ENOTDIR}


@contextlib.contextmanager
def workplace(target: Path, show: Callable[[str], object]) -> Iterator[Path]:
    """Make a folder beside the target, under a name of its own, and remove it in the end, unless it was renamed.

    A lock that dies with the process says that somebody works there; folders without one are removed, and told.
    UserError where nothing can be written.
    """
    with _open_to_us(target.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
        for left in remove_leftovers(target.parent):
            show(f"removed {left}: a preparation that was killed left it")
        folder, lock = _make(target)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


@contextlib.contextmanager
def _open_to_us(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in _CLOSED:
            raise
        raise UserError(
            f"data.folder {folder} cannot be written into: {error.strerror}; name another folder"
        ) from error


def _make(target: Path) -> tuple[Path, int]:
    while True:
        folder = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")
        folder.mkdir()
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(folder, os.O_RDONLY)
            _lock(lock, wait=True)
            if folder.exists():
                return folder, lock
            # Between the two somebody took it for a leftover.
            os.close(lock)


def remove_leftovers(folder: Path) -> list[Path]:
    """Remove hidden folders whose process is gone, and return them."""
    removed = []
    for path in sorted(folder.iterdir()):
        if _LEFTOVER.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            with contextlib.suppress(FileNotFoundError):  # another process removed it
                removed += [path] if _remove_unless_locked(path) else []
    return removed


def _remove_unless_locked(path: Path) -> bool:
    lock = os.open(path, os.O_RDONLY)
    try:
        free = _lock(lock, wait=False)
        if free:
            shutil.rmtree(path, ignore_errors=True)
        return free and not path.exists()
    finally:
        os.close(lock)


def _lock(handle: int, wait: bool) -> bool:
    """Lock a folder; False: somebody holds it, or the file system knows no locks (then nothing is ever removed)."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        return False
    return True


def put_aside(folder: Path) -> None:
    """Remove a folder that others may be looking at: it is gone in one move. Another process may have done it."""
    aside = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.old")
    with contextlib.suppress(FileNotFoundError):
        folder.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)
