"""HS112: teacher forcing in evaluation.

In eval mode the decoder is still fed the targets, where it should go on from its own outputs: validation looks far
better than what the model gives later, when nobody knows the targets.

**How it is known.** In eval mode, with several seeds, what the decoder is fed at each step is compared with the steps of
each input. Some of them being steps of the targets and others the model's own, by chance, is teacher forcing that goes
on. So it is where all are targets, and none is with a switch of that name (`teacher_forcing`, `tf_ratio`) turned off.
A model that reads a given beginning and then goes on by itself is healthy, and so is one that knows no other way than
to be fed its targets. Where the switch is an argument of forward, it is the caller's: a note says how to turn it off.

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

import re
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from ..calling import taken_by_position
from ..patient import Patient
from ..probes.feeding import Feeding, Feedings, fed
from ..rule import Rule, Symptom

_SWITCH = re.compile(r"teacher|forcing|(^|_)tf(_|$)|scheduled|sampling_(p|rate|ratio|prob)|ground_?truth|use_(gt|targets?)")


def check(patient: Patient) -> Symptom | None:
    """In eval mode, the decoder is fed targets as well as what it gave itself."""
    for feeding in patient[Feedings]:
        switch, holder = _switch(patient.model)
        by_caller = any(_SWITCH.search(name) for name in taken_by_position(patient.model))
        if not feeding.by_chance and not (feeding.always and switch and _turns_off(patient, holder, switch, feeding)):
            continue
        name = patient.inputs.name(feeding.path) or "the targets"
        self_name = f"self.{switch}" if switch else "ratio"
        advice = f"forced = self.training and random.random() < {self_name}"
        if by_caller:
            argument = next(name for name in taken_by_position(patient.model) if _SWITCH.search(name))
            advice = f"model(source, target, {argument}=0)  # in evaluation; or look at self.training in forward"
        return Symptom(
            "note" if by_caller else "warning",
            f"{name}, an argument of forward",
            f"in eval mode, {feeding.told} of {feeding.told + feeding.own} steps after the first are fed from {name}, "
            f"the others from the model's own outputs (limit: 0)."
            if feeding.by_chance
            else f"in eval mode, {feeding.told} of {feeding.told} steps after the first are fed from {name}, and with "
            f"{switch} off 0 of them (limit: 0).",
            "whether a target is fed does not depend on the mode: eval() does not turn teacher forcing off",
            advice,
            {"told": feeding.told, "own": feeding.own, "limit": 0.0},
        )
    return None


def _switch(model: nn.Module) -> tuple[str, nn.Module]:
    """Return a number or truth value of a module that is called like a switch for teacher forcing, "" for none."""
    for module in model.modules():
        for name, value in vars(module).items():
            if _SWITCH.search(name.lower()) and isinstance(value, bool | int | float) and value:
                return name, module
    return "", model


def _turns_off(patient: Patient, holder: nn.Module, name: str, feeding: Feeding) -> bool:
    """Whether the model goes on by itself with the switch off."""
    with patient.afresh(), _set(holder, name):
        run = patient.call(collect=True)
    told, own = fed(run, feeding.path)
    return own > 0 and told == 0


@contextmanager
def _set(module: nn.Module, name: str) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, type(before)(0))
    try:
        yield
    finally:
        setattr(module, name, before)


RULE = Rule("HS112", "teacher forcing in evaluation", check, probes=(Feedings,))
