"""HS205: not registered.

Modules, parameters or tensors are held where `nn.Module` does not look: `.to()` leaves them behind, `.parameters()`
does not train them, `state_dict()` does not save them.

**How it is known.** Attributes, lists, dicts and plain objects are searched for modules and tensors that are registered
nowhere. A plain tensor is told only when forward uses it and no call replaces it.

**Limit.** None left out. A plain tensor is a warning.

## Sick

```python
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells = [nn.GRUCell(3, 8), nn.GRUCell(8, 8)]
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        h1 = h2 = x.new_zeros(len(x), 8)
        for x_t in x.unbind(1):
            h1 = self.cells[0](x_t, h1)
            h2 = self.cells[1](h1, h2)
        return self.head(h2)

model = Model()
x = torch.randn(4, 10, 3)
```

## Healthy

```python
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells = nn.ModuleList([nn.GRUCell(3, 8), nn.GRUCell(8, 8)])
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        h1 = h2 = x.new_zeros(len(x), 8)
        for x_t in x.unbind(1):
            h1 = self.cells[0](x_t, h1)
            h2 = self.cells[1](h1, h2)
        return self.head(h2)

model = Model()
x = torch.randn(4, 10, 3)
```
"""

from __future__ import annotations

from torch import Tensor, nn

from ...state import tensors
from ..patient import Patient
from ..probes.calls import PlainCall, TracedCall
from ..rule import Rule, Symptom
from ..unregistered import Unregistered, unregistered


def check(patient: Patient) -> Symptom | None:
    """Modules, parameters or tensors that `.to()` and `.parameters()` miss."""
    modules = [thing for thing in patient.unregistered if isinstance(thing.value, nn.Module) and _trainable(thing)]
    if modules:
        holder = modules[0].holder
        count = len(modules)
        return _missed(
            holder,
            f"{count} module{'s' if count > 1 else ''} in {holder} with {_weights(modules)} weights, of which "
            f"parameters() returns 0 (needed: all).",
            "a plain list or dict of modules is invisible to nn.Module"
            if not modules[0].direct
            else "the attribute was set without registering the module",
            f"self.{holder.rpartition('.')[2]} = nn.ModuleList([...])",
        )
    parameters = [thing for thing in patient.unregistered if isinstance(thing.value, nn.Parameter)]
    if parameters:
        holder = parameters[0].holder
        return _missed(
            holder,
            f"{len(parameters)} parameters in {holder}, of which parameters() returns 0 (needed: all).",
            "a plain list or dict of parameters is invisible to nn.Module",
            f"self.{holder.rpartition('.')[2]} = nn.ParameterList([...])",
        )
    return _plain_tensor(patient)


def _trainable(thing: Unregistered) -> bool:
    return any(parameter.requires_grad for parameter in thing.value.parameters())


def _weights(modules: list[Unregistered]) -> int:
    return sum(parameter.numel() for thing in modules for parameter in thing.value.parameters())


def _missed(holder: str, evidence: str, cause: str, advice: str) -> Symptom:
    return Symptom("error", holder, evidence, cause, advice, {"registered": 0.0})


def _plain_tensor(patient: Patient) -> Symptom | None:
    """Report a tensor in a plain attribute that forward uses, and that no call replaces."""
    held = [t for t in patient.unregistered if isinstance(t.value, Tensor) and t.value.dim() > 0 and t.value.is_leaf]
    if not held or patient.reset_method:
        return None
    used = {id(tensor) for operation in patient[TracedCall].trace for tensor in operation.inputs}
    used |= {id(part) for call in patient[PlainCall].calls for part in tensors(call.given_native).values()}
    after = {id(thing.value) for thing in _still_there(patient)}
    for thing in held:
        if id(thing.value) in used and id(thing.value) in after:
            return Symptom(
                "warning",
                thing.name,
                f"a tensor of shape {tuple(thing.value.shape)} is used by forward and is neither parameter nor buffer: "
                f"0 of 1 follow the model to another device (needed: 1).",
                "a tensor in a plain attribute stays behind when the model moves, and is not saved with it",
                f"self.register_buffer({thing.holder.rpartition('.')[2]!r}, tensor), or nn.Parameter(tensor)",
                {"registered": 0.0},
            )
    return None


def _still_there(patient: Patient) -> list[Unregistered]:
    """Return what is held after a call: a state that each call replaces is no constant."""
    with patient.afresh():
        patient.call()
        return unregistered(patient.model)


RULE = Rule(
    "HS205", "not registered", check, probes=(PlainCall, TracedCall), explains=("HS202", "HS503", "HS504"), static=True
)
