"""Gates and cells from the states alone: given every h, all gates of all steps are one matrix product."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import linear

from .calls import Weights

if TYPE_CHECKING:
    from .padded import Padded


def from_states(take: Padded) -> tuple[Tensor, Tensor | None]:
    """Return the gates `(time, batch, gates * hidden)` after their activations, and an LSTM's cells."""
    assert take.x is not None
    with torch.no_grad():
        gates = _only_valid(take, activated_gates(take.kind, take.x, take.before("h"), take.weights))
        return gates, cells(take, gates) if take.kind == "lstm" else None


def cells(take: Padded, activated: Tensor) -> Tensor:
    """Return an LSTM's cells `(time, batch, hidden)` from its gates."""
    i, f, g, _ = activated.chunk(4, -1)
    with torch.no_grad():
        c = i * g
        last = take.initial["c"].to(c.dtype)
        started = None if take.layout.places is None or not take.reverse else take.valid.unsqueeze(-1)
        order = range(len(c) - 1, -1, -1) if take.reverse else range(len(c))
        forget, steps = f.unbind(0), c.unbind(0)
        for t in order:
            steps[t].addcmul_(forget[t], last)
            if started is not None:  # a short row, read backwards, starts at its own last step
                steps[t].copy_(torch.where(started[t], steps[t], last))
            last = steps[t]
        return _only_valid(take, c)


def activated_gates(kind: str, x: Tensor, before: Tensor, weights: Weights) -> Tensor:
    """Return the gates `(..., gates * hidden)` of steps with input `x` whose h was `before`."""
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        # Under autocast a run's inputs and states may be narrower than its weights.
        flat_x, flat_h = (part.reshape(-1, part.shape[-1]).to(weights.ih.dtype) for part in (x, before))
        return _activated(kind, flat_x, flat_h, weights).view(*x.shape[:-1], -1)


def _activated(kind: str, flat_x: Tensor, flat_h: Tensor, weights: Weights) -> Tensor:
    w_hh, b_hh = weights.hh.t(), weights.bias_hh
    gates = linear(flat_x, weights.ih, weights.bias_ih)
    if kind == "lstm":
        units = gates.shape[-1] // 4
        gates.addmm_(flat_h, w_hh)
        if b_hh is not None:
            gates += b_hh
        gates[:, : 2 * units].sigmoid_()
        gates[:, 2 * units : 3 * units].tanh_()
        gates[:, 3 * units :].sigmoid_()
    else:
        units = gates.shape[-1] // 3
        inner = linear(flat_h, weights.hh[2 * units :], None if b_hh is None else b_hh[2 * units :])
        gates[:, : 2 * units].addmm_(flat_h, w_hh[:, : 2 * units])
        if b_hh is not None:
            gates[:, : 2 * units] += b_hh[: 2 * units]
        gates[:, : 2 * units].sigmoid_()
        gates[:, 2 * units :].addcmul_(gates[:, :units], inner).tanh_()
    return gates


def _only_valid(take: Padded, values: Tensor) -> Tensor:
    return values if take.layout.places is None else values.masked_fill_(~take.valid.unsqueeze(-1), 0)
