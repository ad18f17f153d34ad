"""What of a layer's results the rest of the model uses: the right step, part, layer and direction."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from ...cells import Call
from ...state import tensors
from ..calls import steps_of_rows
from ..equal import same
from ..finding import Finding
from ..patient import Patient
from ..probes.cells import steps_of_cells
from ..probes.gradients import Arrival, backward
from ..probes.rows import influences, mixing
from ..probes.shapes import base, fewer_rows, layout, stepwise
from .rows import misread_layer, without_rows


def whole_bidirectional(patient: Patient) -> Finding | None:
    """HS107: the reverse half of what enters the head has seen one step."""
    for arrival in _summaries(patient):
        call = arrival.call
        if not call.layer.spec.bidirectional or arrival.output is None or _any(arrival.state.values()):
            continue
        lengths, half = steps_of_rows(call), arrival.output.shape[2] // 2
        used = arrival.output.abs()[:, :, half:].sum(2) > 0  # (batch, time)
        if len(used) != len(lengths) or int(lengths.max()) < 2:
            continue
        ends = (lengths - 1).to(used.device)
        at_end = torch.zeros_like(used)
        at_end[torch.arange(len(used), device=used.device), ends] = True
        last_column = torch.zeros_like(used)
        last_column[:, -1] = True
        if not bool(used.any()) or (bool((used & ~at_end).any()) and bool((used & ~last_column).any())):
            continue
        return Finding(
            "HS107",
            "error",
            call.layer.label,
            f"the reverse direction is used at one of {used.shape[1]} steps, the last, where it has seen 1 step: "
            f"{half} of {2 * half} units that enter the head (needed: all steps seen).",
            "out[:, -1] of a bidirectional layer is the end of the forward direction, but the start of the reverse one",
            "take both ends: torch.cat([h_n[-2], h_n[-1]], dim=1), or hs.pool.Last(bidirectional=True)",
            {"steps_seen": 1, "units": half},
        )
    return None


def right_slice(patient: Patient) -> Finding | None:
    """HS109: what enters the head is not the final h of the last layer."""
    return _swapped(patient) or _mixture(patient) or _slice(patient)


def _slice(patient: Patient) -> Finding | None:
    for arrival in _summaries(patient):
        found = _wrong_part(arrival) or _wrong_layer(arrival) or _wrong_step(patient, arrival)
        if found is not None:
            evidence, cause, advice, severity = found
            name = arrival.call.layer.label
            return Finding("HS109", severity, name, evidence, cause, advice, {"used": 1.0})  # type: ignore[arg-type]
    return None


def _summaries(patient: Patient) -> list[Arrival]:
    """Return fused layers whose results end in one value for each row, and go into no further layer."""
    leaf = layout(patient).main
    if leaf is None or stepwise(leaf) or leaf.state or not backward(patient).connected:
        return []
    found = backward(patient).arrivals
    fed = {id(part) for call in backward(patient).run.calls for part in _tensors(call.input, call.given_native)}
    return [
        arrival
        for arrival in found
        if not fed & {id(part) for part in _tensors(arrival.call.output_native, arrival.call.state_native)}
    ]


def _tensors(*values: object) -> list[Tensor]:
    return list(tensors(values).values())


def _any(gradients: object) -> bool:
    return any(g is not None and bool(g.abs().max() > 0) for g in gradients)  # type: ignore[attr-defined]


def _wrong_part(arrival: Arrival) -> tuple[str, str, str, str] | None:
    if not {"h", "c"} <= arrival.state.keys() or not _any([arrival.state["c"]]):
        return None
    if _any([arrival.state["h"], arrival.output]):
        return None
    return (
        "all that leaves the layer is c_n: its gradient is above 0, those of h_n and of the output are 0 "
        "(needed: h_n).",
        "nn.LSTM returns out, (h_n, c_n): taking the second of the pair, or unpacking it in the wrong order, "
        "gives the cell state",
        "out, (h_n, c_n) = self.lstm(x); self.head(h_n[-1])",
        "error",
    )


def _wrong_layer(arrival: Arrival) -> tuple[str, str, str, str] | None:
    gradient, spec = arrival.state.get("h"), arrival.call.layer.spec
    stacked = arrival.call.state.batch_axis.get("h") == 1  # (layers × directions, batch, unit)
    if gradient is None or not stacked or _any([arrival.output, arrival.state.get("c")]):
        return None
    used = [k for k in range(len(gradient)) if bool(gradient[k].abs().max() > 0)]
    places = [(k // spec.directions, k % spec.directions) for k in used]
    if not places:
        return None
    top = max(depth for depth, _ in places)
    if top < spec.layers - 1:
        return (
            f"of {spec.layers} layers, the final state of layer {top} is the last that is used (needed: "
            f"{spec.layers - 1}).",
            "h_n is (layers × directions, batch, unit): h_n[0] is the first layer, not the last",
            "h_n[-1] for one direction, torch.cat([h_n[-2], h_n[-1]], dim=1) for two",
            "error",
        )
    if spec.directions == 2 and len({way for depth, way in places if depth == top}) == 1:
        way = "reverse" if places[-1][1] else "forward"
        return (
            f"of the two directions of the last layer, only the {way} one is used: 1 of 2 (needed: 2).",
            "h_n[-1] of a bidirectional layer is its reverse direction alone",
            "torch.cat([h_n[-2], h_n[-1]], dim=1), and a head with twice the units",
            "warning",
        )
    return None


def _wrong_step(patient: Patient, arrival: Arrival) -> tuple[str, str, str, str] | None:
    """The output of a one-way layer is used at its first step alone."""
    if arrival.output is None or _any(arrival.state.values()) or arrival.call.layer.spec.bidirectional:
        return None
    used = arrival.output.abs().sum(2) > 0  # (batch, time)
    steps = used.shape[1]
    if steps < 2 or not bool(used[:, 0].any()) or bool(used[:, 1:].any()):
        return None
    return (
        f"of {steps} steps of the layer's output, only the first is used, which has seen 1 step (needed: the last).",
        "out[:, 0] is the first step",
        "out[:, -1] takes the last step of each row, or h_n[-1]",
        "error",
    )


def _swapped(patient: Patient) -> Finding | None:
    """A state's h and c change places on the way from one call to the next."""
    groups = [(name, steps.calls) for name, steps in steps_of_cells(patient).items()]
    calls = [call for call in base(patient).calls if call.layer.fused]
    groups += [(b.layer.label, [a, b]) for a in calls for b in calls if a is not b]
    for name, group in groups:
        hits = sum(_is_swapped(a, b) for a, b in pairwise(group))
        if hits and hits == len(group) - 1:
            return Finding(
                "HS109",
                "error",
                name,
                f"the state that enters as h is the c that came out before, and the other way round, "
                f"{hits} of {hits} times (limit: 0).",
                "(h, c) was unpacked as (c, h)",
                "h, c = self.cell(x_t, (h, c)): h comes first, going in and coming out",
                {"times": hits},
            )
    return None


