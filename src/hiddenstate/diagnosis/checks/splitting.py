"""Pieces and whole: a sequence fed in two pieces, with the state handed over, gives what the whole gives."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from ...state import tensors
from ..finding import Finding
from ..inputs import Inputs, state_named
from ..patient import Patient
from ..probes.repeats import stochastic, twice
from ..probes.shapes import base, by_rows, layout, stepwise


def split_is_whole(patient: Patient) -> Finding | None:
    """HS108: two pieces with the state handed over differ from the whole."""
    inputs = patient.inputs
    slot = inputs.slot(inputs.main)
    if slot.time is None or inputs.steps < 3 or not inputs.batched or inputs.lengths is not None:
        return None
    if stochastic(patient) or not isinstance(inputs.get(inputs.main), Tensor):
        return None
    if any(s.kind in ("mask", "other", "features") and s.rows is not None and s.time is None for s in inputs.slots):
        return None  # what is said once for each row, such as a reset, would be said again for the second piece
    calls = base(patient).calls
    if any(call.layer.fused and call.layer.spec.bidirectional for call in calls):
        return None  # its reverse direction begins at the end of each piece, and nobody expects otherwise
    if patient.carry is not None or patient.reset_method:
        return _carried(patient)
    place = _state_argument(patient)
    if place is None or not isinstance(base(patient).result, tuple) or len(base(patient).result) != 2:
        return None
    return _handed_over(patient, place)


def _state_argument(patient: Patient) -> int | None:
    """Return the place of the state among forward's arguments, where it takes one."""
    states = [slot.path[0] for slot in patient.inputs.slots if slot.kind == "state"]
    if states:
        return int(states[0])
    try:
        taken = [
            p
            for p in inspect.signature(patient.model.forward).parameters.values()
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
    except (TypeError, ValueError):
        return None
    given = len(patient.inputs.args)
    if isinstance(patient.model, nn.RNNBase):
        return 1
    return given if given < len(taken) and state_named(taken[given].name) else None


def _pieces(inputs: Inputs) -> tuple[Inputs, Inputs, int]:
    cut = inputs.steps // 2
    paths = [slot.path for slot in inputs.slots if slot.time is not None and slot.steps == inputs.steps]
    return inputs.crop(cut, paths), inputs.tail(cut, paths), cut


def _handed_over(patient: Patient, place: int) -> Finding | None:
    first, second, cut = _pieces(patient.inputs)
    whole = base(patient)
    state = whole.result[1]
    if not tensors(state) or not _state_shaped(patient, state):
        return None
    one = patient.run(first)
    args = (*second.args[:place], one.result[1], *second.args[place + 1 :])
    from dataclasses import replace

    try:
        two = patient.run(replace(second, args=args))
    except Exception as error:  # what it returns is not what it takes
        return _broken(
            patient,
            f"the state that the model returned was refused by its next call: {type(error).__name__}: "
            f"{str(error).splitlines()[0][:120] if str(error) else ''}",
            float("inf"),
            cut,
        )
    return _compared(patient, (whole.result, one.result, two.result), cut)


def _state_shaped(patient: Patient, state: Any) -> bool:
    """Whether what is returned second is a state: it has rows and no steps."""
    steps = [leaf for leaf in layout(patient).leaves if leaf.path[:1] == (1,)]
    return bool(steps) and all(not stepwise(leaf) and leaf.rows is not None for leaf in steps)


def _carried(patient: Patient) -> Finding | None:
    if twice(patient).gap == 0:
        return None
    first, second, cut = _pieces(patient.inputs)
    with patient.afresh():
        one = patient.call(first)
        two = patient.call(second)
    return _compared(patient, (base(patient).result, one.result, two.result), cut)


def _compared(patient: Patient, results: tuple[Any, Any, Any], cut: int) -> Finding | None:
    whole, one, two = (tensors(result) for result in results)
    worst, what = 0.0, ""
    for leaf in layout(patient).leaves:
        if leaf.rows is None or leaf.path not in one or leaf.path not in two:
            continue
        old = whole[leaf.path]
        if stepwise(leaf):
            pieces = [by_rows(t[leaf.path], leaf, patient.inputs.batch) for t in (one, two)]
            new, old = torch.cat(pieces, dim=1), by_rows(old, leaf, patient.inputs.batch)
        elif leaf.state or leaf.path[:1] == (1,):
            new = two[leaf.path]
        else:
            continue  # a summary of one piece is not a summary of the whole
        if new.shape != old.shape:
            continue
        size = float(old.detach().abs().max()) or 1.0
        gap = float((new - old).detach().abs().max()) / size
        if gap > worst:
            worst, what = gap, "output" if stepwise(leaf) else "final state"
    if worst <= patient.thresholds.split:
        return None
    return _broken(patient, f"the {what} of two pieces cut at step {cut} differs from that of the whole", worst, cut)


def _broken(patient: Patient, seen: str, gap: float, cut: int) -> Finding:
    convolved = any(isinstance(module, nn.modules.conv._ConvNd) for module in patient.model.modules())
    limit = patient.thresholds.split
    return Finding(
        "HS108",
        "note" if convolved else "error",
        "the model",
        f"{seen}, by {gap:.2g} of its size (limit {limit:.1g}).",
        "a convolution sees the edge of each piece"
        if convolved
        else "the state is ignored, not returned as it ended, or returned in another form than it is taken in",
        "out, state = self.lstm(x, state); return self.head(out), state; hs.check_split(model, x) names the layer",
        {"gap": gap, "limit": limit, "cut": cut},
    )
