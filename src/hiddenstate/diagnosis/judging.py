"""Judging a look: its numbers, and what is wrong with them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..cells import Layer
from .advice import CLIPPING, FILLING, freezing, remembering
from .look import LayerOutput, Look
from .probes.slopes import FADING, per_step
from .report import Finding
from .rule import Symptom
from .thresholds import Thresholds

_SURE = 32  # steps of all rows from which some still units are worth a note


def judged(look: Look, limits: Thresholds) -> tuple[dict[str, float], list[Finding]]:
    """Return the numbers of a look, and what is wrong with them."""
    numbers: dict[str, float] = {}
    found: list[Finding] = []
    for name, pieces in look.outputs.items():
        h, valid = _joined(pieces)
        fed = all(bool(piece.fed) for piece in pieces if piece.fed is not None)
        bad = _infinite(name, h, valid, fed=fed)
        if bad is not None:
            if not any(finding.code == "HS401" for finding in found):
                found.append(bad)  # layers after the first one only pass it on
            numbers[f"{name}.finite"] = 0.0
            continue
        values = h.flatten(0, 1) if valid is None else h[valid.to(h.device)]  # (steps of all rows, unit)
        found += _states(name, values, look, numbers=numbers, limits=limits)
        found += _gates(name, look, found, numbers=numbers, limits=limits)
        found += _same_rows(name, h, valid)
    for name, back in look.back.items():
        # A saturated state passes on zeros: what ends there was not cut.
        saturated = any((finding.code, finding.where) == ("HS402", name) for finding in found)
        cut = None if saturated else _cut(name, look)
        found += [] if cut is None else [cut]
        gone = _back(
            look.layers.get(name), name, [piece for piece in back if len(piece)], numbers=numbers, limits=limits
        )
        found += gone if cut is None else []
    if look.gradient == look.gradient:
        numbers["gradient"] = look.gradient
    lost = look.passing.starts.symptom()
    found += [] if lost is None else [_as_finding("HS103", lost)]
    if look.without and look.model is not None:
        unused, left = look.passing.unused(look.without, look.model)
        found += [_as_finding("HS104", symptom) for symptom in unused]
        found += [_without(left, look.model)] if left else []
    numbers["graph"] = float(look.nodes)
    return numbers, found


def _as_finding(code: str, seen: Symptom) -> Finding:
    return Finding(code, seen.severity, seen.where, seen.evidence, seen.cause, seen.advice, seen.numbers)


def _joined(outputs: list[LayerOutput]) -> tuple[Tensor, Tensor | None]:
    """Return the outputs of all calls along time, and which steps are real; the last where rows or units differ."""
    if any(output.h.shape[::2] != outputs[0].h.shape[::2] for output in outputs):
        outputs = outputs[-1:]
    h = torch.cat([output.h for output in outputs], dim=1)
    if all(output.valid is None for output in outputs):
        return h, None
    real = [torch.ones(o.h.shape[:2], dtype=torch.bool) if o.valid is None else o.valid for o in outputs]
    return h, torch.cat(real, dim=1)


def _states(name: str, values: Tensor, look: Look, *, numbers: dict[str, float], limits: Thresholds) -> list[Finding]:
    size = values.abs()
    numbers[f"{name}.norm"] = float(values.norm(dim=1).mean())
    spread = values.amax(0) - values.amin(0)
    dead = float((spread < limits.dead).float().mean()) if len(values) > 1 else 0.0
    numbers[f"{name}.dead"] = dead
    found = []
    own = name not in look.relu and not isinstance(look.layers[name].module, nn.RNNBase | nn.RNNCellBase)
    if name in look.bounded or (own and float(size.max()) <= 1):  # a loop or cell of the user's own tells by its values
        share = float((size >= limits.saturated).float().mean())
        numbers[f"{name}.saturated"] = share
        if share > limits.saturated_share:
            found.append(
                Finding(
                    "HS402",
                    "warning",
                    name,
                    f"{share:.0%} of the values of |h| are ≥ {limits.saturated:g} (limit "
                    f"{limits.saturated_share:.0%}).",
                    "inputs or weights have become too large",
                    CLIPPING,
                    {"share": share, "limit": limits.saturated_share},
                )
            )
    limit = limits.dead_share_relu if name in look.relu else limits.dead_share
    some = round(dead * values.shape[1]) > 1 and dead > limits.some_dead and len(values) >= _SURE
    if (dead > limit or some) and len(values) >= 8:
        found.append(
            Finding(
                "HS403",
                "warning" if dead > limit else "note",
                name,
                f"{round(dead * values.shape[1])} of {values.shape[1]} units vary by less than {limits.dead:g} over "
                f"the batch (limit {limits.some_dead if dead <= limit else limit:.0%}).",
                "an update pushed them where no gradient brings them back",
                "a smaller learning rate; tanh instead of ReLU",
                {"share": dead, "limit": limit},
            )
        )
    return found


def _gates(
    name: str, look: Look, told: list[Finding], *, numbers: dict[str, float], limits: Thresholds
) -> list[Finding]:
    """Take what a sample of a layer showed; say that its gates are saturated where its states do not tell already."""
    sample = look.measured.get(name)
    if sample is None:
        return []
    for what, number in (("gates", sample.gates), ("memory", sample.memory)):
        if number == number:
            numbers[f"{name}.{what}"] = number
    if not sample.gates > limits.saturated_gates or any((f.code, f.where) == ("HS402", name) for f in told):
        return []
    return [
        Finding(
            "HS402",
            "warning",
            name,
            f"{sample.gates:.0%} of the gates are below 0.05 or above 0.95 (limit {limits.saturated_gates:.0%}).",
            "inputs or weights have become too large",
            CLIPPING,
            {"gates": sample.gates, "limit": limits.saturated_gates},
        )
    ]


def _infinite(name: str, h: Tensor, valid: Tensor | None, *, fed: bool) -> Finding | None:
    if bool(torch.isfinite(h).all()):
        return None
    bad = (~torch.isfinite(h)).any(2).cpu()
    if valid is not None:
        bad &= valid
    places = bad.T.nonzero()
    if not len(places):
        return None
    step, row = int(places[0][0]), int(places[0][1])
    return Finding(
        "HS401",
        "error",
        name,
        f"the state holds NaN or Inf, first at step {step} of row {row}; {int(bad.any(1).sum())} rows have "
        "some (limit 0).",
        "an update blew up" if fed else "what enters the layer holds NaN or Inf already",
        CLIPPING if fed else FILLING,
        {"step": step, "row": row, "limit": 0.0},
    )


def _cut(name: str, look: Look) -> Finding | None:
    """Say how far gradients reach back, where a state is handed on without its graph."""
    spans, back, outputs = look.spans.get(name, []), look.back.get(name, []), look.outputs.get(name, [])
    steps, reach = sum(spans), max(spans, default=0)
    if len(back) == len(outputs) and any(len(piece) and bool(piece.any()) for piece in back):
        first = next(place for place, piece in enumerate(back) if len(piece) and bool(piece.any()))
        reach = min(reach, sum(output.h.shape[1] for output in outputs[first:]))
    if reach >= steps:
        return None
    return Finding(
        "HS105",
        "note" if reach > 1 else "warning",
        name,
        f"gradients reach back {reach} of {steps} steps (limit: all).",
        "the state is handed on without its graph inside forward: detach(), .data or torch.no_grad()",
        "# hand the state on as it is within forward, and detach it between batches; or leave it as truncation",
        {"reach": reach, "steps": steps},
    )


def _same_rows(name: str, h: Tensor, valid: Tensor | None) -> list[Finding]:
    """Say that most rows of the batch are one and the same."""
    rows, steps = h.shape[:2]
    if valid is not None or rows < 3 or steps < 2 or not bool(h.any()):
        return []
    _, counts = torch.unique(h.flatten(1), dim=0, return_counts=True)
    most = int(counts.max())
    if most < 3 or 2 * most < rows:
        return []
    return [
        Finding(
            "HS404",
            "note",
            name,
            f"{most} of {rows} rows of the batch have the same states at all {steps} steps (limit: half of them).",
            "the batch holds one sequence several times: expanded, repeated or drawn again, or the input is constant",
            "# look at the batch: torch.unique(x, dim=0).shape; use x.repeat only where the rows are to be alike",
            {"rows": rows, "identical": most},
        )
    ]


def _back(
    layer: Layer | None, name: str, pieces: list[Tensor], *, numbers: dict[str, float], limits: Thresholds
) -> list[Finding]:
    if not pieces:
        return []
    sizes = torch.cat(pieces).double()
    first, last = float(sizes[0]), float(sizes[-1])
    numbers[f"{name}.gradient_first"], numbers[f"{name}.gradient_last"] = first, last
    if len(sizes) < 2 or not last > 0:
        return []
    ratio = first / last
    seen = f"the gradient at the first of {len(sizes)} steps is {ratio:.2g} of that at the last"
    if ratio < limits.vanishing:
        grave = per_step(sizes) < FADING
        return [
            Finding(
                "HS501",
                "warning" if grave else "note",
                name,
                f"{seen} (limit {limits.vanishing:.0e}).",
                "each step passes on less than it gets",
                remembering(layer),
                {"ratio": ratio, "limit": limits.vanishing},
            )
        ]
    if ratio > limits.exploding:
        return [
            Finding(
                "HS502",
                "warning",
                name,
                f"{seen} (limit {limits.exploding:.0e}).",
                "the recurrent weights amplify",
                CLIPPING,
                {"ratio": ratio, "limit": limits.exploding},
            )
        ]
    return []


def _without(names: list[str], model: nn.Module) -> Finding:
    return Finding(
        "HS503",
        "warning",
        ", ".join(names[:3]) + (", …" if len(names) > 3 else ""),
        f"{len(names)} parameters have no gradient when the optimizer steps (limit 0).",
        "they are not used in forward, or detached on the way to the loss",
        freezing(names, model),
        {"without": len(names), "limit": 0.0},
    )
