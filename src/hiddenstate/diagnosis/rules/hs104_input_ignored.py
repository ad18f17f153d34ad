"""HS104: input ignored.

The input does not reach the output: the model computes something, and not from what it was given. Also told of a second
input that no mode uses, and of marks that say where a sequence begins anew (`done`, `episode_starts`) and are never
read. A mask or a label for each row that is never read is a note.

**How it is known.** Every step of the input is replaced, and no output moves; a cell of your own is called once more
with another input. An output that follows earlier steps but not its own is a note: a model that shifts its input inside
is right to do so, and so is one whose state moves on between two inputs, which predicts each before it reads it. Where
a layer is fed the input and does not move, the layer is named.

**Limit.** `reach = 1e-6`: a change of the output, relative to its size.

## Sick

```python
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 8, batch_first=True)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        out, _ = self.lstm(torch.zeros_like(x))
        return self.head(out[:, -1])

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

    def forward(self, x):
        out, _ = self.lstm(x)
        return self.head(out[:, -1])

model = Model()
x = torch.randn(4, 10, 3)
```
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ...cells import taken_by_position
from ...state import Path, spelled
from ..advice import drawn_anew
from ..argument_names import begins_anew, forces_teacher
from ..inputs import Argument, ModelInputs
from ..outcome import Outcome, apart, gap, same
from ..patient import Patient
from ..probes.calls import OutputLayout, PlainCall, TracedCall
from ..probes.cells import CellTrials, SteppedCells
from ..probes.gradients import reaches_input
from ..probes.states import SaturatedStates
from ..probes.steps import Reach
from ..rule import Rule, Symptom


def check(patient: Patient) -> Symptom | None:
    """The input does not reach the output."""
    limit = patient.thresholds.reach
    for trial in patient[CellTrials]:
        if trial.by_input is not None and trial.by_input <= limit:
            return Symptom(
                "error",
                trial.name,
                f"the cell's next state and output are the same whatever input it is given (change "
                f"{trial.by_input:.2g}, limit {limit:.0e}).",
                "the term with the input is missing from the cell",
                "h = torch.tanh(self.input(x) + self.recurrent(h))",
                {"change": 0.0, "limit": limit},
            )
    seen = patient[Reach]
    if seen.all is not None and seen.all <= limit and _nothing_moves(patient) and not reaches_input(patient):
        where, cause, advice = _in_a_layer(patient) or _lost(patient)
        return Symptom(
            "warning" if patient[SaturatedStates].track else "error",  # then what saturates it is told
            where or patient[PlainCall].calls.labels,
            f"with every step of the input replaced, the output moved by {seen.all:.2g} of its size "
            f"(limit {limit:.0e}).",
            cause,
            advice,
            {"change": seen.all, "limit": limit},
        )
    return (
        _second_input_unused(patient)
        or _one_step_fed(patient)
        or _first_step_only(patient)
        or _one_step_late(patient)
        or _marks_unread(patient)
    )


def _in_a_layer(patient: Patient) -> tuple[str, str, str] | None:
    """Return a layer that is fed the input and does not move, why, and how it would; None where there is none."""
    rows = torch.ones(patient.inputs.batch, dtype=torch.bool)
    plain, other = patient[PlainCall], patient.run(patient.inputs.other_rows(rows, seed=9), collect=True)
    for a, b in zip(plain.calls, other.calls, strict=False):
        fed = a.x.shape == b.x.shape and a.x.is_floating_point() and not same(a.x, b.x)
        if not fed or apart(a.output, b.output) > patient.thresholds.reach:
            continue
        size = float(a.x.detach().double().std())
        if patient[SaturatedStates].track and size > 1:
            cause = f"the layer is fed the input, of standard deviation {size:.3g}, and saturated by it: nothing moves"
            return a.layer.label, cause, "x = (x - mean) / std, with numbers of the training data, before the layer"
        cause = "the layer is fed the input, and does not move: its weights for the input are zero, or its gates shut"
        return a.layer.label, cause, drawn_anew(a.layer)
    return None


def _lost(patient: Patient) -> tuple[str, str, str]:
    """Return the line at which what the input says is lost, why, and what to write there."""
    rows = torch.ones(patient.inputs.batch, dtype=torch.bool)
    old, new = patient[TracedCall].trace, patient.run(patient.inputs.other_rows(rows, seed=9), trace=True).trace
    last = None
    for a, b in zip(old, new, strict=False):
        if a.name != b.name:
            break
        came = any(x.shape != y.shape or not same(x, y) for x, y in zip(a.inputs, b.inputs, strict=False))
        went = any(x.shape != y.shape or not same(x, y) for x, y in zip(a.outputs, b.outputs, strict=False))
        if came and not went and a.outputs:
            last = a
    if last is None:
        return (
            "",
            "the output is computed from something else: another variable, a constant, a first state",
            "follow x through forward: each result must be passed on, as in x = self.embed(x); out, _ = self.lstm(x)",
        )
    shape = tuple(last.inputs[0].shape)
    if last.name in ("layer_norm", "group_norm", "instance_norm", "softmax") and shape[-1:] == (1,):
        return last.line, f"`{last.name}` over a single feature makes every input the same", "x  # as it is, without it"
    if last.name in ("mul", "__mul__", "__rmul__", "masked_fill", "where"):
        return last.line, f"`{last.name}` leaves nothing of it: a mask or factor of 0", "x * mask  # 1 where it is real"
    if last.name in ("zeros_like", "ones_like", "new_zeros", "rand_like", "randn_like", "empty_like", "full_like"):
        return last.line, f"`{last.name}` takes the shape of it, and no value", "out, _ = self.lstm(x)  # with x itself"
    if last.name in ("long", "int", "round", "floor", "to", "clamp", "trunc", "sign"):
        return (
            last.line,
            f"`{last.name}` rounds all of it away: fractions below 1 are the same whole number",
            "tokens are whole numbers before they get here: (vocabulary * x).long(), or nn.Linear for fractions",
        )
    return (
        last.line,
        f"`{last.name}` gives the same whatever it is given",
        "follow x through forward: each result must be passed on, as in x = self.embed(x); out, _ = self.lstm(x)",
    )


def _nothing_moves(patient: Patient) -> bool:
    """Whether none of the outputs, the final one or others, moves when every row is replaced."""
    rows = torch.ones(patient.inputs.batch, dtype=torch.bool)
    return gap(patient[PlainCall], patient.run(patient.inputs.other_rows(rows, seed=9))) <= patient.thresholds.reach


def _second_input_unused(patient: Patient) -> Symptom | None:
    """Report one of several sequences that no output follows."""
    limit = patient.thresholds.reach
    sequences = [a for a in patient.inputs.arguments if a.kind == "sequence" and a.time is not None]
    sequences += [
        a for a in patient.inputs.arguments if a.kind == "features" and isinstance(_value(patient, a), Tensor)
    ]
    for argument in sequences if len(sequences) > 1 else ():
        # Teacher forcing is for training only: an input counts as unused when neither mode uses it.
        if gap(*_replaced_everywhere(patient, argument.path)) > limit:
            continue
        if gap(*_replaced_everywhere(patient, argument.path, train=True)) > limit:
            continue
        if argument.path != patient.inputs.main and any(map(forces_teacher, taken_by_position(patient.model))):
            continue  # targets, where teacher forcing is off in this call
        if argument.path == patient.inputs.main and not _runs_a_layer(patient, argument.path):
            continue  # only its size is asked for, as that of encoder_outputs in a decoder without attention
        return Symptom(
            "warning",
            _named(patient, argument.path),
            f"with every step of this input replaced, no output moved, in eval and in training (0, limit {limit:.0e}).",
            "what is made of it is dropped, overwritten or mistaken for another variable in forward: an encoder's "
            "state, for one, that the decoder is not handed",
            "# hand on what is made of it: _, state = self.encoder(source); out, _ = self.decoder(target, state)",
            {"change": 0.0, "limit": limit},
        )
    return None


def _marks_unread(patient: Patient) -> Symptom | None:
    """Report marks for rows and steps, or a label for each row, that no output follows in any mode."""
    inputs, limit = patient.inputs, patient.thresholds.reach
    beside = [a for a in inputs.arguments if a.rows is not None and a.real is None]
    beside = [a for a in beside if isinstance(_value(patient, a), Tensor)]
    marks = [a for a in beside if a.kind in ("mask", "other") or (a.kind == "features" and _marks(_value(patient, a)))]
    unread = [a for a in marks if _moved_by_marks(patient, a) <= limit]
    states = [a for a in inputs.arguments if a.kind == "state"]
    if unread and states and gap(patient[PlainCall], patient.run(_from_another_state(inputs))) <= limit:
        return None  # the state itself counts for nothing, so there is nothing to set back
    # Marks of a new sequence first: without them a state is never set back.
    unread.sort(key=lambda argument: not begins_anew(inputs.name(argument.path)))
    for argument in unread:
        marked = _marks(_value(patient, argument))
        anew = begins_anew(inputs.name(argument.path)) and marked
        return Symptom(
            "warning" if anew else "note",
            _named(patient, argument.path),
            f"set to 0, to 1 and the other way round, and from another state, it moved no output, in eval and in "
            f"training (0, limit {limit:.0e})."
            if marked
            else f"with every row's replaced, no output moved, in eval and in training (0, limit {limit:.0e}).",
            "it says where a sequence begins anew, and forward never reads it: the state goes on from one sequence to "
            "the next"
            if anew
            else "forward takes it and never reads it",
            "h = h * (1 - done[:, t]).unsqueeze(-1)  # done is 1 where a new sequence begins at step t; before the cell"
            if anew
            else "# use it in forward, or leave it out: def forward(self, x)",
            {"change": 0.0, "limit": limit},
        )
    return None


def _moved_by_marks(patient: Patient, argument: Argument) -> float:
    """Return how far other marks move the outputs, in any mode; infinity where the model takes no others."""
    inputs, marks = _from_another_state(patient.inputs), _value(patient, argument)
    if _marks(marks):
        others = [torch.zeros_like(marks), torch.ones_like(marks), (marks == 0).to(marks)]
    else:
        others = [marks.roll(1, argument.rows or 0)] if bool((marks != marks.roll(1, 0)).any()) else []
    worst = 0.0 if others else float("inf")
    for train in (False, True):
        before = _attempt(patient, inputs, train=train)
        for other in others:
            after = _attempt(patient, inputs.put(argument.path, other), train=train)
            worst = max(worst, gap(before, after) if before is not None and after is not None else float("inf"))
            if worst > patient.thresholds.reach:
                return worst
    return worst


def _marks(values: Tensor) -> bool:
    return bool(((values == 0) | (values == 1)).all())


def _from_another_state(inputs: ModelInputs) -> ModelInputs:
    """Return the inputs with other states handed in: one of zeros is the same after it was set back."""
    everything = inputs.other_rows(torch.ones(inputs.batch, dtype=torch.bool), seed=2)
    for argument in inputs.arguments:
        if argument.kind == "state":
            inputs = inputs.put(argument.path, everything.get(argument.path))
    return inputs


def _attempt(patient: Patient, inputs: ModelInputs, *, train: bool) -> Outcome | None:
    try:
        return patient.run(inputs, train=train)
    except Exception:  # marks that it does not take
        return None


def _runs_a_layer(patient: Patient, path: Path) -> bool:
    """Whether a recurrent layer of the model follows this input."""
    inputs = patient.inputs
    mask = torch.ones(inputs.batch, max(inputs.argument(path).steps, 1), dtype=torch.bool)
    other = patient.run(inputs.other_steps(mask, (path,), seed=5), collect=True)
    pairs = zip(patient[PlainCall].calls, other.calls, strict=False)
    return any(a.output.shape != b.output.shape or not torch.equal(a.output, b.output) for a, b in pairs)


def _named(patient: Patient, path: Path) -> str:
    """Return an argument by its name, where it has one."""
    name = patient.inputs.name(path)
    return f"{name} (input{spelled(path)})" if name else f"input{spelled(path)}"


def _replaced_everywhere(patient: Patient, path: Path, *, train: bool = False) -> tuple[Outcome, Outcome]:
    """Return a call from another state and one with every step of one input replaced."""
    inputs = _from_another_state(patient.inputs)
    argument = inputs.argument(path)
    mask = torch.ones(inputs.batch, max(argument.steps, 1), dtype=torch.bool)
    plain = patient.run(inputs, train=train)
    if argument.kind == "features":
        rows = inputs.other_rows(torch.ones(inputs.batch, dtype=torch.bool), seed=5)
        return plain, patient.run(inputs.put(path, rows.get(path)), train=train)
    return plain, patient.run(inputs.other_steps(mask, (path,), seed=5), train=train)


def _value(patient: Patient, argument: Argument) -> Any:
    return patient.inputs.get(argument.path)


def _one_step_fed(patient: Patient) -> Symptom | None:
    """Report a cell that is fed one and the same step of the input at every step."""
    for name, steps in patient[SteppedCells].items():
        if steps.fed is None:
            continue
        return Symptom(
            "error",
            name,
            f"called {len(steps.calls)} times in one forward, and each time fed step {steps.fed} of the input: "
            f"{len(steps.calls)} of {len(steps.calls)} calls (limit: 1).",
            "the index of time stands still in the loop",
            "for t in range(x.size(1)): h = self.cell(x[:, t], h)",
            {"calls": len(steps.calls), "limit": 1.0},
        )
    return None


def _first_step_only(patient: Patient) -> Symptom | None:
    """Report a model that goes on for as many steps as its input has, and reads the first of them alone."""
    inputs, seen, limit = patient.inputs, patient[Reach], patient.thresholds.reach
    if inputs.steps < 3 or seen.last is None or seen.last > limit or not seen.earlier:
        return None
    later = (torch.arange(inputs.steps) > 0) & inputs.valid
    others = [inputs.other_steps(later, (inputs.main,), seed=seed) for seed in (6, 8)]
    # In training too, where targets may be read along.
    for train, changed in zip((False, True), others, strict=True):
        plain = patient.run(train=True, collect=True) if train else patient[PlainCall]
        other = patient.run(changed, train=train, collect=True)
        if gap(plain, other) > limit or any(not same(a.x, b.x) for a, b in zip(plain.calls, other.calls, strict=False)):
            return None  # a layer that is fed the other steps, and does not follow them, has another fault
    return Symptom(
        "error",
        patient[PlainCall].calls.labels,
        f"with all of {inputs.steps} steps but the first replaced, no output moved, in eval and in training (0, limit "
        f"{limit:.0e}).",
        "the first step is fed at every step: the index of time stands still",
        "for t in range(x.size(1)): h = self.cell(x[:, t], h)",
        {"change": 0.0, "limit": limit},
    )


def _one_step_late(patient: Patient) -> Symptom | None:
    """Report an output that follows earlier steps, and not its own."""
    leaf = patient[OutputLayout].main
    seen = patient[Reach]
    if leaf is None or not leaf.stepwise or not seen.earlier:
        return None
    if seen.last is None or seen.last > patient.thresholds.reach:
        return None
    return Symptom(
        # A model that shifts its input has no use for the last step; one that steps through it and drops it has.
        "warning" if seen.last_is_dropped and not _moves_on(patient) else "note",
        patient[PlainCall].calls.labels,
        f"the last output does not follow the last step of the input (moved by {seen.last:.2g}), only earlier ones.",
        "the output is taken before the state is updated, or the input is shifted inside the model",
        "update first, then read: h = self.cell(x_t, h); y = self.head(h)",
        {"change": seen.last, "limit": patient.thresholds.reach},
    )


def _moves_on(patient: Patient) -> bool:
    """Whether a state goes on between two inputs, as it decays with time or follows an equation of its own."""
    for steps in patient[SteppedCells].values():
        pairs = [(before.state, after.given) for before, after in pairwise(steps.calls)]
        if any(
            given is not None and any(not same(given[n], end[n]) for n in end if n in given) for end, given in pairs
        ):
            return True
    return False


RULE = Rule(
    "HS104",
    "input ignored",
    check,
    probes=(CellTrials, OutputLayout, PlainCall, Reach, SaturatedStates, SteppedCells, TracedCall),
    explains=("HS103", "HS302", "HS404", "HS405", "HS503"),
)
