"""HS109: wrong slice of the final state.

What enters the head is not the final hidden state of the last layer: it is the cell state, another layer, one direction
of two, the first step, a row instead of a step, or a mixture of rows.

**How it is known.** The gradient of the output shows which of `out`, `h_n` and `c_n` is used, and which layers,
directions and steps of it, with lengths also a step before the last of each row. For rows, see HS101. For states that
are handed on, values show whether h and c changed places.

**Limit.** None: it is so or it is not. One direction of two is a warning, the others are errors.

## Sick

```python
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 8, num_layers=2, batch_first=True)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        _, (h_n, _) = self.lstm(x)
        return self.head(h_n[0])                      # the first layer

model = Model()
x = torch.randn(4, 10, 3)
```

## Healthy

```python
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 8, num_layers=2, batch_first=True)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        _, (h_n, _) = self.lstm(x)
        return self.head(h_n[-1])

model = Model()
x = torch.randn(4, 10, 3)
```
"""

from __future__ import annotations

from itertools import pairwise

from ...cells import Call
from ..outcome import same
from ..patient import Patient
from ..probes.calls import FewerRows, PlainCall
from ..probes.cells import SteppedCells
from ..probes.gradients import Arrival, Backward, Summaries, arrives
from ..probes.rows import MisreadLayer, RowInfluences, RowlessOutput, RowMixing
from ..rule import Rule, Symptom


def check(patient: Patient) -> Symptom | None:
    """What enters the head is not the final h of the last layer."""
    found = _swapped(patient) or _mixture(patient)
    if found is not None:
        return found
    slices = (
        _wrong_part(arrival) or _of_places(arrival) or _wrong_step(arrival) or _too_early(patient, arrival)
        for arrival in patient[Summaries]
    )
    return next(filter(None, slices), None) or _handed_slice(patient)


def _handed_slice(patient: Patient) -> Symptom | None:
    """Report a layer of whose final states another one is handed those of a lower layer, or of one direction."""
    found = patient[Backward]
    starts = {part.shape for call in found.outcome.calls if call.given is not None for part in call.given.values()}
    way_out = "hs.Bridge(self.encoder, self.decoder) maps all of them: bridge.native(state)" if starts else ""
    for arrival in found.arrivals if found.connected else ():
        whole = {part.shape for part in arrival.call.state.values()} & starts  # handed on as it is, or step by step
        symptom = None if whole else _of_places(arrival, way_out)
        if symptom is not None:
            return symptom
    return None


def _wrong_part(arrival: Arrival) -> Symptom | None:
    """Report a head that is given the cell state instead of h."""
    if not {"h", "c"} <= arrival.state.keys() or not arrives(arrival.state["c"]):
        return None
    if arrives(arrival.state["h"], arrival.output):
        return None
    return Symptom(
        "error",
        arrival.call.layer.label,
        "all that leaves the layer is c_n: its gradient is above 0, those of h_n and of the output are 0 "
        "(needed: h_n).",
        "nn.LSTM returns out, (h_n, c_n): taking the second of the pair, or unpacking it in the wrong order, "
        "gives the cell state",
        "out, (h_n, c_n) = self.lstm(x); self.head(h_n[-1])",
        {"used": 1.0},
    )


