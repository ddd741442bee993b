"""The feed-forward layer of a block."""

import torch.nn.functional as F
from torch import Tensor, nn

from model.config import ModelConfig


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)), without biases (Shazeer, 2020)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.d_model, config.hidden_width, bias=False)
        self.up_proj = nn.Linear(config.d_model, config.hidden_width, bias=False)
        self.down_proj = nn.Linear(config.hidden_width, config.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return hidden
