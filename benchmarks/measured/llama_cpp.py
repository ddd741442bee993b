"""llama.cpp writing text with our weights, through its Python package and that of its file format.

Neither is a dependency, for llama.cpp is compiled where it is installed:

    CMAKE_ARGS="-DGGML_NATIVE=ON" pip install --no-binary llama-cpp-python llama-cpp-python gguf

Tokens go in and logits come out by its C functions, so what Python adds is a few microseconds a token. It keeps keys
and values in float16, as it does for everyone who does not ask for more.
"""

import importlib
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from benchmarks.measured import Measurement, repeated
from benchmarks.measured.decoding import PROMPT
from model.config import ModelConfig
from model.errors import UserError
from model.position.config import RoPEConfig
from model.sampling import generate
from model.sampling_config import SamplingSettings
from model.transformer import Transformer

QUANTIZED = {"fp32": "F32", "bf16": "BF16", "int8": "Q8_0"}  # our words for what weights are kept in, and its own
# Our names of a block's parts, and its own.
PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
ENDS = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}


def llama_cpp(model: dict[str, Any], prompts: int, new_tokens: int, precision: str, seconds: float) -> Measurement:
    """Measure new tokens a second, of all prompts together; the notes say whether its first ones are ours."""
    importlib.import_module("llama_cpp")
    network = Transformer(ModelConfig.model_validate(model)).eval()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        write_gguf(network, path, QUANTIZED[precision])
        writer = Writer(path, prompts, len(PROMPT) + new_tokens)
    written = writer.write([PROMPT] * prompts, new_tokens)
    notes = {"read_as": precision, "agrees": agreement(written[0], ours(network, new_tokens))}
    return Measurement(
        repeated(lambda: writer.write([PROMPT] * prompts, new_tokens), prompts * new_tokens, seconds), notes
    )


def ours(network: Transformer, new_tokens: int) -> list[int]:
    """Return what our definition writes, greedily, in float32."""
    steps = generate(network, [PROMPT], SamplingSettings(temperature=0), new_tokens)
    return [token for step in steps for token in step.tokens if token is not None]


def agreement(theirs: list[int], mine: list[int]) -> int:
    """Return after how many tokens two texts part."""
    return next((i for i, (a, b) in enumerate(zip(theirs, mine, strict=True)) if a != b), len(mine))


def their_name(name: str) -> str:
    """Return llama.cpp's name of one of our parameters."""
    part = name.removesuffix(".weight")
    if part in ENDS:
        return f"{ENDS[part]}.weight"
    _, layer, inner = part.split(".", 2)
    return f"blk.{layer}.{PARTS[inner]}.weight"


def write_gguf(network: Transformer, path: Path, quantized: str) -> None:
    """Write a RoPE model as llama.cpp reads it: matrices quantized, gains in float32. Its pairs are neighbours too."""
    gguf: Any = importlib.import_module("gguf")
    config, position = network.config, network.config.position
    if not isinstance(position, RoPEConfig) or position.layout != "interleaved":
        raise UserError(
            f"position {position.kind!r}: llama.cpp's model of this kind turns interleaved pairs, nothing else"
        )
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.context)
    writer.add_embedding_length(config.d_model)
    writer.add_block_count(config.n_layers)
    writer.add_feed_forward_length(config.hidden_width)
    writer.add_head_count(config.n_heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(position.base)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    for name, parameter in network.named_parameters():
        weight = parameter.detach().numpy()
        kind = gguf.GGMLQuantizationType["F32" if weight.ndim == 1 else quantized]
        writer.add_tensor(their_name(name), gguf.quants.quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Writer:
    """A model of llama.cpp that writes up to so many texts of this length at once, greedily."""

    def __init__(self, path: Path, texts: int, length: int) -> None:
        self.api: Any = importlib.import_module("llama_cpp")
        self.silence = self.api.llama_log_callback(lambda level, text, data: None)  # has to outlive its uses
        self.api.llama_log_set(self.silence, None)
        self.api.llama_backend_init()
        settings = self.api.llama_model_default_params()
        settings.use_mmap = False  # the file goes
        self.model = self.api.llama_model_load_from_file(str(path).encode(), settings)
        assert self.model, "llama.cpp does not read the file"
        self.context = self.api.llama_init_from_model(self.model, self._context_settings(texts, length))
        assert self.context, "llama.cpp has no room for the texts"
        self.vocab_size = self.api.llama_vocab_n_tokens(self.api.llama_model_get_vocab(self.model))
        self.batch = self.api.llama_batch_init(texts * len(PROMPT), 0, 1)

    def _context_settings(self, texts: int, length: int) -> Any:
        settings = self.api.llama_context_default_params()
        settings.n_ctx = texts * (-(-length // 256) * 256)  # rounded up, as it is done anyway
        settings.n_seq_max = texts
        settings.n_batch = settings.n_ubatch = max(512, texts * len(PROMPT))
        settings.n_threads = settings.n_threads_batch = torch.get_num_threads()
        return settings

    def write(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        """Return the new tokens of each prompt; all prompts are equally long."""
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)
        written: list[list[int]] = [[] for _ in prompts]
        last = self._read(prompts, begin=0)
        for position in range(len(prompts[0]), len(prompts[0]) + new_tokens):
            for text, token in zip(written, last, strict=True):
                text.append(token)
            if len(written[0]) < new_tokens:
                last = self._read([[token] for token in last], position)
        return written

    def _read(self, texts: list[list[int]], begin: int) -> list[int]:
        """Let the model read tokens of each text from a position on, and return the likeliest next ones."""
        batch, ends, slot = self.batch, [], 0
        for number, tokens in enumerate(texts):
            for offset, token in enumerate(tokens):
                batch.token[slot], batch.pos[slot] = token, begin + offset
                batch.n_seq_id[slot], batch.seq_id[slot][0] = 1, number
                batch.logits[slot] = offset == len(tokens) - 1
                slot += 1
            ends.append(slot - 1)
        batch.n_tokens = slot
        status = self.api.llama_decode(self.context, batch)
        assert status == 0, f"llama_decode answered {status}"
        return [self._likeliest(end) for end in ends]

    def _likeliest(self, slot: int) -> int:
        logits = self.api.llama_get_logits_ith(self.context, slot)
        return int(np.ctypeslib.as_array(logits, (self.vocab_size,)).argmax())
