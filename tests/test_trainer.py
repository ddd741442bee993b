"""A step: learning rate, gradients, accumulation, precision, and what happens to numbers that are not finite."""

import itertools
import math
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from data.loader import Windows
from model.errors import UserError
from model.transformer import IGNORED, token_losses
from tests.conftest import ARMS, tiny_config
from training.batches import cut
from training.config import Config, OptimizerConfig
from training.evaluate import evaluate
from training.hardware import (
    Hardware,
    best_precision,
    choose_device,
    micro_batch_rows,
    resolve_compile,
    use_faster_float32,
)
from training.optimizer import decays, parameter_groups
from training.schedule import learning_rate
from training.trainer import MAX_SKIPPED_IN_A_ROW, Trainer, Unread

TEXT = (
    "The wheel turns by an equal angle for every step, so two marks on it keep their distance however far it rolls. "
    "A clock has hands of several speeds: the fast one tells neighbours apart, the slow one tells morning from night. "
) * 12
ROOT = Path(__file__).resolve().parents[1]
CPU = Hardware(torch.device("cpu"), "fp32")


def trainer_on_text(position="rope", precision="fp32", model=None, optimizer=None, **training) -> Trainer:
    """A tiny trainer on the bytes of TEXT."""
    shape = tiny_config(position, vocab_size=260, context=32, **(model or {}))
    config = Config.model_construct(
        model=shape,
        optimizer=OptimizerConfig.model_validate({"lr": 1e-2, "warmup_steps": 5, **(optimizer or {})}),
        training=Config.model_fields["training"].annotation.model_validate({"steps": 20, "batch_size": 8, **training}),
    )
    windows = Windows(np.frombuffer(TEXT.encode(), dtype=np.uint8), shape.context, seed=0)
    return Trainer(config, windows, Hardware(torch.device("cpu"), precision))


# --- Learning rate ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("warmup", "steps"), [(0, 1), (0, 2), (0, 100), (10, 100), (99, 100), (100, 100), (500, 100), (1, 2), (7, 1)]
)
def test_the_learning_rate_starts_above_0_peaks_once_and_ends_at_its_floor(warmup, steps):
    config = OptimizerConfig(lr=2.0, warmup_steps=warmup, min_lr_fraction=0.25)
    rates = [learning_rate(step, steps, config) for step in range(steps)]
    assert all(0 < rate <= 2.0 for rate in rates)
    assert rates.count(2.0) == 1
    assert steps == 1 or rates[-1] == pytest.approx(0.5)
    peak = rates.index(2.0)
    assert rates == sorted(rates[: peak + 1]) + sorted(rates[peak + 1 :], reverse=True)


def test_the_learning_rate_is_a_line_then_half_a_cosine():
    config = OptimizerConfig(lr=1.0, warmup_steps=3, min_lr_fraction=0.0)
    rates = [learning_rate(step, 8, config) for step in range(8)]
    expected = [0.25, 0.5, 0.75, 1.0, *(0.5 + 0.5 * math.cos(math.pi * k / 4) for k in (1, 2, 3, 4))]
    assert rates == pytest.approx(expected, abs=1e-12)


# --- Optimizer --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ARMS)
def test_each_parameter_is_in_one_group_and_only_matrices_of_the_trunk_decay(name, tied):
    trainer = trainer_on_text(name, model={"tie_embeddings": tied, "qk_norm": True})
    decayed, free = parameter_groups(trainer.model, 0.1)
    assert (decayed["weight_decay"], free["weight_decay"]) == (0.1, 0.0)
    grouped = [id(p) for p in (*decayed["params"], *free["params"])]
    assert sorted(grouped) == sorted(id(p) for p in trainer.model.parameters())
    for parameter_name, parameter in trainer.model.named_parameters():
        is_matrix = parameter.dim() == 2 and "position" not in parameter_name
        assert decays(parameter_name, parameter) == is_matrix
        assert (id(parameter) in {id(p) for p in decayed["params"]}) == is_matrix


def test_the_learning_rate_of_the_step_reaches_the_optimizer():
    trainer = trainer_on_text(optimizer={"lr": 0.5})
    assert trainer.step().lr == trainer.optimizer.param_groups[0]["lr"] == pytest.approx(0.5 / 6)


