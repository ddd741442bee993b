"""The experiments on optimizers and precision: the arithmetic of their tables, and products in another way."""

import math
from contextlib import nullcontext

import pytest
import torch

from benchmarks.optimizers import Arm, Place, best_rate, beyond_the_edge, interval, losses_of, steps_to, train
from benchmarks.precision import FastProducts, bfloat16_hardware
from tests.test_optimizer import trainer_with
from training.hardware import best_precision


def factors(*shapes, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


PRODUCTS = {
    "mm": lambda: torch.mm(*factors((24, 40), (40, 32))),
    "bmm": lambda: torch.bmm(*factors((3, 24, 40), (3, 40, 32))),
    "addmm": lambda: torch.addmm(*factors((24, 32), (24, 40), (40, 32)), beta=0.5, alpha=2.0),
    "baddbmm": lambda: torch.baddbmm(*factors((3, 24, 32), (3, 24, 40), (3, 40, 32)), beta=0.5, alpha=2.0),
    "linear": lambda: torch.nn.functional.linear(*factors((2, 24, 40), (32, 40))),
    "matmul": lambda: torch.matmul(*factors((2, 24, 40), (40, 32))),
}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", PRODUCTS)
def test_fast_products_of_bfloat16_matrices_are_those_of_the_slow_kernels(name, grad):
    with nullcontext() if grad else torch.inference_mode():
        slow = PRODUCTS[name]()
        with FastProducts() as products:
            fast = PRODUCTS[name]()
    assert products.count == 1
    assert fast.dtype == slow.dtype == torch.bfloat16
    # The order of sums differs, so that a rounding now and then falls the other way: by one unit in the last place.
    assert (fast == slow).float().mean() > 0.98
    torch.testing.assert_close(fast, slow, rtol=2**-7, atol=2**-12)


def test_products_of_float32_matrices_are_left_alone():
    a, b = factors((24, 40), (40, 32), dtype=torch.float32)
    with FastProducts() as products:
        fast = a @ b
    assert products.count == 0
    assert torch.equal(fast, a @ b)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_steps_in_bfloat16_are_much_nearer_to_the_slow_ones_than_to_float32(kind, monkeypatch):
    slow, fast, full = trainer_with(kind, "bf16"), trainer_with(kind, "bf16"), trainer_with(kind, "fp32")
    monkeypatch.setattr("training.optimizer.best_precision", lambda device: "bf16")
    losses = [[trainer.step().loss for _ in range(4)] for trainer in (slow, full)]
    with bfloat16_hardware():
        losses.append([fast.step().loss for _ in range(4)])
    from_slow, from_full = (sum(abs(a - b) for a, b in zip(losses[2], other, strict=True)) for other in losses[:2])
    assert from_slow < 3e-4
    assert from_slow < from_full / 2


@pytest.mark.skipif(best_precision(torch.device("cpu")) == "bf16", reason="this CPU multiplies bfloat16 itself")
def test_a_run_that_never_multiplies_in_bfloat16_is_noticed():
    with pytest.raises(AssertionError, match="multiplied no such matrices"), bfloat16_hardware():
        trainer_with("adamw", "fp32").step()


@pytest.mark.parametrize(
    ("target", "steps"), [(2.5, 60.0), (3.0, 40.0), (2.0, 80.0), (1.75, 100.0), (1.4, math.inf), (9.0, 40.0)]
)
def test_the_step_that_reaches_a_loss_lies_on_the_line_between_two_evaluations(target, steps):
    assert steps_to([(40, 3.0), (80, 2.0), (120, 1.5)], target) == pytest.approx(steps)


def test_the_first_crossing_counts_where_a_loss_rises_again():
    assert steps_to([(40, 3.0), (80, 2.0), (120, 2.6), (160, 2.0)], 2.2) == pytest.approx(72.0)


def test_the_interval_is_students():
    mean, half = interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (mean, half) == (3.0, pytest.approx(2.7764451052 * math.sqrt(2.5) / math.sqrt(5)))


def test_a_grid_of_rates_is_extended_where_its_best_is_at_the_edge():
    assert beyond_the_edge({1.0: 3.0, 2.0: 2.0, 4.0: 2.5}) == []
    assert beyond_the_edge({1.0: 3.0, 2.0: 2.0, 4.0: 1.5}) == [8.0]
    assert beyond_the_edge({1.0: 1.0, 2.0: 2.0, 4.0: 1.5}) == [0.5]
    assert best_rate({1.0: 3.0, 2.0: 2.0, 4.0: 2.5}) == 2.0


def test_a_run_that_is_there_is_not_trained_again(tmp_path):
    place, arm = Place(tmp_path, "nowhere", 50, 1), Arm("muon", 0.01, 3)
    place.path(arm).parent.mkdir()
    place.path(arm).write_text('{"validation": [[25, 3.5], [50, 3.25]]}')
    train(arm, place)
    assert losses_of(arm, place) == [(25, 3.5), (50, 3.25)]