def _of_places(arrival: Arrival, way_out: str = "") -> Symptom | None:
    """Report final states of which those of a lower layer, or of one direction of two, are all that is used."""
    spec, axes = arrival.call.layer.spec, arrival.call.state.batch_axis
    parts = [part for name, part in arrival.state.items() if axes.get(name) == 1]  # (layers × directions, batch, unit)
    if arrives(arrival.output) or not all(axes.get(name) == 1 for name in arrival.state):
        return None
    used = [k for k in range(spec.layers * spec.directions) if arrives(*(p[k] for p in parts if p is not None))]
    places = [(k // spec.directions, k % spec.directions) for k in used]
    if not places:
        return None
    top = max(depth for depth, _ in places)
    if top < spec.layers - 1:
        return Symptom(
            "error",
            arrival.call.layer.label,
            f"of {spec.layers} layers, the final state of layer {top} is the last that is used "
            f"(needed: {spec.layers - 1}).",
            "h_n is (layers × directions, batch, unit): h_n[0] is the first layer, not the last",
            way_out or "h_n[-1] for one direction, torch.cat([h_n[-2], h_n[-1]], dim=1) for two",
            {"used": 1.0},
        )
    if spec.directions == 2 and len({way for depth, way in places if depth == top}) == 1:
        way = "reverse" if places[-1][1] else "forward"
        return Symptom(
            "warning",
            arrival.call.layer.label,
            f"of the two directions of the last layer, only the {way} one is used: 1 of 2 (needed: 2).",
            f"h_n[{-1 if way == 'reverse' else -2}] of a bidirectional layer is its {way} direction alone",
            way_out or "torch.cat([h_n[-2], h_n[-1]], dim=1), and a head with twice the units",
            {"used": 1.0},
        )
    return None


def _wrong_step(arrival: Arrival) -> Symptom | None:
    """Report an output of a one-way layer that is used at its first step alone."""
    if arrival.output is None or arrives(*arrival.state.values()) or arrival.call.layer.spec.bidirectional:
        return None
    used = arrival.output.abs().sum(2) > 0  # (batch, time)
    steps = used.shape[1]
    if steps < 2 or not bool(used[:, 0].any()) or bool(used[:, 1:].any()):
        return None
    return Symptom(
        "error",
        arrival.call.layer.label,
        f"of {steps} steps of the layer's output, only the first is used, which has seen 1 step (needed: the last).",
        "out[:, 0] is the first step",
        "out[:, -1] takes the last step of each row, or h_n[-1]",
        {"used": 1.0},
    )


def _too_early(patient: Patient, arrival: Arrival) -> Symptom | None:
    """Report an output that is used at one step of each row, as many before its last as in every other row."""
    known = patient.inputs.known_lengths()
    if arrival.output is None or arrives(*arrival.state.values()) or known is None or len(set(known.tolist())) < 2:
        return None
    used = (arrival.output.abs().sum(2) > 0).cpu()  # (batch, time)
    if arrival.call.layer.spec.bidirectional or len(used) != len(known) or not bool((used.sum(1) == 1).all()):
        return None
    early = (known - 1 - used.int().argmax(1))[known > 2]  # of shorter rows, a step before the last may be clamped
    if early.numel() < 2 or len(set(early.tolist())) > 1 or int(early[0]) <= 0:
        return None
    return Symptom(
        "error",
        arrival.call.layer.label,
        f"of each row's steps, the one {int(early[0])} before its last is used, in {len(early)} of {len(early)} rows "
        f"(needed: 0 before).",
        f"the index of the last step is too small: the last of n steps is n - 1, and n - {1 + int(early[0])} was taken",
        "out[torch.arange(len(out)), lengths - 1]",
        {"early": int(early[0])},
    )


def _swapped(patient: Patient) -> Symptom | None:
    """Report a state whose h and c change places on the way from one call to the next."""
    groups = [(name, steps.calls) for name, steps in patient[SteppedCells].items()]
    calls = [call for call in patient[PlainCall].calls if call.layer.fused]
    groups += [(b.layer.label, [a, b]) for a in calls for b in calls if a is not b]
    for name, group in groups:
        hits = sum(_is_swapped(a, b) for a, b in pairwise(group))
        if hits and hits == len(group) - 1:
            return Symptom(
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


def _mixture(patient: Patient) -> Symptom | None:
    """Report rows that are apart in the layers, and mixed where the final state is taken apart."""
    leaks = [influence for influence in patient[RowInfluences] if influence.leaks and influence.sources is None]
    lost = patient[RowlessOutput].evidence if not leaks else ""
    if not leaks and (not lost or patient[MisreadLayer].layer is not None):
        return None
    calls = [call for call in patient[PlainCall].calls if call.layer.fused]
    if not calls or not _layers_keep_rows(patient):
        return None
    if lost:
        return Symptom(
            "error",
            patient[RowMixing].where,
            lost,
            "an index meant for the steps took a row of the batch, as out[-1] does on (batch, time, unit)",
            "out[:, -1] takes the last step of every row",
            {"axes": 0},
        )
    state = _mixed_state(patient)
    if not state or not patient[RowMixing].of_state:
        return None
    return Symptom(
        "error",
        calls[-1].layer.label,
        f"what enters the head is {state}, and {leaks[0].others} of {patient.inputs.batch} of its rows follow "
        "rows that are not theirs (limit: 0).",
        "h_n is (layers × directions, batch, unit): view or reshape to (batch, -1) mixes rows",
        "h_n.transpose(0, 1).reshape(batch, -1), or torch.cat([h_n[-2], h_n[-1]], dim=1)",
        {"rows": leaks[0].others},
    )


def _layers_keep_rows(patient: Patient) -> bool:
    """Whether each layer has fewer rows when a row of the input is left out."""
    fewer = patient[FewerRows].outcome
    if fewer is None:
        return False
    pairs = zip(patient[PlainCall].calls, fewer.calls, strict=False)
    return all(b.rows == a.rows - a.rows // patient.inputs.batch for a, b in pairs)


def _mixed_state(patient: Patient) -> str:
    """Return what of the last layer's state is used, where its output is not."""
    if not patient[Backward].connected:
        return ""
    arrivals = patient[Backward].arrivals
    if not arrivals or arrives(arrivals[-1].output):
        return ""
    used = [name for name, gradient in arrivals[-1].state.items() if arrives(gradient)]
    return f"made of {used[0]}_n" if used else ""


RULE = Rule(
    "HS109",
    "wrong slice of the final state",
    check,
    probes=(
        Backward,
        FewerRows,
        MisreadLayer,
        PlainCall,
        RowInfluences,
        RowMixing,
        RowlessOutput,
        SteppedCells,
        Summaries,
    ),
    explains=("HS102", "HS103", "HS104", "HS106", "HS107", "HS302", "HS501", "HS503"),
)