# --- Accumulation -----------------------------------------------------------------------------------------------------


def gradients(trainer, inputs, targets):
    trainer.model.double()
    trainer.accumulate(inputs, targets)
    return {name: p.grad.clone() for name, p in trainer.model.named_parameters()}


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_micro_batches_of_unequal_target_counts_give_the_gradient_of_the_whole_step(rows):
    # With equal counts a mean of means is right by chance: here one micro-batch has a tenth of the targets.
    windows = torch.from_numpy(trainer_on_text().windows.batch(0, 8))
    inputs, targets = windows[:, :-1], windows[:, 1:].clone()
    targets[:3, 3:] = IGNORED
    whole = gradients(trainer_on_text(), inputs, targets)
    parts = gradients(trainer_on_text(micro_batch_size=rows), inputs, targets)
    for name, gradient in whole.items():
        torch.testing.assert_close(parts[name], gradient, rtol=0, atol=1e-12 * gradient.abs().max().item() + 1e-15)


def test_the_loss_of_a_step_is_the_mean_over_all_its_targets():
    trainer = trainer_on_text(micro_batch_size=3)
    windows = torch.from_numpy(trainer.windows.batch(0, 8))
    expected = token_losses(trainer.model(windows[:, :-1]), windows[:, 1:]).mean().item()
    assert trainer.step().loss == pytest.approx(expected, rel=1e-6)


# --- The whole step ---------------------------------------------------------------------------------------------------

# Eager float32 on a literal text. A refactoring leaves this trace as it is; what changes it changes every result.
PINNED = [
    5.54031,
    5.38518,
    5.04472,
    4.77396,
    4.43957,
    4.01827,
    3.61343,
    3.26582,
    3.09815,
    3.04868,
    2.97017,
    2.93738,
    2.91174,
    2.94073,
    2.93253,
    2.97108,
    2.94245,
    2.88816,
    2.93587,
    2.88926,
]


def trace(trainer):
    return [trainer.step().loss for _ in range(trainer.config.training.steps)]


def test_twenty_losses_on_a_literal_text_stay_what_they_were():
    assert trace(trainer_on_text()) == pytest.approx(PINNED, abs=1e-4)


def test_accumulation_leaves_the_trace_as_it_is():
    assert trace(trainer_on_text(micro_batch_size=3)) == pytest.approx(PINNED, abs=1e-4)


def test_gradients_are_clipped_to_the_norm_and_reported_before():
    free, clipped = (trainer_on_text(optimizer={"clip_norm": limit}) for limit in (0.0, 1e-3))
    windows = torch.from_numpy(free.windows.batch(0, 8))
    seen = []
    for trainer in (free, clipped):
        trainer.accumulate(windows[:, :-1], windows[:, 1:])
        trainer.optimizer.step = lambda trainer=trainer: seen.append(
            torch.nn.utils.get_total_norm([p.grad for p in trainer.parameters]).item()
        )
        seen.append(trainer.update(0.01, torch.tensor(1.0))[1].item())
    reported_free, norm_free, reported_clipped, norm_clipped = seen[1], seen[0], seen[3], seen[2]
    assert reported_free == reported_clipped == pytest.approx(norm_free)
    assert norm_clipped == pytest.approx(1e-3, rel=1e-3)


def test_dropout_is_seeded_by_the_step_alone():
    one, other = (trainer_on_text(model={"dropout": 0.3}) for _ in "ab")
    torch.manual_seed(5)
    first = one.step().loss
    torch.manual_seed(6)
    torch.rand(3)
    assert other.step().loss == first
    assert one.step().loss != trainer_on_text().step().loss


# --- Precision --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("precision", "tolerance"), [("bf16", 0.05), ("fp16", 0.02)])
def test_half_precision_follows_float32_and_keeps_float32_weights(precision, tolerance):
    trainer = trainer_on_text(precision=precision)
    half, full = trace(trainer), trace(trainer_on_text())
    applied = list(zip(half, full, strict=True))
    assert trainer.skipped == 0
    assert all(abs(a - b) < tolerance * b for a, b in applied)
    assert {p.dtype for p in trainer.parameters} == {torch.float32}


