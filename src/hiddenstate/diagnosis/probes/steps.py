"""Which steps of the input each step of the output follows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...state import Path
from ..inputs import Inputs
from ..patient import Patient, Run, probe
from .shapes import base, by_rows, eps, final, layout, stepwise


@dataclass(frozen=True, slots=True)
class Future:
    """How much the output at a step follows later steps of the input."""

    share: float  # largest change before the first touched step, relative to the largest change of all
    limit: float
    back: int  # how many steps before the first touched one the output still changed
    cuts: int  # cuts at which it did, of those that were tried
    tried: int


def sequences(patient: Patient) -> tuple[Path, ...]:
    """Return the inputs whose steps are followed: those that the output has steps for, else the main one."""
    return layout(patient).aligned or (patient.inputs.main,)


def change(old: Tensor, new: Tensor) -> Tensor:
    """Return the size of the change of each entry, zero where both are the same NaN or Inf."""
    gap = (new.detach().double() - old.detach().double()).abs()
    same = (old == new) | ((old != old) & (new != new))
    return torch.where(same, torch.zeros_like(gap), gap).nan_to_num(nan=float("inf")).cpu()


def moved(patient: Patient, old: Tensor | None, new: Tensor | None) -> float | None:
    """Return the largest change relative to the output's size; None where it cannot be told, 0 where it is noise."""
    if old is None or new is None or old.shape != new.shape or old.numel() == 0:
        return None
    size = float(old.detach().abs().nan_to_num(posinf=0.0, neginf=0.0).max()) or 1.0
    share = float(change(old, new).max()) / size
    return 0.0 if share <= 8 * eps(old) else share


@probe
def future(patient: Patient) -> Future | None:
    """Replace all steps after a cut, and see whether the output before it changes; None where that cannot be asked."""
    inputs, found = patient.inputs, layout(patient)
    leaf = found.main
    if leaf is None or not stepwise(leaf) or not found.aligned:
        return None
    slot = inputs.slot(found.aligned[0])
    before = base(patient)
    old = by_rows(before.outputs[leaf.path], leaf, inputs.batch)
    steps = old.shape[1]
    if steps != (slot.steps if inputs.lengths is None else int(inputs.lengths.max())) or steps < 2:
        return None
    return _future(patient, old, steps, slot_steps=slot.steps)


def _future(patient: Patient, old: Tensor, steps: int, *, slot_steps: int) -> Future | None:
    inputs, leaf = patient.inputs, layout(patient).main
    assert leaf is not None
    share, back, hit, limit, tried = 0.0, 0, 0, patient.thresholds.leak, 0
    for cut in sorted({1, (steps + 1) // 2, steps - 1}):
        mask = (torch.arange(slot_steps) >= cut).expand(inputs.batch, -1)
        if slot_steps == inputs.steps:
            mask = mask & inputs.valid
        run = patient.run(inputs.other_steps(mask, layout(patient).aligned, seed=cut))
        new = run.outputs.get(leaf.path)
        if new is None or new.shape != patient_shape(patient, leaf.path):
            continue
        tried += 1
        gaps = change(old, by_rows(new, leaf, inputs.batch)).reshape(*old.shape[:2], -1).max(2).values  # (batch, steps)
        alive = mask.any(1)  # a row that ended before the cut was not touched
        largest = float(gaps.max())
        early = gaps[alive][:, :cut].max(0).values if bool(alive.any()) else torch.zeros(cut)
        noise = 256 * eps(old) * float(old.abs().nan_to_num(posinf=0.0).max())
        bound = max(noise, patient.thresholds.leak * largest)
        if largest > 0 and float(early.max()) > bound:
            hit += 1
            back = max(back, cut - int((early > bound).nonzero()[0]))
            share, limit = max(share, float(early.max()) / largest), bound / largest
    return Future(share, limit, back, hit, tried) if tried else None


def patient_shape(patient: Patient, path: Path) -> torch.Size:
    """Return the shape of one output in the plain call."""
    return base(patient).outputs[path].shape


@dataclass(frozen=True, slots=True)
class Reach:
    """How far replacing steps of the input moves the final output, relative to its size; None: unknown."""

    earlier: float | None  # all real steps but the last of each row
    last: float | None  # the last real step of each row
    all: float | None
    first: float | None  # the first step


@probe
def reach(patient: Patient) -> Reach:
    """Replace the earlier steps, the last step, and all steps, and see how far the final output moves."""
    inputs = patient.inputs
    old = final(patient, base(patient))
    steps = torch.arange(inputs.steps).unsqueeze(0)
    last = inputs.last.unsqueeze(1)
    one = inputs.steps < 2

    if inputs.slot(inputs.main).time is None:
        everything = patient.run(inputs.other_rows(torch.ones(inputs.batch, dtype=torch.bool), seed=3))
        return Reach(None, None, moved(patient, old, final(patient, everything)), None)

    def after(mask: Tensor) -> float | None:
        chosen = _same_length(patient)
        return moved(patient, old, final(patient, patient.run(inputs.other_steps(mask & inputs.valid, chosen, seed=3))))

    return Reach(
        earlier=None if one else after(steps < last),
        last=after(steps == last),
        all=after(inputs.valid),
        first=None if one else after((steps == 0).expand(inputs.batch, -1)),
    )


def _same_length(patient: Patient) -> tuple[Path, ...]:
    inputs = patient.inputs
    wanted = sequences(patient)
    if inputs.slot(wanted[0]).steps != inputs.steps:
        return (inputs.main,)
    return wanted


def replaced_everywhere(patient: Patient, path: Path, *, train: bool = False) -> tuple[Run, Run]:
    """Return the plain call and one with every step of one input replaced."""
    inputs: Inputs = patient.inputs
    slot = inputs.slot(path)
    mask = torch.ones(inputs.batch, max(slot.steps, 1), dtype=torch.bool)
    plain = patient.run(train=train) if train else base(patient)
    return plain, patient.run(inputs.other_steps(mask, (path,), seed=5), train=train)


@probe
def looking_ahead(patient: Patient) -> str:
    """Return the line of the first operation whose steps follow later steps of the input, "" where none is seen."""
    inputs, aligned = patient.inputs, layout(patient).aligned
    steps = inputs.slot(aligned[0]).steps if aligned else 0
    cut = (steps + 1) // 2
    mask = (torch.arange(steps) >= cut).expand(inputs.batch, -1)
    old = patient.run(trace=True).trace.events
    new = patient.run(inputs.other_steps(mask, aligned, seed=cut), trace=True).trace.events
    for a, b in zip(old, new, strict=False):
        if a.name != b.name:
            break
        pair = (a.output, b.output)
        if all(isinstance(t, Tensor) and t.is_floating_point() for t in pair) and _ahead(*pair, steps=steps, cut=cut):
            return a.line
    return ""


def _ahead(old: Tensor, new: Tensor, *, steps: int, cut: int) -> bool:
    """Whether a tensor has an axis of steps, and changed before the cut along every such axis."""
    axes = [axis for axis, size in enumerate(old.shape) if size == steps]
    if not axes or old.shape != new.shape:
        return False
    changed = change(old, new) > 256 * eps(old) * (float(old.abs().nan_to_num(posinf=0.0).max()) or 1.0)
    return bool(changed.any()) and all(bool(changed.narrow(axis, 0, cut).any()) for axis in axes)
