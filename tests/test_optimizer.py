"""AdamW and Muon: which parameter belongs to which, what one step does, and that a stop leaves no trace."""

import io
import math

import numpy as np
import pytest
import torch
from torch import nn

import training.optimizer
from data.loader import Windows
from model.errors import UserError
from tests.conftest import ARMS, tiny_config
from training.config import Config, OptimizerConfig, TrainingConfig, load, to_yaml
from training.hardware import Hardware
from training.optimizer import Muon, build_optimizer, orthogonal
from training.trainer import Trainer

SHAPES = [(16, 16), (16, 40), (40, 16), (16, 16), (24, 40)]
JORDAN = (3.4445, -4.7750, 2.0315)
TEXT = (
    b"A clock has hands of several speeds: the fast one tells neighbours apart, the slow one tells day from night. "
    * 20
)


def trainer_with(kind="muon", precision="fp32", position="rope", **model) -> Trainer:
    """A tiny trainer on bytes."""
    shape = tiny_config(position, vocab_size=260, context=32, **model)
    config = Config.model_construct(
        model=shape,
        optimizer=OptimizerConfig(method=kind, lr=1e-2, warmup_steps=5),
        training=TrainingConfig(steps=20, batch_size=4),
    )
    windows = Windows(np.frombuffer(TEXT, dtype=np.uint8), shape.context, seed=0)
    return Trainer(config, windows, Hardware(torch.device("cpu"), precision))


def matrices(shapes=SHAPES, dtype=torch.float64, seed=0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)) for shape in shapes]


def give_gradients(parameters, seed):
    for parameter, gradient in zip(parameters, matrices([p.shape for p in parameters], seed=seed), strict=True):
        parameter.grad = gradient.detach().to(parameter.dtype)


# --- Which parameter belongs to which -----------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ARMS)
def test_muon_moves_the_matrices_of_the_layers_alone_and_each_parameter_is_in_one_group(name, tied):
    trainer = trainer_with(position=name, tie_embeddings=tied, qk_norm=True)
    hidden, decayed, free = trainer.optimizer.param_groups
    grouped = [id(p) for group in (hidden, decayed, free) for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in trainer.model.parameters())
    names = {id(p): name for name, p in trainer.model.named_parameters()}
    held = [{names[id(p)] for p in group["params"]} for group in (hidden, decayed, free)]
    kinds = ["self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down"]
    assert held[0] == {f"layers.{layer}.{kind}_proj.weight" for layer in range(3) for kind in kinds}
    assert held[1] == {"embed_tokens.weight"} | (set() if tied else {"lm_head.weight"})
    assert all("norm" in name or name.startswith("position.") for name in held[2])
    assert [group["weight_decay"] for group in (hidden, decayed, free)] == [0.1, 0.1, 0.0]


def test_the_learning_rate_of_the_step_reaches_every_group():
    trainer = trainer_with()
    lr = trainer.step().lr
    assert [group["lr"] for group in trainer.optimizer.param_groups] == [lr] * 3


# --- One step -----------------------------------------------------------------------------------------------------


def by_singular_values(matrix: np.ndarray, steps: int = 5) -> np.ndarray:
    """Newton-Schulz by its meaning: an odd polynomial of the singular values, in float64."""
    a, b, c = JORDAN
    u, s, v = np.linalg.svd(matrix, full_matrices=False)
    s = s / np.sqrt((s**2).sum())
    for _ in range(steps):
        s = a * s + b * s**3 + c * s**5
    return u * s @ v


