"""AdamW, or Muon for the matrices of the layers and AdamW for the rest; and which parameters decay."""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from training.config import OptimizerConfig
from training.hardware import best_precision

# How many matrices of one shape are multiplied in one call: a GPU wants few calls, memory few copies.
AT_ONCE = 16


def decays(name: str, parameter: nn.Parameter) -> bool:
    """Say whether weight decay applies: to matrices, token embeddings among them; not to gains or positions."""
    return parameter.dim() >= 2 and not name.startswith("position.")


def is_hidden(name: str, parameter: nn.Parameter) -> bool:
    """Say whether a parameter maps hidden vectors to hidden vectors: a matrix of a layer, which Muon is made for."""
    return parameter.dim() == 2 and name.startswith("layers.")


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Put each parameter into exactly one group: decayed or not. A tied matrix is one parameter."""
    return groups_of(model.named_parameters(), weight_decay)


def groups_of(parameters: Iterable[tuple[str, nn.Parameter]], weight_decay: float) -> list[dict[str, Any]]:
    """Put each of these named parameters into exactly one group: decayed or not."""
    named = list(parameters)
    return [
        {"params": [p for name, p in named if decays(name, p)], "weight_decay": weight_decay},
        {"params": [p for name, p in named if not decays(name, p)], "weight_decay": 0.0},
    ]


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Build the optimizer that the settings name over the model's parameters."""
    return BUILDERS[config.method](model, config)


