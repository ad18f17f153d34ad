"""HS206: learned initial state that is not trained.

A first state that was meant to be learned stays as it was: it is no parameter, gets no gradient, or is unknown to the
optimizer.

**How it is known.** A tensor in an attribute wants a gradient and is no parameter; or a parameter that is named like a
first state (`h0`, `init_hidden`, …) gets no gradient on three batches, or is in no group of `optimizer=`.

**Limit.** Exactly zero.

## Sick

```python
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.h0 = torch.zeros(1, 1, 8, requires_grad=True)
        self.gru = nn.GRU(3, 8, batch_first=True)

    def forward(self, x):
        return self.gru(x, self.h0.expand(1, len(x), 8).contiguous())[0]

model = Model()
x = torch.randn(4, 10, 3)
```

## Healthy

```python
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.h0 = nn.Parameter(torch.zeros(1, 1, 8))
        self.gru = nn.GRU(3, 8, batch_first=True)

    def forward(self, x):
        return self.gru(x, self.h0.expand(1, len(x), 8).contiguous())[0]

model = Model()
x = torch.randn(4, 10, 3)
```
"""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor, nn

from ..argument_names import state_named
from ..patient import Patient
from ..probes.calls import TracedCall
from ..probes.gradients import ParameterGradients
from ..rule import Rule, Symptom

_STATE = r"(h|c|hx|cx|hs|hidden|cell|state|s|h0|c0|hidden_state|cell_state)"


_FIRST = r"(init|initial|start|first|learned|learnable|trainable|default|zero)"


_INITIAL = re.compile(
    rf"(^|[._]){_STATE}s?_?(0|{_FIRST})$|(^|[._]){_FIRST}_?{_STATE}s?$|initial_|(^|[._])(init|initial|start)s?$",
    re.IGNORECASE,
)


def check(patient: Patient) -> Symptom | None:
    """A first state that wants to be learned and is not."""
    wanted = [thing for thing in patient.unregistered if _wants_a_gradient(thing.value)]
    for thing in wanted:
        value = thing.value
        name = thing.holder.rpartition(".")[2]
        if not value.is_leaf and _INITIAL.search(name):
            return _untrained(
                thing.name,
                "what is stored is the result of an operation on a parameter, and no parameter: 0 of 1 (needed: 1).",
                "nn.Parameter(...) times a number, or the like, is a plain tensor with a graph",
                f"self.{name} = nn.Parameter(0.1 * torch.randn({', '.join(map(str, value.shape))}))",
            )
        if value.is_leaf and _first_state(name):
            alike = [each for each in wanted if each.value.is_leaf and _first_state(each.holder.rpartition(".")[2])]
            n = len(alike)
            return _untrained(
                ", ".join(each.name for each in alike),
                f"{'it wants a gradient, and is' if n == 1 else f'{n} tensors want a gradient, and are'} not among the "
                f"parameters() of the model: 0 of {n} (needed: {n}).",
                "a tensor with requires_grad=True in an attribute is no parameter",
                "; ".join(
                    f"self.{each.holder.rpartition('.')[2]} = "
                    f"nn.Parameter(torch.zeros({', '.join(map(str, each.value.shape))}))"
                    for each in alike
                ),
            )
    wanting = [name for name, buffer in patient.model.named_buffers() if buffer.requires_grad and buffer.is_leaf]
    if wanting:
        name, shape = wanting[0].rpartition(".")[2], tuple(patient.model.get_buffer(wanting[0]).shape)
        return _untrained(
            wanting[0],
            "it wants a gradient, and is a buffer: parameters() returns 0 of 1 (needed: 1).",
            "a buffer is saved and moved with the model, and never trained",
            f"self.{name} = nn.Parameter(torch.zeros{shape})",
        )
    found = _outside_the_optimizer(patient)
    if found is not None:
        return found
    names = {name: p for name, p in patient.model.named_parameters() if p.requires_grad and _INITIAL.search(name)}
    if not names:
        return None
    optimized = patient.optimized
    for name, parameter in names.items():
        if patient.optimizers and id(parameter) not in optimized:
            return _untrained(
                name,
                "it is a parameter of the model, and in 0 of the optimizer's groups (needed: 1).",
                "the optimizer was made before the parameter, or from other parameters",
                "make the optimizer after the model is complete: optimizer = Adam(model.parameters())",
            )
    gradients = patient[ParameterGradients]
    lost = [name for name in names if gradients.sizes.get(name) == 0 and gradients.usable]
    if not lost:
        return None
    cut = patient[TracedCall].trace.named("detach", "detach_", "get:data", "numpy", "tolist", "item")
    first = lost[0].rpartition(".")[2]
    return _untrained(
        ", ".join(lost),
        f"{len(lost)} of {len(names)} first states have {'no' if lost[0] in gradients.missing else 'a'} gradient"
        f"{'' if lost[0] in gradients.missing else ' of exactly 0'} on {gradients.batches} batches (limit: above 0).",
        "it is detached or read through .data on the way to the layer"
        if cut
        else "it is never handed to the layer, or overwritten on the way",
        f"out, _ = self.rnn(x, self.{first}.expand(-1, x.size(0), -1).contiguous())  # handed in, and not detached",
    )


def _first_state(name: str) -> bool:
    return bool(_INITIAL.search(name) or state_named(name))


def _wants_a_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and value.requires_grad


def _outside_the_optimizer(patient: Patient) -> Symptom | None:
    """Report an `hs.Learned` that a Carry starts from, and that no optimizer knows."""
    learned = None if patient.carry is None else patient.carry.init
    if not isinstance(learned, nn.Module) or not patient.optimizers:
        return None
    missing = [name for name, p in learned.named_parameters() if p.requires_grad and id(p) not in patient.optimized]
    if not missing:
        return None
    return _untrained(
        f"init of the Carry, {type(learned).__name__}",
        f"{len(missing)} of its parameters are in 0 of the optimizer's groups (needed: 1).",
        "it is a module of its own, beside the model: model.parameters() does not hold it",
        "optimizer = torch.optim.Adam([*model.parameters(), *learned.parameters()])",
    )


def _untrained(where: str, evidence: str, cause: str, advice: str) -> Symptom:
    return Symptom("error", where, evidence, cause, advice, {"trained": 0.0})


RULE = Rule(
    "HS206",
    "learned initial state that is not trained",
    check,
    probes=(ParameterGradients, TracedCall),
    explains=("HS205", "HS302", "HS503", "HS504"),
)
