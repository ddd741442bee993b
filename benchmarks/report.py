"""Tables in Markdown, and on which machine and versions they were made."""

import os
import platform
import subprocess
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from benchmarks.rounds import Result, Results, share
from benchmarks.workloads import ROOT

PACKAGES = ("torch", "transformers", "sentencepiece", "numpy")
THIS = "this"


class Table(NamedTuple):
    """One topic: a title, what its columns are, its rows, and what a reader must know to read it."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    remark: str = ""

    def __str__(self) -> str:
        assert all(len(row) == len(self.header) for row in self.rows), f"a row of {self.title} is not whole"
        lines = [self.header, ["---", *["--:"] * (len(self.header) - 1)], *self.rows]
        table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
        return "\n\n".join(part for part in (f"## {self.title}", table, self.remark) if part)


def percent(value: float) -> str:
    """Return a share in words: 71 %."""
    return f"{value:.0%}".replace("%", " %")


def rate(result: Result, unit: float = 1.0, form: str = ",.0f") -> str:
    """Return the median rate in multiples of a unit, or why there is none."""
    return cell(result) or f"{result.rate / unit:{form}}"


def cell(*results: Result) -> str:
    """Return why the first that failed of these did; "" if none did."""
    return next((result.error.replace("|", "/") for result in results if result.error is not None), "")


def against(results: Results, baseline: str | None, name: str) -> list[str]:
    """Return the cells that compare with the baseline: none without one, else the ratio or what it cannot do."""
    if baseline is None:
        return []
    if (baseline, name) not in results:
        return ["-"]  # of the machine, not of the project
    ours, theirs = results[THIS, name], results[baseline, name]
    return [cell(ours, theirs) or f"{share(ours, theirs):.2f}"]


def against_header(baseline: str | None) -> list[str]:
    """Return the title of the column that `against` fills."""
    return [] if baseline is None else [f"times {baseline}"]


# --- The machine -----------------------------------------------------------------------------------------------------


def machine() -> str:
    """Say on which machine, with which versions and from which revision figures were made."""
    import torch

    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    versions = ", ".join(f"{name} {_version(name)}" for name in PACKAGES)
    return (
        f"Machine: {_processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, {_memory()}{gpu}; "
        f"{platform.system()} {platform.machine()}. Versions: Python {platform.python_version()}, {versions}. "
        f"Revision: {_revision()}. {time.strftime('%Y-%m-%d', time.gmtime())}."
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _processor() -> str:
    """Return the processor's name and what it multiplies fast with, where the system says so."""
    information = Path("/proc/cpuinfo")
    if not information.exists():
        return platform.processor() or platform.machine()
    fields = dict(line.split(":", 1) for line in information.read_text().splitlines() if ":" in line)
    named = {name.strip(): value.strip() for name, value in fields.items()}
    can = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in named.get("flags", "").split()]
    family = f" family {named['cpu family']} model {named['model']}" if "cpu family" in named else ""
    return f"{named.get('model name', platform.machine())}{family} ({', '.join(can) or 'no AVX'})"


def _memory() -> str:
    if not hasattr(os, "sysconf"):
        return "memory unknown"
    return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB"


def _revision() -> str:
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + (" with changes" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
