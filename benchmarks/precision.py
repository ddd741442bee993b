"""The same runs in bfloat16 and in float32: how far apart the validation losses end.

    python -m benchmarks.precision

The runs in float32 are those of `benchmarks.optimizers`, where they are there. A CPU without bfloat16 instructions
multiplies bfloat16 matrices fifty times more slowly than float32 ones. So that the question can be answered there too,
such a product is then computed in another way with the same result: the factors, already rounded to bfloat16, are
multiplied and summed in float32, and the result is rounded to bfloat16, as the hardware does. All else, autocast and
the attention kernel included, is what `training.precision bf16` does everywhere.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from benchmarks.optimizers import (
    KINDS,
    Arm,
    Place,
    cells,
    command_line,
    final_loss,
    interval,
    place_of,
    table,
    train_all,
)
from training.config import load
from training.hardware import best_precision

SEEDS = (0, 1, 2)
ATEN = torch.ops.aten
PRODUCTS = {
    ATEN.mm.default,
    ATEN.bmm.default,
    ATEN.addmm.default,
    ATEN.baddbmm.default,
    ATEN.linear.default,
    ATEN.matmul.default,
}


class FastProducts(TorchDispatchMode):
    """Computes products of bfloat16 matrices in float32, rounds the result to bfloat16, and counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func not in PRODUCTS or not any(is_bfloat16(arg) for arg in args):
            return func(*args, **(kwargs or {}))
        self.count += 1
        wide = tree_map_only(Tensor, lambda tensor: tensor.float(), args)
        return func(*wide, **(kwargs or {})).bfloat16()


def is_bfloat16(value: object) -> bool:
    """Say whether a value is a tensor in bfloat16."""
    return isinstance(value, Tensor) and value.dtype == torch.bfloat16


@contextmanager
def bfloat16_hardware() -> Iterator[None]:
    """Compute as a CPU with bfloat16 instructions does, whether this one has them or not."""
    if best_precision(torch.device("cpu")) == "bf16":
        yield
        return
    with (
        mock.patch.object(torch.cpu, "get_capabilities", return_value={"avx512_bf16": True}),
        FastProducts() as products,
    ):
        yield
    assert products.count, "the run was in bfloat16 and multiplied no such matrices"


def precision_table(kind: str, lr: float, place: Place) -> Iterator[str]:
    """Yield the final loss of every seed in both precisions, and what bfloat16 adds, with its paired interval."""
    full, half = (
        [final_loss(Arm(kind, lr, seed, precision), place) for seed in SEEDS] for precision in ("fp32", "bf16")
    )
    added = [100 * (b / a - 1) for a, b in zip(full, half, strict=True)]
    rows = [["fp32", *cells(full), told(full, ".4f")], ["bf16", *cells(half), told(half, ".4f")]]
    rows += [["bf16 adds, %", *(f"{value:+.2f}" for value in added), told(added, "+.2f")]]
    return table([f"final loss, `{kind}` at {lr:g}", *(f"seed {seed}" for seed in SEEDS), "mean, 95 % interval"], rows)


def told(values: list[float], form: str) -> str:
    """Return mean and half-width of the 95 % interval as text."""
    mean, half = interval(values)
    return f"{mean:{form}} ± {half:{form.lstrip('+')}}"


def main() -> None:
    """Train what is not there yet, and print the table."""
    parser = command_line(__doc__ or "")
    demo = load("configs/demo.yaml").optimizer
    parser.add_argument("--kind", choices=KINDS, default=demo.method)
    parser.add_argument("--lr", type=float, default=demo.lr)
    options = parser.parse_args()
    place = place_of(options)
    train_all([Arm(options.kind, options.lr, seed) for seed in SEEDS], place, options.processes)
    halves = [Arm(options.kind, options.lr, seed, "bf16") for seed in SEEDS]
    train_all(halves, place, options.processes, bfloat16_hardware)
    print("\n".join(precision_table(options.kind, options.lr, place)))


if __name__ == "__main__":
    main()
