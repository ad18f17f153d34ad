"""Torch's own CPU loop in Python, operation by operation, so that its intermediate values can be kept.

On the CPU, a fused GRU (and an LSTM that does not run in oneDNN) is a loop of plain operations in C++. The same
operations in the same order on the same shapes give the same bits, forward and backward, and in Python each step's
gates are accessible. Do not merge or reorder operations: a vectorized sigmoid rounds its last lanes differently.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import linear

from .frames import TrackWeights

Parts = tuple[Tensor, ...]  # (h,) or (h, c), each (batch, unit)


@dataclass(slots=True)
class GateBuffer:
    """The gates and cells of one track, step by step in the order of computation."""

    gates: list[Tensor] = field(default_factory=list)  # each (batch, gates * hidden), activated
    candidates: list[Tensor] = field(default_factory=list)  # of a GRU: `gates` hold an intermediate instead
    cells: list[Tensor] = field(default_factory=list)

    def join(self, *, packed: bool) -> tuple[Tensor, Tensor | None]:
        """Return all gates `(time, batch, gates * hidden)` and an LSTM's cells; without the time axis if `packed`."""
        join = torch.cat if packed else torch.stack
        with torch.no_grad():
            gates = join([step.detach() for step in self.gates])
            if self.candidates:
                gates[..., gates.shape[-1] // 3 * 2 :] = join([step.detach() for step in self.candidates])
            return gates, join([step.detach() for step in self.cells]) if self.cells else None


def lstm_step(x: Tensor, state: Parts, weights: TrackWeights, buffer: GateBuffer, *, projected: bool = True) -> Parts:
    """Run one LSTM step as `aten::lstm_cell` does; with `projected`, `x` has been multiplied by its weights before."""
    h, c = state
    gates = linear(h, weights.hh, weights.bias_hh).add_(x if projected else linear(x, weights.ih, weights.bias_ih))
    chunks = torch.unsafe_chunk(gates, 4, 1)
    i, f = chunks[0].sigmoid_(), chunks[1].sigmoid_()
    g, o = chunks[2].tanh_(), chunks[3].sigmoid_()
    c = (f * c).add_(i * g)
    h = o * c.tanh()
    if weights.projection is not None:
        h = torch.matmul(h, weights.projection.t())
    buffer.gates.append(gates)  # holds the activated gates: the chunks share its memory
    buffer.cells.append(c)
    return h, c


def gru_step(x: Tensor, state: Parts, weights: TrackWeights, buffer: GateBuffer, *, projected: bool = True) -> Parts:
    """Run one GRU step as `aten::gru_cell` does; with `projected`, `x` has been multiplied by its weights before."""
    (h,) = state
    from_x = torch.unsafe_chunk(x if projected else linear(x, weights.ih, weights.bias_ih), 3, 1)
    gates = linear(h, weights.hh, weights.bias_hh)
    from_h = torch.unsafe_chunk(gates, 3, 1)
    r = from_h[0].add_(from_x[0]).sigmoid_()
    z = from_h[1].add_(from_x[1]).sigmoid_()
    n = from_x[2].add(from_h[2].mul_(r)).tanh_()
    buffer.gates.append(gates)
    buffer.candidates.append(n)
    return ((h - n).mul_(z).add_(n),)


STEP: dict[str, Callable[..., Parts]] = {"lstm": lstm_step, "gru": gru_step}


def sequence(
    kind: str, x: Tensor, state: Parts, weights: TrackWeights, *, reverse: bool
) -> tuple[Tensor, Parts, GateBuffer]:
    """Run one track over `x (time, batch, feature)`; the outputs are in the order of positions."""
    buffer, step = GateBuffer(), STEP[kind]
    inputs = linear(x, weights.ih, weights.bias_ih).unbind(0)
    outputs = []
    for projected in reversed(inputs) if reverse else inputs:
        state = step(projected, state, weights, buffer)
        outputs.append(state[0])
    if reverse:
        for steps in (outputs, buffer.gates, buffer.candidates, buffer.cells):
            steps.reverse()
    return torch.stack(outputs, 0), state, buffer


def packed(
    kind: str, data: Tensor, sizes: Sequence[int], state: Parts, weights: TrackWeights, *, reverse: bool
) -> tuple[Tensor, Parts, GateBuffer]:
    """Run one track over packed `data (rows, feature)`, `sizes[t]` rows at step t."""
    run = _packed_reverse if reverse else _packed_forward
    outputs, state, buffer = run(kind, linear(data, weights.ih, weights.bias_ih), sizes, state, weights)
    return torch.cat(outputs, 0), state, buffer


def _packed_forward(
    kind: str, projected: Tensor, sizes: Sequence[int], state: Parts, weights: TrackWeights
) -> tuple[list[Tensor], Parts, GateBuffer]:
    buffer, step = GateBuffer(), STEP[kind]
    outputs, done = [], []
    offset, last = 0, sizes[0]
    for size in sizes:
        if size < last:  # the rows at the end are finished
            done.append(tuple(part.narrow(0, size, last - size) for part in state))
            state = tuple(part.narrow(0, 0, size) for part in state)
        state = step(projected.narrow(0, offset, size), state, weights, buffer)
        outputs.append(state[0])
        offset, last = offset + size, size
    done.append(state)
    final = tuple(torch.cat(parts, 0) for parts in zip(*reversed(done), strict=True))
    return outputs, final, buffer


def _packed_reverse(
    kind: str, projected: Tensor, sizes: Sequence[int], initial: Parts, weights: TrackWeights
) -> tuple[list[Tensor], Parts, GateBuffer]:
    buffer, step = GateBuffer(), STEP[kind]
    outputs = []
    offset, last = projected.shape[0], sizes[-1]
    state = tuple(part.narrow(0, 0, last) for part in initial)
    for size in reversed(sizes):
        if size > last:
            new = (part.narrow(0, last, size - last) for part in initial)
            state = tuple(torch.cat(pair, 0) for pair in zip(state, new, strict=True))
        offset, last = offset - size, size
        state = step(projected.narrow(0, offset, size), state, weights, buffer)
        outputs.append(state[0])
    for steps in (outputs, buffer.gates, buffer.candidates, buffer.cells):
        steps.reverse()
    return outputs, state, buffer
