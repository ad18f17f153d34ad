"""Rows of a batch: each is a sample of its own, in its own place, however many there are."""

from __future__ import annotations

import re

import torch
from torch import nn

from ...cells import Layer
from ...state import spelled, tensors
from ..finding import Finding
from ..patient import Patient
from ..probes.repeats import traced
from ..probes.rows import Influence, influences, mixing
from ..probes.shapes import base, by_rows, fewer_rows, layout
from ..probes.steps import change

_PACKING = ("_pack_padded_sequence", "sort", "argsort")


def rows_apart(patient: Patient) -> Finding | None:
    """HS101: an output row follows an input row that is not its own."""
    if patient.memo.get("unbatched") and not isinstance(patient.model, nn.RNNBase):
        return _perhaps_steps(patient)
    found = [influence for influence in influences(patient) if influence.leaks]
    if not found:
        return without_rows(patient)
    worst = max(found, key=lambda influence: influence.share)
    if _permuted(worst):
        return None  # every row is whole, though in another place: HS110
    where, cause, advice = _reading(patient)
    evidence = (
        f"output{spelled(worst.leaf.path)} row {worst.row} changed when only other rows of the input did, by "
        f"{worst.share:.2g} of the largest change (limit {worst.limit:.1g}); so did {worst.others} of "
        f"{patient.inputs.batch} rows. Eval mode."
    )
    batch_norm = any(
        isinstance(m, nn.modules.batchnorm._BatchNorm) and m.running_mean is None for m in patient.model.modules()
    )
    return Finding(
        "HS101",
        "note" if batch_norm else "error",
        where,
        evidence,
        "a BatchNorm without running statistics uses those of the batch, also in eval mode" if batch_norm else cause,
        advice,
        {"share": worst.share, "limit": worst.limit, "rows": worst.others},
    )


def _perhaps_steps(patient: Patient) -> Finding:
    """An input of two axes was read as one sequence: right for one sequence, wrong for a table of samples."""
    call = base(patient).calls[0]
    rows = patient.inputs.steps
    return Finding(
        "HS101",
        "note",
        call.layer.label,
        f"the {rows} rows of the input were read as {rows} steps of 1 sequence, since it has no axis for time.",
        "right for one sequence without a batch; wrong where each row is a sample of its own",
        "x.unsqueeze(1) makes each row a sequence of one step, x.unsqueeze(0) makes the whole a batch of one",
        {"rows": rows},
    )


def _permuted(influence: Influence) -> bool:
    sources = influence.sources
    return sources is not None and sorted(sources) == list(range(len(sources))) and list(sources) != sorted(sources)


def _reading(patient: Patient) -> tuple[str, str, str]:
    """Return where rows meet, why, and what to change."""
    layer = misread_layer(patient)
    if layer is not None:
        first = layer.spec.batch_first
        kind = f"nn.{type(layer.module).__name__}" if isinstance(layer.module, nn.RNNBase) else layer.kind
        fix = (
            f"{kind}(..., batch_first=True), and take the last step as out[:, -1]"
            if not first
            else f"{kind}(..., batch_first=False), or x.transpose(0, 1) before it"
        )
        return (
            layer.label,
            f"the layer has batch_first={first}, so it reads the {patient.inputs.batch} rows as steps in time",
            f"{fix}. If the input is (time, batch, feature) on purpose: hs.diagnose(..., batch_axis=1).",
        )
    name, line = mixing(patient).name, mixing(patient).line
    if name in ("view", "reshape", "flatten", "unflatten", "view_as"):
        return (
            line or name,
            f"`{name}` joins rows and steps that are not neighbors in memory: it does not swap axes",
            "swap axes with x.transpose(0, 1) (or permute), and only then view or reshape; for h_n: "
            "h_n.transpose(0, 1).reshape(batch, -1)",
        )
    if name in ("softmax", "log_softmax"):
        return line or name, f"`{name}` runs over the batch axis", f"torch.{name}(logits, dim=-1)"
    what = f"`{name}` is the first operation that lets rows meet" if name else "some operation lets rows meet"
    return (
        line or "the model",
        f"{what}; usually a mean, norm, softmax or reshape over the batch axis",
        "let it run over the last axis: dim=-1, and swap axes with transpose, not view",
    )


