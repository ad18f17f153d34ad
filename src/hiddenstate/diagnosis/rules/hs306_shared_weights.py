"""HS306: layers share their weights.

What is written as several layers is one: `[layer] * 3` holds the same layer three times, and `copy.copy` makes a second
module with the weights of the first. The stack has the depth, and the weights of a single layer.

**How it is known.** Two places of one `ModuleList`, `Sequential` or `ModuleDict` hold the same recurrent module, or two
modules hold one dictionary of parameters; the weights that are there are counted, and those that as many layers would
have. A layer that forward calls several times is shared on purpose, and so is one that has two names, unless it is fed
what it gave under the other, or runs in both directions.

**Limit.** One place for each layer.

## Sick

```python
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.GRU(8, 8, batch_first=True)] * 3)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        for layer in self.layers:
            x, _ = layer(x)
        return self.head(x)

model = Model()
x = torch.randn(4, 10, 8)
```

## Healthy

```python
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.GRU(8, 8, batch_first=True) for _ in range(3)])
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        for layer in self.layers:
            x, _ = layer(x)
        return self.head(x)

model = Model()
x = torch.randn(4, 10, 8)
```
"""

from __future__ import annotations

from torch import nn

from ...cells import Layer
from ...state import tensors
from ..advice import path_of
from ..patient import Patient
from ..probes.calls import TracedCall
from ..probes.steps import Directions
from ..rule import Rule, Symptom


def check(patient: Patient) -> Symptom | None:
    """Several places that should hold a layer each hold one and the same."""
    recurrent = {layer.module for layer in patient.layers}
    for name, container in patient.model.named_modules():
        if not isinstance(container, nn.ModuleList | nn.Sequential | nn.ModuleDict):
            continue
        places: dict[int, list[str]] = {}
        for key, module in container._modules.items():
            if module is not None and not recurrent.isdisjoint(module.modules()):
                places.setdefault(id(module), []).append(key)
        for keys in places.values():
            if len(keys) > 1:
                return _shared(name, container, keys)
    return _copied(patient) or _under_several_names(patient)


def _shared(name: str, container: nn.Module, keys: list[str]) -> Symptom:
    module = container._modules[keys[0]]
    assert module is not None
    weights = sum(p.numel() for p in module.parameters())
    kind = type(container).__name__
    path = path_of("model", name)
    each = {"ModuleDict": "{key: copy.deepcopy(layer) for key, layer in %s.items()}"}.get(
        kind, "(copy.deepcopy(layer) for layer in %s)"
    )
    again = f"torch.nn.{kind}({'*' if kind == 'Sequential' else ''}{each % path})"
    return Symptom(
        "warning",
        ", ".join(f"{name}.{key}" if name else key for key in keys),
        f"{len(keys)} places hold one {type(module).__name__}: {weights:,} weights, where {len(keys)} layers have "
        f"{len(keys) * weights:,} (needed: one place for each layer).",
        "[layer] * n repeats one layer, and does not make n of them",
        f"import copy; {path} = {again}  # or one made for each place; on purpose: call one layer several times",
        {"places": len(keys), "weights": weights},
    )


def _under_several_names(patient: Patient) -> Symptom | None:
    """Report a layer of several names that is fed what it made itself, or that runs in both directions."""
    names: dict[nn.Module, list[str]] = {}
    for name, module in patient.model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    for layer in patient.layers:
        places = names.get(layer.module, [])
        if len(places) < 2:
            continue
        ways = {way for name, way in patient[Directions].items() if name.partition("#")[0] == layer.name}
        both = {"forwards", "backwards"} <= ways
        if both or _stacked(patient, layer):
            weights = sum(p.numel() for p in layer.module.parameters())
            anew = "; ".join(f"{place} = copy.deepcopy({place})" for place in map(_place, places[1:]))
            return Symptom(
                "warning",
                ", ".join(places),
                f"{len(places)} names stand for one {type(layer.module).__name__}: {weights:,} weights, where "
                f"{len(places)} layers have {len(places) * weights:,} (needed: one layer for each name).",
                "one layer is assigned twice, and runs in both directions"
                if both
                else "one layer is assigned twice, as a default argument is, and is fed what it gave itself",
                f"import copy; {anew}  # on purpose: one name, and call the layer several times",
                {"places": len(places), "weights": weights},
            )
    return None


def _stacked(patient: Patient, layer: Layer) -> bool:
    """Whether a layer is fed a sequence that was made of what it gave in an earlier call."""
    run = patient[TracedCall]
    calls = [call for call in run.calls.of(layer) if layer.fused and call.steps > 1]
    if len(calls) < 2:
        return False
    made = run.trace.makers()
    ends = {id(tensor) for tensor in tensors(calls[0].output_native).values()}
    return any(id(tensor) in ends for tensor in made.behind(*tensors(calls[1].input).values()))


def _copied(patient: Patient) -> Symptom | None:
    """Report modules that hold one dictionary of parameters, as a shallow copy does."""
    places: dict[int, list[str]] = {}
    for name, module in patient.model.named_modules():
        own = vars(module).get("_parameters") or vars(module).get("_modules")  # a scripted module makes them when asked
        if not own:
            continue
        places.setdefault(id(own), []).append(name)
    for names in places.values():
        if len(names) < 2:
            continue
        n, weights = len(names), sum(p.numel() for p in patient.model.get_submodule(names[0]).parameters())
        anew = "; ".join(f"{place} = copy.deepcopy({place})" for place in map(_place, names[1:]))
        return Symptom(
            "warning",
            ", ".join(names),
            f"{n} modules hold one dictionary of parameters: {weights:,} weights, where {n} have {n * weights:,} "
            f"(needed: one dictionary for each).",
            "copy.copy makes another module with the very parameters of the first",
            f"import copy; {anew}  # in place of copy.copy",
            {"places": n, "weights": weights},
        )
    return None


def _place(name: str) -> str:
    """Return a module of the model as one assigns to it."""
    parent, _, key = name.rpartition(".")
    return f"{path_of('model', parent)}{f'[{key}]' if key.isdigit() else f'.{key}'}"


RULE = Rule("HS306", "layers share their weights", check, probes=(Directions, TracedCall), static=True)
