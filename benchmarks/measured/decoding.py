"""Writing text token by token: ours with each decoder, and Hugging Face's of the same shape. Always greedy."""

from typing import Any

import torch

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


def hugging_face(model: dict[str, Any], prompts: int, new_tokens: int, precision: str, seconds: float) -> Measurement:
    """Measure the same for `LlamaForCausalLM.generate`; the class has a rotation of its own and random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = ModelConfig.model_validate(model)
    assert config.vocab_size is not None
    shape = LlamaConfig(
        hidden_size=config.d_model,
        intermediate_size=config.hidden_width,
        num_hidden_layers=config.n_layers,
        num_attention_heads=config.n_heads,
        num_key_value_heads=config.kv_heads,
        vocab_size=config.vocab_size,
        max_position_embeddings=len(PROMPT) + new_tokens,
        tie_word_embeddings=config.tie_embeddings,
        eos_token_id=None,
        pad_token_id=0,
    )
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    network: Any = LlamaForCausalLM(shape).eval()
    network.to(choose_device("auto"), dtype)
    tokens = torch.tensor([PROMPT] * prompts, device=network.device)

    def write() -> None:
        with torch.inference_mode():
            written = network.generate(
                tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=new_tokens, do_sample=False
            )
        assert written.shape[1] == len(PROMPT) + new_tokens

    return Measurement(repeated(write, prompts * new_tokens, seconds), {"read_as": precision})