def misread_layer(patient: Patient) -> Layer | None:
    """Return the first layer that takes the rows of the input for steps, None where no layer does."""
    fewer = fewer_rows(patient)
    for layer in dict.fromkeys(call.layer for call in base(patient).calls if call.layer.fused):
        before, after = base(patient).calls.of(layer)[0], fewer.calls.of(layer)[:1] if fewer is not None else []
        if after and after[0].steps == before.steps - 1 and after[0].rows == before.rows:
            return layer
    return None


def without_rows(patient: Patient) -> Finding | None:
    """HS101 of an output that has no axis for the rows at all."""
    found = layout(patient)
    inputs = patient.inputs
    if not inputs.batched or inputs.batch < 2 or not found.leaves or fewer_rows(patient) is None:
        return None
    if any(leaf.rows is not None or leaf.pairs for leaf in found.leaves):
        return None
    run, fewer = base(patient), fewer_rows(patient)
    if fewer is None or any(fewer.outputs[p].shape != t.shape for p, t in run.outputs.items() if p in fewer.outputs):
        return None  # it grows with the batch in some way of its own
    if _one_sequence(patient):
        return None
    where, cause, advice = _reading(patient)
    leaf = found.leaves[0]
    if misread_layer(patient) is None:
        cause = "an index meant for the steps took a row of the batch, as out[-1] does on (batch, time, unit)"
        advice = "out[:, -1] takes the last step of every row"
    return Finding(
        "HS101",
        "error",
        where,
        f"the output has shape {leaf.shape} with {inputs.batch} rows of input and the same with {inputs.batch - 1}: "
        f"no axis of it has one entry for each row (needed: 1).",
        cause,
        advice,
        {"axes": 0},
    )


def _one_sequence(patient: Patient) -> bool:
    """Whether a two-axis input reached every layer as one sequence without a batch."""
    calls = base(patient).calls
    return bool(calls) and all(call.rows == 1 for call in calls) and patient.inputs.get(patient.inputs.main).dim() < 3


def rows_in_order(patient: Patient) -> Finding | None:
    """HS110: output rows are those of the input, but in another order."""
    inputs = patient.inputs
    for influence in influences(patient):
        if influence.leaks and _permuted(influence) and influence.sources is not None:
            row = next(i for i, source in enumerate(influence.sources) if i != source)
            return _lost(patient, f"output row {row} follows input row {influence.sources[row]} and no other", 1.0)
    lengths_in = [slot for slot in inputs.slots if slot.kind == "lengths" and slot.rows is not None]
    if not inputs.batched or inputs.batch < 3 or any(i.leaks for i in influences(patient)) or not lengths_in:
        return None
    return _after_permuting(patient)


