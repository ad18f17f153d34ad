"""HS106: padding counts.

The padding behind a short sequence takes part in its result, so that the same sequence is judged differently in another
batch.

**How it is known.** With `lengths=`, lengths among the inputs under a name such as `lengths` or `seq_len`, or a mask of
0 and 1 that marks the end of each row, as `attention_mask` does: the padding is filled with other values (where the
model is told the lengths), more padding is added, and the shortest rows are run by themselves without any. The outputs
at real steps must stay the same. A reverse layer made by hand with `x.flip(1)` begins in the padding, and is found so.
With `loss=` and `targets=`, the gradient of the loss at padded steps must be zero.

**Limit.** `padding = 1e-3`: a change of the output, relative to its size. A model with convolutions gets a note.

## Sick

```python
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 8, batch_first=True)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        out, _ = self.lstm(x)
        return self.head(out[:, -1])                  # padding, for short rows

model = Model()
x = torch.randn(4, 10, 3)
lengths = torch.tensor([10, 7, 4, 2])
options = {"lengths": lengths}
```

## Healthy

```python
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 8, batch_first=True)
        self.head = nn.Linear(8, 2)

    def forward(self, x, lengths):
        out, _ = self.lstm(x)
        return self.head(out[torch.arange(len(x)), lengths - 1])

model = Model()
x = torch.randn(4, 10, 3)
lengths = torch.tensor([10, 7, 4, 2])
options = {"lengths": lengths}
inputs = (x, lengths)
```
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ...state import tensors
from ..inputs import ModelInputs
from ..outcome import Outcome, change, eps
from ..padding import padded
from ..patient import Patient
from ..probes.calls import OtherSeed, OutputLayout, OutputTensor, PlainCall, attempt, by_rows
from ..probes.gradients import Backward, gradients
from ..probes.pooling import PooledSteps, StepPool
from ..probes.steps import Directions
from ..rule import Rule, Symptom

_MORE = 3  # steps of padding that are added


def check(patient: Patient) -> Symptom | None:
    """With lengths, more padding or other values in it move the output."""
    inputs = patient.inputs
    if inputs.lengths is None or isinstance(inputs.get(inputs.main), PackedSequence) or not inputs.batched:
        return None
    leaf = patient[OutputLayout].main
    if leaf is None or inputs.argument(inputs.main).time is None or patient[OtherSeed].gap > 0:
        return None
    seen = False
    for what, measure in (("more", _more), ("no", _trimmed), ("other values in the", _other_values)):
        if seen and measure is _other_values and _marked(inputs):
            break
        moved = measure(patient, leaf)
        seen = seen or moved is not None
        if moved is not None and moved > patient.thresholds.padding:
            return _symptom(patient, leaf, f"with {what} padding", moved)
    return _in_the_loss(patient, leaf)


def _marked(inputs: ModelInputs) -> bool:
    """Whether padding is one value throughout, by which a model may know it: that value is not for us to change."""
    argument = inputs.argument(inputs.main)
    assert argument.rows is not None
    assert argument.time is not None
    x = inputs.get(inputs.main).movedim((argument.rows, argument.time), (0, 1))
    padding = x[~inputs.valid.to(x.device)]
    return bool(padding.numel()) and bool((padding == padding.flatten()[0]).all())


def _symptom(patient: Patient, leaf: OutputTensor, what: str, moved: float) -> Symptom:
    convolved = any(isinstance(module, nn.modules.conv._ConvNd) for module in patient.model.modules())
    causes, advice = [], []
    reached = _reaches_layers(patient)
    if reached:
        causes.append(
            "the reverse direction begins in the padding" if _runs_backwards(patient) else "the layer reads it"
        )
        advice.append("pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)")
    if not leaf.stepwise:
        cause, line = _at_the_end(patient, reached=reached)
        causes += [cause] if cause else []
        advice += [line] if line else []
    if convolved:
        causes, advice = ["a convolution reaches into the padding"], ["x * mask.unsqueeze(-1) after each convolution"]
    lines = ", and ".join(advice) or "out * mask.unsqueeze(-1), with mask = torch.arange(T) < lengths.unsqueeze(1)"
    return Symptom(
        "note" if convolved else "error",
        patient[PlainCall].calls.labels,
        f"{what}, the output at real steps moves by {moved:.2g} of its size (limit {patient.thresholds.padding:.1g}).",
        ", and ".join(causes) or "what is returned at real steps follows padded ones",
        f"{_lengths(patient.inputs)}{lines}",
        {"moved": moved, "limit": patient.thresholds.padding},
    )


def _lengths(inputs: ModelInputs) -> str:
    """Return how the lengths are had from a mask, where forward takes a mask instead of them."""
    if any(argument.kind == "lengths" and argument.rows is not None for argument in inputs.arguments):
        return ""
    masks = [argument for argument in inputs.arguments if argument.real is not None and inputs.name(argument.path)]
    if not masks:
        return ""
    name, dtype = inputs.name(masks[0].path), inputs.get(masks[0].path).dtype
    marks = name if masks[0].real else f"~{name}" if dtype == torch.bool else f"1 - {name}"
    single = "" if inputs.get(masks[0].path).dim() == 2 else ".squeeze(-1)"
    whole = ".long()" if dtype.is_floating_point else ""
    return f"lengths = {marks if masks[0].real else f'({marks})'}{single}.sum({masks[0].time}){whole}; "


def _at_the_end(patient: Patient, *, reached: bool) -> tuple[str, str]:
    """Return how padding gets into the one value of each row, and what leaves it out."""
    pools = patient[PooledSteps]
    for pool in pools:
        if pool.counts:
            return f"`{pool.name}` runs over padded steps too", _left_out(pool)
    if any(pool.name == "sum" for pool in pools) and not reached:
        return "the sum is divided by the number of all steps", "out.sum(1) / lengths.unsqueeze(1)"
    if pools and reached:
        return "", ""  # what is made of the steps leaves padding out
    if reached and not _head_reads_padding(patient):
        return "", ""
    return "the last column is taken for the last step", "out[torch.arange(len(out)), lengths - 1]"


def _head_reads_padding(patient: Patient) -> bool:
    """Whether padded steps of a layer's output go into what the model returns, as far as there are any."""
    outputs = [arrival.output for arrival in patient[Backward].arrivals if arrival.output is not None]
    fits = [out.abs().sum(2) > 0 for out in outputs if out.shape[:2] == patient.inputs.valid.shape]  # (batch, time)
    return any(bool((used.cpu() & ~patient.inputs.valid).any()) for used in fits)


