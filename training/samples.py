"""The samples that a run prints on its way, and where they are kept."""

import re
from pathlib import Path

from data.tokenizer import Tokenizer
from model.durable import write_text
from model.transformer import Transformer
from training.config import TrainingConfig

_HEADING = re.compile(r"^=== step (\d+)\n", re.MULTILINE)


def record_sample(path: Path, step: int, text: str) -> None:
    """Append a sample under a heading that names its step."""
    with path.open("a", encoding="utf-8") as file:
        file.write(f"=== step {step}\n{text}\n\n")


def rewind_samples(path: Path, step: int) -> None:
    """Drop the samples that were taken after a step."""
    if not path.exists():
        return
    text = path.read_text(encoding="utf-8")
    later = [match.start() for match in _HEADING.finditer(text) if int(match[1]) > step]
    if later:
        write_text(path, text[: later[0]])
