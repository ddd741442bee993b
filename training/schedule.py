"""The learning rate over time. Torch-free."""

import math

from training.config import OptimizerConfig


def warmup_length(config: OptimizerConfig, steps: int) -> int:
    """Return the number of warm-up steps: as configured, but at most half the run."""
    return min(config.warmup_steps, (steps - 1) // 2)


def learning_rate(step: int, steps: int, config: OptimizerConfig) -> float:
    """Return the learning rate of a step counted from 0: a line up to the peak, then half a cosine down.

    Warm-up of w steps gives peak * (step + 1) / (w + 1), so the first step is never lost at a rate of 0; step w has
    the peak, and the last step has peak * min_lr_fraction (Loshchilov and Hutter, 2017).
    """
    warmup = warmup_length(config, steps)
    if step < warmup:
        return config.lr * (step + 1) / (warmup + 1)
    progress = min(1.0, (step - warmup) / max(1, steps - 1 - warmup))
    floor = config.lr * config.min_lr_fraction
    return floor + (config.lr - floor) * (1 + math.cos(math.pi * progress)) / 2
