"""The fastest rate at which this machine multiplies matrices: what a training speed is held against."""

import time
from collections.abc import Iterator

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SMALLEST, LARGEST = 256, 8192


def measured_peak(device: torch.device, precision: str, seconds: float = 0.2) -> float:
    """Return the FLOP/s of the fastest of some square matrix products, 2 n^3 operations each.

    float32 is multiplied as this process has it set up, so call it after `use_faster_float32`. Of several sizes and
    repetitions the fastest counts: a busy machine only ever makes a product slower.
    """
    return max(_rates(device, DTYPES[precision], seconds))


def _rates(device: torch.device, dtype: torch.dtype, seconds: float) -> Iterator[float]:
    """Double the size until one product takes a tenth of the time: a slow precision is not waited for."""
    size = SMALLEST
    while True:
        a, b = torch.randn(2, size, size, device=device).to(dtype).unbind()
        taken = _seconds_of_a_product(a, b)  # the first one also sets the kernel up
        deadline = time.perf_counter() + seconds / 5
        while taken < seconds / 2 and time.perf_counter() < deadline:
            taken = min(taken, _seconds_of_a_product(a, b))
        yield 2 * size**3 / taken
        if size == LARGEST or taken > seconds / 10:
            return
        size *= 2


def _seconds_of_a_product(a: torch.Tensor, b: torch.Tensor) -> float:
    wait_for(a.device)
    begin = time.perf_counter()
    a @ b
    wait_for(a.device)
    return time.perf_counter() - begin


def wait_for(device: torch.device) -> None:
    """Wait until the device has done what it was given; a CPU always has."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
