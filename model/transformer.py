"""The network, and on one screen every place where position enters it."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.attention import Attention, Signal, with_kernel
from model.cache import Cache, LayerCache
from model.config import ModelConfig
from model.errors import UserError
from model.feed_forward import SwiGLU
from model.initialisation import draw_normal, parameter_generator, weight_std
from model.norm import RMSNorm
from model.position import build_scheme
from model.position.scheme import PositionScheme


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed-forward(norm(x))."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.d_model, config.norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.d_model, config.norm_eps)
        self.mlp = SwiGLU(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, signal: Signal, position: PositionScheme, cache: LayerCache | None = None) -> Tensor:
        x = x + self.dropout(self.self_attn(self.input_layernorm(x), signal, position, cache))
        return x + self.dropout(self.mlp(self.post_attention_layernorm(x)))


class ParameterCount(NamedTuple):
    """How many numbers a model learns: all, those of its positional scheme, and those of the trunk.

    The trunk is what is left without token embeddings and positional parameters: the same for every scheme.
    """

    total: int
    positional: int
    non_embedding: int


class Transformer(nn.Module):
    """A LLaMA-style decoder with an exchangeable positional scheme (Touvron et al., 2023).

    Equal seeds give bitwise equal weights in every part that two models share, whatever their schemes.
    """

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        super().__init__()
        if config.vocab_size is None:
            raise UserError("model.vocab_size is not set: give the size of the tokenizer's vocabulary")
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.d_model)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.n_layers))
        self.norm = RMSNorm(config.d_model, config.norm_eps)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.dropout = nn.Dropout(config.dropout)
        self.position = build_scheme(config)
        if config.tie_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self.initialise(seed)

    def forward(self, tokens: Tensor, positions: Tensor | None = None, cache: Cache | None = None) -> Tensor:
        """Return the logits (B, T, V) of the token after each of `tokens` (B, T).

        `positions` (B or 1, T) are 0 .. T-1 when not given (then the cache, if any, must be empty); -1 marks a pad,
        whose logits mean nothing. Raises UserError where a position lies beyond what the scheme is defined for.
        """
        return self.logits(self.hidden(tokens, positions, cache))

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits (B, T, V) of hidden states (B, T, C)."""
        logits: Tensor = self.lm_head(hidden)
        return logits

    def hidden(self, tokens: Tensor, positions: Tensor | None = None, cache: Cache | None = None) -> Tensor:
        """Return the hidden states (B, T, C) that `logits` reads."""
        signal = self.signal(tokens.shape[1], positions, cache, tokens.device)
        # The lookup stays apart from the blocks: its backward, compiled for a CPU, is not deterministic.
        return self.blocks(self.embed_tokens(tokens), signal, cache)

    def blocks(self, x: Tensor, signal: Signal, cache: Cache | None = None) -> Tensor:
        """Run token vectors (B, T, C) through all blocks and the last norm."""
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        silent = with_kernel(signal._replace(rotation=None, bias=None), dtype, x.device)
        signal = with_kernel(signal, dtype, x.device)
        x = self.dropout(x)
        for layer, block in enumerate(self.layers):
            acts = self.position.applies_to(layer)
            if acts:
                x = self.position.embed(x, signal.q_positions, layer, signal.length)
            x = block(x, signal if acts else silent, self.position, cache and cache.layers[layer])
        normed: Tensor = self.norm(x)
        return normed

    def signal(self, length: int, positions: Tensor | None, cache: Cache | None, device: torch.device) -> Signal:
        """Compute once what every layer is told about positions."""
        is_causal = positions is None
        if positions is None:
            assert cache is None or cache.used == 0, "positions must be given to a cache that holds something"
            positions = torch.arange(length, device=device)[None]
        self.check_reach(length if is_causal else None, positions)
        declared = cache.length if cache else length
        positions = self.placed(positions, declared)
        k_positions = positions if cache is None else cache.append_positions(positions)
        dtype = torch.promote_types(self.embed_tokens.weight.dtype, torch.float32)
        rotation = self.position.rotation(positions, declared, dtype)
        bias = self.position.bias(positions, k_positions, dtype)
        return Signal(positions, k_positions, is_causal, declared, rotation, bias)

    def placed(self, positions: Tensor, length: int) -> Tensor:
        """Return where the tokens of a text of this length stand: at their number, or, randomised, further apart.

        Ordered draws without repetition from 0 .. random_positions - 1 (Ruoss et al., 2023): in training from torch's
        global generator, else always the same for a length, so that a text read in pieces stays where it was.
        """
        reach = self.config.random_positions
        if reach is None:
            return positions
        if length > reach:
            raise UserError(f"model.random_positions {reach} are fewer than the {length} tokens of this text")
        generator = None if self.training else torch.Generator().manual_seed(length)
        places = torch.randperm(reach, generator=generator)[:length].sort().values.to(positions.device)
        if int(positions.max()) >= length:
            raise UserError(f"position {int(positions.max())} lies beyond the declared length {length} of this text")
        return torch.where(positions >= 0, places[positions.clamp(min=0)], positions)

    def check_reach(self, length: int | None, positions: Tensor) -> None:
        """Refuse a text longer than the positional scheme is defined for; `length` None: read it off the positions."""
        limit = self.position.max_positions
        if limit is None:
            return  # asking the tensor would make the device wait
        needed = int(positions.max()) + 1 if length is None else length
        if needed > limit:
            raise UserError(
                f"position {self.config.position.kind!r} is defined for {limit} positions, but {needed} are needed: "
                "give a shorter text, or train with a larger model.context or another scheme"
            )

    def initialise(self, seed: int) -> None:
        """Draw every weight from a generator of its own."""
        names = {parameter: name for name, parameter in self.named_parameters()}

        def draw(parameter: nn.Parameter, std: float) -> None:
            draw_normal(parameter, std, parameter_generator(seed, names[parameter]))

        for parameter, name in names.items():
            if parameter.dim() >= 2 and not name.startswith("position."):
                draw(parameter, weight_std(name, self.config))
        self.position.initialise(draw)

    def count_parameters(self) -> ParameterCount:
        """Count the parameters in three groups; a matrix shared by input and output counts once."""
        total = sum(p.numel() for p in self.parameters())
        positional = sum(p.numel() for p in self.position.parameters())
        tokens = sum(p.numel() for p in {self.embed_tokens.weight, self.lm_head.weight})
        return ParameterCount(total, positional, total - positional - tokens)


IGNORED = -100


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return -ln p(target) for each token, in at least float32, shape of `targets`; 0 where a target is IGNORED."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    losses = F.cross_entropy(logits.to(wide).flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="none")
    return losses.view_as(targets)
