"""Hugging Face's Llama of the same shape, with a rotation of its own and random weights."""

from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_

from benchmarks.measured import Measurement, repeated
from benchmarks.measured.decoding import PROMPT
from benchmarks.measured.training import measurement
from model.config import ModelConfig
from training.config import Config
from training.hardware import choose_device, choose_hardware


def llama(config: ModelConfig, length: int) -> Any:
    """Build `LlamaForCausalLM` for texts of that length."""
    from transformers import LlamaConfig, LlamaForCausalLM

    assert config.vocab_size is not None
    shape = LlamaConfig(
        hidden_size=config.d_model,
        intermediate_size=config.hidden_width,
        num_hidden_layers=config.n_layers,
        num_attention_heads=config.n_heads,
        num_key_value_heads=config.kv_heads,
        vocab_size=config.vocab_size,
        max_position_embeddings=length,
        tie_word_embeddings=config.tie_embeddings,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(shape)


def decoding(model: dict[str, Any], prompts: int, new_tokens: int, precision: str, seconds: float) -> Measurement:
    """Measure new tokens a second of `generate`, greedy, of all prompts together."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    network = llama(ModelConfig.model_validate(model), len(PROMPT) + new_tokens).eval()
    network.to(choose_device("auto"), dtype)
    tokens = torch.tensor([PROMPT] * prompts, device=network.device)

    def write() -> None:
        with torch.inference_mode():
            written = network.generate(
                tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=new_tokens, do_sample=False
            )
        assert written.shape[1] == len(PROMPT) + new_tokens

    return Measurement(repeated(write, prompts * new_tokens, seconds), {"read_as": precision})


def training(workload: dict[str, Any], compiled: bool, seconds: float) -> Measurement:
    """Measure tokens a second of steps as its Trainer takes them: all windows at once, clipped, fused AdamW."""
    config = Config.model_validate(workload)
    hardware, shape = choose_hardware(config.training), (config.training.batch_size, config.model.context)
    network = llama(config.model, config.model.context).to(hardware.device)
    optimizer = torch.optim.AdamW(network.parameters(), fused=True)
    tokens = torch.randint(config.data.vocab_size, shape, device=hardware.device)
    model: Any = torch.compile(network) if compiled else network

    def step() -> None:
        with hardware.autocast():
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return measurement(step, tokens.numel(), seconds, *hardware, "on" if compiled else "off")
