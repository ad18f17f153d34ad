"""One look at one training call: what each layer did, how gradients came back, and what to make of it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ..cells import Call, EndState, Layer
from ..state import tensors
from .advice import CLIPPING, FILLING, freezing, remembering
from .graphs import count_nodes
from .outcome import with_gradient
from .passing_on import PassingOn
from .probes.slopes import FADING, per_step
from .report import Finding
from .rule import Symptom
from .thresholds import Thresholds

_SURE = 32  # steps of all rows from which some still units are worth a note
_SAME_CALL = 1e-2  # distance of arguments up to which a call may be the same one, run again


@dataclass(frozen=True, slots=True, eq=False)
class LayerOutput:
    """What one call of a layer gave."""

    h: Tensor  # (batch, time, unit)
    valid: Tensor | None  # (batch, time), None where all steps are real
    fed: Tensor | None = None  # whether all that entered it was finite, a bool without axes


@dataclass(frozen=True, slots=True, eq=False)
class _ExpectedGradient:
    """Where the gradient of one call belongs, and by what the call is known when it runs again."""

    sizes: list[Tensor]
    index: int
    arguments: list[Tensor]

    def distance(self, call: Call) -> float:
        """Return how far the arguments are from those of this call, relative to their size; inf for other shapes."""
        again = _arguments(call)
        if [new.shape for new in again] != [old.shape for old in self.arguments]:
            return float("inf")
        pairs = [(new, old) for new, old in zip(again, self.arguments, strict=True) if old.numel()]
        gaps = [float((new - old).abs().max() / (1 + old.abs().max())) for new, old in pairs]
        return max(gaps, default=0.0) if all(gap == gap for gap in gaps) else float("inf")


class Look:
    """Gathers tensors during a call and its backward; numbers are made of them once, afterwards."""

    def __init__(self, step: int) -> None:
        """Begin at this training call."""
        self.step = step
        self.outputs: dict[str, list[LayerOutput]] = {}  # layer -> of each call
        self.layers: dict[str, Layer] = {}
        self.spans: dict[str, list[int]] = {}  # layer -> steps from one cut of its graph to the next
        self._ended: dict[str, EndState] = {}  # layer -> what its last call ended in
        self.relu: set[str] = set()
        self.bounded: set[str] = set()
        self.back: dict[str, list[Tensor]] = {}  # layer -> size of the gradient at each step, (time,) for each call
        self.gradient = float("nan")  # of all parameters
        self.without: list[str] = []  # parameters without gradient
        self.model: nn.Module | None = None  # whose parameters they are
        self.nodes = 0
        self.passing = PassingOn()
        self._waiting: list[_ExpectedGradient] = []  # of calls without a graph, which a backward pass may run again

    def enter(self, call: Call) -> Call:
        """See that gradients to the layer's input are noticed; return the call, with another input where need be."""
        sizes = self.back.setdefault(call.layer.name or "model", [])
        with suppress(Exception):  # a cell that is called in a way of its own
            self.passing.enter(call)
        self._see_cut(call)
        place = _ExpectedGradient(sizes, len(sizes), [] if torch.is_grad_enabled() else _arguments(call))
        sizes.append(torch.empty(0))
        if torch.is_grad_enabled():
            return _noticed(call, place)
        self._waiting.append(place)
        return call

    def _see_cut(self, call: Call) -> None:
        """Count the steps since a state was last handed on without its graph, within this call of the model."""
        name = call.layer.name or "model"
        spans, last = self.spans.setdefault(name, [0]), self._ended.get(name)
        try:
            given, steps = tensors(call.given_native).values(), call.steps
        except Exception:  # a cell that is called in a way of its own
            return
        bare = bool(given) and torch.is_grad_enabled() and all(part.grad_fn is None for part in given)
        if bare and last is not None and last.mark is not None and last.handed_on(call.given_native):
            spans.append(0)
        spans[-1] += steps

    def again(self, call: Call) -> Call:
        """Do the same for a call that runs once more within a backward pass, where it had no graph at first."""
        sizes = self.back.get(call.layer.name or "model")
        # With gradients torch may take other kernels, so that the last bits differ; a backward pass begins at the end.
        places = [(place.distance(call), -place.index, place) for place in self._waiting if place.sizes is sizes]
        distance, _, place = min(places, default=(float("inf"), 0, None))
        if place is None or distance > _SAME_CALL:
            return call
        self._waiting.remove(place)
        return _noticed(call, place)

    def leave(self, call: Call) -> None:
        """Keep what a layer gave."""
        try:
            output, lengths = call.output.detach(), call.lengths
            self._ended[call.layer.name or "model"] = EndState.of(call.state_native)
            self.passing.leave(call)
            fed = torch.isfinite(call.x.detach()).all() if call.x.is_floating_point() else None
        except Exception:  # a cell that returns something of its own: nothing to look at
            return
        name, module = call.layer.name or "model", call.layer.module
        valid = None if lengths is None else torch.arange(output.shape[1]) < lengths.unsqueeze(1)
        self.layers[name] = call.layer
        self.outputs.setdefault(name, []).append(LayerOutput(output, valid, fed))
        if isinstance(module, nn.RNN | nn.RNNCell) and module.nonlinearity == "relu":
            self.relu.add(name)
        elif isinstance(module, nn.RNNBase | nn.RNNCellBase) and not getattr(module, "proj_size", 0):
            self.bounded.add(name)

    def end(self, result: Any) -> None:
        """Count the graph behind what the model, or a module of it, returned."""
        self.nodes = max(self.nodes, count_nodes(result))

    def update(self, model: nn.Module) -> None:
        """Measure the parameters' gradients, right before they are used."""
        self.model = model
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        grads = [p.grad.detach() for _, p in named if p.grad is not None and not p.grad.is_sparse]
        if grads:
            self.gradient = float(torch.stack([g.norm() for g in grads]).norm())
        self.without = [name for name, p in named if p.grad is None]


