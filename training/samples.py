"""The samples that a run prints on its way, and where they are kept."""

import re
from pathlib import Path

from data.tokenizer import Tokenizer
from model.durable import write_text
from model.sampling import generate
from model.sampling_config import SamplingSettings
from model.transformer import Transformer
from training.config import TrainingConfig

_HEADING = re.compile(r"^=== step (\d+)\n", re.MULTILINE)


def sample_text(model: Transformer, tokenizer: Tokenizer, settings: TrainingConfig, step: int) -> str:
    """Return the sample prompt continued; draws from a generator of its own, so training goes on as if unasked."""
    prompt = [tokenizer.bos, *tokenizer.encode(settings.sample_prompt)]
    steps = generate(
        model, [prompt], SamplingSettings(seed=step), settings.sample_tokens, (tokenizer.bos, tokenizer.eos)
    )
    new = [token for step in steps for token in step.tokens if token is not None]
    return settings.sample_prompt + tokenizer.decode(new)


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
