"""HS209: another state in training than in evaluation.

The model is trained from one state and used from another: what is handed in, learned or passed on from an encoder
counts in one mode, and in the other the layer starts from zeros. Agents that are rolled out with their state and
trained without it are the usual case.

**How it is known.** Each state that is handed in, and each mark of a new sequence (`done`, `episode_starts`), is
replaced in eval mode and, with three seeds, in training mode: outputs that follow it in one mode must follow it in the
other. And the state that each layer starts from is compared: zero in one mode and, whatever the seed, the same other
values in the other, or made with weights that take no part in the other. Noise on the first state in training is no
finding.

**Limit.** `reach = 1e-6`: a change of the output, relative to its size.

## Sick

```python
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(3, 8, batch_first=True)
        self.head = nn.Linear(8, 2)

    def forward(self, x, h):
        out, h = self.gru(x) if self.training else self.gru(x, h)
        return self.head(out), h

model = Model()
inputs = torch.randn(4, 10, 3), torch.randn(1, 4, 8)
```

## Healthy

```python
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(3, 8, batch_first=True)
        self.head = nn.Linear(8, 2)

    def forward(self, x, h):
        out, h = self.gru(x, h)
        return self.head(out), h

model = Model()
inputs = torch.randn(4, 10, 3), torch.randn(1, 4, 8)
```
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...cells import Layer
from ...state import tensors
from ..argument_names import begins_anew
from ..inputs import Argument
from ..outcome import Outcome, gap, same
from ..patient import Patient
from ..probes.calls import PlainCall
from ..rule import Rule, Symptom

_SEEDS = range(3)  # of training mode, where dropout may hide a state now and then


def check(patient: Patient) -> Symptom | None:
    """A state counts in one mode, and not in the other."""
    if patient.alone:
        return None
    for argument in patient.inputs.arguments:
        marks = argument.kind == "mask" and begins_anew(patient.inputs.name(argument.path))
        if argument.kind == "state" or marks:
            found = _of_argument(patient, argument)
            if found is not None:
                return found
    return _of_layers(patient)


def _of_argument(patient: Patient, argument: Argument) -> Symptom | None:
    """Report a state, or marks of a new sequence, that outputs follow in one mode alone."""
    inputs, limit = patient.inputs, patient.thresholds.reach
    old = inputs.get(argument.path)
    everything = inputs.other_rows(torch.ones(inputs.batch, dtype=torch.bool), seed=2)
    if argument.kind == "state":
        new = everything.get(argument.path)
    else:  # from states other than zero, which marks would set back to what they are
        new = (old == 0).to(old)
        for state in inputs.arguments:
            inputs = inputs.put(state.path, everything.get(state.path)) if state.kind == "state" else inputs
    changed = inputs.put(argument.path, new)

    def moved(*, train: bool) -> float:
        most = 0.0
        for seed in _SEEDS if train else _SEEDS[:1]:
            runs = [patient.run(each, train=train, number=seed) for each in (inputs, changed)]
            most = max(most, gap(*runs))
            if most > limit:
                break
        return most

    in_eval, in_training = moved(train=False), moved(train=True)
    if (in_eval > limit) == (in_training > limit):
        return None
    name = inputs.name(argument.path) or "a state"
    where = "training" if in_training <= limit else "evaluation"
    return Symptom(
        "warning" if where == "training" else "error",
        f"{name}, an argument of forward",
        f"replaced by another, it moves the output by {in_eval:.2g} of its size in eval mode and by {in_training:.2g} "
        f"in training (limit {limit:.0e}).",
        f"forward reads {name} in one mode and not in {where}: a branch on self.training"
        + (", so that the model is trained from other states than it is used with" if where == "training" else ""),
        f"out, state = self.rnn(x, {name})  # in both modes"
        if argument.kind == "state"
        else f"h = h * (1 - {name}[:, t]).unsqueeze(-1)  # in both modes, before the cell",
        {"evaluation": in_eval, "training": in_training, "limit": limit},
    )


def _of_layers(patient: Patient) -> Symptom | None:
    """Report a layer that starts from zeros in one mode, and from the same other state each time in the other."""
    if not patient[PlainCall].calls:
        return None
    first = patient.run(train=True, collect=True)
    for layer in patient.layers:
        evaluated, trained = _start(patient[PlainCall], layer), _start(first, layer)
        if evaluated is None or trained is None or trained.shape != evaluated.shape:
            continue
        size = _size(evaluated)
        if bool(size) == bool(_size(trained)):
            found = _made_otherwise(patient, layer) if size and not same(evaluated, trained) else None
            if found is not None:
                return found
            continue
        starts = [trained, *(_start(patient.run(train=True, collect=True, number=n), layer) for n in _SEEDS[1:])]
        if any(state is None or not same(state, trained) for state in starts):
            continue  # drawn anew each time: noise, or a state that is dropped now and then
        sizes = [_size(trained)] * len(starts)
        zero, other = ("training", size) if size else ("evaluation", max(sizes))
        return Symptom(
            "warning",
            layer.label,
            f"it starts from a state of size {other:.2g} in {'evaluation' if size else 'training'}, and from one of "
            f"size 0 in {zero} ({len(sizes)} of {len(sizes)} seeds).",
            f"what the layer starts from is not handed to it in {zero}: a branch on self.training, or another path",
            "out, state = self.rnn(x, state)  # the same first state in both modes",
            {"evaluation": size, "training": max(sizes)},
        )
    return None


def _made_otherwise(patient: Patient, layer: Layer) -> Symptom | None:
    """Report a first state that weights take part in, in one mode alone."""
    runs = [patient.run(train=train, collect=True, trace=True) for train in (False, True)]
    evaluated, trained = (_weights_behind(patient, run, layer) for run in runs)
    again = patient.run(train=True, collect=True, number=1)
    states = [_start(run, layer) for run in (runs[1], again)]
    drawn = any(state is None for state in states) or not same(*[state for state in states if state is not None])
    if evaluated == trained or drawn:  # drawn anew, it is noise, or a latent of which evaluation takes the mean
        return None
    where, names = ("evaluation", trained - evaluated) if trained - evaluated else ("training", evaluated - trained)
    shown, other = ", ".join(sorted(names)[:3]), "training" if where == "evaluation" else "evaluation"
    return Symptom(
        "warning",
        layer.label,
        f"{shown} takes part in the state that it starts from in {other}, and not in {where} (needed: in both).",
        f"what the layer starts from is made in another way in {where}: a branch on self.training",
        "state = self.bridge(state)  # in both modes",
        {"evaluation": len(evaluated), "training": len(trained)},
    )


def _weights_behind(patient: Patient, run: Outcome, layer: Layer) -> set[str]:
    """Return the names of the parameters that the first state of a layer is made with."""
    names = {id(p): name for name, p in patient.model.named_parameters()}
    made, calls = run.trace.makers(), run.calls.of(layer)
    first = tensors(calls[0].given_native).values() if calls else ()
    return {names[id(tensor)] for tensor in made.behind(*first) if id(tensor) in names}


def _start(run: Outcome, layer: Layer) -> Tensor | None:
    """Return the state that a layer is given in its first call, all parts one after the other; None: not called."""
    calls = run.calls.of(layer)
    if not calls:
        return None
    state = calls[0].given if calls[0].given is not None else calls[0].state.map(torch.zeros_like)
    parts = [part.detach().flatten().double() for part in state.values() if part.is_floating_point()]
    return torch.cat(parts) if parts else None


def _size(state: Tensor) -> float:
    return float(state.abs().nan_to_num().max()) if state.numel() else 0.0


RULE = Rule("HS209", "another state in training than in evaluation", check, probes=(PlainCall,), explains=("HS108",))
