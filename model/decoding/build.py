"""Builds the C++ kernel once and keeps it: a plain shared library, without PyTorch's headers, loaded by ctypes.

`torch.utils.cpp_extension` would need ninja, take twenty seconds for a file that includes PyTorch's headers, and wait
for ever for a lock that a killed process has left. Here the library's name tells what it was built from, and it is
written under another name and renamed: there is no lock, two processes at once both end with a whole library.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("native.cpp")
FLAGS = ("-std=c++20", "-O3", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math")
MACHINE = "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"
BUILD_SECONDS = 6.0
"""About how long a build takes on a laptop."""


class BuildError(Exception):
    """The kernel cannot be built or loaded here; the message is one line."""


def folder() -> Path:
    """Return where built kernels are kept: TORCH_EXTENSIONS_DIR, else the user's cache folder."""
    named = os.environ.get("TORCH_EXTENSIONS_DIR")
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(named) / "ropelab" if named else Path(caches) / "ropelab"


def compiler() -> list[str]:
    """Return the C++ compiler's command: CXX, else the first of the usual names that is there (BuildError)."""
    named = shlex.split(os.environ.get("CXX", ""))
    for command in [named] if named else [["c++"], ["g++"], ["clang++"]]:
        if shutil.which(command[0]):
            return command
    raise BuildError(f"there is no C++ compiler ({named[0] if named else 'c++, g++ or clang++'})")


def has_compiler() -> bool:
    """Say whether there is a compiler, without trying it."""
    try:
        return bool(compiler())
    except BuildError:
        return False


def command_line() -> list[str]:
    """Return the command that builds, without the output's name."""
    # Apple's compiler knows OpenMP only by this spelling, and takes PyTorch's copy of its library.
    threads = ["-fopenmp"]
    if sys.platform == "darwin":
        threads = ["-Xpreprocessor", "-fopenmp", f"-L{Path(torch.__file__).parent / 'lib'}", "-lomp"]
    return [*compiler(), *FLAGS, MACHINE, *threads, str(SOURCE)]


def library() -> Path:
    """Return where this source, built by this command for this processor, is or will be."""
    # One home folder may serve several machines, and what is built for one may be an illegal instruction on another.
    processor = sorted(torch.cpu.get_capabilities().items())
    parts = (SOURCE.read_text(encoding="utf-8"), command_line(), platform.platform(), processor)
    return folder() / f"decode-{hashlib.sha256(repr(parts).encode()).hexdigest()[:16]}.so"


def is_built() -> bool:
    """Say whether the kernel is there already."""
    try:
        return library().exists()
    except BuildError:
        return False


def build(path: Path) -> None:
    """Compile to `path` (BuildError)."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix="building-") as scratch:
            fresh = Path(scratch) / path.name
            done = subprocess.run([*command_line(), "-o", str(fresh)], capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise BuildError(f"{compiler()[0]} failed: {first_error(done.stderr)}")
            os.replace(fresh, path)
    except OSError as error:
        raise BuildError(f"it cannot be written to {path.parent}: {error.strerror}") from None


def first_error(output: str) -> str:
    """Return the line of a compiler's output that says most."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[-1] if lines else "no output")


@functools.cache
def load() -> ctypes.CDLL:
    """Return the kernel, built first if it is not there (BuildError)."""
    path = library()
    if not path.exists():
        build(path)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        path.unlink(missing_ok=True)  # so that the next run builds anew
        raise BuildError(f"the built kernel cannot be loaded: {first_error(str(error))}") from None
