"""Training as `train.py` does it, on random tokens."""

import time
from types import SimpleNamespace
from typing import Any

import numpy as np

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

    def step() -> None:
        trainer.step()
        wait()

    tokens = config.training.batch_size * config.model.context
    begin = time.perf_counter()
    step()
    first = time.perf_counter() - begin
    notes = {"first_step": first, "precision": trainer.hardware.precision, "compile": trainer.config.training.compile}
    return Measurement(repeated(step, tokens, seconds), notes)