def _is_swapped(before: Call, after: Call) -> bool:
    a, b = before.state, after.given
    if b is None or set(a) != {"h", "c"} or set(b) != {"h", "c"} or a["h"].shape != b["h"].shape:
        return False
    return same(a["c"], b["h"]) and same(a["h"], b["c"]) and not same(a["h"], a["c"])


def _mixture(patient: Patient) -> Finding | None:
    """Rows are apart in the layers, and mixed where the final state is taken apart."""
    leaks = [influence for influence in influences(patient) if influence.leaks and influence.sources is None]
    lost = without_rows(patient) if not leaks else None
    if not leaks and (lost is None or misread_layer(patient) is not None):
        return None
    calls = [call for call in base(patient).calls if call.layer.fused]
    if not calls or not _layers_keep_rows(patient):
        return None
    if lost is not None:
        return Finding("HS109", "error", lost.where, lost.evidence, lost.cause, lost.advice, {"axes": 0})
    state = _mixed_state(patient)
    if not state or not mixing(patient).of_state:
        return None
    return Finding(
        "HS109",
        "error",
        calls[-1].layer.label,
        f"what enters the head is {state}, and {leaks[0].others} of {patient.inputs.batch} of its rows follow "
        "rows that "
        f"are not theirs (limit: 0).",
        "h_n is (layers × directions, batch, unit): view or reshape to (batch, -1) mixes rows",
        "h_n.transpose(0, 1).reshape(batch, -1), or torch.cat([h_n[-2], h_n[-1]], dim=1)",
        {"rows": leaks[0].others},
    )


def _layers_keep_rows(patient: Patient) -> bool:
    fewer = fewer_rows(patient)
    if fewer is None:
        return False
    pairs = zip(base(patient).calls, fewer.calls, strict=False)
    return all(b.rows == a.rows - a.rows // patient.inputs.batch for a, b in pairs)


def _mixed_state(patient: Patient) -> str:
    """Return what of the last layer's state is used, where its output is not."""
    if not backward(patient).connected:
        return ""
    arrivals = backward(patient).arrivals
    if not arrivals or _any([arrivals[-1].output]):
        return ""
    used = [name for name, gradient in arrivals[-1].state.items() if _any([gradient])]
    return f"made of {used[0]}_n" if used else ""
