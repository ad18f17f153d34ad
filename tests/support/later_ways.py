"""Loops whose steps do something else once `late` is set, as branches in Python do, with an oracle that steps them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn

UNITS = 4
States: TypeAlias = "tuple[Tensor, Tensor]"  # h, and something beside it
Step: TypeAlias = "Callable[[LateLoop, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]"


class LateLoop(nn.Module):
    """A loop from zeros, around a cell or written out, whose step is given."""

    def __init__(self, one: Step, *, raw: bool) -> None:
        super().__init__()
        self.one, self.raw, self.late = one, raw, False
        self.mix, self.say = nn.Linear(2 * UNITS, UNITS), nn.Linear(UNITS, UNITS)
        self.cell = None if raw else nn.GRUCell(UNITS, UNITS)

    def step(self, x: Tensor, h: Tensor) -> Tensor:
        return torch.tanh(self.mix(torch.cat([x, h], 1))) if self.cell is None else self.cell(x, h)

    def forward(self, x: Tensor) -> Tensor:
        h, p, out = x.new_zeros(len(x), UNITS), x.new_zeros(len(x), UNITS), []
        for frame in x.unbind(1):
            y, h, p = self.one(self, frame, h, p)
            out.append(y)
        return torch.stack(out, 1)


def stepped(model: LateLoop, x: Tensor, late: Sequence[bool]) -> Tensor:
    """Return what a model gives that is late at the steps at which `late` says so."""
    h, p, out = x.new_zeros(len(x), UNITS), x.new_zeros(len(x), UNITS), []
    for frame, model.late in zip(x.unbind(1), late, strict=True):
        y, h, p = model.one(model, frame, h, p)
        out.append(y)
    return torch.stack(out, 1)


def _other_state(m, x, h, p):
    new = m.step(x, p if m.late else h)
    return new, new, h


def _other_summand(m, x, h, p):
    new = m.step(x, h) + 0 * p
    return new + (p if m.late else h), new, h


def _own_words(m, x, h, p):
    new = m.step(p if m.late else x, h)
    return new, new, m.say(new)


def _last_input(m, x, h, p):
    new = m.step(p if m.late else x, h)
    return new, new, x


def _skipped(m, x, h, p):
    new = h if m.late else m.step(x, h)
    return new + x, new, p


def _twice(m, x, h, p):
    new = m.step(x, h)
    new = m.step(x, new) if m.late else new
    return new, new, p


def _sum_beside(m, x, h, p):
    new = m.step(x, h)
    p = 0.5 * p + new if m.late else p
    return new + p, new, p


def _sum_read(m, x, h, p):
    new = m.step(x, h)
    p = 0.5 * p + new
    return new + (p if m.late else new), new, p


def _swapped(m, x, h, p):
    one, other = (p, h) if m.late else (h, p)
    new = m.step(x, one)
    return new, new, 0.5 * other + new


def _masked(m, x, h, p):
    h = torch.where(x[:, :1] > 0, h, torch.zeros_like(h)) if m.late else h
    new = m.step(x, h)
    return new, new, p


def _written(m, x, h, p):
    if m.late:
        h = h.clone()
        h[x[:, 0] > 0] = 0.0
    new = m.step(x, h)
    return new, new, p


def _scaled(m, x, h, p):
    new = m.step(x, h) * (0.5 if m.late else 0.9)
    return new, new, p


def _seen_otherwise(m, x, h, p):
    new = m.step(x, h)
    return new.relu() if m.late else new, new, p


LATE_STEPS: dict[str, Step] = {
    each.__name__.strip("_").replace("_", " "): each
    for each in (
        _other_state,
        _other_summand,
        _own_words,
        _last_input,
        _skipped,
        _twice,
        _sum_beside,
        _sum_read,
        _swapped,
        _masked,
        _written,
        _scaled,
        _seen_otherwise,
    )
}
