"""Steps in time: the past counts, the present counts, the future does not, and gradients go back."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ..finding import Finding
from ..patient import Patient
from ..probes.cells import steps_of_cells, trials
from ..probes.gradients import backward
from ..probes.repeats import gap, traced
from ..probes.shapes import base, layout, stepwise
from ..probes.steps import future, reach, replaced_everywhere
from ..tree import spelled
from ..watching import Call, same
from .states import not_saturated, rows_differ, steps_differ


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
        "note" if (reason or layout(patient).guessed and not _normalizes_time(patient)) and not summed else "error",
        _line_over_time(patient) or "the model",
        f"with all steps after a cut replaced, outputs up to {seen.back} steps before it changed, by {seen.share:.2g} of "
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
    calls = base(patient).watch.calls
    if any(call.layer.fused and call.layer.spec.bidirectional for call in calls):
        return True
    if any(getattr(module, "bidirectional", False) is True for module in patient.model.modules()):
        return True
    # Two layers by hand, one of which is given the sequence in reverse.
    fused = [call for call in calls if call.layer.fused and not isinstance(call.x, PackedSequence)]
    sources = [call.source[0] for call in fused]
    if any(a.shape == b.shape and a is not b and same(a, b.flip(1)) for a in sources for b in sources):
        return True
    flips = traced(patient).trace.named("flip", "fliplr", "flipud")
    return len({call.layer.name for call in calls}) > 1 and bool(flips)


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
        if event.name in rearranged and event.inputs and id(event.inputs[0]) in weights and isinstance(event.output, Tensor):
            weights.add(id(event.output))
    return any(id(tensor) in weights for event in later for tensor in event.inputs)


def _decodes(patient: Patient) -> bool:
    """Whether a layer starts from, or is fed with, what another layer ended in."""
    calls = [call for call in base(patient).watch.calls if call.state is not None]
    first: dict[str, Call] = {}
    for call in calls:
        first.setdefault(call.layer.name, call)
    finals: list[Tensor] = []
    for name, call in first.items():
        others = [part for c in calls if c.layer.name != name and c.state is not None for part in c.state.values()]
        finals = [part.detach() for part in others]
        if call.given is not None and any(float(part.abs().max()) > 0 for part in call.given.values()) and finals:
            return True
        if _constant_input(calls, name):
            return True
    return False


def _constant_input(calls: list[Call], name: str) -> bool:
    own = [call for call in calls if call.layer.name == name]
    if len({call.layer.name for call in calls}) < 2 or isinstance(own[0].x, PackedSequence):
        return False
    fed = own[0].source[0] if own[0].layer.fused else torch.cat([call.source[0] for call in own], dim=1)
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


def _line_over_time(patient: Patient) -> str:
    names = ("softmax", "log_softmax", "flip", "roll", "mean", "std", "layer_norm", "batch_norm", "instance_norm", "sum")
    lines = [event.line for event in traced(patient).trace.named(*names) if event.line]
    return lines[0] if lines else ""


def state_used(patient: Patient) -> Finding | None:
    """HS103: what came before does not reach what comes now."""
    return _handed_in(patient) or _cell_forgets(patient) or _never_handed_on(patient) or _nothing_earlier(patient)


def _handed_in(patient: Patient) -> Finding | None:
    states = [slot for slot in patient.inputs.slots if slot.kind == "state"]
    if not states or patient.alone:
        return None
    mask = torch.ones(patient.inputs.batch, dtype=torch.bool)
    changed = patient.inputs
    everything = patient.inputs.other_rows(mask, seed=2)
    for slot in states:
        changed = changed.put(slot.path, everything.get(slot.path))
    if gap(base(patient), patient.run(changed)) > patient.thresholds.reach:
        return None
    return _forgotten(
        f"argument {states[0].path[0] + 1} of forward",
        "the state that is handed in was replaced by another, and no output changed (0, limit 1e-06).",
        "forward takes a state and does not pass it to the layer",
        "out, state = self.lstm(x, state)",
    )


def _cell_forgets(patient: Patient) -> Finding | None:
    for trial in trials(patient):
        unused = [part for part, moved in trial.by_part.items() if moved == 0]
        if unused and len(unused) == len(trial.by_part):
            return _forgotten(
                trial.name,
                "the cell's next state and output are the same whatever state it is given (change 0, limit 1e-06).",
                "the recurrent term is missing: the next state is computed from the input alone",
                "h = torch.tanh(self.input(x) + self.recurrent(h))",
            )
        if unused and "h" not in unused:
            return _forgotten(
                f"{trial.name} part {unused[0]}",
                f"the next state does not change with part {unused[0]!r} of the state (change 0, limit 1e-06).",
                f"part {unused[0]!r} is computed anew at each step instead of from its last value",
                "c = f * c + i * g",
            )
    return None


def _never_handed_on(patient: Patient) -> Finding | None:
    for name, steps in steps_of_cells(patient).items():
        constant = steps.constant_parts()
        if steps.starts_anew or constant:
            part = "" if steps.starts_anew or len(constant) == len(steps.parts) else f" part {constant[0]}"
            return _forgotten(
                name + part,
                f"called {len(steps.calls)} times in one forward, and each time with the same first state"
                f"{part and ' in' + part}: {len(steps.calls)} of {len(steps.calls)} calls (limit: 1).",
                "the state is made anew inside the loop over time, or what the cell returns is not handed on",
                "make the first state before the loop, and hand it on: h = self.cell(x_t, h)",
            )
    return None


def _nothing_earlier(patient: Patient) -> Finding | None:
    if patient.inputs.steps < 2 or not _recurrent(patient):
        return None
    seen = reach(patient)
    if seen.earlier is None or seen.earlier > patient.thresholds.reach or not seen.all:
        return None
    if not_saturated(patient) is not None or rows_differ(patient) is not None and steps_differ(patient) is None:
        return None  # then nothing passes from step to step, whatever the model does
    return _forgotten(
        _name_of_layers(patient),
        f"with all steps but the last replaced, the last output moved by {seen.earlier:.2g} of its size "
        f"(limit {patient.thresholds.reach:.0e}).",
        "the state is made anew at each step, or the recurrent term is missing",
        "make the first state before the loop, and hand it on: h = self.cell(x_t, h)",
    )


def _recurrent(patient: Patient) -> bool:
    if base(patient).watch.calls or patient.layers:
        return True
    words = ("rnn", "lstm", "gru", "recur", "hidden", "_hh", "w_h", "h2", "2h", "cell", "u_")
    names = [type(m).__name__ for m in patient.model.modules()] + [n for n, _ in patient.model.named_parameters()]
    if any(word in name.lower() for name in names for word in words):
        return True
    code = getattr(getattr(type(patient.model), "forward", None), "__code__", None)
    variables = {name.lower() for name in code.co_varnames} if code is not None else set()
    return bool(variables & {"h", "hx", "hidden", "state", "states", "h_t", "ht", "h_prev", "hiddens", "h0", "hidden_state"})


def _name_of_layers(patient: Patient) -> str:
    names = list(dict.fromkeys(call.layer.name for call in base(patient).watch.calls))
    return ", ".join(name or "the model itself" for name in names) or "the model"


def _forgotten(where: str, evidence: str, cause: str, advice: str) -> Finding:
    return Finding("HS103", "error", where, evidence, cause, advice, {"change": 0.0, "limit": 1e-6})


def input_used(patient: Patient) -> Finding | None:
    """HS104: the input does not reach the output."""
    limit = patient.thresholds.reach
    for trial in trials(patient):
        if trial.by_input == 0:
            return Finding(
                "HS104",
                "error",
                trial.name,
                "the cell's next state and output are the same whatever input it is given (change 0, limit 1e-06).",
                "the term with the input is missing from the cell",
                "h = torch.tanh(self.input(x) + self.recurrent(h))",
                {"change": 0.0, "limit": limit},
            )
    seen = reach(patient)
    if seen.all is not None and seen.all <= limit and gap(base(patient), _all_replaced(patient)) <= limit:
        return Finding(
            "HS104",
            "error",
            _name_of_layers(patient),
            f"with every step of the input replaced, the output moved by {seen.all:.2g} of its size (limit {limit:.0e}).",
            "the output is computed from something else: another variable, a constant, a first state",
            "follow x through forward: each result must be passed on, as in x = self.embed(x); out, _ = self.lstm(x)",
            {"change": seen.all, "limit": limit},
        )
    return _second_input_unused(patient) or _one_step_late(patient)


def _all_replaced(patient: Patient):  # type: ignore[no-untyped-def]
    return patient.run(patient.inputs.other_rows(torch.ones(patient.inputs.batch, dtype=torch.bool), seed=9))


def _second_input_unused(patient: Patient) -> Finding | None:
    limit = patient.thresholds.reach
    for slot in patient.inputs.slots:
        if slot.kind != "sequence" or slot.path == patient.inputs.main or slot.time is None:
            continue
        # Teacher forcing is for training only: an input counts as unused when neither mode uses it.
        if gap(*replaced_everywhere(patient, slot.path)) > limit:
            continue
        if gap(*replaced_everywhere(patient, slot.path, train=True)) > limit:
            continue
        return Finding(
            "HS104",
            "warning",
            f"input{spelled(slot.path)}",
            f"with every step of this input replaced, no output moved, in eval and in training (0, limit {limit:.0e}).",
            "it is overwritten or mistaken for another variable in forward",
            "use it: b = self.tower(second)",
            {"change": 0.0, "limit": limit},
        )
    return None


def _one_step_late(patient: Patient) -> Finding | None:
    leaf = layout(patient).main
    seen = reach(patient)
    if leaf is None or not stepwise(leaf) or seen.last is None or seen.last > patient.thresholds.reach or not seen.earlier:
        return None
    return Finding(
        "HS104",
        "note",
        _name_of_layers(patient),
        f"the last output does not follow the last step of the input (moved by {seen.last:.2g}), only earlier ones.",
        "the output is taken before the state is updated, or the input is shifted inside the model",
        "update first, then read: h = self.cell(x_t, h); y = self.head(h)",
        {"change": seen.last, "limit": patient.thresholds.reach},
    )


def gradient_flows(patient: Patient) -> Finding | None:
    """HS105: earlier inputs change the output, but no gradient reaches them."""
    if not _trainable(patient):
        return None
    for trial in trials(patient):
        if trial.cut:
            return _cut(trial.name, "inside the cell", trial.cut, traced_line(patient))
    for name, steps in steps_of_cells(patient).items():
        cuts = steps.detached()
        if cuts and cuts == len(steps.calls) - 1:
            seen = f"the state that enters the cell has no graph at {cuts} of {cuts} steps"
            return _cut(name, "between two steps", seen, traced_line(patient))
    return _whole_cut(patient)


def _whole_cut(patient: Patient) -> Finding | None:
    seen = reach(patient)
    if not seen.earlier or seen.earlier <= patient.thresholds.reach:
        return None
    found = backward(patient)
    if not found.connected:
        seen_text = f"earlier steps move the last output by {seen.earlier:.2g} of its size, and it has no graph at all"
        return _cut("the model", "before it is returned", seen_text, traced_line(patient))
    if not found.steps:
        return None
    last = patient.inputs.last
    largest = 0.0
    for sizes in found.steps.values():
        if sizes.shape[1] < 2:
            continue
        ends = last if len(last) == len(sizes) and sizes.shape[1] == patient.inputs.steps else None
        stop = ends.clamp(max=sizes.shape[1] - 1) if ends is not None else torch.full((len(sizes),), sizes.shape[1] - 1)
        earlier = torch.arange(sizes.shape[1]).unsqueeze(0) < stop.unsqueeze(1)
        largest = max(largest, float((sizes * earlier).nan_to_num(nan=1.0).max()))
    if largest > 0:
        return None
    text = f"earlier steps move the last output by {seen.earlier:.2g} of its size, and their gradient is exactly 0"
    return _cut(_name_of_layers(patient), "between two steps", text, traced_line(patient))


def _trainable(patient: Patient) -> bool:
    mine = [p for layer in patient.layers for p in layer.module.parameters()] or list(patient.model.parameters())
    return any(parameter.requires_grad for parameter in mine)


def traced_line(patient: Patient) -> str:
    """Return the line on which a graph is cut, "" where none is seen."""
    events = traced(patient).trace.named("detach", "detach_", "get:data", "tensor", "numpy", "item", "tolist")
    return next((event.line for event in events if event.line), "")


def _cut(where: str, place: str, seen: str, line: str) -> Finding:
    return Finding(
        "HS105",
        "error",
        f"{where} ({line})" if line else where,
        f"{seen} (limit: above 0).",
        f"the graph is cut {place}: detach(), .data, torch.no_grad(), .item() or torch.tensor(...) on the way",
        "hand the state on as it is: h = self.cell(x_t, h); detach only between batches, outside forward",
        {"gradient": 0.0, "limit": 0.0},
    )
