"""Which device computes, and in which precision."""

import contextlib
import ctypes
import math
import sys
from typing import Any, Literal, NamedTuple

import torch

from model.decoding.build import has_compiler
from model.errors import UserError
from model.flops import training_flops
from training.config import Config, TrainingConfig

# A CPU is fastest while what a matrix product writes stays in its cache: 2k to 4k tokens (measured on two machines).
CPU_TOKENS_AT_ONCE = 2048
# From how much arithmetic on compiling pays: it takes half a minute, and saves a tenth (float32) to a third (bfloat16)
# of a run. On two CPUs of 75 and 450 GFLOP/s that was the same 5e13. The figure for GPUs is an estimate.
COMPILING_PAYS = {"cpu": 5e13, "cuda": 1e16}  # FLOPs


class Hardware(NamedTuple):
    """Where and how precisely a run computes."""

    device: torch.device
    precision: str

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Return the context in which matrix products run in the chosen precision; weights stay in float32."""
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.precision)
        return contextlib.nullcontext() if dtype is None else torch.autocast(self.device.type, dtype)

    def __str__(self) -> str:
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type
        threads = f", {torch.get_num_threads()} threads" if self.device.type == "cpu" else ""
        return f"{name}{threads}, {self.precision}"


def choose_hardware(config: TrainingConfig) -> Hardware:
    """Resolve `device: auto` and `precision: auto`; UserError for a device that is not there."""
    device = choose_device(config.device)
    return Hardware(device, best_precision(device) if config.precision == "auto" else config.precision)


def micro_batch_rows(config: Config, device: torch.device) -> int:
    """Return how many windows go through the model at once: as configured, else what is fastest."""
    rows = config.training.micro_batch_size
    if rows is None and device.type == "cpu":
        rows = max(1, CPU_TOKENS_AT_ONCE // config.model.context)
    return min(rows or config.training.batch_size, config.training.batch_size)


def resolve_compile(config: Config, device: torch.device) -> Literal["on", "off"]:
    """Return whether a run of this configuration is compiled; auto: if it is long enough for compiling to pay.

    Decided from the configuration, never from a clock: the same command gives the same bits. UserError where compiling
    was asked for and there is no compiler.
    """
    asked = config.training.compile
    if asked == "auto":
        tokens = config.training.steps * config.training.batch_size * config.model.context
        pays = tokens * training_flops(config.model) > COMPILING_PAYS.get(device.type, math.inf)
        return "on" if pays and has_compiler() else "off"
    if asked == "on" and not has_compiler():
        raise UserError("training.compile on needs a C++ compiler (g++ or clang++), and there is none: install one")
    return asked


def set_up_cpu() -> None:
    """Let this process compute on a CPU as fast as it can, with the same results."""
    use_faster_float32()
    keep_freed_memory()


# Names of <malloc.h>.
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4


def keep_freed_memory() -> bool:
    """Let the C library keep freed memory for the next tensors of this process; say whether it can (glibc).

    Else every large tensor is asked from the system anew, and comes page by page, filled with zeros: 50,000 page
    faults a step of 4,096 tokens through 12 million parameters, 3 % of its time. The process's largest size is the
    same.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    return mallopt is not None and mallopt(M_MMAP_MAX, 0) == 1 == mallopt(M_TRIM_THRESHOLD, -1)


def use_faster_float32() -> bool:
    """Let oneDNN multiply float32 matrices on the CPU where it does so in full precision; say whether it does.

    MKL takes its slower AVX2 path on AMD. The setting is named after what it allows on CPUs with AMX, where products
    would really be rounded to bfloat16; so the result is measured, and the setting is taken back where it rounds.
    """
    backend: Any = torch.backends.mkldnn
    matmul = backend.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    a, b = torch.randn(2, 256, 256, generator=torch.Generator().manual_seed(0)).unbind()
    exact = (a.double() @ b.double()).float()
    is_exact = bool((a @ b - exact).norm() < 1e-6 * exact.norm())
    if not is_exact:
        matmul.fp32_precision = before
    return is_exact


def choose_device(name: str = "auto") -> torch.device:
    """Return the device of that name; auto: cuda, else mps, else cpu."""
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        name = next(kind for kind, there in available.items() if there)
    if not available[name]:
        there = ", ".join(kind for kind, is_there in available.items() if is_there)
        raise UserError(f"device {name} is not available on this machine; available: {there}")
    return torch.device(name)


def best_precision(device: torch.device) -> str:
    """Return bf16 where the hardware multiplies it fast, else fp16 on CUDA, else fp32."""
    if device.type == "cuda":
        # Before compute capability 8.0 bfloat16 is emulated, and slow.
        return "bf16" if torch.cuda.get_device_capability(device) >= (8, 0) else "fp16"
    if device.type == "cpu":
        # Without these instructions a CPU takes 100 times longer in bfloat16 than in float32.
        can = torch.cpu.get_capabilities()
        return "bf16" if can.get("avx512_bf16") or can.get("amx_bf16") else "fp32"
    return "fp32"
