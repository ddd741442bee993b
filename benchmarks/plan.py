"""What one call of `python -m benchmarks` is asked for."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.report import THIS
from benchmarks.rounds import Case, Results, measure
from benchmarks.workloads import ROOT, Settings


@dataclass(frozen=True)
class Plan:
    """What to measure, for how long, and against which other tree; None among the choices: what a user gets."""

    workloads: dict[str, Settings]
    rounds: int
    seconds: float
    precisions: Sequence[str | None] = (None,)
    compile: Sequence[str | None] = (None,)
    decoders: Sequence[str] = ()
    weights: Sequence[str] = ("fp32", "bf16", "int8")
    prompts: int = 32
    new_tokens: int = 256
    text_bytes: int = 12_000_000
    vocab_size: int = 4096
    beyond_cache: int = 256 * 2**20
    baseline: str | None = None
    trees: dict[str, Path] = field(default_factory=lambda: {THIS: ROOT})

    def measured(self, cases: Sequence[Case], title: str) -> Results:
        """Measure the cases in all trees, in turn."""
        return measure(cases, self.trees, self.rounds, title)
