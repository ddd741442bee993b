"""Training as `train.py` does it, on random tokens."""

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.measured import Measurement, repeated, wait
from training.config import Config
from training.loop import make_trainer

TOKENS = 300_000


def with_compile_settled(config: Config) -> Config:
    """Return the configuration as a run keeps it: `compile: auto`, where a revision has it, is settled once."""
    if config.training.compile in ("off", "on"):
        return config
    from training.hardware import choose_device, resolve_compile

    compiled = resolve_compile(config, choose_device(config.training.device))
    return config.model_copy(update={"training": config.training.model_copy(update={"compile": compiled})})


def steps(workload: dict[str, Any], seconds: float) -> Measurement:
    """Measure tokens a second of whole steps: windows, forward, backward, clipping, optimizer."""
    config = with_compile_settled(Config.model_validate(workload))
    ids = np.random.default_rng(0).integers(config.data.vocab_size, size=TOKENS).astype(np.uint16)
    # Of prepared data the trainer asks for no more than this.
    prepared: Any = SimpleNamespace(train=SimpleNamespace(ids=ids))
    trainer = make_trainer(config, prepared)

    tokens = config.training.batch_size * config.model.context
    device, precision = trainer.hardware
    return measurement(trainer.step, tokens, seconds, device, precision, trainer.config.training.compile)


def measurement(
    step: Callable[[], object], tokens: int, seconds: float, device: torch.device, precision: str, compiled: str
) -> Measurement:
    """Take the first step, and measure tokens a second of the others, and what share of products beside them it is."""

    def whole_step() -> None:
        step()
        wait()

    begin = time.perf_counter()
    whole_step()
    first = time.perf_counter() - begin
    shares: list[float] = []  # tokens a FLOP of the products beside them, one a round
    train = repeated(whole_step, tokens, seconds)
    multiply = products(device, precision, seconds)

    def rate() -> float:
        found = train()
        shares.append(found / multiply())
        return found

    notes = {"first_step": first, "precision": precision, "compile": compiled, "shares": shares}
    return Measurement(rate, notes)


def products(device: torch.device, precision: str, seconds: float) -> Callable[[], float]:
    """Return a function that multiplies square matrices for so long, and says how many FLOP/s that was in the mean.

    The peak is the fastest product of many. Where other work disturbs this machine, whole steps of seconds cannot
    dodge it and a product of milliseconds can; the mean has been disturbed as they were.
    """
    size, dtype = 1024, {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    a, b = torch.randn(2, size, size, device=device).to(dtype).unbind()

    def work() -> None:
        a @ b
        wait()

    return repeated(work, 2 * size**3, seconds)
