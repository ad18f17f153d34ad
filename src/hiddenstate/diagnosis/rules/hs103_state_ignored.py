"""HS103: state ignored.

What came before does not reach what comes now: the recurrent part is there, and does nothing.

**How it is known.** Four ways: a state that is handed to the model is replaced; a cell of your own is called once more
with another state; the states that enter a cell, step by step, are compared with each other; and all steps but the last
are replaced, to see whether the last output moves.

**Limit.** `reach = 1e-6`: a change of the output, relative to its size.

## Sick

```python
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(3, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        for x_t in x.unbind(1):
            h = x.new_zeros(len(x), 8)                # anew at each step
            h = self.cell(x_t, h)
        return self.head(h)

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

import torch

from ..difference import gap
from ..patient import Patient
from ..probes.calls import PlainCall
from ..probes.cells import CellTrials, SteppedCells
from ..probes.states import ConstantStates, IdenticalRows, SaturatedStates
from ..probes.steps import Reach
from ..rule import Rule, Symptom


def check(patient: Patient) -> Symptom | None:
    """What came before does not reach what comes now."""
    return _handed_in(patient) or _cell_forgets(patient) or _never_handed_on(patient) or _nothing_earlier(patient)


def _handed_in(patient: Patient) -> Symptom | None:
    """Report a state among the arguments of forward that no output follows."""
    states = [argument for argument in patient.inputs.arguments if argument.kind == "state"]
    if not states or patient.alone:
        return None
    mask = torch.ones(patient.inputs.batch, dtype=torch.bool)
    changed = patient.inputs
    everything = patient.inputs.other_rows(mask, seed=2)
    for argument in states:
        changed = changed.put(argument.path, everything.get(argument.path))
    if gap(patient[PlainCall], patient.run(changed)) > patient.thresholds.reach:
        return None
    return _forgotten(
        f"argument {states[0].path[0] + 1} of forward",
        "the state that is handed in was replaced by another, and no output changed (0, limit 1e-06).",
        "forward takes a state and does not pass it to the layer",
        "out, state = self.lstm(x, state)",
    )


def _cell_forgets(patient: Patient) -> Symptom | None:
    """Report a cell whose next state does not follow the last one, or a part of it."""
    for trial in patient[CellTrials]:
        unused = [part for part, moved in trial.by_part.items() if moved == 0]
        if unused and len(unused) == len(trial.by_part):
            return _forgotten(
                trial.name,
                "the cell's next state and output are the same whatever state it is given (change 0, limit 1e-06).",
                "the recurrent term is missing: the next state is computed from the input alone",
                "h = torch.tanh(self.input(x) + self.recurrent(h))",
            )
        if "c" in unused:  # other parts may well be outputs that are only handed along
            return _forgotten(
                f"{trial.name} part c",
                "the next state does not change with part 'c' of the state (change 0, limit 1e-06).",
                "part 'c' is computed anew at each step instead of from its last value",
                "c = f * c + i * g",
            )
    return None


def _never_handed_on(patient: Patient) -> Symptom | None:
    """Report a loop that calls its cell with the same state at every step."""
    for name, steps in patient[SteppedCells].items():
        constant = steps.constant_parts()
        if steps.starts_anew or constant:
            part = "" if steps.starts_anew or len(constant) == len(steps.parts) else f" part {constant[0]}"
            return _forgotten(
                name + part,
                f"called {len(steps.calls)} times in one forward, and each time with the same first state"
                f"{part and ' in' + part}: {len(steps.calls)} of {len(steps.calls)} calls (limit: 1).",
                "the state is made anew inside the loop over time, or what the cell returns is not handed on",
                "make the first state before the loop, and hand it on: h = self.cell(x_t, h)",
            )
    return None


def _nothing_earlier(patient: Patient) -> Symptom | None:
    """Report a last output that no step but the last moves."""
    if patient.inputs.steps < 2 or not _recurrent(patient):
        return None
    seen = patient[Reach]
    if seen.earlier is None or seen.earlier > patient.thresholds.reach or not seen.all:
        return None
    if patient[SaturatedStates].track or (patient[IdenticalRows].track and not patient[ConstantStates].track):
        return None  # then nothing passes from step to step, whatever the model does
    return _forgotten(
        patient[PlainCall].calls.labels,
        f"with all steps but the last replaced, the last output moved by {seen.earlier:.2g} of its size "
        f"(limit {patient.thresholds.reach:.0e}).",
        "the state is made anew at each step, or the recurrent term is missing",
        "make the first state before the loop, and hand it on: h = self.cell(x_t, h)",
    )


def _recurrent(patient: Patient) -> bool:
    """Whether the model has recurrent layers, or by its names is meant to be recurrent."""
    if patient[PlainCall].calls or patient.layers:
        return True
    words = ("rnn", "lstm", "gru", "recur", "hidden", "_hh", "w_h", "h2", "2h", "cell", "u_")
    names = [type(m).__name__ for m in patient.model.modules()] + [n for n, _ in patient.model.named_parameters()]
    if any(word in name.lower() for name in names for word in words):
        return True
    code = getattr(getattr(type(patient.model), "forward", None), "__code__", None)
    variables = {name.lower() for name in code.co_varnames} if code is not None else set()
    return bool(
        variables & {"h", "hx", "hidden", "state", "states", "h_t", "ht", "h_prev", "hiddens", "h0", "hidden_state"}
    )


def _forgotten(where: str, evidence: str, cause: str, advice: str) -> Symptom:
    return Symptom("error", where, evidence, cause, advice, {"change": 0.0, "limit": 1e-6})


RULE = Rule(
    "HS103",
    "state ignored",
    check,
    probes=(CellTrials, ConstantStates, IdenticalRows, PlainCall, Reach, SaturatedStates, SteppedCells),
    explains=("HS105", "HS108", "HS302", "HS501", "HS503"),
)
