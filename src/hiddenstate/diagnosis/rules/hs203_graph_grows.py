"""HS203: the graph grows.

The graph of one call reaches back into the one before: the second `backward()` fails, or, with `retain_graph=True`,
takes longer and longer.

**How it is known.** Three calls in training mode, one after the other. The graph behind the second output must not hold
nodes of the first. Attributes that still have a graph after a call are named. A model that is called step by step, or
whose neurons keep their own state as spiking ones do, goes on through that graph until it is reset: where a method that
is called like it (`reset`, `reset_states`, `init_sequence`) lets the next call begin with a graph of its own, it is a
note that names the method.

**Limit.** No shared node, apart from those of the parameters.

## Sick

```python
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 8, batch_first=True)
        self.head = nn.Linear(8, 2)
        self.hidden = None

    def forward(self, x):
        out, self.hidden = self.lstm(x, self.hidden)
        return self.head(out)

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
        self.hidden = None

    def forward(self, x):
        out, hidden = self.lstm(x, self.hidden)
        self.hidden = tuple(part.detach() for part in hidden)
        return self.head(out)

model = Model()
x = torch.randn(4, 10, 3)
Model.reset_state = lambda self: setattr(self, "hidden", None)
```

The healthy model still keeps its state between calls, and says so by having a method `reset_state`: see
[HS201](HS201.md).
"""

from __future__ import annotations

from typing import Any

from ...state import tensors
from ..advice import detaching
from ..outcome import Outcome
from ..patient import Patient, held_tensors
from ..rule import Rule, Symptom


def check(patient: Patient) -> Symptom | None:
    """The graph of one call reaches back into the call before."""
    with patient.afresh():
        outcomes = [patient.call(train=True, grad=True) for _ in range(3)]
        holders = [name for name, tensor in held_tensors(patient.model).items() if tensor.grad_fn is not None]
        anew = patient.call_after_reset(train=True, grad=True) if patient.resets else None
    first, second, third = map(_graph, outcomes)
    shared = len(first & second)
    if not shared:
        return None
    made_once = [name for name in holders if not len(first) < len(second) < len(third)]
    if made_once:
        return None  # what is kept was made with the model, and not by its calls
    # Step by step, a model goes on through the graph of the steps before; pieces of a sequence do not.
    stepped = patient.inputs.argument(patient.inputs.main).time is None or not patient.layers
    ended = stepped and anew is not None and not _graph(anew) & third
    return Symptom(
        "note" if ended else "error",
        ", ".join(holders) or "the model",
        f"the graph of three calls in a row has {len(first)}, {len(second)}, {len(third)} nodes, and the second "
        f"holds {shared} of the first (limit 0): a second backward fails, or takes ever longer.",
        f"a state is kept from call to call with its graph, until {next(iter(patient.resets))}()"
        if ended
        else "a state is kept from call to call with its graph",
        detaching(holders, patient.layers),
        {"shared": shared, "first": len(first), "second": len(second), "third": len(third)},
    )


def _graph(outcome: Outcome) -> set[Any]:
    """Return every node reachable from a call's outputs, except those that belong to parameters."""
    waiting = [t.grad_fn for t in tensors(outcome.result).values() if t.grad_fn is not None]
    found: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node in found or type(node).__name__ == "AccumulateGrad":
            continue
        found.add(node)
        waiting.extend(inner for inner, _ in node.next_functions if inner is not None)
        if len(found) > 200_000:
            break
    return found


RULE = Rule("HS203", "the graph grows", check)
