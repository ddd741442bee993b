"""Several processes that train one model: who takes which rows, what is added up, and what the first one does alone.

`Alone` is the one process of an ordinary run: nothing is exchanged. Under torchrun there are several, and each holds
either a copy of the model (`Copies`) or a part of every weight (`Shards`). All of them run the same program: whatever
is decided from a clock, a file or a signal is decided by one and told to all, so that they never wait for each other in
different places. The mean gradient of a step is the sum over all its rows, divided by the number of its targets,
whoever computes them.
"""

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from model.errors import UserError
from model.transformer import Transformer
from training.config import TrainingConfig
from training.hardware import choose_device
from training.optimizer import gradient_norms

Result = TypeVar("Result")
Loss = Callable[[Tensor, Tensor], Tensor]

# How long an exchange waits for a process that does not answer. One that dies is noticed at once, by its connection or
# by torchrun; this is for one that hangs, or whose machine has lost its power. Compiling takes minutes, and not the
# same time everywhere.
PATIENCE, PATIENCE_COMPILING = timedelta(minutes=1), timedelta(minutes=10)
# What one process does while the others wait, such as preparing a corpus, may take hours.
WITHOUT_END = timedelta(days=365)
SECONDS_BETWEEN_LOOKS = 0.02
# Gradients travel in packages of so many numbers: few exchanges, and little memory for the copies.
PACKAGE = 2**23


class Alone:
    """The one process of an ordinary run."""

    rank, count = 0, 1

    @property
    def is_first(self) -> bool:
        """Say whether this process is the one that writes and shows."""
        return self.rank == 0

    def share(self, rows: np.ndarray) -> tuple[np.ndarray, int]:
        """Return this process's part of some rows, and how many of them count: the first ones."""
        return rows, len(rows)

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of the tensor over all processes."""
        return tensor

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Let every gradient be the sum over all processes."""

    def gradient_norms(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """Return the norm of each parameter's whole gradient, (number of parameters,)."""
        return gradient_norms(parameters)

    def any(self, flag: bool) -> bool:
        """Say whether the flag is set in any process: the same answer in all."""
        return flag

    def first(self, action: Callable[[], Result]) -> Result:
        """Let the first process act, once all have come here, and tell all what it got."""
        return action()

    def arrange(self, model: Transformer, loss: Loss) -> Loss:
        """Place the model's weights, and return the function that computes its loss from there."""
        return loss

    def gathered(self, model: Transformer) -> Transformer:
        """Return the model with all its weights in this process."""
        return model

    def spread(self, whole: Transformer, model: Transformer) -> None:
        """Let the model have the weights of what `gathered` returned."""

    def whole(self, value: Any) -> Any:
        """Return a tensor of the optimizer with all its numbers."""
        return value

    def part(self, value: Any, parameter: nn.Parameter) -> Any:
        """Return what this process keeps of a tensor of the optimizer for this parameter."""
        return value

    def __str__(self) -> str:
        return ""


ALONE = Alone()


class Copies(Alone):
    """Several processes with a copy of the model each.

    Gradients are added up once a step, after the last micro-batch. PyTorch's DistributedDataParallel would do it during
    the last backward pass, and so hide some of the wait; but it takes means where a sum is wanted, renames parameters,
    and needs telling which micro-batch is the last.
    """

    def __init__(self, store: Store, rank: int, count: int) -> None:
        self.store, self.rank, self.count = store, rank, count
        self.telling: dist.ProcessGroup | None = None

    def share(self, rows: np.ndarray) -> tuple[np.ndarray, int]:
        """Return this process's part of some rows, and how many of them count: the first ones.

        All processes get equally many, for all have to take part in every exchange: one that is a row short gets the
        very first row once more, which does not count.
        """
        parts = np.array_split(rows, self.count)
        mine, longest = parts[self.rank], len(parts[0])
        return np.concatenate([mine, np.repeat(rows[:1], longest - len(mine), axis=0)]), len(mine)

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of the tensor over all processes."""
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Let every gradient be the sum over all processes."""
        for some in packages([p.grad for p in parameters if p.grad is not None]):
            total = self.sum(torch.cat([gradient.flatten() for gradient in some]))
            for gradient, summed in zip(some, total.split([g.numel() for g in some]), strict=True):
                gradient.copy_(summed.view_as(gradient))

    def any(self, flag: bool) -> bool:
        """Say whether the flag is set in any process: the same answer in all."""
        return bool(self.sum(torch.tensor(int(flag))))  # on the CPU, so that no GPU is waited for

    def first(self, action: Callable[[], Result]) -> Result:
        """Let the first process act, once all have come here, and tell all what it got.

        However long it takes: its word is waited for without end, but not when its connection has closed.
        """
        self.any(False)  # all come here at about the same time, or one is lost, and this says so
        told = [action() if self.is_first else None]
        dist.broadcast_object_list(told, src=0, group=self.telling)
        return told[0]  # type: ignore[return-value]  # by now it is what the first got

    def failed_before(self, status: int) -> int | None:
        """Return the exit status of the process that failed first; None: it is this one, the only one to say why."""
        own = f"{status} {self.rank}"
        first = self.store.compare_set("failed", "", own).decode()
        return None if first == own else int(first.split()[0])

    def __str__(self) -> str:
        return f", {self.count} processes"


class Shards(Copies):
    """Several processes that hold a part of every weight, gradient and moment each (FSDP2; Zhao and others, 2023).

    The weights of a block are gathered when it computes, and let go after it; gradients are added up on the way back.
    """

    def arrange(self, model: Transformer, loss: Loss) -> Loss:
        """Place the model's weights, and return the function that computes its loss from there."""
        from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

        refuse_scalars(model)
        for module in (*model.layers, model):
            sharded = fully_shard(module)
            # A sum, not a mean over processes: the loss is divided by the targets of the whole step already.
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)
        # The weights outside the blocks are gathered around a method of the model, which the loss is not.
        model.step_loss = loss  # type: ignore[assignment]
        register_fsdp_forward_method(model, "step_loss")
        return model.step_loss  # type: ignore[return-value]

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Let every gradient be the sum over all processes: it is, since the backward pass."""

    def gradient_norms(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """Return the norm of each parameter's whole gradient, (number of parameters,)."""
        mine = [local(p.new_zeros(()) if p.grad is None else p.grad).norm() for p in parameters]
        norms = torch.stack(mine)
        return self.sum(norms.double().square()).sqrt().to(norms.dtype)

    def gathered(self, model: Transformer) -> Transformer:
        """Return the model with all its weights in this process, as a copy on the CPU."""
        whole = Transformer(model.config).to(model.embed_tokens.weight.dtype)
        with torch.no_grad():
            for ours, theirs in zip(whole.parameters(), model.parameters(), strict=True):
                ours.copy_(self.whole(theirs))
        return whole

    def spread(self, whole: Transformer, model: Transformer) -> None:
        """Let the model have the weights of what `gathered` returned."""
        with torch.no_grad():
            for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
                ours.copy_(self.part(theirs.detach(), ours))

    def whole(self, value: Any) -> Any:
        """Return a tensor of the optimizer with all its numbers."""
        return value.full_tensor().cpu() if is_sharded(value) else value

    def part(self, value: Any, parameter: nn.Parameter) -> Any:
        """Return what this process keeps of a tensor of the optimizer for this parameter."""
        from torch.distributed.tensor import distribute_tensor

        if not isinstance(value, Tensor) or value.shape != parameter.shape:
            return value  # the number of steps
        like: Any = parameter
        # Every process has read the same file: nothing needs to be sent.
        return distribute_tensor(value.to(parameter.device), like.device_mesh, like.placements, src_data_rank=None)

    def __str__(self) -> str:
        return f", {self.count} processes with a part of the model each"


