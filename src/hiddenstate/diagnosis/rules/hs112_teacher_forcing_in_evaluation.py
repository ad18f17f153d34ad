"""HS112: teacher forcing in evaluation.

In eval mode the decoder is still fed the targets, where it should go on from its own outputs: validation looks far
better than what the model gives later, when nobody knows the targets.

**How it is known.** In eval mode, with several seeds, what the decoder is fed at each step is compared with the steps
of each input. Some of them being steps of the targets and others the model's own, by chance, is teacher forcing that
goes on. So it is where all are targets, and none is with a switch of that name (`teacher_forcing`, `tf_ratio`) turned
off. A model that reads a given beginning and then goes on by itself is healthy, and so is one that knows no other way
than to be fed its targets. Where the switch is an argument of forward that the call gave, it is the caller's: a note
says how to turn it off. One that is on unless the call says otherwise is a warning.

**Limit.** No step of the targets after the first step of the model's own.

## Sick

```python
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)
        self.encoder, self.decoder = nn.GRU(8, 8, batch_first=True), nn.GRUCell(8, 8)
        self.teacher_forcing_ratio = 0.5

    def forward(self, source, target):
        h = self.encoder(self.embed(source))[1][0]
        token, outs = target[:, 0], []
        for t in range(1, target.size(1)):
            h = self.decoder(self.embed(token), h)
            outs.append(self.head(h))
            forced = torch.rand(1).item() < self.teacher_forcing_ratio
            token = target[:, t] if forced else outs[-1].argmax(1)
        return torch.stack(outs, 1)

model = Model()
inputs = torch.randint(20, (4, 9)), torch.randint(20, (4, 8))
```

## Healthy

```python
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)
        self.encoder, self.decoder = nn.GRU(8, 8, batch_first=True), nn.GRUCell(8, 8)
        self.teacher_forcing_ratio = 0.5

    def forward(self, source, target):
        h = self.encoder(self.embed(source))[1][0]
        token, outs = target[:, 0], []
        for t in range(1, target.size(1)):
            h = self.decoder(self.embed(token), h)
            outs.append(self.head(h))
            forced = self.training and torch.rand(1).item() < self.teacher_forcing_ratio
            token = target[:, t] if forced else outs[-1].argmax(1)
        return torch.stack(outs, 1)

model = Model()
inputs = torch.randint(20, (4, 9)), torch.randint(20, (4, 8))
```
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from torch import nn

from ...cells import Calling, taken_by_position
from ..argument_names import forces_teacher
from ..inputs import ModelInputs
from ..patient import Patient
from ..probes.feeding import Feeding, Feedings, fed
from ..rule import Rule, Symptom


def check(patient: Patient) -> Symptom | None:
    """In eval mode, the decoder is fed targets as well as what it gave itself."""
    for feeding in patient[Feedings]:
        argument = next((name for name in taken_by_position(patient.model) if forces_teacher(name)), "")
        switch, holder = ("", patient.model) if argument else _switch(patient.model)
        off = feeding.always and (argument or switch) and _turns_off(patient, feeding, argument, switch, holder)
        if not feeding.by_chance and not off:
            continue
        name, steps = patient.inputs.name(feeding.path) or "the targets", feeding.told + feeding.own
        advice = f"forced = self.training and random.random() < {f'self.{switch}' if switch else 'ratio'}"
        given = argument in patient.inputs.calling.names
        if argument:
            call = f"model(source, target, {argument}=0)"
            advice = f"{call}  # in evaluation; or look at self.training in forward"
            advice = advice if given else f"forced = self.training and random.random() < {argument}  # or call {call}"
        return Symptom(
            "note" if given else "warning",
            f"{name}, an argument of forward",
            f"in eval mode, {feeding.told} of {steps} steps after the first are fed from {name}, "
            + (
                "the others from the model's own outputs"
                if feeding.by_chance
                else f"and with {argument or switch} off 0 of them"
            )
            + " (limit: 0).",
            "whether a target is fed does not depend on the mode: eval() does not turn teacher forcing off",
            advice,
            {"told": feeding.told, "own": feeding.own, "limit": 0.0},
        )
    return None


def _switch(model: nn.Module) -> tuple[str, nn.Module]:
    """Return a number or truth value of a module that is called like a switch for teacher forcing, "" for none."""
    for module in model.modules():
        for name, value in vars(module).items():
            if forces_teacher(name) and isinstance(value, bool | int | float) and value:
                return name, module
    return "", model


def _turns_off(patient: Patient, feeding: Feeding, argument: str, switch: str, holder: nn.Module) -> bool:
    """Whether the model goes on by itself with the switch off: an argument of forward, or an attribute."""
    try:
        if argument:
            run = patient.run(_without(patient.inputs, argument), collect=True)
        else:
            with patient.afresh(), _set(holder, switch):
                run = patient.call(collect=True)
    except Exception:  # a switch of another kind
        return False
    told, own = fed(run, feeding.path)
    return own > 0 and told == 0


def _without(inputs: ModelInputs, argument: str) -> ModelInputs:
    """Return the inputs with an argument of forward set to 0, whether it was given or not."""
    how = inputs.calling
    if argument in how.names:
        return inputs.put((how.names.index(argument),), 0)
    named = Calling((*how.names, argument), how.keywords + 1)
    return replace(inputs, args=(*inputs.args, 0), calling=named)


@contextmanager
def _set(module: nn.Module, name: str) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, type(before)(0))
    try:
        yield
    finally:
        setattr(module, name, before)


RULE = Rule("HS112", "teacher forcing in evaluation", check, probes=(Feedings,))
