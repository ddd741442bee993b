"""What the machine can do: multiply, and read memory."""

from typing import Any

import torch

from benchmarks.measured import Measurement, fastest
from training.hardware import choose_device, use_faster_float32
from training.peak import measured_peak


def matmul(precision: str, onednn: bool, seconds: float) -> Measurement:
    """Measure FLOP/s of matrix products; `onednn`: with the faster float32 that training asks for."""
    device = choose_device("auto")
    backend: Any = torch.backends.mkldnn
    default = backend.matmul.fp32_precision
    exact = use_faster_float32() if onednn else True
    faster = backend.matmul.fp32_precision

    def rate() -> float:
        backend.matmul.fp32_precision = faster
        try:
            return measured_peak(device, precision, seconds)
        finally:
            backend.matmul.fp32_precision = default

    return Measurement(rate, {"exact": exact, "taken": faster != default, "device": device.type})


def read(size: int, seconds: float) -> Measurement:
    """Measure bytes a second of reading `size` bytes again and again, with all threads.

    The fastest of three plain ways: a sum of float32, of float64 (half as many additions), and a matrix with a vector.
    A C loop with OpenMP, with and without prefetching and several streams, was no faster where the memory is the limit.
    """
    width = 4096
    matrix = torch.randn(max(1, size // (4 * width)), width, device=choose_device("auto"))
    vector = torch.randn(width, device=matrix.device)
    wide = matrix.view(torch.float64) if matrix.device.type != "mps" else matrix
    # `.item()` waits for the device.
    ways = [lambda: matrix.sum().item(), lambda: wide.sum().item(), lambda: (matrix @ vector)[0].item()]
    return Measurement(fastest(ways, matrix.nbytes, seconds), {"bytes": matrix.nbytes})
