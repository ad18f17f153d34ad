"""One step of torch's RNN, GRU and LSTM and its derivatives, as explicit formulas.

Each part of the next state is computed from gates, and the slope of a gate scales the rows of that gate's weights. So
a derivative by the previous state is a sum of `slope * W_hh` over the gates, and one by the input the same with `W_ih`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

Parts = tuple[Tensor, "Tensor | None"]  # h (row, unit), and c for an LSTM


@dataclass(frozen=True, slots=True)
class GateWeights:
    """The weights of one layer in torch's layout: gates stacked along the first axis."""

    w_ih: Tensor  # (gates * unit, feature)
    w_hh: Tensor  # (gates * unit, visible)
    b_ih: Tensor | None
    b_hh: Tensor | None
    w_hr: Tensor | None  # (visible, unit), an LSTM's projection

    def double(self) -> GateWeights:
        """Return the same weights in double precision."""
        biases = [None if part is None else part.double() for part in (self.b_ih, self.b_hh, self.w_hr)]
        return GateWeights(self.w_ih.double(), self.w_hh.double(), *biases)

    def drive(self, x: Tensor) -> Tensor:
        """Return what the input adds to each gate: (..., gates * unit)."""
        return torch.nn.functional.linear(x, self.w_ih, self.b_ih)

    def recur(self, h: Tensor) -> Tensor:
        """Return what the previous state adds to each gate."""
        return torch.nn.functional.linear(h, self.w_hh, self.b_hh)


@dataclass(frozen=True, slots=True)
class PartDerivatives:
    """The derivatives of one part of the next state, `h` or `c`, by its arguments: (row, unit, ·)."""

    by_h: Tensor
    by_c: Tensor | None
    by_input: Tensor | None


@dataclass(frozen=True, slots=True)
class Derivatives:
    """The derivatives of the next state of one layer, and its next h, which is the input of the layer above."""

    h: PartDerivatives
    c: PartDerivatives | None
    next_h: Tensor


class ClosedForm(ABC):
    """The step of one kind of layer, and its derivatives."""

    @abstractmethod
    def step(self, weights: GateWeights, drive: Tensor, parts: Parts) -> Parts:
        """Return the next parts."""

    @abstractmethod
    def derivatives(self, weights: GateWeights, drive: Tensor, parts: Parts, *, by_input: bool) -> Derivatives:
        """Return the derivatives of the next parts; those by the input only if asked for."""


class RnnForm(ClosedForm):
    """`h' = φ(W_ih x + W_hh h + b)` with φ tanh or relu."""

    def __init__(self, relu: bool) -> None:
        """Choose φ."""
        self.relu = relu

    def step(self, weights: GateWeights, drive: Tensor, parts: Parts) -> Parts:
        """Return φ of the sum."""
        total = drive + weights.recur(parts[0])
        return (torch.relu(total) if self.relu else torch.tanh(total)), None

    def derivatives(self, weights: GateWeights, drive: Tensor, parts: Parts, *, by_input: bool) -> Derivatives:
        """Scale the rows of the weights by φ'."""
        h, _ = self.step(weights, drive, parts)
        slope = (h > 0).to(h.dtype) if self.relu else 1 - h * h
        inputs = _scaled([slope], weights.w_ih) if by_input else None
        block = PartDerivatives(_scaled([slope], weights.w_hh), None, inputs)
        return Derivatives(block, None, h)