def test_steps_of_muon_are_what_an_independent_computation_in_float64_gives():
    lr, decay, mu = 0.03, 0.2, 0.95
    parameters = matrices()
    expected = [p.detach().numpy().copy() for p in parameters]
    momenta = [np.zeros_like(w) for w in expected]
    muon = Muon(parameters, lr=lr, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
    for step in range(3):
        give_gradients(parameters, seed=step + 1)
        muon.step()
        for number, parameter in enumerate(parameters):
            gradient = parameter.grad.numpy()
            momenta[number] = mu * momenta[number] + (1 - mu) * gradient
            direction = by_singular_values((1 - mu) * gradient + mu * momenta[number])
            rms = 0.2 * math.sqrt(max(parameter.shape))
            expected[number] = expected[number] * (1 - lr * decay) - lr * rms * direction
    for parameter, matrix in zip(parameters, expected, strict=True):
        np.testing.assert_allclose(parameter.detach().numpy(), matrix, rtol=0, atol=1e-11)


@pytest.mark.parametrize("nesterov", [True, False])
def test_in_bfloat16_a_step_is_the_one_that_pytorch_takes(nesterov, monkeypatch):
    monkeypatch.setattr(training.optimizer, "best_precision", lambda device: "bf16")
    ours, theirs = matrices(dtype=torch.float32), matrices(dtype=torch.float32)
    settings = {"lr": 0.02, "weight_decay": 0.3, "adjust_lr_fn": "match_rms_adamw", "nesterov": nesterov}
    optimizers = Muon(ours, **settings), torch.optim.Muon(theirs, **settings)
    before = [p.detach().clone() for p in ours]
    for step in range(3):
        for parameters, optimizer in zip((ours, theirs), optimizers, strict=True):
            give_gradients(parameters, seed=step + 1)
            optimizer.step()
    for a, b, start in zip(ours, theirs, before, strict=True):
        # Sums may be taken in another order, so a rounding may fall the other way: far below bfloat16's own error.
        assert (a - b).norm() < 1e-3 * (b - start).norm()
        assert (a - start).norm() > 0.1


def test_in_float32_a_step_is_pytorchs_in_all_but_the_rounding_to_bfloat16(monkeypatch):
    monkeypatch.setattr(training.optimizer, "best_precision", lambda device: "fp32")
    ours, theirs = matrices(dtype=torch.float32), matrices(dtype=torch.float32)
    for parameters, kind in ((ours, Muon), (theirs, torch.optim.Muon)):
        give_gradients(parameters, seed=1)
        kind(parameters, lr=0.02, weight_decay=0.0, adjust_lr_fn="match_rms_adamw").step()
    starts = matrices(dtype=torch.float32)
    errors = [(a - b).norm() / (b - start).norm() for a, b, start in zip(ours, theirs, starts, strict=True)]
    assert all(1e-4 < error < 2e-2 for error in errors)


def test_float32_is_enough_for_the_orthogonalisation(monkeypatch):
    monkeypatch.setattr(training.optimizer, "best_precision", lambda device: "fp32")
    # Singular values over four decades: the small ones are where a rounding could grow.
    u, _, v = torch.linalg.svd(matrices([(32, 48)])[0], full_matrices=False)
    matrix = (u * torch.logspace(0, -4, 32, dtype=torch.float64)) @ v
    exact = orthogonal(matrix[None], JORDAN, 5, 1e-7)[0]
    rounded = orthogonal(matrix[None].float(), JORDAN, 5, 1e-7)[0]
    assert exact.dtype == torch.float64
    assert rounded.dtype == torch.float32
    assert (rounded - exact).norm() < 1e-4 * exact.norm()


def test_an_orthogonal_step_moves_all_directions_of_a_matrix_about_equally_far():
    steps = orthogonal(torch.stack([m.detach() for m in matrices([(16, 40)] * 3)]), JORDAN, 5, 1e-7)
    values = torch.linalg.svdvals(steps)
    assert values.min() > 0.6
    assert values.max() < 1.3


def test_a_matrix_without_gradient_stays_and_a_gradient_of_zero_moves_nothing_but_by_decay():
    still, zero = matrices([(16, 16), (16, 16)])
    zero.grad = torch.zeros_like(zero)
    before = [p.detach().clone() for p in (still, zero)]
    Muon([still, zero], lr=0.1, weight_decay=0.5).step()
    assert torch.equal(still, before[0])
    torch.testing.assert_close(zero.detach(), before[1] * 0.95, rtol=0, atol=1e-15)


def test_more_matrices_than_are_taken_at_once_all_move_as_alone(monkeypatch):
    together, alone = matrices([(16, 16)] * 5), matrices([(16, 16)] * 5)
    for parameters, at_once in ((together, 2), (alone, 1)):
        monkeypatch.setattr(training.optimizer, "AT_ONCE", at_once)
        give_gradients(parameters, seed=1)
        Muon(parameters, lr=0.1).step()
    for a, b in zip(together, alone, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_the_rest_moves_as_under_adamw_alone():
    muon, plain = trainer_with("muon"), trainer_with("adamw")
    for trainer in (muon, plain):
        trainer.step()
    weights = dict(plain.model.named_parameters())
    for name, parameter in muon.model.named_parameters():
        is_hidden = name.startswith("layers.") and parameter.dim() == 2
        assert torch.equal(parameter, weights[name]) == (not is_hidden), name


# --- A run ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_muon_learns_in_every_precision(precision):
    trainer = trainer_with(precision=precision)
    losses = [trainer.step().loss for _ in range(20)]
    assert trainer.skipped == 0
    assert losses[-1] < 0.6 * losses[0]


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_saved_and_loaded_state_goes_on_bitwise(kind):
    whole, first, second = (trainer_with(kind) for _ in range(3))
    for _ in range(6):
        whole.step()
    for _ in range(3):
        first.step()
    second.model.load_state_dict(first.model.state_dict())
    second.optimizer.load_state_dict(torch.load(io.BytesIO(first.state_bytes()), weights_only=True)["optimizer"])
    second.next_step = first.next_step
    for _ in range(3):
        second.step()
    for one, other in zip(whole.parameters, second.parameters, strict=True):
        assert torch.equal(one, other)
        for name, value in whole.optimizer.state[one].items():
            assert torch.equal(value, second.optimizer.state[other][name])
    sizes = {"adamw": 3, "muon": 1}  # two moments and a count, or one momentum
    assert (
        len(second.optimizer.state[dict(second.model.named_parameters())["layers.0.mlp.up_proj.weight"]]) == sizes[kind]
    )


def test_a_state_of_the_other_optimizer_is_refused():
    with pytest.raises(ValueError, match="parameter group"):
        trainer_with("muon").optimizer.load_state_dict(trainer_with("adamw").optimizer.state_dict())


def test_a_gradient_that_is_not_finite_leaves_weights_and_momentum_as_they_were():
    trainer = trainer_with()
    trainer.step()
    weights = [p.detach().clone() for p in trainer.parameters]
    states = [{k: v.clone() for k, v in trainer.optimizer.state[p].items()} for p in trainer.parameters]
    name = "layers.1.mlp.up_proj.weight"
    dict(trainer.model.named_parameters())[name].register_hook(lambda grad: grad * float("nan"))
    assert trainer.step().skipped
    for parameter, weight, state in zip(trainer.parameters, weights, states, strict=True):
        assert torch.equal(parameter, weight)
        assert all(torch.equal(trainer.optimizer.state[parameter][key], value) for key, value in state.items())


def test_an_overflow_in_float16_skips_the_step_of_both_parts():
    trainer = trainer_with(precision="fp16")
    trainer.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**60)
    before = [p.detach().clone() for p in trainer.parameters]
    assert trainer.step().skipped
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.parameters, strict=True))
    moments = [value for state in trainer.optimizer.state.values() for value in state.values()]
    assert not any(value.any() for value in moments)


