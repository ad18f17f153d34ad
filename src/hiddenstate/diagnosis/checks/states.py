"""The values of the states: finite, alive, and different from row to row and from step to step."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from ...cells import Call
from ...measure import saturation
from ...recording import Trajectory
from ...state import ends, spelled
from ..calls import steps_of_rows
from ..finding import Finding
from ..inputs import Inputs
from ..patient import Patient, Run
from ..probes.parameters import parameter_gradients
from ..probes.shapes import base, by_rows, layout, stepwise
from ..probes.states import real, recorded, varied

_BOUNDED = ("lstm", "gru", "rnn", "lstm_cell", "gru_cell", "rnn_cell")  # torch's own: |h| ≤ 1


def all_finite(patient: Patient) -> Finding | None:
    """HS401: NaN or Inf in a parameter, a state, an output or a gradient."""
    for name, parameter in patient.model.named_parameters():
        if not bool(parameter.detach().isfinite().all()):
            return _infinite(name, "the parameter", parameter, "an update blew up, or a file was damaged")
    return infinite_values(base(patient)) or _infinite_output(patient) or _infinite_gradient(patient)


def infinite_values(run: Run) -> Finding | None:
    """HS401 of what enters and leaves the layers in one run."""
    for call in run.calls:
        found = _infinite_call(run.inputs, call)
        if found is not None:
            return found
    return None


def _infinite_call(inputs: Inputs, call: Call) -> Finding | None:
    name = call.layer.label
    source, lengths = call.x, steps_of_rows(call)
    bad = _first_bad(source, lengths)
    if bad is not None and source.is_floating_point():
        row, step = bad
        given = [spelled(path) for path, end in ends(inputs.args) if _has_bad(end)]
        cause = (
            f"input{given[0]} holds it: missing values or a division by zero in the data"
            if given
            else "something before the layer makes it: a log or a division by zero, a square root of a negative number"
        )
        return _infinite(name, f"what enters the layer, at row {row}, step {step}", source, cause)
    output = call.output
    bad = _first_bad(output, lengths)
    if bad is not None:
        row, step = bad
        return _infinite(name, f"the state, first at row {row}, step {step}", output, "the state grew out of bounds")
    return None


def _has_bad(end: object) -> bool:
    end = end.data if isinstance(end, PackedSequence) else end
    return isinstance(end, Tensor) and end.is_floating_point() and not bool(end.isfinite().all())


def _first_bad(sequence: Tensor, lengths: Tensor) -> tuple[int, int] | None:
    if not sequence.is_floating_point() or bool(sequence.isfinite().all()):
        return None
    bad = (~sequence.detach().isfinite()).flatten(2).any(2).cpu()  # (batch, time)
    bad &= torch.arange(bad.shape[1]) < lengths.cpu().unsqueeze(1)
    places = bad.T.nonzero()
    return (int(places[0][1]), int(places[0][0])) if len(places) else None


def _infinite_output(patient: Patient) -> Finding | None:
    for leaf in layout(patient).leaves:
        out = base(patient).outputs[leaf.path]
        if leaf.rows is not None and stepwise(leaf) and patient.inputs.lengths is not None:
            rows = by_rows(out, leaf, patient.inputs.batch)
            out = rows[patient.inputs.valid[:, : rows.shape[1]].to(rows.device)]
        if bool(out.isnan().any()) or bool((out == float("inf")).any()):
            return _infinite(
                f"output{spelled(leaf.path)}", "the output", out, "the head makes it: a log of 0, or a division by 0"
            )
    return None


def _infinite_gradient(patient: Patient) -> Finding | None:
    if not any(p.requires_grad for p in patient.model.parameters()):
        return None
    try:
        found = parameter_gradients(patient)
    except Exception:  # reported where gradients are asked for
        return None
    if not found.infinite:
        return None
    return Finding(
        "HS401",
        "error",
        found.infinite[0],
        f"the gradient of {len(found.infinite)} parameters holds NaN or Inf, all outputs are finite (limit 0).",
        "a function without a finite slope: a square root, norm or log at 0, or torch.where around an infinite branch",
        "keep away from the edge: (x + 1e-8).sqrt(), and mask before the function, not after it",
        {"parameters": len(found.infinite), "limit": 0.0},
    )


def _infinite(where: str, what: str, values: Tensor, cause: str) -> Finding:
    nans, infs = int(values.isnan().sum()), int(values.isinf().sum())
    return Finding(
        "HS401",
        "error",
        where,
        f"{what}, holds {nans} NaN and {infs} Inf among {values.numel()} values (limit 0).",
        cause,
        "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) before optimizer.step(), a smaller learning rate, "
        "x = torch.nan_to_num(x) for missing values",
        {"nan": nans, "inf": infs, "limit": 0.0},
    )


def _tracks(patient: Patient) -> dict[str, Trajectory]:
    return {name: t for name, t in recorded(patient).items() if bool(t.h.isfinite().all()) and t.h.numel()}


def not_saturated(patient: Patient) -> Finding | None:
    """HS402: most of a state, or of its gates, is pressed against the ends of its range."""
    limits = patient.thresholds
    for name, track in _tracks(patient).items():
        measured = saturation(track, limits.saturated)
        gates = [gate.share for key, gate in measured.gates.items() if gate.range == "sigmoid" and key]
        by_gates = sum(gates) / len(gates) if gates else 0.0
        of_states = measured.share > limits.saturated_share and (track.kind in _BOUNDED or measured.max_abs <= 1)
        if of_states or by_gates > limits.saturated_gates:
            what = (
                f"{measured.share:.0%} of the values of |h| are ≥ {limits.saturated:g} (limit "
                f"{limits.saturated_share:.0%})"
                if of_states
                else f"{by_gates:.0%} of the gates are below 0.05 or above 0.95 (limit {limits.saturated_gates:.0%})"
            )
            return Finding(
                "HS402",
                "warning",
                name,
                f"{what}; mean |h| is {measured.mean_abs:.3g}.",
                "inputs or weights are too large: no gradient passes through a saturated tanh or sigmoid",
                "x = (x - mean) / std before the layer; a smaller learning rate; "
                "nn.init.orthogonal_(layer.weight_hh_l0)",
                {"share": measured.share, "gates": by_gates, "limit": limits.saturated_share},
            )
    return None


def alive(patient: Patient) -> Finding | None:
    """HS403: units that never move, or a state that is all zero."""
    limits = patient.thresholds
    for name, track in _tracks(patient).items():
        values = real(track, track.h)
        if len(values) < 2:
            continue
        if not bool(values.any()):
            # A second look: zeros in, zeros out, where there is no bias.
            again = varied(patient).get(name)
            if again is not None and bool(again.h.any()):
                continue
            return _dead(name, f"all {values.numel()} values of the state are exactly 0 (limit: some)", "error", 1.0)
        if len(values) < 8:
            continue
        share = float(((values.amax(0) - values.amin(0)) < limits.dead).float().mean())
        off = float((values.abs().amax(0) == 0).float().mean())
        limit = limits.dead_share_relu if off > 0 else limits.dead_share
        if share > limit and values.shape[1] > 1 and _still_dead(patient, name, limits.dead, limit):
            return _dead(
                name,
                f"{share:.0%} of {values.shape[1]} units vary by less than {limits.dead:g} over all rows and steps "
                f"(limit {limit:.0%})",
                "warning",
                share,
            )
    return None


def _still_dead(patient: Patient, name: str, dead: float, limit: float) -> bool:
    again = varied(patient).get(name)
    if again is None:
        return True
    values = real(again, again.h)
    return float(((values.amax(0) - values.amin(0)) < dead).float().mean()) > limit


def _dead(where: str, seen: str, severity: str, share: float) -> Finding:
    return Finding(
        "HS403",
        severity,  # type: ignore[arg-type]
        where,
        f"{seen}.",
        "weights of zero, a ReLU pushed below zero for good, or an input that is all zero",
        "nn.init.xavier_uniform_(layer.weight_ih_l0); a smaller learning rate; tanh instead of ReLU",
        {"share": share},
    )


def rows_differ(patient: Patient) -> Finding | None:
    """HS404: every row has the same states, though rows of the input differ."""
    if not patient.inputs.batched or patient.inputs.batch < 2:
        return None
    for name, track in varied(patient).items():
        h = track.h
        if len(h) != patient.inputs.batch or not bool(h.any()) or not bool(h.isfinite().all()):
            continue
        steps = int(track.valid.all(0).sum())
        spread = float((h[:, :steps].amax(0) - h[:, :steps].amin(0)).max()) if steps else 1.0
        size = float(h.abs().max())
        if spread <= patient.thresholds.identical * size:
            return Finding(
                "HS404",
                "warning",
                name,
                f"the states of {len(h)} rows with different input differ by {spread / size:.2g} of their size at most "
                f"(limit {patient.thresholds.identical:.0e}).",
                "the input does not reach the layer: weights of zero, a constant fed in its place, or a "
                "collapsed embedding",
                "look at what enters the layer: with hs.record(model) as rec: model(x)",
                {"spread": spread / size, "limit": patient.thresholds.identical},
            )
    return None


def steps_differ(patient: Patient) -> Finding | None:
    """HS405: a state that does not change from step to step, though the input does."""
    for name, track in varied(patient).items():
        h = track.h
        steps = int(track.valid.all(0).sum())
        if steps < 3 or not bool(h.any()) or not bool(h.isfinite().all()):
            continue
        spread = float((h[:, :steps].amax(1) - h[:, :steps].amin(1)).max())
        size = float(h.abs().max())
        if spread <= patient.thresholds.identical * size:
            return Finding(
                "HS405",
                "warning",
                name,
                f"over {steps} steps of different input the state changes by {spread / size:.2g} of its size at most "
                f"(limit {patient.thresholds.identical:.0e}).",
                "the state is never updated, or the same step is fed again and again",
                "hand each step in: for x_t in x.unbind(1): h = self.cell(x_t, h)",
                {"spread": spread / size, "limit": patient.thresholds.identical},
            )
    return None