class GruForm(ClosedForm):
    """GRU in torch's form: the reset gate is applied after the candidate's recurrent weights."""

    def step(self, weights: GateWeights, drive: Tensor, parts: Parts) -> Parts:
        """Mix the previous state with the candidate."""
        _, update, candidate, _ = self._gates(weights, drive, parts[0])
        return (1 - update) * candidate + update * parts[0], None

    def derivatives(self, weights: GateWeights, drive: Tensor, parts: Parts, *, by_input: bool) -> Derivatives:
        """Sum the slopes of reset, update and candidate."""
        h = parts[0]
        reset, update, candidate, inner = self._gates(weights, drive, h)
        d_candidate = (1 - update) * (1 - candidate * candidate)
        d_reset = d_candidate * inner * reset * (1 - reset)
        d_update = (h - candidate) * update * (1 - update)
        by_h = _scaled([d_reset, d_update, d_candidate * reset], weights.w_hh)
        by_h.diagonal(dim1=1, dim2=2).add_(update)
        inputs = _scaled([d_reset, d_update, d_candidate], weights.w_ih) if by_input else None
        return Derivatives(PartDerivatives(by_h, None, inputs), None, (1 - update) * candidate + update * h)

    def _gates(self, weights: GateWeights, drive: Tensor, h: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        d_reset, d_update, d_candidate = drive.chunk(3, -1)
        r_reset, r_update, inner = weights.recur(h).chunk(3, -1)
        reset = torch.sigmoid(d_reset + r_reset)
        return reset, torch.sigmoid(d_update + r_update), torch.tanh(d_candidate + reset * inner), inner


class LstmForm(ClosedForm):
    """LSTM, with or without a projection of its h."""

    def step(self, weights: GateWeights, drive: Tensor, parts: Parts) -> Parts:
        """Update c with the forget and input gates, then compute h with the output gate."""
        into, forget, candidate, out = self._gates(weights, drive, parts)
        c = forget * _cell(parts) + into * candidate
        h = out * torch.tanh(c)
        return (h if weights.w_hr is None else h @ weights.w_hr.T), c

    def derivatives(self, weights: GateWeights, drive: Tensor, parts: Parts, *, by_input: bool) -> Derivatives:
        """Differentiate c first; h depends on most of its arguments through c."""
        before = _cell(parts)
        into, forget, candidate, out = self._gates(weights, drive, parts)
        shown = torch.tanh(forget * before + into * candidate)
        through = out * (1 - shown * shown)  # dh / dc, before a projection
        d_c = [candidate * into * (1 - into), before * forget * (1 - forget), into * (1 - candidate * candidate)]
        d_out = shown * out * (1 - out)
        into_c = _scaled(d_c, weights.w_ih) if by_input else None
        c = PartDerivatives(_scaled(d_c, weights.w_hh), torch.diag_embed(forget), into_c)
        inputs = None if into_c is None else _shown(through, into_c, d_out, weights.w_ih)
        h = PartDerivatives(_shown(through, c.by_h, d_out, weights.w_hh), torch.diag_embed(through * forget), inputs)
        visible = out * shown
        if (down := weights.w_hr) is not None:
            visible = visible @ down.T
            inputs = None if inputs is None else down @ inputs
            h = PartDerivatives(down @ h.by_h, down * (through * forget).unsqueeze(1), inputs)
        return Derivatives(h, c, visible)

    def _gates(self, weights: GateWeights, drive: Tensor, parts: Parts) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        into, forget, candidate, out = (drive + weights.recur(parts[0])).chunk(4, -1)
        return torch.sigmoid(into), torch.sigmoid(forget), torch.tanh(candidate), torch.sigmoid(out)


FORMS: dict[str, ClosedForm] = {
    "tanh": RnnForm(relu=False),
    "relu": RnnForm(relu=True),
    "gru": GruForm(),
    "lstm": LstmForm(),
}


def _scaled(slopes: list[Tensor], weights: Tensor) -> Tensor:
    """Return Σ slope_g · W_g over the first gates: (row, unit, column)."""
    unit = slopes[0].shape[-1]
    gates = weights.reshape(-1, unit, weights.shape[1])
    total = slopes[0].unsqueeze(-1) * gates[0]
    for slope, gate in zip(slopes[1:], gates[1:], strict=False):  # c does not depend on the last gate, the output gate
        total.addcmul_(slope.unsqueeze(-1), gate)
    return total


def _shown(through: Tensor, by_cell: Tensor, d_out: Tensor, weights: Tensor) -> Tensor:
    """Return the derivative of `out * tanh(c)` from the derivatives of c and of the output gate."""
    gate = weights[3 * d_out.shape[-1] :]
    return torch.addcmul(d_out.unsqueeze(-1) * gate, through.unsqueeze(-1), by_cell)


def _cell(parts: Parts) -> Tensor:
    assert parts[1] is not None
    return parts[1]
