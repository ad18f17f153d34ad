"""HS108: split is not whole.

A sequence fed in two pieces, with the state handed over, does not give what the whole gives: generation, streaming and
truncated training all rely on it.

**How it is known.** Asked of models that take a state and return `(output, state)`, of models with a reset method, and
of models carried by `hs.Carry`. The sequence is cut in the middle; outputs and the final state are compared.
`hs.check_split` names the layer. Bidirectional models are not asked.

**Limit.** `split = 1e-3`: the difference, relative to the size of the whole.

## Sick

```python
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 8, batch_first=True)
        self.head = nn.Linear(8, 2)

    def forward(self, x, state=None):
        out, _ = self.lstm(x, state)
        if state is None:
            state = (torch.zeros(1, len(x), 8), torch.zeros(1, len(x), 8))
        return self.head(out), state                  # the state it was given

model = Model()
x = torch.randn(4, 10, 3)
```

## Healthy

```python
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 8, batch_first=True)
        self.head = nn.Linear(8, 2)

    def forward(self, x, state=None):
        out, state = self.lstm(x, state)
        return self.head(out), state

model = Model()
x = torch.randn(4, 10, 3)
```
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ...cells import Layer
from ...state import tensors
from ..argument_names import state_named
from ..inputs import ModelInputs
from ..outcome import Outcome, same
from ..patient import Patient
from ..probes.calls import OtherSeed, OutputLayout, PlainCall, RepeatedCall, attempt, by_rows
from ..rule import Rule, Symptom


def check(patient: Patient) -> Symptom | None:
    """Two pieces with the state handed over differ from the whole."""
    inputs = patient.inputs
    if (
        inputs.argument(inputs.main).time is None
        or inputs.steps < 3
        or not inputs.batched
        or inputs.lengths is not None
    ):
        return None
    if patient[OtherSeed].gap > 0 or not isinstance(inputs.get(inputs.main), Tensor):
        return None
    if any(s.kind in ("mask", "other", "features") and s.rows is not None and s.time is None for s in inputs.arguments):
        return None  # what is said once for each row, such as a reset, would be said again for the second piece
    calls = patient[PlainCall].calls
    if any(call.layer.fused and call.layer.spec.bidirectional for call in calls):
        return None  # its reverse direction begins at the end of each piece, and nobody expects otherwise
    if patient.carry is not None or patient[RepeatedCall].reset:
        return _carried(patient)
    place = _state_argument(patient)
    if place is None or not isinstance(patient[PlainCall].result, tuple) or len(patient[PlainCall].result) != 2:
        return None
    return _handed_over(patient, place)


def _state_argument(patient: Patient) -> int | None:
    """Return the place of the state among forward's arguments, where it takes one."""
    states = [argument.path[0] for argument in patient.inputs.arguments if argument.kind == "state"]
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
    if isinstance(patient.model, nn.RNNBase):
        return 1
    given = patient.inputs.calling
    if given.keywords or len(patient.inputs.args) >= len(taken):
        return None  # of what is handed in by name, a place says nothing
    following = taken[len(patient.inputs.args)]
    return len(patient.inputs.args) if state_named(following.name) and type(following.default) is not bool else None


def _pieces(inputs: ModelInputs) -> tuple[ModelInputs, ModelInputs, int]:
    """Return the call in two pieces, and the step at which it was cut."""
    cut = inputs.steps // 2
    paths = [a.path for a in inputs.arguments if a.time is not None and a.steps == inputs.steps]
    return inputs.crop(cut, paths), inputs.tail(cut, paths), cut


def _handed_over(patient: Patient, place: int) -> Symptom | None:
    """Compare the whole with two calls, the second of which is given the state that the first returned."""
    first, second, cut = _pieces(patient.inputs)
    whole = patient[PlainCall]
    state = whole.result[1]
    if not tensors(state) or not _state_shaped(patient):
        return None
    one = patient.run(first, collect=True)
    args = (*second.args[:place], one.result[1], *second.args[place + 1 :])
    try:
        two = patient.run(replace(second, args=args), collect=True)
    except Exception as error:  # what it returns is not what it takes
        return _broken(
            patient,
            f"the state that the model returned was refused by its next call: {type(error).__name__}: "
            f"{str(error).splitlines()[0][:120] if str(error) else ''}",
            float("inf"),
            cut,
            ("what the model returns as its state is not in the form that it takes", _RETURN),
        )
    why = _why(first, place, one, two)
    found = _compared(patient, (whole.result, one.result, two.result), cut, why)
    back = one.result[1]
    if found is not None and isinstance(back, tuple) and len(back) == 2:
        turned = (*second.args[:place], back[::-1], *second.args[place + 1 :])
        other = attempt(patient, replace(second, args=turned))
        if other is not None and _compared(patient, (whole.result, one.result, other.result), cut, why) is None:
            why = (
                "the parts of the state changed places: they are returned in another order than they are taken",
                "h, c = state; ...; return out, (h, c)  # in one order",
            )
            return _compared(patient, (whole.result, one.result, two.result), cut, why)
    return found


