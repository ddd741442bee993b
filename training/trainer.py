"""The state of a run and the one operation that moves it: a step."""

import hashlib
import io
import math
import pickle
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from data.loader import Windows
from model.checkpoint import load_weights
from model.durable import check_folder
from model.errors import UserError
from model.transformer import IGNORED, Transformer, token_losses
from training.config import Config
from training.hardware import Hardware
from training.optimizer import build_optimizer, clip, first_nonfinite
from training.schedule import learning_rate

STATE = "trainer.pt"
MAX_SKIPPED_IN_A_ROW = 5
# float16 starts with a loss scale of 65536 and halves it at each overflow: some skipped steps are normal.
MAX_SKIPPED_IN_A_ROW_FP16 = 20


class StepResult(NamedTuple):
    """What one step did."""

    loss: float
    grad_norm: float
    lr: float
    skipped: bool


def seed_step(seed: int, step: int) -> None:
    """Seed torch's global generator (dropout draws from it) as a function of seed and step: no state to restore."""
    digest = hashlib.sha256(f"step {seed}/{step}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)


class Trainer:
    """Model, optimizer and training windows of one run."""

    def __init__(self, config: Config, windows: Windows, hardware: Hardware) -> None:
        self.config, self.windows, self.hardware = config, windows, hardware
        self.model = Transformer(config.model, config.training.seed).to(hardware.device)
        self.parameters = list(self.model.parameters())
        self.optimizer = build_optimizer(self.model, config.optimizer)
        self.scaler = torch.amp.GradScaler(hardware.device.type, enabled=hardware.precision == "fp16")
        self.loss_of = self._loss_of
        if config.training.compile == "on":
            # Fixed shapes: once a graph has become dynamic, the last bits of its results change.
            self.loss_of = torch.compile(self._loss_of, dynamic=False)
        self.next_step = 0
        self.skipped = 0
        self.skipped_in_a_row = 0
        self.best_loss = math.inf
        self.seconds = 0.0
        self.data_digest = ""

    def step(self) -> StepResult:
        """Read the step's windows, move the weights once, and say what happened."""
        step, training = self.next_step, self.config.training
        seed_step(training.seed, step)
        lr = learning_rate(step, training.steps, self.config.optimizer)
        self.model.train()
        windows = torch.from_numpy(self.windows.batch(step, training.batch_size))
        loss = self.accumulate(windows[:, :-1], windows[:, 1:])
        norm = self.update(lr, loss)
        skipped = not (math.isfinite(loss) and math.isfinite(norm))
        self._count(skipped)
        self.next_step += 1
        return StepResult(loss, norm, lr, skipped)

    def accumulate(self, inputs: Tensor, targets: Tensor) -> float:
        """Add up the gradient of the mean loss over all targets (B, T) of the step, and return that loss.

        Each micro-batch is divided by the number of targets of the whole step: a mean of means would weigh targets
        unequally where micro-batches hold unequal numbers of them.
        """
        count = int((targets != IGNORED).sum())
        rows = self.config.training.micro_batch_size or len(inputs)
        total = torch.zeros((), device=self.hardware.device)
        for some_inputs, some_targets in zip(inputs.split(rows), targets.split(rows), strict=True):
            loss = self._micro_loss(some_inputs, some_targets) / count
            self.scaler.scale(loss).backward()
            total += loss.detach()
        return total.item()

    def _micro_loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        device = self.hardware.device
        with self.hardware.autocast():
            # The lookup stays outside the compiled graph: its compiled backward is not deterministic on a CPU.
            x = self.model.embed_tokens(inputs.to(device, non_blocking=True))
            return self.loss_of(x, targets.to(device, non_blocking=True))

    def _loss_of(self, x: Tensor, targets: Tensor) -> Tensor:
        signal = self.model.signal(x.shape[1], None, None, x.device)
        return token_losses(self.model.logits(self.model.blocks(x, signal)), targets).sum()

    def update(self, lr: float, loss: float) -> float:
        """Let the optimizer use the gradients, unless one of them is not finite; return their norm before clipping."""
        self.scaler.unscale_(self.optimizer)
        total = torch.nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None])
        norm = total.item()
        if math.isfinite(loss) and math.isfinite(norm):
            clip(self.parameters, total, self.config.optimizer.clip_norm)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.scaler.step(self.optimizer)
        else:
            name = first_nonfinite(self.model)
            self.culprit = "the loss" if name is None else f"the gradient of {name}"
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def _count(self, skipped: bool) -> None:
        self.skipped += skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        limit = MAX_SKIPPED_IN_A_ROW_FP16 if self.scaler.is_enabled() else MAX_SKIPPED_IN_A_ROW
        if self.skipped_in_a_row >= limit:
            raise UserError(
                f"step {self.next_step}: {self.culprit} was not finite {limit} times in a row; "
                "the last checkpoint is sound: resume from it with a lower --optimizer.lr"
            )

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs beside the weights, as tensors and plain types."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "next_step": self.next_step,
            "skipped": self.skipped,
            "skipped_in_a_row": self.skipped_in_a_row,
            "best_loss": self.best_loss,
            "seconds": self.seconds,
            "data_digest": self.data_digest,
        }

    def state_bytes(self) -> bytes:
        """Return the state as the content of its file; torch's own writer ends in a RuntimeError on a full disk."""
        buffer = io.BytesIO()
        torch.save(self.state(), buffer)
        return buffer.getvalue()

    def restore(self, folder: Path) -> None:
        """Take up the state of a checkpoint folder; UserError names a file that was damaged."""
        check_folder(folder)
        load_weights(self.model, folder)
        state = read_state(folder / STATE, self.hardware.device)
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scaler.is_enabled() and state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        for name in ("next_step", "skipped", "skipped_in_a_row", "best_loss", "seconds", "data_digest"):
            setattr(self, name, state[name])


def read_state(path: Path, device: torch.device) -> dict[str, Any]:
    """Read a trainer state; nothing in it can run code. UserError for anything else."""
    try:
        return torch.load(path, map_location=device, weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise UserError(f"{path} cannot be read safely: {type(error).__name__}; use another checkpoint") from error
