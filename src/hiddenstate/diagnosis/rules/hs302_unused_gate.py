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

from ..patient import Patient
from ..probes.calls import PlainCall, TracedCall
from ..probes.parameters import ParameterGradients, in_torch_layers, matters
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
    unused = [name for name in suspects[:_MOST] if not matters(patient, name)]
    if unused:
        shown = ", ".join(unused[:3]) + (", …" if len(unused) > 3 else "")
        kind = "missing" if unused[0] in found.missing else "exactly 0"
        return _unused(
            shown, f"its gradient is {kind} on {found.batches} batches (limit: above 0), though forward uses it"
        )
    return _unused_block(patient)


def _unused_block(patient: Patient) -> Symptom | None:
    """Report one gate of several that share a weight."""
    found = patient[ParameterGradients]
    skipped = in_torch_layers(patient.model) | {
        f"{name}.weight" for name, module in patient.model.named_modules() if isinstance(module, nn.Embedding)
    }
    for name, sizes in found.largest.items():
        if name in skipped or sizes.dim() == 0:
            continue
        for axis, length in enumerate(sizes.shape):
            dead = sizes.movedim(axis, 0).reshape(length, -1).amax(1) == 0
            for gates in (2, 3, 4, 5, 6):
                block = _dead_block(dead, gates)
                if block is None:
                    continue
                where = torch.zeros_like(sizes, dtype=torch.bool).movedim(axis, 0)
                where[block * (length // gates) : (block + 1) * (length // gates)] = True
                if not matters(patient, name, where.movedim(0, axis)):
                    return _unused(
                        f"{name}, gate {block} of {gates}",
                        f"the gradient of {length // gates} of its {length} rows is exactly 0 on "
                        f"{found.batches} batches (limit: above 0), that of the others is not",
                    )
    return None


def _dead_block(dead: Tensor, gates: int) -> int | None:
    """Return the first of `gates` equal blocks that is all dead, where every dead entry is part of such a block."""
    if len(dead) % gates or len(dead) // gates < _UNITS or not bool(dead.any()) or bool(dead.all()):
        return None
    blocks = dead.reshape(gates, -1)
    if not bool((blocks.all(1) | ~blocks.any(1)).all()):
        return None
    return int(blocks.all(1).nonzero()[0])


def _unused(where: str, seen: str) -> Symptom:
    return Symptom(
        "warning",
        where,
        f"{seen}, and other values of it change no output.",
        "a gate is computed and then another variable is used in its place, or the line that uses it is missing",
        "use every gate: c = f * c + i * g; h = o * torch.tanh(c)",
        {"gradient": 0.0, "limit": 0.0},
    )


RULE = Rule(
    "HS302",
    "gate or weight computed, never used",
    check,
    probes=(ParameterGradients, PlainCall, TracedCall),
    explains=("HS503",),
)
