"""The state of a run and the one operation that moves it: a step."""

import hashlib
import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from data.loader import Rows, rows_of_step
from model.attention import Signal
from model.checkpoint import load_weights
from model.durable import check_folder
from model.errors import NotFinite, UserError
from model.transformer import IGNORED, Transformer, token_losses
from training.batches import batches
from training.config import Config
from training.distributed import ALONE, Alone
from training.hardware import Hardware, micro_batch_rows
from training.optimizer import build_optimizer, clip
from training.schedule import learning_rate

Result = TypeVar("Result")
OptimizerState = dict[int, dict[str, Any]]

STATE = "trainer.pt"
COUNTERS = ("next_step", "skipped", "skipped_in_a_row", "best_loss", "seconds", "data_digest")
MAX_SKIPPED_IN_A_ROW = 5
# float16 starts with a loss scale of 65536 and halves it at each overflow: some skipped steps are normal.
MAX_SKIPPED_IN_A_ROW_FP16 = 20


class StepResult(NamedTuple):
    """What one step did; `culprit` is the first parameter whose gradient was not finite, or "the loss", or nothing."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    culprit: str | None = None

    @property
    def skipped(self) -> bool:
        """Say whether the weights stayed as they were, because something was not finite."""
        return self.culprit is not None


class Unread(NamedTuple):
    """A step whose numbers are still where they were computed: reading them would make a GPU wait."""

    step: int
    lr: float
    numbers: Tensor  # loss, norm of the gradient, number of the first gradient that is not finite (-1: none)


def seed_step(seed: int, step: int, rank: int = 0) -> None:
    """Seed torch's global generator (dropout draws from it) as a function of seed and step: no state to restore.

    Each process draws its own, for its rows are others.
    """
    digest = hashlib.sha256(f"step {seed}/{step}{f'/{rank}' * (rank > 0)}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def next_tokens(windows: Tensor) -> Tensor:
    """Return the targets (B, T) of windows (B, T + 1): after each token the next one."""
    return windows[:, 1:].clone()  # inputs and targets overlap


class Trainer:
    """Model, optimizer and training windows of one run; `targets_of` says what is learnt from windows (B, T + 1)."""

    def __init__(
        self,
        config: Config,
        windows: Rows,
        hardware: Hardware,
        processes: Alone = ALONE,
        targets_of: Callable[[Tensor], Tensor] = next_tokens,
    ) -> None:
        self.config, self.windows, self.hardware, self.processes = config, windows, hardware, processes
        self.targets_of = targets_of
        self.model = Transformer(config.model, config.training.seed).to(hardware.device)
        self.micro_loss = processes.arrange(self.model, self._micro_loss)
        self.parameters = list(self.model.parameters())
        self.names = [name for name, _ in self.model.named_parameters()]
        self.optimizer = build_optimizer(self.model, config.optimizer)
        self.scaler = torch.amp.GradScaler(hardware.device.type, enabled=hardware.precision == "fp16")
        self.batch = batches(windows, hardware.device)
        self.loss_of = self._loss_of
        if config.training.compile == "on":
            # Fixed shapes: once a graph has become dynamic, the last bits of its results change.
            self.loss_of = torch.compile(self._loss_of, dynamic=False)
        self.unread: list[Unread] = []
        self.next_step = 0
        self.skipped = 0
        self.skipped_in_a_row = 0
        self.best_loss = math.inf
        self.best_step: int | None = None
        self.seconds = 0.0
        self.data_digest = ""

    def step(self) -> StepResult:
        """Take a step, and wait to say what happened."""
        self.advance()
        return self.results()[-1]

    def advance(self) -> None:
        """Read the step's windows and move the weights once; `results` says what happened."""
        step, training = self.next_step, self.config.training
        seed_step(training.seed, step, self.processes.rank)
        lr = learning_rate(step, training.steps, self.config.optimizer)
        self.model.train()
        mine, counted = self.processes.share(rows_of_step(step, training.batch_size))
        windows = self.batch(mine)
        inputs, targets = windows[:, :-1], self.targets_of(windows)
        targets[counted:] = IGNORED
        loss = self.accumulate(inputs, targets)
        self.unread.append(Unread(step, lr, self.update(lr, loss)))
        self.next_step += 1

    def accumulate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Add up the gradient of the mean loss over all targets (B, T) of the step, and return that loss.

        Given are the rows of this process; gradient and loss are those of all of them.
        Each micro-batch is divided by the number of targets of the whole step: a mean of means would weigh targets
        unequally where micro-batches hold unequal numbers of them.
        """
        device = self.hardware.device
        inputs, targets = inputs.to(device), targets.to(device)
        count = self.processes.sum((targets != IGNORED).sum())
        rows = micro_batch_rows(self.config, device)
        total = torch.zeros((), device=device)
        for some_inputs, some_targets in zip(inputs.split(rows), targets.split(rows), strict=True):
            loss = self.micro_loss(some_inputs, some_targets) / count
            self.scaler.scale(loss).backward()
            total += loss.detach()
        self.processes.sum_gradients(self.parameters)
        return self.processes.sum(total)

    def _micro_loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with self.hardware.autocast():
            # The lookup stays outside the compiled graph: its compiled backward is not deterministic on a CPU.
            # So does the signal: inside, cos and sin would be computed anew for every head of every layer.
            signal = self.model.signal(inputs.shape[1], None, None, inputs.device)
            return self.loss_of(self.model.embed_tokens(inputs), signal, targets)

    def _loss_of(self, x: Tensor, signal: Signal, targets: Tensor) -> Tensor:
        return token_losses(self.model.logits(self.model.blocks(x, signal)), targets).sum()

    def update(self, lr: float, loss: Tensor) -> Tensor:
        """Let the optimizer use the gradients, unless one of them or the loss is not finite.

        Return the loss, the norm of the gradients before clipping, and the number of the first parameter whose gradient
        is not finite (-1: none), as one tensor: whoever reads it waits for the device.
        """
        self.scaler.unscale_(self.optimizer)
        norms = self.processes.gradient_norms(self.parameters)
        norm = torch.linalg.vector_norm(norms)
        clip(self.parameters, norm, self.config.optimizer.clip_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self._move(loss.isfinite() & norm.isfinite())
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        # A sum of finite norms may overflow: then no single gradient is to blame.
        infinite = ~norms.isfinite()
        culprit = torch.where(infinite.any(), infinite.int().argmax(), -1)
        return torch.stack([loss, norm, culprit])

    def _move(self, finite: Tensor) -> None:
        """Take the optimizer's step if `finite`: decided on the device where the optimizer can, else after a wait."""
        if getattr(self.optimizer, "_step_supports_amp_scaling", False) and not self.scaler.is_enabled():
            self.optimizer.found_inf = (~finite).float()  # type: ignore[attr-defined]  # GradScaler's own channel
            self.optimizer.step()
        elif bool(finite):
            self.scaler.step(self.optimizer)

    def results(self) -> list[StepResult]:
        """Say what the steps since the last call did, once the device has done them; UserError after some bad ones."""
        numbers = torch.stack([step.numbers for step in self.unread]).tolist() if self.unread else []
        found = [
            StepResult(step, loss, norm, lr, self._culprit(loss, norm, int(worst)))
            for (step, lr, _), (loss, norm, worst) in zip(self.unread, numbers, strict=True)
        ]
        self.unread.clear()
        for result in found:
            self._count(result)
        return found

    def _culprit(self, loss: float, norm: float, worst: int) -> str | None:
        if math.isfinite(loss) and math.isfinite(norm):
            return None
        if worst >= 0:
            return f"the gradient of {self.names[worst]}"
        return "the norm of the gradients" if math.isfinite(loss) else "the loss"

    def _count(self, result: StepResult) -> None:
        self.skipped += result.skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if result.skipped else 0
        limit = MAX_SKIPPED_IN_A_ROW_FP16 if self.scaler.is_enabled() else MAX_SKIPPED_IN_A_ROW
        if self.skipped_in_a_row >= limit:
            raise NotFinite(
                f"step {result.step + 1}: {result.culprit} was not finite {limit} times in a row; "
                "the last checkpoint is sound: resume from it with a lower --optimizer.lr"
            )

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs beside the weights, as tensors and plain types: the same in every process."""
        assert not self.unread, "results of steps come before the state that counts them"
        optimizer = self.optimizer.state_dict()
        return {
            "optimizer": {**optimizer, "state": each_tensor(optimizer["state"], lambda _, v: self.processes.whole(v))},
            "scaler": self.scaler.state_dict(),
            "next_step": self.next_step,
            "skipped": self.skipped,
            "skipped_in_a_row": self.skipped_in_a_row,
            "best_loss": self.best_loss,
            "best_step": self.best_step,
            "seconds": self.seconds,
            "data_digest": self.data_digest,
        }

    def state_bytes(self) -> bytes:
        """Return the state as the content of its file."""
        return packed(self.state())

    def restore(self, folder: Path) -> None:
        """Take up the state of a checkpoint folder; UserError names a file that was damaged."""
        check_folder(folder)
        self.take_weights(lambda model: load_weights(model, folder))
        state = read_state(folder / STATE, torch.device("cpu"))
        if lacking := [name for name in ("optimizer", "scaler", *COUNTERS) if name not in state]:
            raise UserError(f"{folder / STATE} lacks {', '.join(lacking)}: this checkpoint is damaged, use another one")
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        parts = each_tensor(state["optimizer"]["state"], lambda number, v: self.processes.part(v, parameters[number]))
        self.optimizer.load_state_dict({**state["optimizer"], "state": parts})
        if self.scaler.is_enabled() and state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        for name in COUNTERS:
            setattr(self, name, state[name])
        self.best_step = state.get("best_step")  # older states do not know it

    def whole_model(self) -> Transformer:
        """Return the model with all its weights: a copy, where each process has but a part. All have to ask."""
        return self.processes.gathered(self.model)

    def take_weights(self, load: Callable[[Transformer], Result]) -> Result:
        """Let something load weights into the model, whole as files have them, and return what it returns."""
        whole = self.whole_model()
        result = load(whole)
        self.processes.spread(whole, self.model)
        return result


def each_tensor(state: OptimizerState, change: Callable[[int, Any], Any]) -> OptimizerState:
    """Return the state of an optimizer, by number of the parameter and name, with every value changed."""
    return {number: {name: change(number, value) for name, value in values.items()} for number, values in state.items()}


def packed(state: dict[str, Any]) -> bytes:
    """Return a state as the content of its file; torch's own writer ends in a RuntimeError on a full disk."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def read_state(path: Path, device: torch.device) -> dict[str, Any]:
    """Read a trainer state; nothing in it can run code. UserError for anything else."""
    try:
        return torch.load(path, map_location=device, weights_only=True)
    except OSError:
        raise
    except Exception as error:  # a damaged pickle may raise anything
        raise UserError(f"{path} cannot be read safely: {type(error).__name__}; use another checkpoint") from error