def refuse_scalars(model: Transformer) -> None:
    """Raise a UserError where a parameter is a single number: FSDP2 has no way to divide it."""
    names = ", ".join(name for name, parameter in model.named_parameters() if parameter.dim() == 0)
    if names:
        raise UserError(
            f"training.parallel fsdp cannot divide {names} of position {model.config.position.kind!r}: "
            "use --training.parallel ddp"
        )


def packages(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the tensors, of one dtype, in lists of about `PACKAGE` numbers."""
    some: list[Tensor] = []
    for tensor in tensors:
        some.append(tensor)
        if sum(t.numel() for t in some) >= PACKAGE:
            yield some
            some = []
    if some:
        yield some


def is_sharded(value: Any) -> bool:
    """Say whether a tensor is spread over processes."""
    from torch.distributed.tensor import DTensor

    return isinstance(value, DTensor)


def local(value: Any) -> Tensor:
    """Return the part of a tensor that lies in this process."""
    return value.to_local() if is_sharded(value) else value


# --- Joining and leaving ----------------------------------------------------------------------------------------------

LAUNCHED = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


@contextmanager
def joined(training: TrainingConfig) -> Iterator[Alone]:
    """Join the processes that torchrun started, and leave them in the end; without torchrun, or with one, be alone.

    Only the first process is heard. Of several that fail only one says so, whichever it was.
    """
    if not set(os.environ) >= LAUNCHED or os.environ["WORLD_SIZE"] == "1":
        yield ALONE
        return
    processes = met(training)
    try:
        with contextlib.nullcontext() if processes.is_first else silence():
            place(training, int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
            connect(processes, patience_of(training))
            yield processes
    except Exception as error:
        _leave(processes, error)
    else:
        dist.destroy_process_group()


def patience_of(training: TrainingConfig) -> timedelta:
    """Return how long a process that does not answer is waited for."""
    return PATIENCE if training.compile == "off" else PATIENCE_COMPILING


def met(training: TrainingConfig) -> Copies:
    """Find the other processes, by the address that torchrun has put into the environment."""
    store, rank, count = next(iter(rendezvous("env://")))
    kind = {"ddp": Copies, "fsdp": Shards}[training.parallel]
    name = name_of_this_start(PrefixStore("ropelab", store), rank, count, patience_of(training))
    return kind(PrefixStore(f"ropelab {name}", store), rank, count)


def name_of_this_start(store: Store, rank: int, count: int, patience: timedelta) -> str:
    """Return a name on which only the processes that were started together agree; UserError where one does not come.

    torchrun starts processes again with the store of those that ended, where all their words still stand, and how
    often it did so is not the same on all machines. So the first process makes up a name, the others answer it with
    one of their own, and believe the first when it has heard that.
    """
    own = secrets.token_hex(8)
    end = time.monotonic() + patience.total_seconds()
    while time.monotonic() < end:
        if name := _asked(store, own, count) if rank == 0 else _answered(store, own, rank):
            return name
        time.sleep(SECONDS_BETWEEN_LOOKS)
    raise UserError(
        f"not all {count} processes of this run have come within {patience.total_seconds():g} seconds: "
        "start all of them again"
    )


def _asked(store: Store, own: str, count: int) -> str:
    store.set("name", own)
    answers = [_word(store, f"answer {rank}").split() for rank in range(1, count)]
    if any(answer[:1] != [own] for answer in answers):
        return ""
    store.set("heard", " ".join([own, *(answer[1] for answer in answers)]))
    return own


def _answered(store: Store, own: str, rank: int) -> str:
    store.set(f"answer {rank}", f"{_word(store, 'name')} {own}")
    name, *heard = _word(store, "heard").split() or [""]
    return name if own in heard else ""


def _word(store: Store, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""


def connect(processes: Copies, patience: timedelta) -> None:
    """Set up the exchange of tensors, NCCL where they are on GPUs, gloo on CPUs, and the one for the first's words."""
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    store = PrefixStore("exchange", processes.store)
    dist.init_process_group(backend, store=store, rank=processes.rank, world_size=processes.count, timeout=patience)
    processes.telling = dist.new_group(backend="gloo", timeout=WITHOUT_END)


def place(training: TrainingConfig, local_rank: int, local_count: int) -> None:
    """Give this process a GPU of its own, or its share of the CPU."""
    device = choose_device(training.device)
    if device.type == "cpu":
        torch.set_num_threads(threads_of_one(local_count))
        return
    there = torch.cuda.device_count() if device.type == "cuda" else 1
    if local_count > there:
        raise UserError(
            f"{local_count} processes on this machine want a GPU each, and there are {there} of kind {device.type}: "
            f"use torchrun --nproc-per-node {there} or --training.device cpu"
        )
    if device.type == "cuda":
        torch.cuda.set_device(local_rank)


def threads_of_one(local_count: int) -> int:
    """Return how many threads each of the processes on this machine gets, unless OMP_NUM_THREADS says so.

    A 1 there says nothing: torchrun sets it where nothing was set.
    """
    asked = os.environ.get("OMP_NUM_THREADS", "1")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return int(asked) if asked.isdigit() and int(asked) > 1 else max(1, cores // local_count)


@contextmanager
def silence() -> Iterator[None]:
    """Let nothing be shown."""
    with (
        open(os.devnull, "w", encoding="utf-8") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        yield


def _leave(processes: Copies, error: Exception) -> None:
    """Raise the error, or end quietly where another process has said what is wrong."""
    try:
        status = processes.failed_before(2 if isinstance(error, UserError | OSError) or is_lost(error) else 1)
    except RuntimeError:  # the first process is gone, and its list with it
        status = None
    if status is not None:
        raise SystemExit(status) from None
    if is_lost(error):
        raise UserError(
            f"another process of this run has ended, or does not answer ({_first_line(error)}): "
            "the last checkpoint is sound, start all of them again with --resume"
        ) from error
    raise error


def is_lost(error: Exception) -> bool:
    """Say whether an exchange failed because of another process."""
    words = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer")
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:200]
