"""HS103: state ignored.

What came before does not reach what comes now: the recurrent part is there, and does nothing.

**How it is known.** Four ways: a state that is handed to the model is replaced; a cell of your own is called once more
with another state; the states that enter a cell, step by step, are compared with each other; and all steps but the last
are replaced, to see whether the last output moves.

A layer that is handed the `h` of another one, and zeros for its `c`, is told too.

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

from itertools import pairwise

import torch

from ...cells import Call
from ...state import tensors
from ..inputs import ModelInputs
from ..outcome import gap
from ..passing_on import StartWatch
from ..patient import Patient
from ..probes.calls import PlainCall, TracedCall, attempt
from ..probes.cells import CellTrials, SteppedCells
from ..probes.gradients import Backward
from ..probes.handed import HandedStates
from ..probes.states import ConstantStates, IdenticalRows, SaturatedStates
from ..probes.steps import Reach
from ..rule import Rule, Symptom


def check(patient: Patient) -> Symptom | None:
    """What came before does not reach what comes now."""
    found = _handed_in(patient) or _handed_to_a_module(patient) or _cell_forgets(patient)
    return found or _never_handed_on(patient) or _nothing_earlier(patient) or _part_left_out(patient)


def _handed_in(patient: Patient) -> Symptom | None:
    """Report a state among the arguments of forward that no output follows."""
    states = [argument for argument in patient.inputs.arguments if argument.kind == "state"]
    if not states or patient.alone:
        return None
    mask = torch.ones(patient.inputs.batch, dtype=torch.bool)
    everything = patient.inputs.other_rows(mask, seed=2)
    moved = 0.0
    for inputs in (patient.inputs, *_marked_otherwise(patient.inputs)):
        changed = inputs
        for argument in states:
            changed = changed.put(argument.path, everything.get(argument.path))
        before = patient[PlainCall] if inputs is patient.inputs else attempt(patient, inputs)
        after = attempt(patient, changed)
        moved = gap(before, after) if before is not None and after is not None else moved
        if moved > patient.thresholds.reach:
            return None
        in_training = [patient.run(each, train=True) for each in (inputs, changed)] if after is not None else ()
        if in_training and gap(*in_training) > patient.thresholds.reach:
            return None  # one mode alone ignores it, which is another mistake
    return _forgotten(
        patient,
        f"{patient.inputs.name(states[0].path) or 'a state'}, an argument of forward",
        f"the state that is handed in was replaced by another, and no output changed ({moved:.2g} of its size",
        "forward takes a state and does not pass it to the layer",
        "out, state = self.lstm(x, state)",
    )


def _marked_otherwise(inputs: ModelInputs) -> list[ModelInputs]:
    """Return the inputs with all marks set and with none: those that are given may say that every row starts anew."""
    marks = [a for a in inputs.arguments if a.kind == "mask"]
    others = []
    for value in (0, 1) if marks else ():
        changed = inputs
        for argument in marks:
            changed = changed.put(argument.path, torch.full_like(inputs.get(argument.path), value))
        others.append(changed)
    return others


def _handed_to_a_module(patient: Patient) -> Symptom | None:
    """Report a module within the model that takes a state and does not follow it."""
    for handed in patient[HandedStates]:
        if handed.again:
            return Symptom(
                "error",
                handed.module,
                f"called {handed.again} times in one forward, and each time with the same {handed.argument}: "
                f"{handed.again} of {handed.again} calls (limit: 1).",
                "the state is made anew inside the loop over time, or what the cell returns is not handed on",
                "make the first state before the loop, and hand it on: h = self.cell(x_t, h)",
                {"calls": handed.again, "limit": 1.0},
            )
        if handed.moved <= patient.thresholds.reach:
            return _forgotten(
                patient,
                f"{handed.module}, argument {handed.argument}",
                f"with another state handed in, nothing that it returns changed ({handed.moved:.2g} of its size",
                "the module takes a state and does not pass it on to the layer in it: each call starts anew",
                f"out, {handed.argument} = self.rnn(x, {handed.argument})  # in {handed.module}",
            )
    return None


def _part_left_out(patient: Patient) -> Symptom | None:
    """Report a layer that starts from the h of another one, and from zeros where that one's c would belong."""
    watch = StartWatch()
    for call in patient[PlainCall].calls:
        watch.see(call)
    return watch.symptom()


def _cell_forgets(patient: Patient) -> Symptom | None:
    """Report a cell whose next state does not follow the last one, or a part of it."""
    for trial in patient[CellTrials]:
        unused = [part for part, moved in trial.by_part.items() if moved <= patient.thresholds.reach]
        most = max((trial.by_part[part] for part in unused), default=0.0)
        if unused and len(unused) == len(trial.by_part):
            return _forgotten(
                patient,
                trial.name,
                f"the cell's next state and output are the same whatever state it is given (change {most:.2g}",
                "the recurrent term is missing: the next state is computed from the input alone",
                "h = torch.tanh(self.input(x) + self.recurrent(h))",
            )
        if "c" in unused:  # other parts may well be outputs that are only handed along
            return _forgotten(
                patient,
                f"{trial.name} part c",
                f"the next state does not change with part 'c' of the state (change {trial.by_part['c']:.2g}",
                "part 'c' is computed anew at each step instead of from its last value",
                "c = f * c + i * g",
            )
    return None


