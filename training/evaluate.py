"""How well a model predicts text it has not seen."""

import math
from typing import NamedTuple

import numpy as np
import torch

from model.transformer import Transformer, token_losses
from training.distributed import ALONE, Alone
from training.hardware import Hardware


class Evaluation(NamedTuple):
    """The mean loss in nats a token, over `tokens` targets that stand for `text_bytes` bytes of text."""

    loss: float
    tokens: int
    text_bytes: int

    @property
    def perplexity(self) -> float:
        """e^loss: between how many tokens, equally likely, the model hesitates."""
        return math.exp(min(self.loss, 700.0))

    @property
    def bits_per_byte(self) -> float:
        """Bits needed for a byte of text: unlike loss, it compares across tokenizers."""
        return self.loss * self.tokens / (math.log(2) * max(1, self.text_bytes))


@torch.no_grad()  # not inference_mode: weights that FSDP gathers in it cannot be trained afterwards
def evaluate(
    model: Transformer,
    windows: np.ndarray,
    token_bytes: np.ndarray,
    hardware: Hardware,
    rows: int = 16,
    processes: Alone = ALONE,
) -> Evaluation:
    """Score windows (N, T + 1) of token ids: the sum of losses over the number of targets, whatever the batch size."""
    was_training = model.training
    model.eval()
    total = torch.zeros((), dtype=torch.float64)
    mine, counted = processes.share(np.arange(len(windows)))
    for start in range(0, len(mine), rows):
        batch = torch.from_numpy(windows[mine[start : start + rows]]).to(hardware.device)
        with hardware.autocast():
            losses = token_losses(model(batch[:, :-1]), batch[:, 1:])
        total += losses[: max(0, counted - start)].cpu().double().sum()  # widened on the CPU: MPS has no float64
    model.train(was_training)
    targets = windows[:, 1:]
    return Evaluation(processes.sum(total).item() / targets.size, targets.size, int(token_bytes[targets].sum()))
