"""A linear layer as a bank of orthonormal filters, which gives accurate numbers on what its state contains of the past.

The states of `s' = A s + b x` span the responses of the poles of A that b reaches, in whatever coordinates. In the
coordinates of A, this span is extremely ill-conditioned. But it has an orthonormal basis that follows from the poles
alone (Takenaka and Malmquist): first-order sections in a cascade of all-pass filters.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..state import shown_in_short
from .system import System


@shown_in_short
@dataclass(frozen=True, slots=True, eq=False)
class Filter:
    """`z' = advance z + enter x`, whose coordinates under white input have variance one and are uncorrelated."""

    advance: Tensor  # (n, n) complex
    enter: Tensor  # (n,) complex

    def capacity(self, lags: int) -> Tensor:
        """Return the memory capacity at each lag (lags,): how much of z is the input of that many steps ago."""
        response, curve = self.enter, []
        for _ in range(lags):
            curve.append(response.abs().square().sum())
            response = self.advance @ response
        return torch.stack(curve)

    def walk(self, x: Tensor) -> Tensor:
        """Return z at each step of `x (batch, time)`: complex (batch, time, n)."""
        z = torch.zeros(len(x), len(self.enter), dtype=self.enter.dtype, device=x.device)
        states = []
        for step in x.unbind(1):
            z = z @ self.advance.T + step.unsqueeze(1) * self.enter
            states.append(z)
        return torch.stack(states, dim=1)


def as_filter(system: System, x: Tensor) -> Filter | None:
    """Return a system with one input as a filter if it is linear and stable; else None."""
    if x.shape[2] != 1:
        return None
    found = _affine(system)
    if found is None:
        return None
    reached = _reached(*found)
    if not len(reached):  # the input does not move the state
        return Filter(reached.to(torch.complex128), reached.new_zeros(0, dtype=torch.complex128))
    poles = torch.linalg.eigvals(reached)
    return _cascade(poles) if float(poles.abs().max()) < 1 - 1e-9 else None


def _affine(system: System) -> tuple[Tensor, Tensor] | None:
    """Return A (n, n) and b (n,) if the next state is A s + b x + const at all points tried; else None."""
    smooth = system.smooth
    generator = torch.Generator().manual_seed(0)
    origin = system.initial(17)
    noise = torch.randn(16, system.size, generator=generator, dtype=torch.float64).to(origin)
    states = origin.clone()
    states[1:, smooth] += noise * torch.tensor([0.1, 1.0, 10.0, 100.0]).repeat(4).unsqueeze(1).to(origin)
    inputs = torch.zeros(17, 1, dtype=system.input_dtype, device=system.device)
    inputs[1:] = torch.randn(16, 1, generator=generator, dtype=torch.float64).to(inputs) * 3
    with torch.no_grad():
        following = system.step(inputs, states)[:, smooth].double()
    matrix = system.jacobians(inputs[:1], states[:1])[0].double()
    driven = inputs[:1].clone().requires_grad_()
    target = system.step(driven, origin[:1])[0, smooth]
    columns = [torch.autograd.grad(unit, driven, retain_graph=True, allow_unused=True)[0] for unit in target]
    entry = torch.stack([driven.new_zeros(()) if g is None else g.reshape(()) for g in columns]).double()
    predicted = following[0] + (states - origin)[:, smooth].double() @ matrix.T + inputs.double() * entry
    exact = 1e-4 if system.dtype == torch.float32 else 1e-9
    size = following.abs().amax(1).clamp(min=1)
    return (matrix, entry) if bool(((following - predicted).abs().amax(1) <= exact * size).all()) else None


def _reached(matrix: Tensor, entry: Tensor) -> Tensor:
    """Return A on the states that the input reaches, in an orthonormal basis (Arnoldi)."""
    size = float(torch.linalg.matrix_norm(matrix, 2)) or 1.0
    basis: list[Tensor] = []
    vector = entry
    while len(basis) < len(entry) and float(vector.norm()) > 1e-10 * (size if basis else 1e-290):
        basis.append(vector / vector.norm())
        span = torch.stack(basis)  # (found, n)
        vector = matrix @ basis[-1]
        for _ in range(2):  # two passes make it orthogonal to the last digit
            vector = vector - span.T @ (span @ vector)
    if not basis:
        return matrix.new_zeros(0, 0)
    span = torch.stack(basis)
    return span @ matrix @ span.T


def _cascade(poles: Tensor) -> Filter:
    """Put the sections in a row: the input of each is what the all-pass filters of those before it let through."""
    count = len(poles)
    advance = torch.zeros(count, count, dtype=poles.dtype, device=poles.device)
    enter = torch.zeros(count, dtype=poles.dtype, device=poles.device)
    # The input of the next section, as a combination of all sections' states and of the input.
    by_state, by_input = torch.zeros_like(enter), torch.ones((), dtype=poles.dtype, device=poles.device)
    for index, pole in enumerate(poles):
        gain = (1 - pole.abs() ** 2).sqrt().to(poles.dtype)
        advance[index] = gain * by_state
        advance[index, index] += pole
        enter[index] = gain * by_input
        by_state = -pole.conj() * by_state
        by_state[index] += gain
        by_input = -pole.conj() * by_input
    return Filter(advance, enter)
