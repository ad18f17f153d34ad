"""HS205: not registered.

Modules, parameters or tensors are held where `nn.Module` does not look: `.to()` leaves them behind, `.parameters()`
does not train them, `state_dict()` does not save them.

**How it is known.** Attributes, lists, dicts and plain objects are searched for modules and tensors that are registered
nowhere. A plain tensor is told only when forward uses it and no call replaces it: a weight or a first state by a
warning, other constants by a note, and one that forward brings to the input's device (`.to(x.device)`) not at all.

**Limit.** None left out.

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

import re

import torch
from torch import Tensor, nn

from ...state import tensors
from ..argument_names import state_named
from ..outcome import Operation
from ..patient import Patient, Unregistered, unregistered
from ..probes.calls import RepeatedCall, TracedCall
from ..rule import Rule, Symptom

_WEIGHT = re.compile(r"^[Ww]_?[a-z]{0,2}$|[Ww]eight|[Kk]ernel|[Pp]eep")
_MOVES = {"to", "type_as", "cuda", "cpu", "get:device", "get:dtype", "new_zeros", "new_ones", "new_tensor", "__len__"}
_PRODUCTS = {
    "mul",
    "__mul__",
    "__rmul__",
    "conv1d",
    "conv2d",
    "matmul",
    "__matmul__",
    "__rmatmul__",
    "mm",
    "bmm",
    "addmm",
    "linear",
    "einsum",
    "baddbmm",
    "mv",
    "addmv",
}


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
            "a module that a function reads from around it is invisible to nn.Module"
            if _closed_over(modules[0])
            else "a plain list or dict of modules is invisible to nn.Module"
            if not modules[0].direct
            else "the attribute was set without registering the module",
            _registering(modules[0]),
        )
    parameters = [thing for thing in patient.unregistered if isinstance(thing.value, nn.Parameter)]
    if parameters:
        holder = parameters[0].holder
        return _missed(
            holder,
            f"{len(parameters)} parameters in {holder}, of which parameters() returns 0 (needed: all).",
            "a plain list or dict of parameters is invisible to nn.Module",
            f"self.{holder.rpartition('.')[2]} = "
            f"{'nn.ParameterDict({...})' if _by_key(parameters[0]) else 'nn.ParameterList([...])'}",
        )
    raw = [t for t in patient.unregistered if isinstance(t.value, Tensor) and t.value.is_leaf and t.value.requires_grad]
    if raw:
        names = ", ".join(thing.name for thing in raw)
        return _missed(
            names,
            f"{len(raw)} tensors want a gradient, and parameters() returns 0 of them (needed: all).",
            "a tensor with requires_grad=True in an attribute is no parameter",
            "; ".join(
                f"self.{t.name.rpartition('.')[2]} = nn.Parameter(self.{t.name.rpartition('.')[2]}.detach())"
                for t in raw[:3]
            ),
        )
    return _plain_tensor(patient)


def _by_key(thing: Unregistered) -> bool:
    return thing.name[len(thing.holder) :].startswith("['")


def _closed_over(thing: Unregistered) -> str:
    """Return the variable by which a function reads this from around it, "" where none does."""
    rest = thing.name[len(thing.holder) :]
    return rest[2:].partition(")")[0] if rest.startswith(" (") else ""


def _registering(thing: Unregistered) -> str:
    variable = _closed_over(thing)
    if variable:
        return f"self.{variable} = {variable}  # an attribute of its own, which forward calls: self.{variable}(x)"
    return f"self.{thing.holder.rpartition('.')[2]} = {_container(thing)}"


def _container(thing: Unregistered) -> str:
    """Return what registers a module where a plain attribute, list, dict or object holds it."""
    if thing.direct:
        return "module  # as an attribute of an nn.Module, after super().__init__()"
    if _by_key(thing):
        return "nn.ModuleDict({...})"
    return (
        "nn.ModuleList([...])" if thing.name[len(thing.holder) :].startswith("[") else "...  # a subclass of nn.Module"
    )


def _trainable(thing: Unregistered) -> bool:
    return any(parameter.requires_grad for parameter in thing.value.parameters())


def _weights(modules: list[Unregistered]) -> int:
    return sum(parameter.numel() for thing in modules for parameter in thing.value.parameters())


def _missed(holder: str, evidence: str, cause: str, advice: str) -> Symptom:
    return Symptom("error", holder, evidence, cause, advice, {"registered": 0.0})


def _plain_tensor(patient: Patient) -> Symptom | None:
    """Report a tensor in a plain attribute that forward uses, and that no call replaces."""
    held = [t for t in patient.unregistered if isinstance(t.value, Tensor) and t.value.dim() > 0 and t.value.is_leaf]
    if not held or patient[RepeatedCall].reset:
        return None
    trace = patient[TracedCall].trace
    weights: list[Unregistered] = []
    constants: list[Unregistered] = []
    after = {id(thing.value) for thing in _still_there(patient)}
    states = [part for call in patient[TracedCall].calls for part in tensors(call.given_native).values()]
    for thing in held:
        used = [o for o in trace if any(tensor is thing.value for tensor in o.inputs)]
        starts = any(trace.makers().source(part) is thing.value for part in states)
        if id(thing.value) not in after or not (used or starts):
            continue
        if used and not starts and all(operation.name in _MOVES for operation in used):
            continue  # it is brought to where the input is: a constant
        # A constant is made again with the model; a weight or a state is not.
        name = thing.holder.rpartition(".")[2]
        grave = starts or _is_weight(name, thing.value, used) or state_named(name)
        (weights if grave else constants).append(thing)
    told = weights or constants
    if not told:
        return None
    names = ", ".join(thing.name for thing in told)
    return Symptom(
        "warning" if weights else "note",
        names,
        f"{len(told)} tensors, {names} of shape {tuple(told[0].value.shape)}, are used by forward and are neither "
        f"parameters nor buffers: 0 of {len(told)} follow the model to another device (needed: all).",
        "a tensor in a plain attribute stays behind when the model moves, and is not saved with it",
        "; ".join(f"self.register_buffer({t.holder.rpartition('.')[2]!r}, tensor)" for t in told[:4])
        + ", or nn.Parameter(tensor) where it is to be trained",
        {"registered": 0.0},
    )


def _is_weight(name: str, tensor: Tensor, used: list[Operation]) -> bool:
    """Whether a tensor is a factor of a product, or called a weight, and its numbers were drawn: no few that repeat."""
    drawn = tensor.is_floating_point() and tensor.numel() > 3 and 2 * len(torch.unique(tensor)) > tensor.numel()
    return drawn and (bool(_WEIGHT.search(name)) or any(operation.name in _PRODUCTS for operation in used))


def _still_there(patient: Patient) -> list[Unregistered]:
    """Return what is held after a call: a state that each call replaces is no constant."""
    with patient.afresh():
        patient.call()
        return unregistered(patient.model)


RULE = Rule(
    "HS205", "not registered", check, probes=(RepeatedCall, TracedCall), explains=("HS503", "HS504"), static=True
)