def build_adamw(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Build AdamW over all parameters (Loshchilov and Hutter, 2019)."""
    return adamw(parameter_groups(model, config.weight_decay), config)


def build_muon(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Build Muon over the hidden matrices, and AdamW over embeddings, head, gains and positional parameters."""
    named = list(model.named_parameters())
    hidden = [p for name, p in named if is_hidden(name, p)]
    others = [(name, p) for name, p in named if not is_hidden(name, p)]
    muon = Muon(hidden, lr=config.lr, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw")
    return Together(muon, adamw(groups_of(others, config.weight_decay), config))


def adamw(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.AdamW:
    """Build AdamW over these groups, fused where the device has it."""
    device = next(p for group in groups for p in group["params"]).device.type
    fused = device in ("cpu", "cuda", "mps")
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused)


BUILDERS: dict[str, Callable[[nn.Module, OptimizerConfig], torch.optim.Optimizer]] = {
    "adamw": build_adamw,
    "muon": build_muon,
}


# --- Muon -------------------------------------------------------------------------------------------------------------


class Muon(torch.optim.Muon):
    """Momentum whose step is made orthogonal: every direction of a matrix moves equally far (Jordan and others, 2024).

        m <- mu m + (1 - mu) g
        W <- (1 - lr decay) W - lr 0.2 sqrt(max(rows, columns)) orthogonal(mu m + (1 - mu) g)

    The factor after lr gives a step the root mean square of an AdamW step, so both share one rate (Liu and others,
    2025). PyTorch's own step always multiplies in bfloat16, which is slow where a device must emulate it; this one does
    so in `muon_dtype`, and takes all matrices of one shape at once. Settings and state are PyTorch's.
    """

    # What GradScaler asks for: this step reads `found_inf`, a flag on the device, so that nobody has to wait for it.
    _step_supports_amp_scaling = True
    found_inf: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Move every matrix that has a gradient; where `found_inf` is 1, leave all and their state as they are."""
        for group in self.param_groups:
            moved = [p for p in group["params"] if p.grad is not None]
            for some in alike(moved):
                directions = torch.stack([wide(self._direction(p, group)) for p in some])
                steps = orthogonal(directions, group["ns_coefficients"], group["ns_steps"], group["eps"])
                for parameter, step in zip(some, steps, strict=True):
                    move(parameter, step, group, self.found_inf)

    def _direction(self, parameter: nn.Parameter, group: dict[str, Any]) -> Tensor:
        """Update the momentum of a parameter, and return where it points: after Nesterov, one step ahead."""
        grad, state, mu = parameter.grad, self.state[parameter], group["momentum"]
        assert grad is not None
        if not state:
            state["momentum_buffer"] = torch.zeros_like(grad)
        momentum: Tensor = state["momentum_buffer"]
        if self.found_inf is not None:
            grad = torch.where(self.found_inf > 0, momentum, grad)
        momentum.lerp_(grad, 1 - mu)
        return grad.lerp(momentum, mu) if group["nesterov"] else momentum


def alike(parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yield the matrices in lists of one shape, a matrix and its transpose counting as one."""
    shapes: dict[tuple[int, ...], list[nn.Parameter]] = {}
    for parameter in parameters:
        shapes.setdefault(tuple(sorted(parameter.shape)), []).append(parameter)
    for same in shapes.values():
        yield from (same[start : start + AT_ONCE] for start in range(0, len(same), AT_ONCE))


def wide(matrix: Tensor) -> Tensor:
    """Return a matrix, or its transpose, with no more rows than columns: the smaller square is cheaper."""
    return matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT


def muon_dtype(matrix: Tensor) -> torch.dtype:
    """Return the precision of the orthogonalisation: bfloat16, which is enough, where it is fast; else its own."""
    is_fast = matrix.dtype == torch.float32 and best_precision(matrix.device) == "bf16"
    return torch.bfloat16 if is_fast else matrix.dtype


def orthogonal(matrices: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Return matrices (N, rows, columns) with their singular values brought near 1 (0.7 to 1.2) unless almost 0.

    Newton-Schulz: X <- a X + (b A + c A^2) X with A = X X^T, from X of Frobenius norm 1, so that no singular value is
    above 1. The coefficients trade exactness for few steps (Jordan and others, 2024). Wants rows <= columns.
    """
    a, b, c = coefficients
    x = matrices.to(muon_dtype(matrices))
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.to(matrices.dtype)


def move(parameter: nn.Parameter, step: Tensor, group: dict[str, Any], found_inf: Tensor | None = None) -> None:
    """Let a parameter decay, and move it by an orthogonal step, turned back where `wide` had turned it."""
    lr = group["lr"] if found_inf is None else group["lr"] * (1 - found_inf)
    rms = 0.2 * math.sqrt(max(parameter.shape))
    parameter.mul_(1 - lr * group["weight_decay"])
    parameter.sub_((step if step.shape == parameter.shape else step.mT) * (lr * rms))


class Together(torch.optim.Optimizer):
    """Optimizers over parameters of their own that act, are saved and are restored as one."""

    found_inf: Tensor | None = None

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._step_supports_amp_scaling = all(getattr(part, "_step_supports_amp_scaling", False) for part in parts)
        self._share()

    def _share(self) -> None:
        """Let the parts work on this one's groups and state."""
        groups = iter(self.param_groups)
        for part in self.parts:
            part.param_groups = [next(groups) for _ in part.param_groups]
            part.state = self.state

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Let every part move its parameters; where `found_inf` is 1, none does."""
        assert getattr(self, "grad_scale", None) is None, "gradients are unscaled before the step"
        for part in self.parts:
            part.found_inf = self.found_inf  # type: ignore[attr-defined]  # GradScaler's own channel
            part.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up what `state_dict` gave."""
        super().load_state_dict(state_dict)  # replaces groups and state
        self._share()


# --- Gradients --------------------------------------------------------------------------------------------------------


def clip(parameters: Iterable[nn.Parameter], norm: Tensor, limit: float) -> None:
    """Scale gradients of total `norm` down to `limit`; 0: never."""
    if limit > 0:
        nn.utils.clip_grads_with_norm_(parameters, limit, norm)


def gradient_norms(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Return the norm of each parameter's gradient, (number of parameters,); 0 where there is none."""
    gradients = [p.new_zeros(()) if p.grad is None else p.grad for p in parameters]
    return torch.stack(torch._foreach_norm(gradients))
