"""How much memory a process has taken at most."""

import resource
import sys
from pathlib import Path

import torch

STATUS = Path("/proc/self/status")


def peak_bytes() -> int:
    """Return the most memory this process, or on CUDA its tensors, ever held.

    Linux hands the high mark of `getrusage` on from the process that started this one, however small this one is; the
    one in /proc begins anew.
    """
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    if STATUS.exists():
        line = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