def _left_out(pool: StepPool) -> str:
    """Return what leaves padded steps out of an operation, written for the axes that it was applied to."""
    steps = ", ".join(":" if axis == pool.time else "None" for axis in range(len(pool.shape)))
    rows = ", ".join(":" if axis == pool.rows else "None" for axis in range(len(pool.shape)))
    padding = f"torch.arange(out.size({pool.time}))[{steps}] >= lengths[{rows}]"
    if pool.name in ("mean", "adaptive_avg_pool1d", "avg_pool1d"):
        turned = "out" if (pool.rows, pool.time) == (0, 1) else f"out.movedim(({pool.rows}, {pool.time}), (0, 1))"
        return f"hs.pool.Mean()({turned}, lengths)"
    if pool.name == "softmax":
        return f"scores.masked_fill({padding.replace('out', 'scores')}, -torch.inf) before the softmax"
    if pool.name == "sum":
        return f"out.masked_fill({padding}, 0).sum({pool.time})"
    return f"out.masked_fill({padding}, -torch.inf).amax({pool.time})"


def _runs_backwards(patient: Patient) -> bool:
    both = any(c.layer.fused and c.layer.spec.bidirectional for c in patient[PlainCall].calls)
    return both or "backwards" in patient[Directions].values()


def _reaches_layers(patient: Patient) -> bool:
    """Whether the states of a layer at real steps follow padding."""
    inputs, longer = patient.inputs, padded(patient.inputs, _MORE)
    run = None if longer is None else attempt(patient, longer)
    if run is None:
        free = replace(inputs, pad_token=None)
        run = attempt(patient, free.other_steps(~inputs.valid, (inputs.main,), seed=7))
    for a, b in zip(patient[PlainCall].calls, run.calls if run is not None else (), strict=False):
        steps = min(a.steps, b.steps, inputs.steps)
        if a.rows != inputs.batch or b.rows != a.rows or not a.layer.fused:
            continue
        gaps = change(a.output[:, :steps], b.output[:, :steps]).flatten(2).amax(2)[inputs.valid[:, :steps]]
        if bool((gaps > 1e-4).any()):
            return True
    return False


def _moved(patient: Patient, leaf: OutputTensor, run: Outcome) -> float | None:
    """Return how far the output at real steps is from the plain call's; None where they cannot be compared."""
    inputs = patient.inputs
    new = run.outputs.get(leaf.path)
    if new is None or new.dim() != len(leaf.shape):
        return None
    old = by_rows(patient[PlainCall].outputs[leaf.path], leaf, inputs.batch)
    fresh = by_rows(new, leaf, run.inputs.batch)
    if len(fresh) != len(old):
        return None
    valid = torch.ones(len(old), 1, dtype=torch.bool)
    if leaf.stepwise:
        steps = min(old.shape[1], fresh.shape[1])
        old, fresh = old[:, :steps], fresh[:, :steps]
        valid = inputs.valid[:, :steps]
    if old.shape != fresh.shape:
        return None
    return _relative(old, fresh, valid)


