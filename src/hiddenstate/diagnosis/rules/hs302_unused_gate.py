"""HS302: gate or weight computed, never used.

A gate or a weight takes part in the computation, and what it gives is used nowhere.

**How it is known.** Its gradient is missing or exactly zero on three batches, and other values of it change no output.
Of a weight that several gates share, each equal part is asked by itself.

**Limit.** Exactly zero.

## Sick

```python
class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_size, self.hidden_size = 3, 8
        self.gates = nn.Linear(3 + 8, 4 * 8)

    def forward(self, x, state):
        h, c = state
        i, f, g, o = self.gates(torch.cat([x, h], 1)).chunk(4, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = c.tanh()                                  # and o?
        return h, c

model, inputs = Cell(), ()
```

## Healthy

```python
class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_size, self.hidden_size = 3, 8
        self.gates = nn.Linear(3 + 8, 4 * 8)

    def forward(self, x, state):
        h, c = state
        i, f, g, o = self.gates(torch.cat([x, h], 1)).chunk(4, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        return h, c

model, inputs = Cell(), ()
```
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..outcome import SIGMOIDS
from ..patient import Patient
from ..probes.calls import PlainCall, RepeatedCall, TracedCall
from ..probes.gradients import ParameterGradients, in_torch_layers, matters, meets_zeros
from ..rule import Rule, Symptom

_UNITS = 4  # of a gate at least: fewer may all be off by chance


_MOST = 12  # suspects that are tried one by one


def check(patient: Patient) -> Symptom | None:
    """A gate or weight takes part in the computation, and what it gives is used nowhere."""
    found = patient[ParameterGradients]
    if not found.usable:
        return None
    touched = {id(tensor) for operation in patient[TracedCall].trace for tensor in operation.inputs}
    named = dict(patient.model.named_parameters())
    whole = in_torch_layers(patient.model)
    suspects = [n for n, size in found.sizes.items() if size == 0 and id(named[n]) in touched and n not in whole]
    suspects = [name for name in suspects if not meets_zeros(patient, named[name])]
    unused = [name for name in suspects[:_MOST] if not matters(patient, name)]
    if unused:
        shown = ", ".join(unused[:3]) + (", …" if len(unused) > 3 else "")
        kind = "missing" if unused[0] in found.missing else "exactly 0"
        return _unused(
            shown,
            f"its gradient is {kind} on {found.batches} batches (limit: above 0), though forward uses it",
            gates=any(_is_squashed(patient, named[name]) for name in unused),
        )
    return _unused_block(patient)


def _is_squashed(patient: Patient, parameter: Tensor) -> bool:
    """Whether a sigmoid is taken of what a parameter gives, as of a gate."""
    trace = patient[TracedCall].trace
    gives = {id(out) for o in trace if any(t is parameter for t in o.inputs) for out in o.outputs}
    return any(o.name in SIGMOIDS and o.inputs and id(o.inputs[0]) in gives for o in trace)


def _unused_block(patient: Patient) -> Symptom | None:
    """Report one gate of several that share a weight."""
    found = patient[ParameterGradients]
    skipped = in_torch_layers(patient.model) | {
        f"{name}.weight" for name, module in patient.model.named_modules() if isinstance(module, nn.Embedding)
    }
    for name, sizes in found.largest.items():
        if name in skipped or sizes.dim() == 0:
            continue
        for axis, length in enumerate(sizes.shape[:2]):
            hit = _idle_block(patient, name, sizes, axis)
            if hit is None:
                continue
            block, gates = hit
            alike = [
                n for n, other in found.largest.items() if n != name and n not in skipped and _same_block(other, hit)
            ]
            return _unused(
                f"{', '.join([name, *alike])}, gate {block + 1} of {gates}",
                f"the gradient of {length // gates} of the {length} {'rows' if axis == 0 else 'columns'} of {name} is "
                f"exactly 0 on {found.batches} batches (limit: above 0), that of the others is not",
                gates=True,
            )
    return None


def _idle_block(patient: Patient, name: str, sizes: Tensor, axis: int) -> tuple[int, int] | None:
    """Return which of how many equal blocks along an axis gets no gradient, and changes no output."""
    length = sizes.shape[axis]
    dead = sizes.movedim(axis, 0).reshape(length, -1).amax(1) == 0
    for gates in (2, 3, 4, 5, 6):
        block = _dead_block(dead, gates, least=3 if sizes.dim() > 2 else _UNITS)
        if block is None:
            continue
        where = torch.zeros_like(sizes, dtype=torch.bool).movedim(axis, 0)
        where[block * (length // gates) : (block + 1) * (length // gates)] = True
        where = where.movedim(0, axis)
        meets = axis == 1 and _meets_zeros(patient, name, slice(block * length // gates, (block + 1) * length // gates))
        if not meets and not _masked(patient, name, where) and not matters(patient, name, where):
            return block, gates
    return None


def _same_block(sizes: Tensor, hit: tuple[int, int]) -> bool:
    """Whether the same block of another weight gets no gradient either."""
    block, gates = hit
    for axis, length in enumerate(sizes.shape[:2]):
        dead = sizes.movedim(axis, 0).reshape(length, -1).amax(1) == 0
        if length % gates == 0 and _dead_block(dead, gates, least=1) == block:
            return True
    return False


def _masked(patient: Patient, name: str, where: Tensor) -> bool:
    """Whether forward sets these entries to zero on purpose, as sparse wirings and pruning do."""
    parameter = dict(patient.model.named_parameters())[name]
    for operation in patient[TracedCall].trace:
        result = operation.output
        if any(tensor is parameter for tensor in operation.inputs) and isinstance(result, Tensor):
            same = result.shape == parameter.shape and result.dtype == parameter.dtype
            if same and not bool(result.detach()[where].any()) and bool(parameter.detach()[where].any()):
                return True
    return False


def _meets_zeros(patient: Patient, name: str, block: slice) -> bool:
    """Whether these columns of a weight only ever meet zeros: units that are dead, and no gate that is left out."""
    parameter = dict(patient.model.named_parameters())[name]
    others = [
        other
        for operation in patient[TracedCall].trace
        if any(tensor is parameter for tensor in operation.inputs)
        for other in operation.inputs
        if other is not parameter and other.dim() > 1 and other.shape[-1] == parameter.shape[1]
    ]
    return bool(others) and not any(bool(other[..., block].any()) for other in others)


def _dead_block(dead: Tensor, gates: int, *, least: int) -> int | None:
    """Return the first of `gates` equal blocks that is all dead, where every dead entry is part of such a block."""
    if len(dead) % gates or len(dead) // gates < least or not bool(dead.any()) or bool(dead.all()):
        return None
    blocks = dead.reshape(gates, -1)
    if not bool((blocks.all(1) | ~blocks.any(1)).all()):
        return None
    return int(blocks.all(1).nonzero()[0])


def _unused(where: str, seen: str, *, gates: bool) -> Symptom:
    return Symptom(
        "warning",
        where,
        f"{seen}, and other values of it change no output.",
        "a gate is computed and then another variable is used in its place, or the line that uses it is missing"
        if gates
        else "its result is computed and then dropped: another variable is used in its place, or the line that uses it "
        "is missing",
        "use every gate that is computed: h = o * torch.tanh(c) for an output gate, r * h for a reset gate"
        if gates
        else "use what it gives: h = self.norm(h) under the name that is read later, torch.cat([h, context], dim=-1) "
        "before the head; or remove the layer",
        {"gradient": 0.0, "limit": 0.0},
    )


RULE = Rule(
    "HS302",
    "gate or weight computed, never used",
    check,
    probes=(ParameterGradients, PlainCall, RepeatedCall, TracedCall),
    explains=("HS503",),
)
