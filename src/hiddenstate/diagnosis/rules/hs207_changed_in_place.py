"""HS207: state changed in place.

A tensor that belongs to the caller has other values after the call: the next call, or a second use of the same batch,
starts from something else.

**How it is known.** All inputs are copied, and compared after a call in eval and in training mode; cells of your own
must leave the state they are given as it is.

**Limit.** Not a single value.

## Sick

```python
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(3, 8, batch_first=True)

    def forward(self, x, h, done):
        h[:, done] = 0.0                              # in the caller's tensor
        return self.gru(x, h)

model = Model()
x = torch.randn(4, 10, 3)
inputs = (x, torch.ones(1, 4, 8), torch.tensor([True, False, False, True]))
```

## Healthy

```python
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(3, 8, batch_first=True)

    def forward(self, x, h, done):
        h = h.masked_fill(done[None, :, None], 0.0)
        return self.gru(x, h)

model = Model()
x = torch.randn(4, 10, 3)
inputs = (x, torch.ones(1, 4, 8), torch.tensor([True, False, False, True]))
```
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from ...state import ends, spelled
from ..outcome import same
from ..patient import Patient, held_tensors
from ..probes.calls import PlainCall
from ..rule import Rule, Symptom


def check(patient: Patient) -> Symptom | None:
    """A tensor that the caller handed in has other values afterwards."""
    for train in (False, True):
        copies = replace(patient.inputs, args=patient.inputs.own_args())
        before = {path: end.clone() for path, end in ends(copies.args) if isinstance(end, Tensor)}
        patient.run(copies, train=train, own=True)
        for path, end in ends(copies.args):
            if isinstance(end, Tensor) and not same(end, before[path]):
                return _touched(f"input{spelled(path)}", float((end != before[path]).float().mean()))
    for call in patient[PlainCall].calls.overwritten:
        return _touched(f"{call.layer.name or 'the cell'}, the state it is given", 1.0)
    return _needed_by_the_graph(patient)


def _needed_by_the_graph(patient: Patient) -> Symptom | None:
    """Report a kept tensor that is written into though the backward pass of the same call needs it: torch refuses."""
    with patient.afresh():
        before = {name: (tensor, tensor._version) for name, tensor in held_tensors(patient.model).items()}
        run = patient.call(train=True, grad=True)
        after = held_tensors(patient.model)
        written = [name for name, (t, version) in before.items() if after.get(name) is t and t._version != version]
        outputs = [t for t in run.outputs.values() if t.requires_grad]
        if (
            not written
            or not outputs
            or any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in patient.model.modules())
        ):
            return None
        try:
            wanted = [p for p in patient.model.parameters() if p.requires_grad]
            torch.autograd.grad(torch.stack([t.sum() for t in outputs]).sum(), wanted, allow_unused=True)
        except RuntimeError as error:
            return Symptom(
                "error",
                ", ".join(written),
                f"torch refuses the backward pass of 1 of 1 calls in training: {str(error).partition(':')[0]}.",
                "a tensor that the graph needs has been written into in the same call: copy_, += or [...] =",
                f"self.{written[0].rpartition('.')[2]} = h.detach()  # a new tensor in its place",
                {"written": len(written), "limit": 0.0},
            )
    return None


def _touched(where: str, share: float) -> Symptom:
    return Symptom(
        "error",
        where,
        f"{share:.0%} of its values differ after the call (limit 0%).",
        "it is written into: +=, *=, h[...] = or a method that ends in _ on a tensor that belongs to the caller",
        "make a new one: h = h + delta, or begin with h = h.clone()",
        {"share": share, "limit": 0.0},
    )


RULE = Rule(
    "HS207",
    "state changed in place",
    check,
    probes=(PlainCall,),
    explains=("HS101", "HS102", "HS105", "HS108", "HS110", "HS302", "HS501", "HS502", "HS503"),
)
