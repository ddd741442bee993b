"""What is written down about a run: its losses, its speed, and hashes that say what it shared with others."""

import math
from hashlib import sha256
from statistics import median
from typing import Any

import torch

from data.loader import Rows, rows_of_step
from experiments.config import Experiment
from experiments.plan import Run, digest
from experiments.store import Row
from experiments.tasks import TaskRun
from model.attention import attend_reference, with_kernel
from model.position.config import SchemeConfig
from model.transformer import Transformer
from training.config import Config
from training.hardware import Hardware
from training.machine import hardware as machine
from training.machine import now, revision, today, versions

CURVE = 20  # points of a curve of losses, at least


def evaluation_name(run: Run, scheme: SchemeConfig, experiment: Experiment) -> str:
    """Return under which name an evaluation is kept: by the run's key and all that decides what is measured."""
    asked = experiment.model_dump(mode="json", include={"lengths", "measures", "evaluation"})
    return f"{run.key}-{digest([scheme.model_dump(mode='json'), asked])}"


def watched(config: Config) -> Config:
    """Return the settings with an evaluation often enough for a curve, and few other interruptions."""
    training = config.training
    often = {
        "eval_every": min(training.eval_every, max(1, training.steps // CURVE)),
        "checkpoint_every": max(1, -(-training.steps // 4)),
        "log_every": max(1, training.steps // 50),
    }
    return config.model_copy(update={"training": training.model_copy(update=often)})


def training_row(metrics: list[dict[str, Any]], config: Config) -> Row:
    """Return what a finished run's metrics come to.

    Diverged is also a run that ends worse than guessing all tokens alike, ln V.
    """
    last = metrics[-1]
    guessing = math.log(config.model.vocab_size or math.inf)
    failed = last["final_loss"] is None or last["final_loss"] > guessing
    return {
        "status": "diverged" if failed else "finished",
        "why": f"its loss {last['final_loss']} is above ln V {guessing:.2f}" if failed else "",
        "validation_loss": last["final_loss"],
        "validation_bits_per_byte": last["final_bits_per_byte"],
        "curve": [[row["tokens"], row["validation_loss"]] for row in metrics if "validation_loss" in row],
        "tokens": last["tokens"],
        "seconds": last["seconds"],
        # The median: a pause, or other work for a while, is not the scheme's.
        "tokens_per_second": median(row["tokens_per_second"] for row in metrics if "tokens_per_second" in row),
        "skipped_steps": last["skipped_steps"],
    }


def task_row(run: TaskRun) -> Row:
    """Return what a run on a task came to."""
    tokens = run.validation[-1].tokens if run.validation else 0
    return {
        "status": "diverged" if run.diverged else "finished",
        "why": run.diverged or "",
        "validation_loss": run.validation_loss,
        "curve": [[point.tokens, point.loss] for point in run.validation],
        "tokens": tokens,
        "seconds": run.seconds,
        "tokens_per_second": tokens / run.seconds,
    }


def described(config: Config, rows: Rows, hardware: Hardware) -> Row:
    """Return what is known of a run before it begins."""
    return {
        "config": config.model_dump(mode="json"),
        "precision": hardware.precision,
        "machine": machine(),
        "versions": versions(),
        "revision": revision(),
        "date": today(),
        "begun": now(),
        **model_facts(config, hardware),
        "hashes": {"weights": weights_hash(config), "windows": rows_hash(rows, config)},
    }


def rows_hash(rows: Rows, config: Config) -> str:
    """Return a hash of every token that the run reads, in order."""
    read = sha256()
    for step in range(config.training.steps):
        read.update(rows.rows(rows_of_step(step, config.training.batch_size)).tobytes())
    return read.hexdigest()[:16]


def model_facts(config: Config, hardware: Hardware) -> Row:
    """Return the numbers of parameters, and how attention is computed."""
    model = Transformer(config.model, config.training.seed)
    return {"parameters": model.count_parameters()._asdict(), "backend": backend(model, hardware)}


def backend(model: Transformer, hardware: Hardware) -> str:
    """Return the name of what computes attention in training."""
    if model.position.reads_content:
        return attend_reference.__name__
    signal = model.signal(model.config.context, None, None, torch.device("cpu"))
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(hardware.precision, torch.float32)
    kernel = with_kernel(signal, dtype, hardware.device).kernel
    assert kernel is not None
    return kernel.__name__


def weights_hash(config: Config) -> str:
    """Return a hash of the weights at the start, without those of the positional scheme."""
    model = Transformer(config.model, config.training.seed)
    weights = sha256()
    for name, parameter in sorted(model.named_parameters()):
        if not name.startswith("position."):
            weights.update(name.encode() + parameter.detach().numpy().tobytes())
    return weights.hexdigest()[:16]