def _arguments(call: Call) -> list[Tensor]:
    found = [tensor.detach() for tensor in tensors((call.args, call.kwargs)).values()]
    return [tensor if tensor.is_complex() else tensor.float() for tensor in found]


def _noticed(call: Call, place: _ExpectedGradient) -> Call:
    try:
        call = with_gradient(call)
        x = call.input
    except Exception:  # a cell that is called in a way of its own: nothing to look at
        return call
    data = x.data if isinstance(x, PackedSequence) else x
    # The hook must not hold the call: its tensors, and their graphs, would then live until Python looks for cycles.
    layer, packing = call.layer, x._replace(data=data.new_empty(0)) if isinstance(x, PackedSequence) else None

    def arrived(gradient: Tensor) -> None:
        back = Call(layer, (gradient if packing is None else packing._replace(data=gradient),)).x
        place.sizes[place.index] = back.detach().transpose(0, 1).flatten(1).norm(dim=1)

    if data.requires_grad:
        data.register_hook(arrived)  # type: ignore[no-untyped-call]
    return call


def no_call_seen(updates: int) -> str:
    """Say that there was no training call at all, in spite of so many updates, and why that may be."""
    return (
        f"{f'{updates} updates and ' if updates else ''}not a single training call: nothing was looked at. The model "
        f"that is trained is another one, a copy of it, or in eval mode."
    )


def nothing_seen(names: Sequence[str]) -> str:
    """Say that no look has seen anything of these layers, and why that may be."""
    return (
        f"nothing of {', '.join(names)}: not called in the calls that were looked at, or run past the layer itself (by "
        f"its weights, or `nn.LSTM.forward(layer, x)`), or returning something else than layers of its kind."
    )


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
        found += _same_rows(name, h, valid)
    for name, back in look.back.items():
        cut = _cut(name, look)
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
    if name in look.bounded:
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
