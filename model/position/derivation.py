"""RoPE derived, from a complex number to the elementwise form: four functions, read from top to bottom.

Each takes one vector x of width D (the last two any batch of them), its position m and the frequencies
theta_i = base^(-2i/D), i = 0 .. D/2 - 1, and turns pair i = (x_2i, x_2i+1) by the angle m theta_i. The network never
imports this page; `tests/test_rope_derivation.py` proves that each form equals the one before.
"""

import torch
from torch import Tensor


def complex_form(x: Tensor, position: float, frequencies: Tensor) -> Tensor:
    """f(z, m) = z e^(i m theta), with z = x_2i + i x_2i+1: each pair is one complex number.

    Where it starts (Su et al., 2021, section 3.4.1): the score Re(f(q, m) conj(f(k, n))) shall depend on q, k and
    m - n alone, and f(z, 0) = z. Then |f(z, m)| = |z|, and the phase it adds cannot depend on z and grows in equal
    steps, so it is m theta.
    """
    z = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    turned = z * torch.polar(torch.ones_like(frequencies), position * frequencies)
    return torch.view_as_real(turned).flatten(-2)


def rotation_matrix(angle: Tensor) -> Tensor:
    """R(a) = [[cos a, -sin a], [sin a, cos a]]: multiplying by e^(ia), written for a column vector (re, im)."""
    cos, sin = angle.cos(), angle.sin()
    return torch.stack((torch.stack((cos, -sin)), torch.stack((sin, cos))))


def matrix_form(x: Tensor, position: float, frequencies: Tensor) -> Tensor:
    """f(x, m)_i = R(m theta_i) (x_2i, x_2i+1)^T: what changed is that each complex product became a 2 x 2 matrix."""
    pairs = x.unflatten(-1, (-1, 2))
    turned = [rotation_matrix(position * f) @ pair for f, pair in zip(frequencies, pairs, strict=True)]
    return torch.cat(turned)


def block_diagonal_matrix(position: float, frequencies: Tensor) -> Tensor:
    """R_m = diag(R(m theta_0), ..., R(m theta_D/2-1)), shape (D, D): orthogonal, with R_m R_n = R_m+n."""
    return torch.block_diag(*(rotation_matrix(position * f) for f in frequencies))


def block_diagonal_form(x: Tensor, position: float, frequencies: Tensor) -> Tensor:
    """f(x, m) = R_m x: what changed is that all pairs turn in one product.

    For column vectors. Rows of a batch are row vectors, so they take the transposed matrix: x R_m^T.
    """
    return x @ block_diagonal_matrix(position, frequencies).T


def elementwise_form(x: Tensor, position: float, frequencies: Tensor) -> Tensor:
    """f(x, m) = x * (c_0, c_0, c_1, c_1, ...) + x' * (s_0, s_0, s_1, s_1, ...), x' = (-x_1, x_0, -x_3, x_2, ...).

    What changed is that the zeros of R_m are no longer multiplied: D products instead of D^2.
    """
    cos = (position * frequencies).cos().repeat_interleave(2)
    sin = (position * frequencies).sin().repeat_interleave(2)
    swapped = torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)
    return x * cos + swapped * sin
