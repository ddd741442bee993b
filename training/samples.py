"""The samples that a run prints on its way, and where they are kept."""

import re
from pathlib import Path

from data.tokenizer import Tokenizer
from model.durable import append, write_bytes
from model.sampling import generate
from model.sampling_config import SamplingSettings
from model.transformer import Transformer
from training.config import TrainingConfig

_HEADING = re.compile(rb"^=== step (\d+), (\d+) bytes\n", re.MULTILINE)


def sample_text(model: Transformer, tokenizer: Tokenizer, settings: TrainingConfig, step: int) -> str:
    """Return the sample prompt continued; draws from a generator of its own, so training goes on as if unasked."""
    prompt = [tokenizer.bos, *tokenizer.encode(settings.sample_prompt)]
    steps = generate(
        model, [prompt], SamplingSettings(seed=step), settings.sample_tokens, (tokenizer.bos, tokenizer.eos)
    )
    new = [token for step in steps for token in step.tokens if token is not None]
    return settings.sample_prompt + tokenizer.decode(new)


def record_sample(path: Path, step: int, text: str) -> None:
    """Append a sample under a heading that names its step, and its length: a model may write such a heading too."""
    body = text.encode()
    append(path, b"=== step %d, %d bytes\n%b\n\n" % (step, len(body), body))


def rewind_samples(path: Path, step: int) -> None:
    """Drop the samples that were taken after a step."""
    if path.exists():
        content = path.read_bytes()
        kept = content[: _end(content, step)]
        if kept != content:
            write_bytes(path, kept)


def _end(content: bytes, step: int) -> int:
    """Return where the first sample that was taken after a step begins."""
    here = 0
    while match := _HEADING.search(content, here):
        if int(match[1]) > step:
            return match.start()
        here = match.end() + int(match[2])
    return len(content)
