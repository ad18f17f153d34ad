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
from ..inputs import ModelInputs
from ..outcome import Outcome, change, eps
from ..patient import Patient
from ..probes.calls import OtherSeed, OutputLayout, OutputTensor, PlainCall, TracedCall, attempt, by_rows
from ..probes.gradients import gradients
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
    if _reaches_layers(patient):
        causes.append(
            "the reverse direction begins in the padding" if _runs_backwards(patient) else "the layer reads it"
        )
        advice.append("pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)")
    if not leaf.stepwise:
        names = {operation.name for operation in patient[TracedCall].trace}
        names -= {"softmax"} if names & {"masked_fill", "masked_fill_"} else set()  # its scores are masked already
        pooled = next((each for each in _POOLS if each in names), "")
        says = f"`{pooled}` runs over padded steps too" if pooled else "the last column is taken for the last step"
        causes.append(f"{says}, or is divided by the number of all steps" if pooled == "sum" else says)
        advice.append(_POOLS.get(pooled, "out[torch.arange(len(out)), lengths - 1]"))
    if convolved:
        causes, advice = ["a convolution reaches into the padding"], ["x * mask.unsqueeze(-1) after each convolution"]
    return Symptom(
        "note" if convolved else "error",
        patient[PlainCall].calls.labels,
        f"{what}, the output at real steps moves by {moved:.2g} of its size (limit {patient.thresholds.padding:.1g}).",
        ", and ".join(causes) or "what is returned at real steps follows padded ones",
        ", and ".join(advice) or "out * mask.unsqueeze(-1), with mask = torch.arange(T) < lengths.unsqueeze(1)",
        {"moved": moved, "limit": patient.thresholds.padding},
    )


_MAX = "out.masked_fill(torch.arange(T)[None, :, None] >= lengths[:, None, None], -torch.inf).amax(1)"
_POOLS = {  # operations over the steps, and what leaves padded ones out
    "mean": "hs.pool.Mean()(out, lengths)",
    "max": _MAX,
    "amax": _MAX,
    "adaptive_max_pool1d": _MAX,
    "adaptive_avg_pool1d": "hs.pool.Mean()(out, lengths)",
    "avg_pool1d": "hs.pool.Mean()(out, lengths)",
    "softmax": "scores.masked_fill(torch.arange(T) >= lengths.unsqueeze(1), -torch.inf) before the softmax",
    "sum": "(out * mask.unsqueeze(-1)).sum(1) / lengths.unsqueeze(1), with mask = torch.arange(T) < lengths[:, None]",
}


def _runs_backwards(patient: Patient) -> bool:
    both = any(c.layer.fused and c.layer.spec.bidirectional for c in patient[PlainCall].calls)
    return both or "backwards" in patient[Directions].values()


def _reaches_layers(patient: Patient) -> bool:
    """Whether the states of a layer at real steps follow padding."""
    inputs, longer = patient.inputs, _padded(patient.inputs)
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


RULE = Rule("HS106", "padding counts", check, probes=(Directions, OtherSeed, OutputLayout, PlainCall, TracedCall))
