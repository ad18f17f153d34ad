"""Listeners that only look on: they keep no cell from running by a schedule, and see every step all the same.

After a schedule has run, its steps are run once more in the plain loop, for their eyes only; outputs and gradients are
the schedule's, as if nobody had looked.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..cells import listeners
from .twins import members


@dataclass(frozen=True, slots=True, eq=False)
class RowPlaces:
    """Where the rows of a call lie in the sequences that the user gave: sorted, cut into segments, or some of them."""

    rows: Tensor  # (places,) the user's row
    starts: Tensor  # (places,) the step of it that the call begins with
    batch: int  # the user's rows in all

    def of(self, rows: Tensor, starts: Tensor) -> RowPlaces:
        """Return where rows of these rows lie."""
        return RowPlaces(self.rows[rows], self.starts[rows] + starts, self.batch)


class _Here(threading.local):
    places: RowPlaces | None = None


_here = _Here()


def must_step(module: nn.Module) -> bool:
    """Say whether a hook or a listener must be there at every step of a module."""
    stores = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(stores) or any(not listener.observes for listener in listeners(module))


def observed(module: nn.Module) -> bool:
    """Say whether anybody only looks on."""
    return any(listener.observes for member in members(module) for listener in listeners(member))


def places() -> RowPlaces | None:
    """Return where the rows of the call under way lie; None: as the user gave them."""
    return _here.places


@contextmanager
def placed(rows: Tensor, batch: int, *, starts: Tensor | None = None) -> Iterator[None]:
    """Tell observers which of `batch` rows are run inside, and from which step on."""
    before, first = _here.places, torch.zeros_like(rows) if starts is None else starts
    _here.places = RowPlaces(rows, first, batch) if before is None else before.of(rows, first)
    try:
        yield
    finally:
        _here.places = before
