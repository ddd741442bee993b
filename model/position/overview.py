"""The schemes at a glance, made from the code: the table, RoPE's pairs, and what each scheme does to scores."""

import math
import re
from collections.abc import Sequence
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from model.attention import Attention, Signal, attention_scores
from model.config import ModelConfig
from model.position import SCHEMES, build_scheme
from model.position.config import RoPEConfig, SchemeConfig
from model.position.rope import rope_frequencies
from model.position.scaling import RULES, Scaled, scaled
from model.position.scaling_config import AnyScalingConfig, ScalingConfig
from model.position.scheme import PositionScheme
from model.transformer import Transformer

SCALINGS: dict[str, type[ScalingConfig]] = {
    config.model_fields["kind"].default: config for config in get_args(get_args(AnyScalingConfig)[0])
}
STRETCH = 4  # by how much the tables and pictures of the scalings reach beyond the training length
DRAWS = 32  # tokens that a curve of scores is the mean of


def base_config(context: int = 256, base: float = 10000.0) -> ModelConfig:
    """Return the shape that counts and pictures are made for: that of configs/base.yaml."""
    return ModelConfig(vocab_size=2048, context=context, position=RoPEConfig(base=base))


def with_scheme(config: ModelConfig, name: str, **changes: object) -> ModelConfig:
    """Return the configuration with the scheme of this name, or unchanged in position if it has it already."""
    position = config.position if config.position.kind == name else {"kind": name}
    return ModelConfig.model_validate({**dict(config), "position": position, **changes})


# --- Tables ----------------------------------------------------------------------------------------------------------


def paper(config: type[SchemeConfig] | type[ScalingConfig]) -> str:
    """Return authors and year: the last parenthesis with a year in the docstring of a configuration."""
    found = re.findall(r"\(([^()\"]*\b(?:19|20)\d\d)\b[^()]*\)", config.__doc__ or "")
    return found[-1] if found else "no paper: a control"


def scheme_row(name: str, config: ModelConfig) -> tuple[str, ...]:
    """Return name, place, added parameters, limit and paper of a scheme, read off the scheme that a model gets."""
    scheme, entry = build_scheme(with_scheme(config, name)), SCHEMES[name]
    added = sum(parameter.numel() for parameter in scheme.parameters())
    limit = "none" if scheme.max_positions is None else f"{scheme.max_positions:,}"
    return name, entry.place, f"{added:,}", limit, paper(entry.config)


def stretched(name: str, config: ModelConfig) -> Scaled:
    """Return RoPE's frequencies under a scaling, at a call of STRETCH times the training length."""
    # By the declared length alone: that is each rule's default.
    scaling = SCALINGS[name](kind=name)
    return scaled(plain_frequencies(config), scaling, config.context, STRETCH * config.context)


def plain_frequencies(config: ModelConfig) -> Tensor:
    """Return the frequencies (P,) of the configuration's RoPE, without scaling."""
    assert isinstance(config.position, RoPEConfig)
    return rope_frequencies(config.position.base, config.position.turned_width(config.head_dim))


def scaling_row(name: str, config: ModelConfig) -> tuple[str, ...]:
    """Return name, divisors of the fastest and the slowest pair, temperature and paper of a scaling of RoPE."""
    frequencies, temperature = stretched(name, config)
    divisors = plain_frequencies(config) / frequencies
    return name, f"{divisors[0]:.2f}", f"{divisors[-1]:.2f}", f"{temperature:.3f}", paper(SCALINGS[name])


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Set rows of text in columns; a column of numbers stands to the right."""
    columns = list(zip(header, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    numbers = [all(re.fullmatch(r"[\d,.]+|none", cell) for cell in column[1:]) for column in columns]

    def line(cells: Sequence[str]) -> str:
        parts = zip(cells, widths, numbers, strict=True)
        return "  ".join(cell.rjust(width) if number else cell.ljust(width) for cell, width, number in parts).rstrip()

    return "\n".join(map(line, (header, ["-" * width for width in widths], *rows)))


def overview(config: ModelConfig) -> str:
    """Return what `python -m model.position` prints."""
    schemes = table(
        ("scheme", "enters at", "parameters", "limit", "paper"), [scheme_row(name, config) for name in SCHEMES]
    )
    scalings = table(
        ("scaling of rope", "fastest pair /", "slowest pair /", "temperature", "paper"),
        [scaling_row(name, config) for name in RULES],
    )
    trunk = Transformer(with_scheme(config, "nope")).count_parameters()
    return "\n\n".join(
        (
            schemes,
            f"parameters: those that the scheme adds to a trunk of {trunk.non_embedding:,} and token embeddings of "
            f"{trunk.total - trunk.non_embedding:,}\n({config.n_layers} layers, {config.n_heads} heads of "
            f"{config.head_dim}, context {config.context}); limit: positions that the scheme is defined for.",
            scalings,
            f"At {STRETCH} times the training length of {config.context}; longrope without searched divisors of its "
            f"own.\n{turn_report(plain_frequencies(config), config.context)}",
        )
    )


def never_turn(frequencies: Tensor, length: int) -> Tensor:
    """Say which pairs (P,) turn by less than a full circle within a text of this length."""
    return frequencies * length < 2 * math.pi


def turn_report(frequencies: Tensor, length: int) -> str:
    """Say in words how many pairs never complete a turn in training: of these, not all angles are ever seen."""
    few = int(never_turn(frequencies, length).sum())
    if not few:
        return f"rope: each of {len(frequencies)} pairs completes a turn in {length} tokens"
    return f"rope: {few} of {len(frequencies)} pairs never complete a turn in {length} tokens"


# --- Curves ----------------------------------------------------------------------------------------------------------


class Curves(NamedTuple):
    """Scores (draws, H, S) of a query and keys of equal content, by distance 0 .. S-1."""

    scores: Tensor
    by_head: bool
    """Heads differ and draws do not: the scheme adds numbers of its own for each head."""


class RecordingAttention(Attention):
    """Attention that keeps the scores of its last query, position and all, where the values would be mixed."""

    recorded: Curves

    def attend(self, q: Tensor, k: Tensor, v: Tensor, signal: Signal, position: PositionScheme) -> Tensor:
        q, bias = q[:, :, -1:], signal.bias
        last = signal._replace(q_positions=signal.q_positions[:, -1:])
        scores = position.scores(q, attention_scores(q, k), self.layer, last)
        scores = scores if bias is None else scores + bias[:, :, -1:]
        self.recorded = Curves(scores.squeeze(2).flip(-1), by_head=bias is not None)  # last key first: by distance
        return v


@torch.no_grad()
def score_curves(name: str, config: ModelConfig) -> Curves:
    """Return what a fresh model's first layer scores at each distance, up to twice the training length.

    Random queries and keys would score 0 on average at any distance. So a text repeats one token, keys are projected
    as queries are, and both are normalised: without position every score is sqrt(D), and what differs is position's.
    """
    config = with_scheme(config, name, n_layers=1, n_kv_heads=None, d_ff=1, qk_norm=True)
    model = Transformer(config).eval()
    attention = RecordingAttention(config, 0)
    attention.load_state_dict(model.layers[0].self_attn.state_dict())  # type: ignore[union-attr]
    attention.k_proj = attention.q_proj
    model.layers[0].self_attn = attention
    length = min(2 * config.context, model.position.max_positions or math.inf)
    model.hidden(torch.arange(DRAWS)[:, None].expand(-1, int(length)))
    return attention.recorded
