"""How the next token is chosen, as settings. Torch-free, so that the command's help and errors are instant."""

from typing import Annotated, Literal

from pydantic import Field

from model.settings import Settings

PastContext = Literal["stop", "reread"]
DecoderName = Literal["auto", "model", "eager", "compiled", "native"]
Precision = Literal["fp32", "bf16", "int8"]


class SamplingSettings(Settings):
    """How the next token is chosen from the logits; the settings act in the order in which they stand here."""

    repetition_penalty: Annotated[float, Field(gt=0)] = 1.0
    """Makes every token that stands in the prompt or in the new text less likely, once each; 1: off."""
    temperature: Annotated[float, Field(ge=0)] = 0.8
    """Divides the logits; 0: always the most likely token, whatever the seed."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Keep the k most likely tokens; 0, or more than the vocabulary has: all."""
    top_p: Annotated[float, Field(ge=0, le=1)] = 0.95
    """Keep the most likely tokens until their probabilities reach this sum, and always one; 1: all."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Keep tokens at least this many times as likely as the most likely one; 0: all."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Equal seeds give equal text."""
