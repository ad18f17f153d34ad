"""HS102: the future does not count, unless there is a reason why it may."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ...cells import Call
from ...state import tensors
from ..equal import same
from ..finding import Finding
from ..patient import Patient
from ..probes.directions import directions
from ..probes.repeats import traced
from ..probes.shapes import base, layout
from ..probes.steps import future, looking_ahead


def no_future(patient: Patient) -> Finding | None:
    """HS102: the output at a step follows later steps, in a model that is not bidirectional."""
    if _runs_backwards(patient):
        return None
    seen = future(patient)
    if seen is None or not seen.cuts or _decodes(patient):
        return None
    local = seen.back <= max(3, patient.inputs.steps // 3) and seen.back < patient.inputs.steps - 1
    reason = _allowed(patient, local=local)
    summed = _sums_to_one_over_time(patient)
    cause = (
        summed
        or reason
        or (
            "the input is shifted or mixed with its neighbors before the recurrence"
            if local
            else "a mean, norm, softmax, flip or the final state is taken over all steps and given to each of them"
        )
    )
    return Finding(
        "HS102",
        "note" if (reason or (layout(patient).guessed and not _normalizes_time(patient))) and not summed else "error",
        looking_ahead(patient) or "the model",
        f"with all steps after a cut replaced, outputs up to {seen.back} steps before it changed, by "
        f"{seen.share:.2g} of "
        f"the largest change (limit {seen.limit:.1g}), at {seen.cuts} of {seen.tried} cuts.",
        cause,
        "softmax over the classes: dim=-1; statistics over the past only: x.cumsum(1) / steps; a mask on attention: "
        "scores.masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf)",
        {"share": seen.share, "limit": seen.limit, "steps": seen.back},
    )


def _normalizes_time(patient: Patient) -> bool:
    """Whether a LayerNorm has the steps among its axes."""
    norms = [module for module in patient.model.modules() if isinstance(module, nn.LayerNorm)]
    return any(len(norm.normalized_shape) > 1 and patient.inputs.steps in norm.normalized_shape for norm in norms)


def _runs_backwards(patient: Patient) -> bool:
    calls = base(patient).calls
    if any(call.layer.fused and call.layer.spec.bidirectional for call in calls):
        return True
    if any(getattr(module, "bidirectional", False) is True for module in patient.model.modules()):
        return True
    return {"forwards", "backwards"} <= set(directions(patient).values())  # two layers by hand


def _allowed(patient: Patient, *, local: bool) -> str:
    """Return a reason for which a model may well look ahead, "" where there is none."""
    modules = list(patient.model.modules())
    attention = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
    if any(isinstance(module, attention) for module in modules) or _attends(patient):
        return "attention without a causal mask looks at all steps, which is right unless the future is to be predicted"
    if any(isinstance(module, nn.modules.conv._ConvNd) for module in modules):
        return "a convolution looks at both sides of a step, which is right unless the future is to be predicted"
    return ""


def _attends(patient: Patient) -> bool:
    trace = traced(patient).trace
    if trace.named("scaled_dot_product_attention", "multi_head_attention_forward"):
        return True
    weights = {id(event.output) for event in trace.named("softmax", "sparsemax")}
    later = trace.named("bmm", "matmul", "__matmul__", "einsum", "mul", "__mul__", "__rmul__", "__rmatmul__")
    rearranged = {"transpose", "unsqueeze", "permute", "view", "reshape", "expand", "dropout", "squeeze", "__getitem__"}
    for event in trace.events:
        if (
            event.name in rearranged
            and event.inputs
            and id(event.inputs[0]) in weights
            and isinstance(event.output, Tensor)
        ):
            weights.add(id(event.output))
    return any(id(tensor) in weights for event in later for tensor in event.inputs)


def _decodes(patient: Patient) -> bool:
    """Whether a layer starts from, or is fed with, what another layer ended in."""
    calls = base(patient).calls
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
    own = [call for call in calls if call.layer.name == name]
    if len({call.layer.name for call in calls}) < 2 or isinstance(own[0].input, PackedSequence):
        return False
    fed = own[0].x if own[0].layer.fused else torch.cat([call.x for call in own], dim=1)
    return fed.shape[1] > 1 and same(fed, fed[:, :1].expand_as(fed))


def _sums_to_one_over_time(patient: Patient) -> str:
    leaf = layout(patient).main
    if leaf is None or leaf.time is None or len(leaf.shape) < 3 or leaf.shape[-1] < 2:
        return ""
    out = base(patient).outputs[leaf.path].double()
    if bool((out < 0).any()):
        out = out.exp()
    sums = out.sum(leaf.time)
    own = out.sum(-1)
    if float((sums - 1).abs().max()) < 1e-4 and float((own - 1).abs().max()) > 1e-3:
        return "the softmax runs over the steps: the output sums to 1 along time"
    return ""