def _never_handed_on(patient: Patient) -> Symptom | None:
    """Report a loop that calls its cell with the same state at every step."""
    for name, steps in patient[SteppedCells].items():
        constant = steps.constant_parts()
        if _multiplied(patient, name) and (constant or _unmoved(patient)):
            return Symptom(
                "error",
                name,
                f"called {len(steps.calls)} times in one forward, and what the last step gave is multiplied by 0 for "
                f"all rows or nearly all of them (limit: where a sequence ends).",
                "a mask sets the state back at every step: it is the wrong way round, or no row ever goes on",
                "h = h * keep.unsqueeze(-1)  # keep is 1 where a sequence goes on, 0 where it has ended: 1 - done",
                {"calls": len(steps.calls), "limit": 0.0},
            )
        if steps.starts_anew or constant:
            part = "" if steps.starts_anew or len(constant) == len(steps.parts) else f" part {constant[0]}"
            return Symptom(
                "error",
                name + part,
                f"called {len(steps.calls)} times in one forward, and each time with the same first state"
                f"{part and ' in' + part}: {len(steps.calls)} of {len(steps.calls)} calls (limit: 1).",
                "the state is made anew inside the loop over time, or what the cell returns is not handed on",
                "make the first state before the loop, and hand it on: h = self.cell(x_t, h)",
                {"calls": len(steps.calls), "limit": 1.0},
            )
    return None


def _multiplied(patient: Patient, name: str) -> bool:
    """Whether the state that enters each step is the last one times zero."""
    run = patient[TracedCall]
    calls = [call for call in run.calls if call.layer.label == name]
    made = run.trace.makers()
    hits = 0
    for before, after in pairwise(calls):
        ended = {id(part) for part in tensors(before.state_native).values()}
        for part in tensors(after.given_native).values():
            maker = made.origin(part)
            product = maker is not None and maker.name in ("mul", "__mul__", "__rmul__", "mul_")
            zeros = float((part == 0).float().mean()) > 0.7
            if product and zeros and any(id(made.source(t)) in ended for t in maker.inputs):  # type: ignore[union-attr]
                hits += 1
                break
    return bool(calls) and 2 * hits >= len(calls) - 1 > 0


def _unmoved(patient: Patient) -> bool:
    """Whether no step but the last moves the last output."""
    seen = patient[Reach].earlier
    return patient.inputs.steps > 1 and seen is not None and seen <= patient.thresholds.reach


def _nothing_earlier(patient: Patient) -> Symptom | None:
    """Report a last output that no step but the last moves."""
    if patient.inputs.steps < 2 or not _recurrent(patient):
        return None
    seen = patient[Reach]
    if seen.earlier is None or seen.earlier > patient.thresholds.reach or not seen.all:
        return None
    if patient[SaturatedStates].track or (patient[IdenticalRows].track and not patient[ConstantStates].track):
        return None  # then nothing passes from step to step, whatever the model does
    if any(steps.fed is not None for steps in patient[SteppedCells].values()):
        return None  # it is fed one step alone
    if _discrete(patient) and any(bool(sizes[:, :-1].any()) for sizes in patient[Backward].steps.values()):
        return None  # samples or spikes stay as they are, and their gradients reach earlier steps
    flat = next((call for call in patient[PlainCall].calls if _one_step_each(patient, call)), None)
    if flat is not None:
        return _forgotten(
            patient,
            flat.layer.label,
            f"with all steps but the last replaced, no output at the last step moved ({seen.earlier:.2g} of its size",
            f"the layer is given {flat.rows} sequences of one step, where the input has {patient.inputs.batch} of "
            f"{patient.inputs.steps}: rows and steps were joined on one axis before it",
            "out, _ = self.lstm(x)  # with x of (batch, time, feature): view and reshape only behind the layer",
        )
    return _forgotten(
        patient,
        patient[PlainCall].calls.labels,
        f"with all steps but the last replaced, no output at the last step moved ({seen.earlier:.2g} of its size",
        "the state is made anew at each step, what a step returns is not handed on, or the recurrent term is missing",
        "make the first state before the loop, and hand it on: h = self.cell(x_t, h)",
    )


def _discrete(patient: Patient) -> bool:
    """Whether all outputs are whole numbers, as spikes and samples are."""
    return all(bool((out == out.round()).all()) for out in patient[PlainCall].outputs.values())


def _one_step_each(patient: Patient, call: Call) -> bool:
    """Whether a layer was given every step of every row as a sequence of its own."""
    joined = patient.inputs.batch * patient.inputs.steps
    return call.layer.fused and call.given_native is None and call.steps == 1 and call.rows == joined


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


def _forgotten(patient: Patient, where: str, seen: str, cause: str, advice: str) -> Symptom:
    limit = patient.thresholds.reach
    return Symptom("error", where, f"{seen}, limit {limit:.0e}).", cause, advice, {"change": 0.0, "limit": limit})


RULE = Rule(
    "HS103",
    "state ignored",
    check,
    probes=(
        Backward,
        CellTrials,
        ConstantStates,
        HandedStates,
        IdenticalRows,
        PlainCall,
        Reach,
        SaturatedStates,
        SteppedCells,
        TracedCall,
    ),
    explains=("HS105", "HS108", "HS302", "HS501", "HS503"),
)