def _after_permuting(patient: Patient) -> Finding | None:
    inputs = patient.inputs
    spread = torch.linspace(max(1, inputs.steps // 3), inputs.steps, inputs.batch).long()
    lengths = inputs.lengths if inputs.lengths is not None and len(set(inputs.lengths.tolist())) > 1 else spread
    falling = lengths.sort(descending=True).values
    ordered = inputs.with_lengths(falling)
    order = torch.arange(inputs.batch).roll(1)
    try:
        before = patient.run(ordered)
        after = patient.run(ordered.select(order.tolist()))
    except Exception:  # a model that wants its rows sorted by length refuses others, and says so itself
        return None
    for leaf in layout(patient).leaves:
        if leaf.rows is None or leaf.path not in before.outputs or leaf.path not in after.outputs:
            continue
        old, new = (by_rows(run.outputs[leaf.path], leaf, inputs.batch) for run in (before, after))
        if old.shape != new.shape:
            continue
        moved, still = change(old[order], new), change(old, new)
        size = float(old.abs().nan_to_num(posinf=0.0).max()) or 1.0
        if float(moved.max()) > 1e-3 * size and float(change(old[order], old).max()) > 1e-3 * size:
            what = "are where they were" if float(still.max()) <= 1e-4 * size else "do not follow"
            return _lost(
                patient,
                f"with the rows of the input moved by one, those of the output {what}",
                float(moved.max()) / size,
            )
    return None


def _lost(patient: Patient, seen: str, number: float) -> Finding:
    events = base_trace_lines(patient)
    return Finding(
        "HS110",
        "error",
        events or "the model",
        f"{seen} ({number:.2g} of the output's size, limit 0.001).",
        "the rows were sorted by length for packing, and the result was never put back in order",
        "pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False) keeps the order by itself; "
        "otherwise out[order.argsort()]",
        {"share": number, "limit": 1e-3},
    )


def base_trace_lines(patient: Patient) -> str:
    """Return the line on which rows are sorted, "" where there is none."""
    events = traced(patient).trace.named("sort", "argsort")
    return next((event.line for event in events if event.line), "")


def any_batch_size(patient: Patient) -> Finding | None:
    """HS204: the model runs with the rows it was given, and with no other number of them."""
    inputs = patient.inputs
    if not inputs.batched or inputs.batch < 2:
        return None
    for count in dict.fromkeys((inputs.batch - 1, 1)):
        try:
            run = patient.run(inputs.select(range(count)))
        except Exception as error:  # the finding itself
            return _one_size(patient, count, f"{count} rows raise {type(error).__name__}: {_short(error)}")
        if count > 1:
            continue
        results = tensors(run.result)  # where one number has no axis left
        for leaf in layout(patient).leaves:
            if leaf.rows is None or leaf.merged or leaf.path not in results:
                continue
            expected = [1 if axis == leaf.rows else size for axis, size in enumerate(leaf.shape)]
            seen = tuple(results[leaf.path].shape)
            if len(seen) < len(expected):
                return _one_size(patient, 1, f"1 row gives shape {seen} instead of {tuple(expected)}", squeezed=True)
    return None


def _one_size(patient: Patient, count: int, seen: str, *, squeezed: bool = False, runs: bool = True) -> Finding:
    cause = (
        "squeeze() without an axis drops the batch axis as well once it has one row"
        if squeezed
        else "a state or a reshape is made for a fixed number of rows; the last batch of an epoch is often smaller"
    )
    advice = (
        "name the axis: out.squeeze(-1)"
        if squeezed
        else "make the state from the input: h0 = x.new_zeros(layers, x.size(0), units), or pass none at all"
    )
    return Finding(
        "HS204",
        "warning" if squeezed else "error",
        "the model",
        f"{patient.inputs.batch} rows {'run' if runs else 'do not run'}, {seen} (needed: any number of rows).",
        cause,
        advice,
        {"rows": count},
    )


def _short(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return text[0][:160] if text else ""


def another_size(patient: Patient, error: str) -> Finding | None:
    """HS204 of a model that cannot be called at all: with some other number of rows it can."""
    inputs = patient.inputs
    if not inputs.batched:
        return None
    named = [v for m in patient.model.modules() for k, v in vars(m).items() if "batch" in k.lower() and type(v) is int]
    numbers = [int(number) for number in re.findall(r"\d+", error)]
    for count in dict.fromkeys([*named, *numbers]):
        if not 0 < count <= 4096 or count == inputs.batch:
            continue
        try:
            patient.run(inputs.select([row % inputs.batch for row in range(count)]))
        except Exception:  # not this one
            continue
        return _one_size(patient, count, f"and {count} rows run", runs=False)
    return None