def test_with_float16_gradients_are_unscaled_before_they_are_clipped():
    full, half = trainer_on_text().step(), trainer_on_text(precision="fp16").step()
    assert half.grad_norm == pytest.approx(full.grad_norm, rel=0.02)


def test_an_overflow_in_float16_skips_the_step_and_halves_the_scale():
    trainer = trainer_on_text(precision="fp16")
    trainer.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**60)
    before = [p.detach().clone() for p in trainer.parameters]
    assert trainer.step().skipped
    assert trainer.scaler.get_scale() == 2.0**59
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.parameters, strict=True))


def test_auto_never_chooses_a_precision_that_the_cpu_computes_slowly(monkeypatch):
    cpu = torch.device("cpu")
    for abilities, expected in (({}, "fp32"), ({"avx512_bf16": True}, "bf16"), ({"amx_bf16": True}, "bf16")):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda abilities=abilities: abilities)
        assert best_precision(cpu) == expected


def test_auto_on_cuda_takes_bf16_from_compute_capability_8_on_and_else_fp16(monkeypatch):
    for capability, expected in (((7, 5), "fp16"), ((8, 0), "bf16"), ((9, 0), "bf16")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, capability=capability: capability)
        assert best_precision(torch.device("cuda")) == expected


def test_faster_float32_products_are_as_exact_as_before():
    matmul = torch.backends.mkldnn.matmul
    before = matmul.fp32_precision
    try:
        a, b = torch.randn(300, 200), torch.randn(200, 100)
        exact = a.double() @ b.double()
        use_faster_float32()
        assert (a @ b - exact).norm() < 1e-6 * exact.norm()
    finally:
        matmul.fp32_precision = before


