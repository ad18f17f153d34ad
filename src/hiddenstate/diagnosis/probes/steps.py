"""Probe: which steps of the input the output depends on, and in which direction each layer runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ...cells import Call
from ...state import Path
from ..outcome import Outcome, change, eps, gap, same
from ..patient import Patient, PatientProbe
from .calls import OutputLayout, PlainCall, finals

Direction = Literal["forwards", "backwards", "unknown"]


@dataclass(frozen=True, slots=True)
class Reach(PatientProbe):
    """How far replacing steps of the input moves the final output, relative to its size; None: unknown."""

    earlier: float | None  # all real steps but the last of each row
    last: float | None  # the last real step of each row
    all: float | None
    last_is_dropped: bool = False  # a layer is fed the last step, and nothing that is returned follows it

    @classmethod
    def measure(cls, patient: Patient) -> Reach:
        """Replace the earlier steps, the last step, and all steps, and see how far the final output moves."""
        inputs, plain = patient.inputs, patient[PlainCall]
        old = finals(patient, plain)
        if inputs.argument(inputs.main).time is None:
            everything = patient.run(inputs.other_rows(torch.ones(inputs.batch, dtype=torch.bool), seed=3))
            return cls(None, None, _moved(old, finals(patient, everything)))
        steps = torch.arange(inputs.steps).unsqueeze(0)
        last = inputs.last.unsqueeze(1)
        sequences = _same_length(patient)

        def after(mask: Tensor) -> Outcome:
            return patient.run(inputs.other_steps(mask & inputs.valid, sequences, seed=3), collect=True)

        at_last = after(steps == last)
        return cls(
            earlier=None if inputs.steps < 2 else _moved(old, finals(patient, after(steps < last))),
            last=_moved(old, finals(patient, at_last)),
            all=_moved(old, finals(patient, after(inputs.valid))),
            last_is_dropped=gap(plain, at_last) == 0 and _layers_follow(plain, at_last),
        )


def _layers_follow(old: Outcome, new: Outcome) -> bool:
    """Whether a layer gives something else in the one call than in the other."""
    pairs = zip(old.calls, new.calls, strict=False)
    return any(a.output.shape != b.output.shape or not same(a.output, b.output) for a, b in pairs)


def _same_length(patient: Patient) -> tuple[Path, ...]:
    """Return all sequences as long as the main one, where the output follows one of them; else the main one."""
    inputs = patient.inputs
    aligned = patient[OutputLayout].aligned or (inputs.main,)
    if inputs.argument(aligned[0]).steps != inputs.steps:
        return (inputs.main,)
    return tuple(a.path for a in inputs.arguments if a.kind == "sequence" and a.steps == inputs.steps)


def _moved(old: list[Tensor], new: list[Tensor]) -> float | None:
    """Return the largest change of any output, relative to its size; None where it cannot be told, 0 where it is noise.

    Of several outputs some may be discrete, such as spikes or samples, and stay as they are.
    """
    pairs = [(a, b) for a, b in zip(old, new, strict=False) if a.shape == b.shape and a.numel()]
    shares = []
    for a, b in pairs:
        size = float(a.detach().abs().nan_to_num(posinf=0.0, neginf=0.0).max()) or 1.0
        share = float(change(a, b).max()) / size
        shares.append(0.0 if share <= 8 * eps(a) else share)
    return max(shares, default=None)


class Directions(dict[str, Direction], PatientProbe):
    """In which direction each layer is run along time, by the layer's name.

    However a model turns the sequence round (flip, gather, an index, a loop from the end), a layer that runs backwards
    begins with what is at the end of the input.
    """

    @classmethod
    def measure(cls, patient: Patient) -> Directions:
        """Replace the later and the earlier half of every row, and see which of them a layer meets first."""
        inputs = patient.inputs
        if inputs.argument(inputs.main).time is None or inputs.steps < 3:
            return cls()
        known = inputs.known_lengths()
        lengths = torch.full((inputs.batch,), inputs.steps) if known is None else known
        step = torch.arange(inputs.steps)
        half, real = ((lengths + 1) // 2).unsqueeze(1), step < lengths.unsqueeze(1)
        halves = (
            (step >= half) & real,
            (step < lengths.unsqueeze(1) // 2) & real,
        )  # (batch, steps): the later, the earlier
        paths = [a.path for a in inputs.arguments if a.kind == "sequence" and a.steps == inputs.steps]
        old = patient[PlainCall]
        late, early = (patient.run(inputs.other_steps(mask, paths, seed=13), collect=True) for mask in halves)
        longest = (lengths == lengths.max()).nonzero()[:, 0]  # in short rows, padding may come first
        found = cls()
        for layer in patient.layers:
            runs = [_runs(run.calls.of(layer), inputs.steps) for run in (old, late, early)]
            for place, (plain, *others) in enumerate(zip(*runs, strict=False)):
                found[f"{layer.name}#{place}" if place else layer.name] = _direction(
                    patient, plain, *others, rows=longest
                )
        return found


def _runs(calls: list[Call], steps: int) -> list[list[Call]]:
    """Return the calls of a layer as runs along all steps, where it is called once or several times for each."""
    if len(calls) > steps and len(calls) % steps == 0 and all(call.steps == 1 for call in calls):
        return [calls[start : start + steps] for start in range(0, len(calls), steps)]
    return [calls] if calls else []


def _direction(patient: Patient, old: list[Call], late: list[Call], early: list[Call], *, rows: Tensor) -> Direction:
    """Say which half of the input a layer meets first; what it has met may change all that it is fed later."""
    before = _fed(old)
    begins, trailing = [], 0
    for after in (_fed(late), _fed(early)):
        if before is None or after is None or before.shape != after.shape or len(before) != patient.inputs.batch:
            return "unknown"
        changed = change(before, after).flatten(2).amax(2)[rows].amax(0) > 0  # (time,) in the order of computation
        places = changed.nonzero()[:, 0]
        begins.append(int(places[0]) if len(places) else len(changed))
        trailing = len(changed) - 1 - int(places[-1]) if len(begins) == 1 and len(places) else trailing
    with_late, with_early = begins
    if with_late == with_early == 0 and trailing:
        return "backwards"  # it reads what another layer made, on which the earlier half has left its trace everywhere
    return "forwards" if with_early < with_late else "backwards" if with_late < with_early else "unknown"


def _fed(calls: list[Call]) -> Tensor | None:
    """Return what a layer is fed in one run, in the order of computation: (batch, time, feature)."""
    pieces = [call.x for call in calls]
    if any(piece.shape[:1] != pieces[0].shape[:1] for piece in pieces):
        return None
    if any(piece.shape[2:] != pieces[0].shape[2:] for piece in pieces):
        return None
    joined = torch.cat(pieces, dim=1)
    return joined if joined.dim() > 2 else joined.unsqueeze(2)
