"""Length generalisation: train on a synthetic task up to a length, and ask for longer answers.

The loss is that of the answer alone, EOS included. An answer counts as exact when each of its tokens is the most likely
one after the true tokens before it: then, and only then, greedy decoding gives the whole answer, for it reads the same
tokens as long as it is right.
"""

import math
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from data.tasks import FEW_STRINGS, MARK, PAD, VOCAB_SIZE, Chance, TaskWindows, chance, find_task, held_out
from experiments.results import Measurement
from experiments.text import reaches
from model.checkpoint import save_model
from model.config import ModelConfig
from model.errors import NotFinite, UserError
from model.transformer import IGNORED, Transformer, token_losses
from training.config import Config, to_yaml
from training.hardware import Hardware, choose_hardware, resolve_compile, set_up_cpu
from training.settings_tree import build
from training.tracking import Metrics
from training.trainer import Trainer


class Point(NamedTuple):
    """A loss after so many steps and tokens; tokens are counted with the prompts and the pads, as they are read."""

    step: int
    tokens: int
    loss: float


class TaskRun(NamedTuple):
    """What training on a task came to; `diverged` says why it was given up."""

    model: Transformer  # in evaluation mode
    config: Config  # as it was used: vocabulary and context are those of the task
    task: str
    length: int
    training: tuple[Point, ...]
    validation: tuple[Point, ...]  # on strings of the training length that are never trained on
    examples: int  # validation strings
    seconds: float
    diverged: str | None = None

    @property
    def validation_loss(self) -> float | None:
        """Return the loss after the last step, in nats a token of the answer; None: it diverged."""
        return None if self.diverged else self.validation[-1].loss

    def measurements(self, arm: str, seed: int) -> list[Measurement]:
        """Return `validation_loss`, and `validation_curve` over tokens, at the training length."""
        final = ("validation_loss", self.validation_loss, None)
        curve = [("validation_curve", point.loss, float(point.tokens)) for point in self.validation]
        return [
            Measurement(arm, seed, measure, value, self.length, x, task=self.task, count=self.examples)
            for measure, value, x in [final, *curve]
        ]


class TaskScore(NamedTuple):
    """How a model does at one length: shares of 1, None where it cannot be asked.

    Either its scheme is not defined for so many tokens, or the length has no test strings; then `examples` is 0.
    """

    task: str
    length: int
    examples: int
    exact: float | None
    token: float | None
    chance: Chance

    def measurements(self, arm: str, seed: int) -> list[Measurement]:
        """Return `task_exact_match` and `task_token_accuracy`, and what chance would bring of each."""
        values = {
            "task_exact_match": self.exact,
            "task_token_accuracy": self.token,
            "task_chance": self.chance.exact,
            "task_token_chance": self.chance.token,
        }
        return [
            Measurement(arm, seed, measure, value, self.length, task=self.task, count=self.examples)
            for measure, value in values.items()
        ]


# --- Training ---------------------------------------------------------------------------------------------------------


def train_task(config: Config, task: str, length: int, folder: Path | None = None) -> TaskRun:
    """Train a new model on examples of a task of up to this length.

    Into `folder` goes metrics.jsonl on the way, and at the end the model as `folder/model`, in one piece: a run that
    was stopped lacks it. A run that leaves the finite numbers is a result and says so; it has no `folder/model` either.
    """
    run = Run(task_trainer(config, task, length), task, length, new_log(folder) if folder else None)
    begin, diverged = time.perf_counter(), None
    try:
        run.go()
        if folder:
            save_model(folder / "model", run.trainer.model, to_yaml(run.trainer.config), b"")
    except NotFinite as error:
        diverged = str(error).partition(";")[0]
    return run.outcome(time.perf_counter() - begin, diverged)


def new_log(folder: Path) -> Metrics:
    """Begin the log of a run anew; UserError where a finished run is."""
    if (folder / "model").exists():
        raise UserError(f"{folder} holds a finished run: take its model, or give another folder")
    folder.mkdir(parents=True, exist_ok=True)
    log = Metrics(folder / "metrics.jsonl")
    log.rewind(-1)  # what a stopped run has left
    return log


def task_trainer(config: Config, task: str, length: int) -> Trainer:
    """Build the state at step 0 of a run on a task."""
    for field in ("init_from", "max_minutes"):
        if getattr(config.training, field) is not None:
            raise UserError(f"training.{field} {getattr(config.training, field)} is not for tasks: leave it out")
    windows = TaskWindows(task, length, config.training.seed)
    hardware = choose_hardware(config.training)
    if hardware.device.type == "cpu":
        set_up_cpu()
    config = fitted(config, windows.context)
    compile = resolve_compile(config, hardware.device)
    config = config.model_copy(update={"training": config.training.model_copy(update={"compile": compile})})
    return Trainer(config, windows, hardware, targets_of=answer_targets)


def fitted(config: Config, context: int) -> Config:
    """Return the settings with the vocabulary of the tasks, and the context that the longest training row needs."""
    tree = {**config.model.model_dump(), "vocab_size": VOCAB_SIZE, "context": context}
    return config.model_copy(update={"model": build(ModelConfig, tree)})


