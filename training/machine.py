"""On which machine, with which versions and from which revision figures were made."""

import os
import platform
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("torch", "transformers", "sentencepiece", "numpy")


def machine() -> str:
    """Say it all in a line."""
    return f"Machine: {hardware()}. Versions: {versions()}. Revision: {revision()}. {today()}."


def hardware() -> str:
    """Return processor, cores, threads, memory, GPU and system."""
    import torch

    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    threads = f"{os.cpu_count()} cores, {torch.get_num_threads()} threads"
    return f"{processor()}, {threads}, {memory()}{gpu}; {platform.system()} {platform.machine()}"


def versions() -> str:
    """Return the versions of Python and of the packages that decide what is computed, and how fast."""
    return f"Python {platform.python_version()}, " + ", ".join(f"{name} {_version(name)}" for name in PACKAGES)


def today() -> str:
    """Return the date, in UTC."""
    return time.strftime("%Y-%m-%d", time.gmtime())


def now() -> str:
    """Return the date and the minute, in UTC."""
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime())


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def processor() -> str:
    """Return the processor's name and what it multiplies fast with, where the system says so."""
    information = Path("/proc/cpuinfo")
    if not information.exists():
        return platform.processor() or platform.machine()
    fields = dict(line.split(":", 1) for line in information.read_text().splitlines() if ":" in line)
    named = {name.strip(): value.strip() for name, value in fields.items()}
    can = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in named.get("flags", "").split()]
    family = f" family {named['cpu family']} model {named['model']}" if "cpu family" in named else ""
    return f"{named.get('model name', platform.machine())}{family} ({', '.join(can) or 'no AVX'})"


def memory() -> str:
    """Return how much memory there is."""
    if not hasattr(os, "sysconf"):
        return "memory unknown"
    return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB"


def revision() -> str:
    """Return the commit that is checked out, and whether files differ from it."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + (" with changes" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
