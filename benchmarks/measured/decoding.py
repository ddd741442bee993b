"""Writing text token by token, with each decoder. Always greedy."""

from typing import Any

from benchmarks.measured import Measurement, repeated
from model.config import ModelConfig
from model.errors import UserError
from model.sampling import generate
from model.sampling_config import SamplingSettings
from model.transformer import Transformer
from training.hardware import choose_device

PROMPT = [1, 7, 11, 13]


def ours(
    model: dict[str, Any], prompts: int, new_tokens: int, decoder: str, precision: str, seconds: float
) -> Measurement:
    """Measure new tokens a second, of all prompts together, from the first call of `generate` to its last token."""
    network = Transformer(ModelConfig.model_validate(model)).to(choose_device("auto")).eval()
    chosen: dict[str, Any] = {}
    read_as = "fp32"
    if (decoder, precision) != ("model", "fp32"):  # the one way that every revision has
        network, chosen["decoder"], read_as = reading(network, decoder, precision, prompts, new_tokens)

    def write() -> None:
        for _ in generate(network, [PROMPT] * prompts, SamplingSettings(temperature=0), new_tokens, **chosen):
            pass

    return Measurement(repeated(write, prompts * new_tokens, seconds), {"read_as": read_as})


def reading(
    network: Transformer, kind: str, precision: Any, prompts: int, new_tokens: int
) -> tuple[Transformer, Any, str]:
    """Return the model that reads prompts, the decoder, and as what it reads the weights.

    UserError: another decoder took the place of the one that was asked for.
    """
    from model.decoding.choose import choose_decoder

    said: list[str] = []
    asked: Any = kind
    rounded, decoder = choose_decoder(network, asked, precision, prompts, new_tokens, said.append)
    if kind not in ("auto", "model" if decoder is None else decoder.name):
        raise UserError(said[-1])
    return rounded, decoder, "fp32" if decoder is None else decoder.read_as(precision)