def test_a_flag_on_the_device_stops_a_step_and_its_absence_does_not():
    moved, stopped, free = (trainer_with() for _ in range(3))
    for trainer, flag in ((moved, torch.zeros(())), (stopped, torch.ones(())), (free, None)):
        for seed, parameter in enumerate(trainer.parameters):
            give_gradients([parameter], seed)
        trainer.optimizer.found_inf = flag
        trainer.optimizer.step()
    start = trainer_with().parameters
    for one, other, stayed, before in zip(moved.parameters, free.parameters, stopped.parameters, start, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-7)
        assert torch.equal(stayed, before)
        assert not torch.equal(one, before)


# --- Settings -------------------------------------------------------------------------------------------------------


def test_each_method_has_a_builder_and_the_settings_keep_it(tmp_path):
    kinds = OptimizerConfig.model_fields["method"].annotation.__args__
    assert set(kinds) == set(training.optimizer.BUILDERS)
    for kind in kinds:
        path = tmp_path / f"{kind}.yaml"
        path.write_text(to_yaml(load(None, {"optimizer.method": kind})))
        assert load(path).optimizer.method == kind
        assert isinstance(
            build_optimizer(trainer_with(kind).model, OptimizerConfig(method=kind)), torch.optim.Optimizer
        )


def test_an_optimizer_that_is_not_known_is_refused_in_one_line():
    with pytest.raises(UserError) as caught:
        load(None, {"optimizer.method": "moun"})
    message = str(caught.value)
    assert "optimizer.method: 'moun' is refused; it must be adamw or muon" in message
    assert "perhaps you meant muon" in message
    assert "\n" not in message
