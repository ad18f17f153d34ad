"""How the output follows the steps of the input, and in which direction each layer is run along them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ...cells import Call
from ...state import Path
from ..difference import change, eps
from ..patient import Patient, PatientProbe
from .calls import PlainCall
from .layout import OutputLayout, final

Direction = Literal["forwards", "backwards", "unknown"]


@dataclass(frozen=True, slots=True)
class Reach(PatientProbe):
    """How far replacing steps of the input moves the final output, relative to its size; None: unknown."""

    earlier: float | None  # all real steps but the last of each row
    last: float | None  # the last real step of each row
    all: float | None

    @classmethod
    def measure(cls, patient: Patient) -> Reach:
        """Replace the earlier steps, the last step, and all steps, and see how far the final output moves."""
        inputs = patient.inputs
        old = final(patient, patient[PlainCall])
        if inputs.argument(inputs.main).time is None:
            everything = patient.run(inputs.other_rows(torch.ones(inputs.batch, dtype=torch.bool), seed=3))
            return cls(None, None, _moved(old, final(patient, everything)))
        steps = torch.arange(inputs.steps).unsqueeze(0)
        last = inputs.last.unsqueeze(1)
        sequences = _same_length(patient)

        def after(mask: Tensor) -> float | None:
            replaced = inputs.other_steps(mask & inputs.valid, sequences, seed=3)
            return _moved(old, final(patient, patient.run(replaced)))

        return cls(
            earlier=None if inputs.steps < 2 else after(steps < last),
            last=after(steps == last),
            all=after(inputs.valid),
        )


def _same_length(patient: Patient) -> tuple[Path, ...]:
    """Return the sequences whose steps the output follows, where they are as long as the main one; else that one."""
    inputs = patient.inputs
    aligned = patient[OutputLayout].aligned or (inputs.main,)
    return aligned if inputs.argument(aligned[0]).steps == inputs.steps else (inputs.main,)


def _moved(old: Tensor | None, new: Tensor | None) -> float | None:
    """Return the largest change relative to the output's size; None where it cannot be told, 0 where it is noise."""
    if old is None or new is None or old.shape != new.shape or old.numel() == 0:
        return None
    size = float(old.detach().abs().nan_to_num(posinf=0.0, neginf=0.0).max()) or 1.0
    share = float(change(old, new).max()) / size
    return 0.0 if share <= 8 * eps(old) else share


class Directions(dict[str, Direction], PatientProbe):
    """In which direction each layer is run along time, by the layer's name.

    However a model turns the sequence round (flip, gather, an index, a loop from the end), a layer that runs backwards
    begins with what is at the end of the input.
    """

    @classmethod
    def measure(cls, patient: Patient) -> Directions:
        """Replace the later half of every row, and see whether a layer meets what is new last or first."""
        inputs = patient.inputs
        if inputs.argument(inputs.main).time is None or inputs.steps < 3:
            return cls()
        known = inputs.known_lengths()
        lengths = torch.full((inputs.batch,), inputs.steps) if known is None else known
        step = torch.arange(inputs.steps)
        late = (step >= ((lengths + 1) // 2).unsqueeze(1)) & (step < lengths.unsqueeze(1))  # (batch, steps)
        paths = [a.path for a in inputs.arguments if a.kind == "sequence" and a.steps == inputs.steps]
        old, new = patient[PlainCall], patient.run(inputs.other_steps(late, paths, seed=13), collect=True)
        longest = (lengths == lengths.max()).nonzero()[:, 0]  # in short rows, padding may come first
        return cls(
            (layer.name, _direction(patient, old.calls.of(layer), new.calls.of(layer), rows=longest))
            for layer in patient.layers
            if old.calls.of(layer)
        )


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
