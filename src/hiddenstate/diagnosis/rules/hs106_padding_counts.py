"""HS106: padding counts.

The padding behind a short sequence takes part in its result, so that the same sequence is judged differently in another
batch.

**How it is known.** With `lengths=`, or lengths among the inputs under a name such as `lengths` or `seq_len`: the
padding is filled with other values (where the model is told the lengths), more padding is added, and the shortest rows
are run by themselves without any. The outputs at real steps must stay the same. A reverse layer made by hand with
`x.flip(1)` begins in the padding, and is found so. With `loss=` and `targets=`, the gradient of the loss at padded
steps must be zero.

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
from ..difference import change, eps
from ..inputs import ModelInputs
from ..outcome import Outcome
from ..patient import Patient
from ..probes.calls import OtherSeed, PlainCall
from ..probes.gradients import gradients
from ..probes.layout import OutputLayout, OutputTensor, by_rows
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
    for what, measure in (("other values in it", _other_values), ("more of it", _more), ("none of it", _trimmed)):
        moved = measure(patient, leaf)
        if moved is not None and moved > patient.thresholds.padding:
            return _symptom(patient, what, moved)
    return _in_the_loss(patient, leaf)


def _symptom(patient: Patient, what: str, moved: float) -> Symptom:
    convolved = any(isinstance(module, nn.modules.conv._ConvNd) for module in patient.model.modules())
    both = any(c.layer.fused and c.layer.spec.bidirectional for c in patient[PlainCall].calls)
    both = both or "backwards" in patient[Directions].values()
    cause = "the last column is taken, or steps are averaged, as if every row had all steps"
    if both:
        cause = "the reverse direction begins in the padding"
    if convolved:
        cause = "a convolution reaches into the padding"
    return Symptom(
        "note" if convolved else "error",
        patient[PlainCall].calls.labels,
        f"{what} moves the output at real steps by {moved:.2g} of its size (limit {patient.thresholds.padding:.1g}).",
        cause,
        "pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False), or "
        "out[torch.arange(len(out)), lengths - 1]; for means a mask: hs.pool.Mean()(out, lengths)",
        {"moved": moved, "limit": patient.thresholds.padding},
    )


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
    longer = _padded(patient.inputs)
    if longer is None:
        return None
    try:
        return _moved(patient, leaf, patient.run(longer))
    except Exception:  # a model of fixed length
        return None


def _padded(inputs: ModelInputs) -> ModelInputs | None:
    changed = inputs
    for argument in inputs.arguments:
        if argument.time is None or argument.steps != inputs.steps or argument.kind not in ("sequence", "mask"):
            continue
        if argument.kind == "sequence" and argument.path != inputs.main:
            return None  # other sequences beside it: how they are padded is unknown
        x = inputs.get(argument.path)
        shape = list(x.shape)
        shape[argument.time] = _MORE
        changed = changed.put(
            argument.path, torch.cat([x, x.new_full(shape, _pad_value(inputs, argument.kind, x))], argument.time)
        )
    arguments = tuple(replace(s, steps=s.steps + _MORE) if s.steps == inputs.steps else s for s in inputs.arguments)
    return replace(changed, arguments=arguments, steps=inputs.steps + _MORE)


def _pad_value(inputs: ModelInputs, kind: str, x: Tensor) -> float:
    if kind == "mask" or x.is_floating_point():
        return 0
    if inputs.pad_token is not None:
        return inputs.pad_token
    argument = inputs.argument(inputs.main)
    assert argument.rows is not None
    assert argument.time is not None
    padding = x.movedim((argument.rows, argument.time), (0, 1))[~inputs.valid.to(x.device)]
    return int(padding.flatten()[0]) if padding.numel() else 0


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


RULE = Rule("HS106", "padding counts", check, probes=(Directions, OtherSeed, OutputLayout, PlainCall))
