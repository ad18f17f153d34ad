"""HS406: state kept in half precision.

The weights have 32 bits, and what is handed on from step to step has 16: each step rounds the state, and what it adds
is lost once it is below a thousandth of what is there.

**How it is known.** The states that enter each step, or that go into the model and come out of it, hold only numbers of
16 bits, though the step before gave more; and the casts that make them so are named. A model that computes in 16 bits
altogether, or under `torch.autocast`, rounds everywhere, and is no finding.

**Limit.** As many bits as the weights have.

## Sick

```python
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(3, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        h = x.new_zeros(len(x), 8).half()
        for x_t in x.unbind(1):
            h = self.cell(x_t, h.float()).half()
        return self.head(h.float())

model = Model()
x = torch.randn(4, 10, 3)
```

## Healthy

```python
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(3, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        h = x.new_zeros(len(x), 8)
        for x_t in x.unbind(1):
            h = self.cell(x_t, h)
        return self.head(h)

model = Model()
x = torch.randn(4, 10, 3)
```
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from ..outcome import Operation
from ..patient import Patient
from ..probes.calls import PlainCall, TracedCall
from ..probes.states import RecordedStates
from ..rule import Rule, Symptom

_NARROW = {torch.float16: 11, torch.bfloat16: 8}  # bits of a number's digits
_WIDE = (torch.float32, torch.float64)
_ENOUGH = 24  # different numbers that tell rounded ones from those that are whole by nature


def check(patient: Patient) -> Symptom | None:
    """What is handed on from step to step has fewer bits than the weights."""
    wide = [p for p in patient.model.parameters() if p.dtype in _WIDE]
    if 2 * len(wide) <= len(list(patient.model.parameters())):
        return None
    casts = [operation for operation in patient[TracedCall].trace if _casts(operation)]
    if not casts:
        return None
    for where, states in _handed_on(patient):
        made = [operation for operation in casts if any(_holds(operation.outputs[0], state) for state in states)]
        if not made or not _rounded(states, made[0].outputs[0].dtype):
            continue
        narrow = made[0].outputs[0].dtype
        bits, all_bits = _NARROW[narrow], 24 if wide[0].dtype == torch.float32 else 53
        line = next((operation.line for operation in made if operation.line), "")
        name = str(narrow).removeprefix("torch.")
        return Symptom(
            "warning",
            f"{where}, {line}" if line else where,
            f"the state goes from step to step with {bits} bits of {all_bits}: each step rounds it by up to "
            f"{2.0**-bits:.1g} of its size, {len(made)} times in this call (needed: {all_bits} bits).",
            f"`{made[0].name}` makes {name} of the state, and the weights are "
            f"{str(wide[0].dtype).removeprefix('torch.')}: what a step adds is rounded away where the state is large",
            "h = self.cell(x_t, h)  # without .half(); to save memory, cast what is stored and not what goes on",
            {"bits": bits, "needed": all_bits},
        )
    return None


def _casts(operation: Operation) -> bool:
    """Whether an operation makes 16 bits of more."""
    if not operation.inputs or not operation.outputs or operation.name == "get:data":
        return False
    narrow, wide = operation.outputs[0].dtype in _NARROW, operation.inputs[0].dtype in _WIDE
    return narrow and wide and operation.name in ("half", "bfloat16", "to", "type", "type_as")


def _holds(cast: Tensor, state: Tensor) -> bool:
    """Whether a state may be what was cast, or one of several that were stacked for it."""
    return cast.shape == state.shape or (cast.dim() > state.dim() and cast.shape[-state.dim() :] == state.shape)


def _handed_on(patient: Patient) -> Iterator[tuple[str, list[Tensor]]]:
    """Yield what is handed on from step to step: to cells, in loops, and through the model's own arguments."""
    plain = patient[PlainCall]
    for layer in patient.layers:
        calls = plain.calls.of(layer)
        lost: list[Tensor] = []
        for before, after in pairwise(calls):
            for name, part in after.given.items() if after.given is not None else ():
                ended = before.state.get(name)
                if ended is not None and ended.shape == part.shape and not _any_rounded([ended]):
                    lost.append(part.detach())
        if lost and len(lost) >= len(calls) - 1:
            yield layer.label, lost
    for name, track in patient[RecordedStates].items():
        if any(name == layer.label or name.startswith(f"{layer.label}.") for layer in patient.seen):
            yield name, list(track.h.detach().unbind(1))
    states = [a for a in patient.inputs.arguments if a.kind == "state"]
    for argument in states:
        given = patient.inputs.get(argument.path)
        back = [t.detach() for t in plain.outputs.values() if t.shape == given.shape and t.dtype in _NARROW]
        if back:
            yield patient.inputs.name(argument.path) or "the state", back


def _any_rounded(states: list[Tensor]) -> bool:
    return any(_rounded(states, dtype) for dtype in _NARROW)


def _rounded(states: list[Tensor], dtype: torch.dtype) -> bool:
    """Whether all numbers are such of 16 bits, and not by nature: spikes, counts and steps of a grid are few."""
    values = torch.cat([state.flatten().float() for state in states])
    if not bool((values == values.to(dtype).float()).all()):
        return False
    return len(set(values[values != values.round()].tolist())) >= _ENOUGH


RULE = Rule("HS406", "state kept in half precision", check, probes=(PlainCall, RecordedStates, TracedCall))
