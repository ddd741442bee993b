"""The windows of a step as a tensor where the model is."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from data.loader import Rows, Windows

# A text larger than this stays in the host's memory (its file is mapped), and each step's windows are copied over.
LARGEST_ON_DEVICE = 2**31  # bytes

Batches = Callable[[np.ndarray], Tensor]


def batches(windows: Rows, device: torch.device) -> Batches:
    """Return a function from the numbers of rows (B,) to their windows (B, T + 1), int64, on the device.

    A GPU would wait for a copy of tokens at every step, so it gets the whole text once and cuts the windows itself;
    only where they start is sent. Rows that are no windows of a text are made on the host.
    """
    if device.type == "cpu":
        return lambda numbers: torch.from_numpy(windows.rows(numbers))
    if not isinstance(windows, Windows) or 4 * len(windows.ids) > LARGEST_ON_DEVICE:
        return lambda numbers: sent(windows.rows(numbers), device)
    ids = torch.from_numpy(windows.ids.astype(np.int32)).to(device)
    return lambda numbers: cut(ids, sent(windows.starts(numbers), device), windows.context)


def cut(ids: Tensor, starts: Tensor, context: int) -> Tensor:
    """Return the windows (B, context + 1) of ids (N,) that begin at `starts` (B,), as int64."""
    return ids[starts[:, None] + torch.arange(context + 1, device=ids.device)].long()


def sent(numbers: np.ndarray, device: torch.device) -> Tensor:
    """Copy numbers to the device without waiting for it."""
    tensor = torch.from_numpy(numbers)
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)