FAULTS = """
import resource
import torch
from training.hardware import set_up_cpu

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.empty(2**24).fill_(1.0)  # 64 MiB, freed at once
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

as_it_is = faults()
set_up_cpu()
faults()  # the first tensor of this size is new to this process
print(as_it_is, faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such setting")
def test_memory_that_was_freed_is_not_asked_from_the_system_again():
    said = subprocess.run([sys.executable, "-c", FAULTS], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    as_it_is, kept = map(int, said.split())
    assert as_it_is >= 20 * 32 > 10 * kept  # pages of 2 MiB at the largest


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_device_that_is_not_there_is_refused_with_those_that_are():
    with pytest.raises(UserError, match=r"device cuda is not available .*: cpu"):
        choose_device("cuda")


# --- Numbers that are not finite --------------------------------------------------------------------------------------


def poison(trainer, name):
    """Give one parameter a NaN gradient in every backward pass; the loss stays finite."""
    dict(trainer.model.named_parameters())[name].register_hook(lambda grad: grad * float("nan"))


def test_a_nan_gradient_skips_the_step_and_leaves_weights_and_optimizer_as_they_were():
    trainer = trainer_on_text()
    trainer.step()
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    moments = [s["exp_avg"].clone() for s in trainer.optimizer.state.values()]
    poison(trainer, "layers.1.mlp.up_proj.weight")
    result = trainer.step()
    assert result.skipped
    assert math.isfinite(result.loss)
    assert trainer.skipped == 1
    assert all(torch.equal(before[name], p) for name, p in trainer.model.named_parameters())
    after = [s["exp_avg"] for s in trainer.optimizer.state.values()]
    assert all(torch.equal(a, b) for a, b in zip(moments, after, strict=True))


def test_steps_that_are_read_later_are_counted_as_if_read_at_once():
    read_at_once, read_later = trainer_on_text(), trainer_on_text()
    for trainer in (read_at_once, read_later):
        weight = dict(trainer.model.named_parameters())["norm.weight"]
        weight.register_hook(lambda grad, trainer=trainer: grad * (float("nan") if trainer.next_step in (2, 3) else 1))
    expected = [read_at_once.step() for _ in range(6)]
    for _ in range(6):
        read_later.advance()
    assert str(read_later.results()) == str(expected)  # NaN equals NaN in words
    assert read_later.results() == []
    assert [result.skipped for result in expected] == [False, False, True, True, False, False]
    assert (read_later.skipped, read_later.skipped_in_a_row) == (2, 0)
    assert all(torch.equal(a, b) for a, b in zip(read_later.parameters, read_at_once.parameters, strict=True))


def test_a_loss_that_is_not_finite_skips_the_step_though_its_gradient_is():
    trainer = trainer_on_text()
    before = [p.detach().clone() for p in trainer.parameters]
    trainer.accumulate(torch.zeros(2, 8, dtype=torch.long), torch.zeros(2, 8, dtype=torch.long))
    trainer.unread.append(Unread(0, 0.01, trainer.update(0.01, torch.tensor(float("inf")))))
    assert trainer.results()[0].culprit == "the loss"
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.parameters, strict=True))


def test_a_sum_of_gradients_that_overflows_blames_no_single_one():
    trainer = trainer_on_text()
    for p in trainer.parameters:
        p.grad = torch.full_like(p, 1e19 / p.numel() ** 0.5)  # each norm is 1e19; the sum of their squares overflows
    trainer.unread.append(Unread(0, 0.01, trainer.update(0.01, torch.tensor(1.0))))
    assert trainer.results()[0].culprit == "the norm of the gradients"


def test_windows_cut_on_a_device_are_those_of_the_file():
    windows = trainer_on_text().windows
    numbers = np.arange(5, 90)
    ids = torch.from_numpy(windows.ids.astype(np.int32))
    cut_there = cut(ids, torch.from_numpy(windows.starts(numbers)), windows.context)
    assert torch.equal(cut_there, torch.from_numpy(windows.rows(numbers)))
    assert cut_there.dtype == torch.int64


def test_a_micro_batch_fills_a_cpus_cache_unless_a_size_is_given():
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    for context, batch, given, on_cpu in ((256, 16, None, 8), (256, 4, None, 4), (4096, 16, None, 1), (256, 16, 2, 2)):
        config = Config.model_validate(
            {"model": {"context": context}, "training": {"batch_size": batch, "micro_batch_size": given}}
        )
        assert micro_batch_rows(config, cpu) == on_cpu
        assert micro_batch_rows(config, gpu) == (given or batch)


# --- Compiling --------------------------------------------------------------------------------------------------------


def a_run(steps, compile="auto"):
    return Config.model_validate({"model": {"vocab_size": 2048}, "training": {"steps": steps, "compile": compile}})


@pytest.mark.parametrize(("asked", "expected"), [("on", "on"), ("off", "off"), ("auto", "off")])
def test_a_short_run_is_compiled_only_where_that_was_asked_for(asked, expected, monkeypatch):
    monkeypatch.setattr("training.hardware.has_compiler", lambda: True)
    assert resolve_compile(a_run(200, asked), torch.device("cpu")) == expected


def test_a_long_run_is_compiled_unless_there_is_no_compiler(monkeypatch):
    for there, expected in ((True, "on"), (False, "off")):
        monkeypatch.setattr("training.hardware.has_compiler", lambda there=there: there)
        assert resolve_compile(a_run(20_000), torch.device("cpu")) == expected


def test_compiling_asked_for_without_a_compiler_is_an_error(monkeypatch):
    monkeypatch.setattr("training.hardware.has_compiler", lambda: False)
    with pytest.raises(UserError, match=r"training.compile on needs a C\+\+ compiler"):
        resolve_compile(a_run(200, "on"), torch.device("cpu"))


# --- Numbers that are not finite, again and again ---------------------------------------------------------------------


def test_after_some_skipped_steps_in_a_row_the_run_stops_and_names_step_and_parameter():
    trainer = trainer_on_text()
    poison(trainer, "layers.1.mlp.up_proj.weight")
    for _ in range(MAX_SKIPPED_IN_A_ROW - 1):
        assert trainer.step().skipped
    with pytest.raises(UserError, match=r"step 5: the gradient of layers.1.mlp.up_proj.weight was not finite"):
        trainer.step()


def test_a_finite_step_ends_the_row_of_skipped_ones():
    trainer = trainer_on_text()
    handle = dict(trainer.model.named_parameters())["norm.weight"].register_hook(lambda grad: grad * float("inf"))
    assert trainer.step().skipped
    handle.remove()
    assert not trainer.step().skipped
    assert (trainer.skipped, trainer.skipped_in_a_row) == (1, 0)


# --- Evaluation -------------------------------------------------------------------------------------------------------


class Fixed(torch.nn.Module):
    """A model whose loss for a target is a function of the token before it, so that sums are known."""

    def forward(self, tokens):
        wanted = tokens.double() / 10  # the probability of token 1 is e^-(token / 10), the rest goes to token 0
        return torch.stack((torch.log1p(-torch.exp(-wanted)), -wanted), dim=-1)


@pytest.mark.parametrize("rows", [1, 2, 3, 8])
def test_the_validation_loss_is_the_sum_over_the_count_for_every_batch_size(rows):
    windows = np.ones((10, 2), dtype=np.int64)
    windows[:, 0] = [10, 100, 100, 100, 100, 100, 100, 100, 100, 100]
    scores = evaluate(Fixed(), windows, np.array([1, 1]), CPU, rows)
    # Batches of 1 and 9: sums 1 and 90 give 9.1; their means 1 and 10 would give 5.5.
    assert scores.loss == pytest.approx(9.1, abs=1e-9)
    assert scores.tokens == 10


def test_the_validation_loss_is_a_mean_over_all_targets_of_all_windows():
    trainer = trainer_on_text()
    windows = trainer.windows.batch(0, 5)
    tokens = torch.from_numpy(windows)
    expected = token_losses(trainer.model(tokens[:, :-1]), tokens[:, 1:]).mean().item()
    assert evaluate(trainer.model, windows, np.ones(260), CPU, rows=2).loss == pytest.approx(expected, rel=1e-6)


def test_bits_per_byte_counts_the_bytes_that_the_targets_stand_for():
    windows = np.array([[10, 1], [10, 1]])
    scores = evaluate(Fixed(), windows, np.array([1, 4]), CPU)
    assert scores.bits_per_byte == pytest.approx(2 * 1.0 / math.log(2) / 8)
    assert scores.perplexity == pytest.approx(math.e)


def test_evaluation_leaves_the_mode_of_the_model_and_the_random_state():
    trainer = trainer_on_text(model={"dropout": 0.5})
    state = torch.get_rng_state()
    windows = trainer.windows.batch(0, 4)
    once, again = (evaluate(trainer.model.train(), windows, np.ones(260), CPU).loss for _ in "ab")
    assert once == again
    assert trainer.model.training
    assert torch.equal(torch.get_rng_state(), state)


# One arm of each kind, and those whose parameters or places differ from it.
LEARNERS = {scheme["kind"]: name for name, scheme in reversed(ARMS.items())}
OTHERS = ["learned_all", "sinusoidal_all", "rope_first", "rope_yarn", "kerple_power"]


@pytest.mark.parametrize("arm", sorted({*LEARNERS.values(), *OTHERS}))
def test_every_scheme_learns_and_gradients_reach_all_its_parameters(arm):
    trainer = trainer_on_text(arm, steps=60)
    losses = trace(trainer)
    assert losses[-1] < 0.6 * losses[0]
    trainer.model(torch.from_numpy(trainer.windows.batch(0, 4))[:, :-1]).square().mean().backward()
    for name, parameter in trainer.model.named_parameters():
        assert parameter.grad.abs().sum() > 0, name


def test_order_matters_for_what_is_learned():
    # The pinned trace would not notice a seed that is not used.
    traces = [trace(trainer_on_text(seed=seed, steps=3)) for seed in (0, 1)]
    assert all(a != b for a, b in itertools.pairwise(traces))


@pytest.mark.parametrize("position", ["rope", "alibi", "t5", "kerple"])
def test_what_a_pass_is_told_of_positions_is_computed_outside_the_compiled_graph(position, monkeypatch):
    # Inside, cos and sin are computed anew for every head of every layer: an eighth of a training step on a CPU.
    graphs = []

    def keep(graph, example_inputs):
        graphs.append(graph)
        return graph

    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **how: real(function, backend=keep, **how))
    compiled = trainer_on_text(position, compile="on")
    torch._dynamo.reset()
    plain = trainer_on_text(position)
    assert compiled.step().loss == plain.step().loss
    called = {str(node.target) for graph in graphs for node in graph.graph.nodes if node.op.startswith("call")}
    assert any("linear" in name for name in called)
    assert not [name for name in called if any(word in name for word in ("cos", "sin", "arange", "pow", "log"))]
