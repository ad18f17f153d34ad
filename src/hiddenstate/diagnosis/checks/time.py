"""Steps in time: the past counts, the present counts, and gradients go back."""

from __future__ import annotations

import torch

from ...state import spelled
from ..finding import Finding
from ..patient import Patient
from ..probes.cells import steps_of_cells, trials
from ..probes.gradients import Backward, backward, one_step_less
from ..probes.repeats import gap, traced
from ..probes.shapes import base, layout, stepwise
from ..probes.steps import reach, replaced_everywhere
from .states import not_saturated, rows_differ, steps_differ


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
        if "c" in unused:  # other parts may well be outputs that are only handed along
            return _forgotten(
                f"{trial.name} part c",
                "the next state does not change with part 'c' of the state (change 0, limit 1e-06).",
                "part 'c' is computed anew at each step instead of from its last value",
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
    if not_saturated(patient) is not None or (rows_differ(patient) is not None and steps_differ(patient) is None):
        return None  # then nothing passes from step to step, whatever the model does
    return _forgotten(
        _name_of_layers(patient),
        f"with all steps but the last replaced, the last output moved by {seen.earlier:.2g} of its size "
        f"(limit {patient.thresholds.reach:.0e}).",
        "the state is made anew at each step, or the recurrent term is missing",
        "make the first state before the loop, and hand it on: h = self.cell(x_t, h)",
    )


def _recurrent(patient: Patient) -> bool:
    if base(patient).calls or patient.layers:
        return True
    words = ("rnn", "lstm", "gru", "recur", "hidden", "_hh", "w_h", "h2", "2h", "cell", "u_")
    names = [type(m).__name__ for m in patient.model.modules()] + [n for n, _ in patient.model.named_parameters()]
    if any(word in name.lower() for name in names for word in words):
        return True
    code = getattr(getattr(type(patient.model), "forward", None), "__code__", None)
    variables = {name.lower() for name in code.co_varnames} if code is not None else set()
    return bool(
        variables & {"h", "hx", "hidden", "state", "states", "h_t", "ht", "h_prev", "hiddens", "h0", "hidden_state"}
    )


def _name_of_layers(patient: Patient) -> str:
    return ", ".join(dict.fromkeys(call.layer.label for call in base(patient).calls)) or "the model"


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
            f"with every step of the input replaced, the output moved by {seen.all:.2g} of its size (limit "
            f"{limit:.0e}).",
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
    if (
        leaf is None
        or not stepwise(leaf)
        or seen.last is None
        or seen.last > patient.thresholds.reach
        or not seen.earlier
    ):
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
    if not found.steps or _reaches_back(found) or _cut_now_and_then(patient):
        return None
    text = f"earlier steps move the last output by {seen.earlier:.2g} of its size, and their gradient is exactly 0"
    return _cut(_name_of_layers(patient), "between two steps", text, traced_line(patient))


def _reaches_back(found: Backward) -> bool:
    """Whether the gradient of a final output reaches any step before the last."""
    inputs = found.run.inputs
    largest = 0.0
    for sizes in found.steps.values():
        if sizes.shape[1] < 2:
            continue
        fits = len(inputs.last) == len(sizes) and sizes.shape[1] == inputs.steps
        ends = inputs.last.clamp(max=sizes.shape[1] - 1) if fits else torch.full((len(sizes),), sizes.shape[1] - 1)
        earlier = torch.arange(sizes.shape[1]).unsqueeze(0) < ends.unsqueeze(1)
        largest = max(largest, float((sizes * earlier).nan_to_num(nan=1.0).max()))
    return largest > 0


def _cut_now_and_then(patient: Patient) -> bool:
    """Whether a cut that the last step begins with is one of every few steps, as truncated backpropagation makes."""
    if patient.inputs.steps < 3:
        return False
    try:
        return _reaches_back(one_step_less(patient))
    except Exception:  # a model of fixed length
        return False


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
