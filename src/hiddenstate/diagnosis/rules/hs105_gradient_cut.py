"""HS105: gradient cut.

Earlier inputs change the output, but no gradient reaches them: the model uses its past and cannot learn to.

**How it is known.** Replaced inputs move the output (as for HS103), and the gradient of the output to them is exactly
zero. For a cell in a loop, the state that enters a step is asked whether it still has the graph with which it left the
step before; a cell of your own is differentiated by itself. Detaching between chunks of several steps is truncation:
a note says how far gradients reach. A layer that the output follows, and none of whose weights a gradient reaches, is
a warning: what it gives was detached on the way to another layer.

**Limit.** Exactly zero.

## Sick

```python
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(3, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        h = x.new_zeros(len(x), 8)
        for x_t in x.unbind(1):
            h = self.cell(x_t, h.detach())
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

from ..advice import path_of
from ..graphs import cut_spans, place_of_cut
from ..outcome import COMPARISONS, Operation, Operations
from ..patient import Patient
from ..probes.calls import OutputLayout, PlainCall, RepeatedCall, TracedCall
from ..probes.cells import CellTrials, SteppedCells
from ..probes.gradients import Backward, ParameterGradients, backward_to_steps, matters, reaches_outputs
from ..probes.states import SaturatedStates
from ..probes.steps import Reach
from ..rule import Rule, Symptom


def check(patient: Patient) -> Symptom | None:
    """Earlier inputs change the output, but no gradient reaches them."""
    if not _trainable(patient):
        return None
    for trial in patient[CellTrials]:
        if trial.cut:
            return _cut(patient, trial.name, "inside the cell", trial.cut)
    for name, steps in patient[SteppedCells].items():
        cuts = steps.detached()
        if cuts and cuts == len(steps.calls) - 1:
            seen = f"the state that enters the cell has no graph at {cuts} of {cuts} steps"
            return _cut(patient, name, "between two steps", seen)
    return _whole_cut(patient) or _between_modules(patient) or _truncated(patient)


def _between_modules(patient: Patient) -> Symptom | None:
    """Report a recurrent layer that the output follows, and none of whose weights a gradient reaches."""
    found, named = patient[ParameterGradients], dict(patient.model.named_parameters())
    for layer in patient.layers if found.usable else ():
        own = {id(p) for p in layer.module.parameters()}
        names = [name for name, p in named.items() if id(p) in own and p.requires_grad]
        if not names or not found.missing.issuperset(names) or not matters(patient, names[0]):
            continue
        if patient.loss is not None and reaches_outputs(patient, names[0]):
            continue  # the loss does not use it
        line, by = place_of_cut(patient[TracedCall], *layer.module.parameters())
        return Symptom(
            "warning",
            f"{layer.label} ({line})" if line else layer.label,
            f"the output follows what it gives, and a gradient reaches 0 of its {len(names)} weights (needed: all).",
            f"the graph is cut behind the layer, on the way to another: {by or 'torch.no_grad()'}"
            + (f" on {line}" if line else ""),
            f"hand on what it gives with its graph: without {by or 'torch.no_grad()'}; or, where this is meant, "
            f"{path_of('model', layer.name)}.requires_grad_(False)",
            {"reached": 0.0, "weights": len(names)},
        )
    return None


def _truncated(patient: Patient) -> Symptom | None:
    """Note how far gradients reach back, where a state loses its graph now and then."""
    calls = patient[Backward].outcome.calls
    for layer in patient.layers:
        spans = cut_spans(calls.of(layer))
        reach, steps = max(spans, default=0), sum(spans)
        if reach < steps:
            line, _ = place_of_cut(patient[TracedCall])
            return Symptom(
                "note",
                f"{layer.label} ({line})" if line else layer.label,
                f"gradients reach back {reach} of {steps} steps (limit: all).",
                "the state is handed on without its graph inside forward: detach(), .data or torch.no_grad()",
                "# hand the state on as it is within forward, and detach it between batches; or leave it as truncation",
                {"reach": reach, "steps": steps},
            )
    return None


def _whole_cut(patient: Patient) -> Symptom | None:
    """Report earlier steps that move the final output, and get no gradient from it."""
    seen = patient[Reach]
    if not seen.earlier or seen.earlier <= patient.thresholds.reach or patient[SaturatedStates].track:
        return None  # saturated, a gradient may well underflow to 0 on its way
    found = patient[Backward]
    if not found.connected:
        seen_text = f"earlier steps move the last output by {seen.earlier:.2g} of its size, and it has no graph at all"
        return _cut(patient, "the model", "before it is returned", seen_text)
    if not found.steps or _reaches_back(found) or _cut_now_and_then(patient):
        return None
    text = f"earlier steps move the last output by {seen.earlier:.2g} of its size, and their gradient is exactly 0"
    after = all(not bool(sizes.any()) for sizes in found.steps.values())  # not even the last step gets one
    return _cut(patient, patient[PlainCall].calls.labels, "after the layer" if after else "between two steps", text)


def _reaches_back(found: Backward) -> bool:
    """Whether the gradient of a final output reaches any step before the last, or nothing has two steps to tell it."""
    inputs = found.outcome.inputs
    largest = 0.0
    several = [sizes for sizes in found.steps.values() if sizes.shape[1] > 1]
    if not several:
        return True
    for sizes in several:
        fits = len(inputs.last) == len(sizes) and sizes.shape[1] == inputs.steps
        ends = inputs.last.clamp(max=sizes.shape[1] - 1) if fits else torch.full((len(sizes),), sizes.shape[1] - 1)
        earlier = torch.arange(sizes.shape[1]).unsqueeze(0) < ends.unsqueeze(1)
        largest = max(largest, float((sizes * earlier).nan_to_num(nan=1.0).max()))
    return largest > 0


def _cut_now_and_then(patient: Patient) -> bool:
    """Whether a cut that the last step begins with is one of every few steps, as truncated backpropagation makes."""
    inputs = patient.inputs
    if inputs.steps < 3:
        return False
    paths = [a.path for a in inputs.arguments if a.time is not None and a.steps == inputs.steps]
    try:
        return _reaches_back(backward_to_steps(patient, inputs.crop(int(inputs.last.max()), paths)))
    except Exception:  # a model of fixed length
        return False


def _trainable(patient: Patient) -> bool:
    mine = [p for layer in patient.layers for p in layer.module.parameters()] or list(patient.model.parameters())
    return any(parameter.requires_grad for parameter in mine) and not patient.quantized  # whole numbers have no slope


def _cut(patient: Patient, where: str, place: str, seen: str) -> Symptom:
    line, by = place_of_cut(patient[TracedCall])
    trace = patient[TracedCall].trace
    hard = [] if line else trace.named("argmax", "one_hot", "round", "sign", "topk", "heaviside") or _compared(trace)
    cause = f"the graph is cut {place}: " + (
        f"{by} on {line}" if by else "torch.no_grad() on the way, since nothing that is called there detaches"
    )
    advice = "hand the state on as it is: h = self.cell(x_t, h); detach only between batches, outside forward"
    if place == "after the layer":
        advice = "return self.head(out)  # with out as the layer gave it, and no detach in between"
    if hard:
        line = hard[0].line
        cause = f"`{hard[0].name}` has no gradient, and all that is handed on goes through it"
        name = hard[0].name
        advice = "soft = logits.softmax(-1); s = hard + soft - soft.detach(), or F.gumbel_softmax(logits, hard=True)"
        if name in ("round", "sign", "heaviside"):
            advice = f"h = h + (torch.{name}(h) - h).detach()  # straight through: its value, and a slope of 1"
        if name in COMPARISONS:
            cause = f"a comparison (`{name}`) has no slope, and all that is handed on goes through it: spikes, for one"
            advice = "soft = torch.sigmoid(5 * (v - threshold)); spikes = hard + (soft - soft.detach())  # a surrogate"
    return Symptom(
        "error",
        f"{where} ({line})" if line else where,
        f"{seen} (limit: above 0).",
        cause,
        advice,
        {"gradient": 0.0, "limit": 0.0},
    )


def _compared(trace: Operations) -> list[Operation]:
    """Return the comparisons of units, of which numbers are made."""
    found = [o for o in trace.named(*COMPARISONS) if any(t.is_floating_point() and t.dim() > 1 for t in o.inputs)]
    numbers = {id(t) for o in trace.named("float", "to", "type", "double", "half", "where", "mul") for t in o.inputs}
    return [o for o in found if o.line and id(o.output) in numbers]


RULE = Rule(
    "HS105",
    "gradient cut",
    check,
    probes=(
        Backward,
        CellTrials,
        OutputLayout,
        ParameterGradients,
        PlainCall,
        Reach,
        RepeatedCall,
        SaturatedStates,
        SteppedCells,
        TracedCall,
    ),
    explains=("HS302", "HS501", "HS503"),
)
