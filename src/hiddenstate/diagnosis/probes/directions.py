"""In which direction each layer is run along time: seen by which of its steps follow the later half of the input."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ...cells import Call
from ..patient import Patient, probe
from .shapes import base
from .steps import change

Direction = Literal["forwards", "backwards", "unknown"]


@probe
def directions(patient: Patient) -> dict[str, Direction]:
    """Replace the later half of every row, and see whether a layer meets what is new last or first.

    However a model turns the sequence round (flip, gather, an index, a loop from the end), a layer that runs backwards
    begins with what is new and ends with what is not.
    """
    inputs = patient.inputs
    if inputs.slot(inputs.main).time is None or inputs.steps < 3:
        return {}
    known = inputs.known_lengths()
    lengths = torch.full((inputs.batch,), inputs.steps) if known is None else known
    step = torch.arange(inputs.steps)
    late = (step >= ((lengths + 1) // 2).unsqueeze(1)) & (step < lengths.unsqueeze(1))  # (batch, steps)
    paths = [slot.path for slot in inputs.slots if slot.kind == "sequence" and slot.steps == inputs.steps]
    old, new = base(patient), patient.run(inputs.other_steps(late, paths, seed=13), collect=True)
    longest = (lengths == lengths.max()).nonzero()[:, 0]  # in short rows, padding may come first
    return {
        layer.name: _direction(patient, old.calls.of(layer), new.calls.of(layer), rows=longest)
        for layer in patient.layers
        if old.calls.of(layer)
    }


def _direction(patient: Patient, old: list[Call], new: list[Call], *, rows: Tensor) -> Direction:
    before, after = _fed(old), _fed(new)
    if before is None or after is None or before.shape != after.shape or len(before) != patient.inputs.batch:
        return "unknown"
    changed = change(before, after).flatten(2).amax(2)[rows].amax(0) > 0  # (time,) in the order of computation
    places = changed.nonzero()[:, 0]
    if not len(places):
        return "unknown"
    leading, trailing = int(places[0]), len(changed) - 1 - int(places[-1])
    return "forwards" if leading > trailing else "backwards" if trailing > leading else "unknown"


def _fed(calls: list[Call]) -> Tensor | None:
    """Return what a layer is fed in one run, in the order of computation: (batch, time, feature)."""
    pieces = [call.x for call in calls]
    if any(piece.shape[:1] != pieces[0].shape[:1] for piece in pieces):
        return None
    if any(piece.shape[2:] != pieces[0].shape[2:] for piece in pieces):
        return None
    joined = torch.cat(pieces, dim=1)
    return joined if joined.dim() > 2 else joined.unsqueeze(2)