def _relative(old: Tensor, new: Tensor, valid: Tensor) -> float:
    gaps = change(old, new).reshape(*old.shape[: valid.dim() if valid.shape[1] > 1 else 1], -1).max(-1).values
    gaps = gaps[valid] if gaps.dim() == 2 else gaps
    size = float(old.abs().nan_to_num(posinf=0.0, neginf=0.0).max()) or 1.0
    share = float(gaps.max()) / size if gaps.numel() else 0.0
    return share if share > 64 * eps(old) else 0.0


def _knows_lengths(inputs: ModelInputs) -> bool:
    return any(argument.kind in ("lengths", "mask") and argument.rows is not None for argument in inputs.arguments)


def _other_values(patient: Patient, leaf: OutputTensor) -> float | None:
    """Put other values into the padding, where the model is told the lengths; else it may know padding by its value."""
    inputs = patient.inputs
    padding = ~inputs.valid
    if not _knows_lengths(inputs) or not bool(padding.any()):
        return None
    free = replace(inputs, pad_token=None)
    return _moved(patient, leaf, patient.run(free.other_steps(padding, (inputs.main,), seed=7)))


def _more(patient: Patient, leaf: OutputTensor) -> float | None:
    """Add steps of padding."""
    longer = padded(patient.inputs, _MORE)
    if longer is None:
        return None
    try:
        return _moved(patient, leaf, patient.run(longer))
    except Exception:  # a model of fixed length
        return None


def _trimmed(patient: Patient, leaf: OutputTensor) -> float | None:
    """Run the shortest rows by themselves, without any padding."""
    inputs = patient.inputs
    assert inputs.lengths is not None
    short = int(inputs.lengths.min())
    if short >= inputs.steps or short < 1:
        return None
    rows = (inputs.lengths == short).nonzero()[:, 0].tolist()
    alone = inputs.select(rows)
    paths = tuple(s.path for s in inputs.arguments if s.time is not None and s.steps == inputs.steps)
    try:
        run = patient.run(alone.crop(short, paths))
    except Exception:  # a model of fixed length
        return None
    new = run.outputs.get(leaf.path)
    if new is None or new.dim() != len(leaf.shape):
        return None
    old = by_rows(patient[PlainCall].outputs[leaf.path], leaf, inputs.batch)[rows]
    fresh = by_rows(new, leaf, len(rows))
    if leaf.stepwise:
        steps = min(old.shape[1], fresh.shape[1], short)
        old, fresh = old[:, :steps], fresh[:, :steps]
    if old.shape != fresh.shape:
        return None
    return _relative(old, fresh, torch.ones(len(rows), 1, dtype=torch.bool))


def _in_the_loss(patient: Patient, leaf: OutputTensor) -> Symptom | None:
    """Report a loss that follows the output at padded steps."""
    if patient.loss is None or not leaf.stepwise or leaf.merged or not bool((~patient.whole.valid).any()):
        return None
    inputs = patient.whole
    run = patient.run(inputs, grad=True)
    out = run.outputs[leaf.path]
    if not out.requires_grad:
        return None
    total = patient.loss(run.result, patient.targets)
    if not any(t is out for t in tensors(run.result).values()):
        return None
    (gradient,) = gradients(total, [out])
    if gradient is None:
        return None
    sizes = by_rows(gradient, leaf, inputs.batch).abs().cpu()
    sizes = sizes.reshape(*sizes.shape[:2], -1).max(2).values  # (batch, time)
    padding = ~inputs.valid[:, : sizes.shape[1]]
    share = float((sizes * padding).max()) / (float(sizes.max()) or 1.0)
    if share <= patient.thresholds.padding:
        return None
    return Symptom(
        "warning",
        "the loss",
        f"the gradient of the loss at padded steps is {share:.2g} of its largest "
        f"(limit {patient.thresholds.padding:.1g}).",
        "the loss averages over all steps, padded ones among them",
        "F.cross_entropy(out.transpose(1, 2), targets, ignore_index=pad), or loss[mask].mean()",
        {"share": share, "limit": patient.thresholds.padding},
    )


RULE = Rule(
    "HS106",
    "padding counts",
    check,
    probes=(Backward, Directions, OtherSeed, OutputLayout, PlainCall, PooledSteps),
)