def answer_targets(rows: Tensor) -> Tensor:
    """Return the targets (B, T) of rows (B, T + 1): the tokens behind MARK, EOS included; else IGNORED."""
    targets, is_behind_mark = rows[:, 1:], (rows == MARK).cumsum(dim=1)[:, :-1] > 0
    return targets.masked_fill(~is_behind_mark | (targets == PAD), IGNORED)


class Run:
    """Steps, evaluations and a log, until the last step; NotFinite where the losses cease to be numbers."""

    def __init__(self, trainer: Trainer, task: str, length: int, log: Metrics | None) -> None:
        self.trainer, self.task, self.length, self.log = trainer, task, length, log
        self.settings = trainer.config.training
        self.strings = validation_strings(task, length, self.settings.eval_windows)
        self.training: list[Point] = []
        self.validation: list[Point] = []

    def go(self) -> None:
        """Take all steps."""
        while self.trainer.next_step < self.settings.steps:
            self.trainer.advance()
            if self.is_due(self.settings.log_every):
                self.note(self.training, "training_loss", self.trainer.results()[-1].loss)
            if self.is_due(self.settings.eval_every):
                self.validate()

    def outcome(self, seconds: float, diverged: str | None) -> TaskRun:
        """Return what the run came to."""
        return TaskRun(
            model=self.trainer.model.eval(),
            config=self.trainer.config,
            task=self.task,
            length=self.length,
            training=tuple(self.training),
            validation=tuple(self.validation),
            examples=len(self.strings),
            seconds=seconds,
            diverged=diverged,
        )

    def is_due(self, every: int) -> bool:
        """Say whether something that comes every so many steps, and after the last one, comes now."""
        return self.trainer.next_step % every == 0 or self.trainer.next_step == self.settings.steps

    def validate(self) -> None:
        """Note the loss on the validation strings."""
        rows = self.settings.batch_size
        loss = score(self.trainer.model, self.strings, self.trainer.hardware, rows).loss
        self.note(self.validation, "validation_loss", loss)
        if not math.isfinite(loss):
            raise NotFinite(f"step {self.trainer.next_step}: the validation loss is not finite")

    def note(self, curve: list[Point], name: str, loss: float) -> None:
        """Add a point to a curve and to the log."""
        step = self.trainer.next_step
        curve.append(Point(step, step * self.settings.batch_size * self.trainer.config.model.context, loss))
        if self.log:
            self.log.log({"step": step, name: loss})


def validation_strings(task: str, length: int, count: int) -> np.ndarray:
    """Return the validation rows of a length; UserError where it has none."""
    strings = held_out(task, length, count, "validation")
    if not len(strings):
        raise UserError(
            f"task {task} at length {length} has fewer than {FEW_STRINGS} strings, too few to hold some out: "
            "train up to a larger length"
        )
    return strings


# --- Measuring --------------------------------------------------------------------------------------------------------


def measure_task(
    model: Transformer, task: str, lengths: Iterable[int], examples: int, hardware: Hardware, rows: int = 32
) -> list[TaskScore]:
    """Score up to `examples` test strings of each length, the same for every model, so many rows at once."""
    return [_score_at(model, task, length, examples, hardware, rows) for length in lengths]


def _score_at(model: Transformer, task: str, length: int, examples: int, hardware: Hardware, rows: int) -> TaskScore:
    guess = chance(find_task(task), length)
    strings = held_out(task, length, examples)
    if not len(strings) or not reaches(model, strings.shape[1] - 1):
        return TaskScore(task, length, 0, None, None, guess)
    found = score(model, strings, hardware, rows)
    return TaskScore(task, length, len(strings), found.exact, found.token, guess)


class Scored(NamedTuple):
    """Mean loss in nats and share of right tokens over all tokens of the answers; share of answers without a fault."""

    loss: float
    token: float
    exact: float


@torch.no_grad()
def score(model: Transformer, strings: np.ndarray, hardware: Hardware, rows: int) -> Scored:
    """Score the answers of strings (n, T + 1), read from position 0, so many rows at once."""
    was_training = model.training
    model.eval()
    parts = [_sums(model, torch.from_numpy(part), hardware) for part in _batches(strings, rows)]
    model.train(was_training)
    loss, right, tokens, exact = torch.stack(parts).sum(dim=0).tolist()
    return Scored(loss / tokens, right / tokens, exact / len(strings))


def _batches(strings: np.ndarray, rows: int) -> list[np.ndarray]:
    return [strings[start : start + rows] for start in range(0, len(strings), rows)]


def _sums(model: Transformer, batch: Tensor, hardware: Hardware) -> Tensor:
    """Return the sum of losses, and how many tokens are right, tokens are there, and answers are right, in float64."""
    batch = batch.to(hardware.device)
    targets = answer_targets(batch)
    with hardware.autocast():
        logits = model(batch[:, :-1])
        losses = token_losses(logits, targets)
    counts, right = targets != IGNORED, logits.argmax(dim=-1) == targets
    sums = (losses.cpu().double().sum(), right.sum(), counts.sum(), (right | ~counts).all(dim=1).sum())
    return torch.stack([value.cpu().double() for value in sums])