_RETURN = "out, state = self.lstm(x, state); return self.head(out), state  # and all else that goes on"


def _why(first: ModelInputs, place: int, one: Outcome, two: Outcome) -> tuple[str, str]:
    """Return what is lost between two pieces, told by what their layers end in and start from."""
    back = list(tensors(one.result[1]).values())
    given = list(tensors(first.args[place]).values()) if place < len(first.args) else []
    if given and len(given) == len(back) and all(map(same, given, back)):
        return "the model returns the very state that it was handed, and not the one in which it ends", _RETURN
    starts = {layer.label: calls[0] for layer in _layers(two) if (calls := two.calls.of(layer))}
    for layer in _layers(one):
        ended, start = one.calls.of(layer)[-1].state, starts.get(layer.label)
        missing = [name for name, part in ended.items() if not any(_holds(t, part) for t in back)]
        if missing:
            what = f"its {' and '.join(missing)}" if len(missing) < len(ended) else "the state"
            return (
                f"{what} in which {layer.label} ends is not among what the model returns, so that it is lost",
                _RETURN,
            )
        if start is not None and start.given is None:
            return (
                f"{layer.label} starts anew in the second piece: the state is returned, and not handed to it",
                _RETURN,
            )
        taken = [] if start is None or start.given is None else list(start.given.items())
        if any(name in ended and not same(ended[name], part) for name, part in taken):
            return f"{layer.label} starts from something else than it ended in: parts or layers changed places", _RETURN
    if one.calls:
        return (
            "each layer goes on from where it ended, and something beside the state starts anew in each piece: "
            "positions, an earlier output, a window of earlier inputs",
            "return self.head(out), (state, position)  # what goes on beside the state is handed on with it",
        )
    return "what is returned as the state is not what the next call has to go on from", _RETURN


def _layers(run: Outcome) -> list[Layer]:
    return list(dict.fromkeys(call.layer for call in run.calls))


def _holds(whole: Tensor, part: Tensor) -> bool:
    """Whether a part of a state is a tensor that is returned, or stands in one of several layers."""
    if whole.numel() == part.numel():
        return bool(torch.equal(whole.detach().flatten(), part.detach().flatten()))
    pieces = whole.detach().unbind(0)
    return any(torch.equal(piece.flatten(), part.detach().flatten()) for piece in pieces)


def _state_shaped(patient: Patient) -> bool:
    """Whether what is returned second is a state: it has rows and no steps."""
    steps = [leaf for leaf in patient[OutputLayout].leaves if leaf.path[:1] == (1,)]
    return bool(steps) and all(not leaf.stepwise and leaf.rows is not None for leaf in steps)


def _carried(patient: Patient) -> Symptom | None:
    """Compare the whole with two calls of a model that keeps its state itself, or has it carried."""
    if patient[RepeatedCall].gap == 0:
        return None
    first, second, cut = _pieces(patient.inputs)
    with patient.afresh():
        one = patient.call(first)
        two = patient.call(second)
    why = (
        "something that the model has to go on from starts anew in each call, beside the state that it keeps",
        "self.state = state  # and all else that goes on: positions, earlier outputs, a window of earlier inputs",
    )
    return _compared(patient, (patient[PlainCall].result, one.result, two.result), cut, why)


def _compared(patient: Patient, results: tuple[Any, Any, Any], cut: int, why: tuple[str, str]) -> Symptom | None:
    whole, one, two = (tensors(result) for result in results)
    worst, what = 0.0, ""
    for leaf in patient[OutputLayout].leaves:
        if leaf.rows is None or leaf.path not in one or leaf.path not in two:
            continue
        old = whole[leaf.path]
        if leaf.stepwise:
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
            worst, what = gap, "output" if leaf.stepwise else "final state"
    if worst <= patient.thresholds.split:
        return None
    return _broken(
        patient, f"the {what} of two pieces cut at step {cut} differs from that of the whole", worst, cut, why
    )


def _broken(patient: Patient, seen: str, gap: float, cut: int, why: tuple[str, str]) -> Symptom:
    convolved = any(isinstance(module, nn.modules.conv._ConvNd) for module in patient.model.modules())
    limit = patient.thresholds.split
    return Symptom(
        "note" if convolved else "error",
        "the model",
        f"{seen}, by {gap:.2g} of its size (limit {limit:.1g}).",
        "a convolution sees the edge of each piece" if convolved else why[0],
        "z = torch.cat([kept, x], dim=1); kept = z[:, -(kernel_size - 1):]  # carry the last inputs along, unpadded"
        if convolved
        else why[1],
        {"gap": gap, "limit": limit, "cut": cut},
    )


RULE = Rule("HS108", "split is not whole", check, probes=(OtherSeed, OutputLayout, PlainCall, RepeatedCall))
