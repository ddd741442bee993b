"""What every weight is before the first step; the one place that says so."""

import hashlib

import torch
from torch import nn

from model.config import ModelConfig


def parameter_generator(seed: int, name: str) -> torch.Generator:
    """Return a random generator that depends on the seed and the parameter's name alone.

    Models of equal seed then share bitwise equal weights wherever they share a parameter, whatever else they hold.
    """
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def weight_std(name: str, config: ModelConfig) -> float:
    """Return the standard deviation that a matrix of the trunk starts with.

    Projections back into the residual stream are scaled down by the square root of how many of them add up there
    (Radford et al., 2019). The token embedding's own scale is explained at `ModelConfig.embedding_std`.
    """
    if name.endswith(("embed_tokens.weight", "lm_head.weight")):
        return config.embedding_std
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        return config.init_std / (2 * config.n_layers) ** 0.5
    return config.init_std


@torch.no_grad()
def draw_normal(parameter: nn.Parameter, std: float, generator: torch.Generator) -> None:
    """Fill a parameter from a normal distribution, the same on every device."""
    parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
