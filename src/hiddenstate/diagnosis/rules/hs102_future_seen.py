"""HS102: a step sees the future.

The output at a step follows inputs of later steps, in a model with one output for each step and no reverse direction.
Such a model cannot be used online, and its validation score promises too much.

**How it is known.** All steps after a cut are replaced, at three cuts; the outputs before the cut must stay as they
are. Bidirectional models and decoders of a summary are not asked. Bidirectional is also a model with one layer that
runs forwards and one that runs backwards, however it turns the sequence round: with the later half of the input
replaced, the one meets what is new last, the other first. Attention without a causal mask and convolutions that look at
both sides may be right: they get a note.

**Limit.** `leak = 1e-4`, relative to the largest change of all.

## Sick

```python
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 8, batch_first=True)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        out, _ = self.lstm(x)
        return torch.softmax(self.head(out), dim=1)   # over the steps

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
        return torch.softmax(self.head(out), dim=-1)  # over the classes

model = Model()
x = torch.randn(4, 10, 3)
```
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ...cells import Call
from ...state import tensors
from ..outcome import Operation, change, eps, same
from ..patient import Patient
from ..probes.calls import OutputLayout, PlainCall, TracedCall, by_rows
from ..probes.steps import Directions
from ..rule import Rule, Symptom


def check(patient: Patient) -> Symptom | None:
    """The output at a step follows later steps, in a model that is not bidirectional."""
    if _runs_backwards(patient):
        return None
    seen = _leak(patient)
    if seen is None or not seen.cuts or _decodes(patient):
        return None
    first = _looking_ahead(patient)
    summed, attention = _sums_to_one_over_time(patient), _upside_down(patient)
    reason = "" if attention else _allowed(patient)
    cause, advice = _explained(patient, first, seen.back)
    if summed or attention or reason:
        cause = summed or attention or reason
        advice = "torch.softmax(logits, dim=-1)  # over the classes" if summed else _MASK
        if reason.startswith("a convolution"):
            advice = "F.pad(x, (kernel_size - 1, 0)) before a convolution without padding looks at the past alone"
    if patient.quantized:
        reason = cause = "the scale of eight bits is taken from the values of all steps"
    unsure = reason or (patient[OutputLayout].guessed and not _normalizes_time(patient))
    limit = patient.thresholds.leak
    noise = f", and {seen.limit:.1g} for what rounding may do" if seen.limit > limit else ""
    return Symptom(
        "note" if unsure and not summed else "error",
        (first.line if first is not None else "") or "the model",
        f"with all steps after a cut replaced, outputs up to {seen.back} steps before it changed, by "
        f"{seen.share:.2g} of the largest change (limit {limit:.0e}{noise}), at {seen.cuts} of {seen.tried} cuts.",
        cause,
        advice,
        {"share": seen.share, "limit": limit, "steps": seen.back},
    )


_MASK = "scores.masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf) before the softmax, or is_causal=True"
_STATISTICS = {
    *("mean", "std", "var", "norm", "max", "min", "amax", "amin", "sum", "median", "std_mean", "var_mean", "softmax"),
    *("layer_norm", "batch_norm", "instance_norm", "group_norm", "log_softmax", "logsumexp", "adaptive_avg_pool1d"),
}


def _explained(patient: Patient, first: Operation | None, back: int) -> tuple[str, str]:
    """Return the cause and the way out, by the operation that looks ahead and by how far it does."""
    ways = set(patient[Directions].values())
    if ways == {"backwards"}:
        return (
            "the layer runs from the last step to the first, so that each of its outputs has seen all later steps",
            "for t in range(x.size(1)): h = self.cell(x[:, t], h)  # from the first step to the last",
        )
    name = first.name if first is not None else ""
    steps = (patient.inputs.steps,)
    over = [o for o in patient[TracedCall].trace if o.name in _STATISTICS and isinstance(o.output, Tensor) and o.inputs]
    over = [o for o in over if o.inputs[0].shape[1:2] == steps and o.output.shape[1:2] != steps]
    name = over[0].name if over and name not in _STATISTICS and back > 3 else name
    if name in _STATISTICS:
        return (
            f"`{name}` runs over all steps, and each of them is given the result",
            "over the features: dim=-1; or over the past alone: x.cumsum(1) / torch.arange(1, T + 1).view(1, -1, 1)",
        )
    if name in (
        "diff",
        "roll",
        "flip",
        "cat",
        "stack",
        "__getitem__",
        "narrow",
        "gather",
        "index_select",
        "pad",
        "shift",
    ):
        if back <= 3:
            fed = _input_is_ahead(patient)
            return (
                f"`{name}` puts {'the input' if fed else 'the output'} of a later step in the place of an earlier one",
                "the step before: torch.cat([x[:, :1] * 0, x[:, :-1]], dim=1)"
                if fed
                else "out, _ = self.rnn(x); return self.head(out)  # each step in its own place",
            )
        return (
            f"`{name}` lets each step have what comes after it",
            "from the past alone: x.cumsum(1) without a flip, out[:, t] in the place of out[:, -1]",
        )
    what = f"`{name}` is the first operation whose result at a step follows later ones" if name else "some operation"
    return (
        f"{what}: the final state, or something over all steps, is given to each of them"
        if name
        else "something over all steps, or the final state, is given to each of them",
        "use at each step what is known by then: the layer's own output, out, _ = self.rnn(x); self.head(out)",
    )


def _input_is_ahead(patient: Patient) -> bool:
    """Whether what enters the first layer follows later steps already."""
    inputs, aligned = patient.inputs, patient[OutputLayout].aligned
    cut = (inputs.steps + 1) // 2
    mask = (torch.arange(inputs.steps) >= cut).expand(inputs.batch, -1)
    new = patient.run(inputs.other_steps(mask, aligned, seed=cut), collect=True).calls
    for a, b in zip(patient[PlainCall].calls[:1], new[:1], strict=False):
        if a.x.shape == b.x.shape and a.x.is_floating_point() and a.x.shape[1] == inputs.steps:
            return bool((change(a.x, b.x)[:, :cut] > 0).any())
    return True


def _upside_down(patient: Patient) -> str:
    """Return the cause where the weights of attention leave out the past and keep the future, "" where not."""
    for operation in patient[TracedCall].trace.named("softmax"):
        weights = operation.output
        if weights.dim() < 2 or weights.shape[-1] != weights.shape[-2] or weights.shape[-1] < 3:
            continue
        if weights.tril(-1).any() or not weights.triu(1).any():
            continue
        return "the mask of the attention is upside down: each step sees itself and later ones, and no earlier one"
    return ""


@dataclass(frozen=True, slots=True)
class _Leak:
    """How much the output at a step follows later steps of the input."""

    share: float  # largest change before the first touched step, relative to the largest change of all
    limit: float
    back: int  # how many steps before the first touched one the output still changed
    cuts: int  # cuts at which it did, of those that were tried
    tried: int


def _leak(patient: Patient) -> _Leak | None:
    """Replace all steps after a cut, and see whether the output before it changes; None where that cannot be asked."""
    inputs, found = patient.inputs, patient[OutputLayout]
    leaf = found.main
    if leaf is None or not leaf.stepwise or not found.aligned:
        return None
    sequence, plain = inputs.argument(found.aligned[0]), patient[PlainCall].outputs[leaf.path]
    old = by_rows(plain, leaf, inputs.batch)
    steps = old.shape[1]
    if steps != (sequence.steps if inputs.lengths is None else int(inputs.lengths.max())) or steps < 2:
        return None
    share, back, hit, limit, tried = 0.0, 0, 0, patient.thresholds.leak, 0
    for cut in sorted({1, (steps + 1) // 2, steps - 1}):
        mask = (torch.arange(sequence.steps) >= cut).expand(inputs.batch, -1)
        if sequence.steps == inputs.steps:
            mask = mask & inputs.valid
        run = patient.run(inputs.other_steps(mask, found.aligned, seed=cut))
        new = run.outputs.get(leaf.path)
        if new is None or new.shape != plain.shape:
            continue
        tried += 1
        gaps = change(old, by_rows(new, leaf, inputs.batch)).reshape(*old.shape[:2], -1).max(2).values  # (batch, steps)
        alive = mask.any(1)  # a row that ended before the cut was not touched
        largest = float(gaps.max())
        early = gaps[alive][:, :cut].max(0).values if bool(alive.any()) else torch.zeros(cut)
        noise = 256 * eps(old) * float(old.abs().nan_to_num(posinf=0.0).max())
        bound = max(noise, patient.thresholds.leak * largest)
        if largest > 0 and float(early.max()) > bound:
            hit += 1
            back = max(back, cut - int((early > bound).nonzero()[0]))
            share, limit = max(share, float(early.max()) / largest), bound / largest
    return _Leak(share, limit, back, hit, tried) if tried else None


def _looking_ahead(patient: Patient) -> Operation | None:
    """Return the first operation whose steps follow later steps of the input, None where none is seen."""
    inputs, aligned = patient.inputs, patient[OutputLayout].aligned
    steps = inputs.argument(aligned[0]).steps if aligned else 0
    cut = (steps + 1) // 2
    mask = (torch.arange(steps) >= cut).expand(inputs.batch, -1)
    old = patient.run(trace=True).trace
    new = patient.run(inputs.other_steps(mask, aligned, seed=cut), trace=True).trace
    for a, b in zip(old, new, strict=False):
        if a.name != b.name:
            break
        pair = (a.output, b.output)
        if all(isinstance(t, Tensor) and t.is_floating_point() for t in pair) and _ahead(*pair, steps=steps, cut=cut):
            return a
    return None


def _ahead(old: Tensor, new: Tensor, *, steps: int, cut: int) -> bool:
    """Whether a tensor has an axis of steps, and changed before the cut along every such axis."""
    axes = [axis for axis, size in enumerate(old.shape) if size == steps]
    if not axes or old.shape != new.shape:
        return False
    changed = change(old, new) > 256 * eps(old) * (float(old.abs().nan_to_num(posinf=0.0).max()) or 1.0)
    return bool(changed.any()) and all(bool(changed.narrow(axis, 0, cut).any()) for axis in axes)


def _normalizes_time(patient: Patient) -> bool:
    """Whether a LayerNorm has the steps among its axes."""
    norms = [module for module in patient.model.modules() if isinstance(module, nn.LayerNorm)]
    return any(len(norm.normalized_shape) > 1 and patient.inputs.steps in norm.normalized_shape for norm in norms)


def _runs_backwards(patient: Patient) -> bool:
    """Whether a layer reads the sequence from its end, so that every step may follow later ones."""
    calls = patient[PlainCall].calls
    if any(call.layer.fused and call.layer.spec.bidirectional for call in calls):
        return True
    if any(getattr(module, "bidirectional", False) is True for module in patient.model.modules()):
        return True
    return {"forwards", "backwards"} <= set(patient[Directions].values())  # two layers by hand


def _allowed(patient: Patient) -> str:
    """Return a reason for which a model may well look ahead, "" where there is none."""
    modules = list(patient.model.modules())
    attention = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
    if any(isinstance(module, attention) for module in modules) or _attends(patient):
        return "attention without a causal mask looks at all steps, which is right unless the future is to be predicted"
    if any(isinstance(module, nn.modules.conv._ConvNd) for module in modules):
        return "a convolution looks at both sides of a step, which is right unless the future is to be predicted"
    return ""


def _attends(patient: Patient) -> bool:
    """Whether the result of a softmax is multiplied with something, as attention does."""
    trace = patient[TracedCall].trace
    if trace.named("scaled_dot_product_attention", "multi_head_attention_forward"):
        return True
    weights = {id(operation.output) for operation in trace.named("softmax", "sparsemax")}
    later = trace.named("bmm", "matmul", "__matmul__", "einsum", "mul", "__mul__", "__rmul__", "__rmatmul__")
    rearranged = {"transpose", "unsqueeze", "permute", "view", "reshape", "expand", "dropout", "squeeze", "__getitem__"}
    for operation in trace:
        if (
            operation.name in rearranged
            and operation.inputs
            and id(operation.inputs[0]) in weights
            and isinstance(operation.output, Tensor)
        ):
            weights.add(id(operation.output))
    return any(id(tensor) in weights for operation in later for tensor in operation.inputs)


def _decodes(patient: Patient) -> bool:
    """Whether a layer starts from, or is fed with, what another layer ended in."""
    calls = patient[PlainCall].calls
    first: dict[str, Call] = {}
    for call in calls:
        first.setdefault(call.layer.name, call)
    for name, call in first.items():
        others = [other for other in calls if other.layer.name != name]
        given = call.given
        begins = given is not None and any(bool(part.any()) for part in given.values())
        if begins and others and not _chained(call, others):
            return True
        if _constant_input(calls, name):
            return True
    return False


def _chained(call: Call, others: list[Call]) -> bool:
    """Whether a layer reads another one's outputs and starts from that one's last state, as no decoder does."""
    if isinstance(call.input, PackedSequence):
        return False
    ends = {id(part) for other in others for part in tensors(other.state_native).values()}
    starts_there = any(id(part) in ends for part in tensors(call.given_native).values())
    return starts_there and any(call.input is other.output_native for other in others)


def _constant_input(calls: list[Call], name: str) -> bool:
    """Whether a layer is fed the same at all steps, as a decoder of one summary is."""
    own = [call for call in calls if call.layer.name == name]
    if len({call.layer.name for call in calls}) < 2 or isinstance(own[0].input, PackedSequence):
        return False
    fed = own[0].x if own[0].layer.fused else torch.cat([call.x for call in own], dim=1)
    return fed.shape[1] > 1 and same(fed, fed[:, :1].expand_as(fed))


def _sums_to_one_over_time(patient: Patient) -> str:
    """Return the cause where the output is a softmax over the wrong axis, "" where it is not."""
    leaf = patient[OutputLayout].main
    if leaf is None or leaf.time is None or len(leaf.shape) < 3 or leaf.shape[-1] < 2:
        return ""
    out = patient[PlainCall].outputs[leaf.path].double()
    if bool((out < 0).any()):
        out = out.exp()
    sums = out.sum(leaf.time)
    own = out.sum(-1)
    if float((sums - 1).abs().max()) < 1e-4 and float((own - 1).abs().max()) > 1e-3:
        return "the softmax runs over the steps: the output sums to 1 along time"
    return ""


RULE = Rule(
    "HS102",
    "a step sees the future",
    check,
    probes=(Directions, OutputLayout, PlainCall, TracedCall),
    explains=("HS108",),
)
