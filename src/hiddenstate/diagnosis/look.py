"""One look at one training call: what each layer did, how gradients came back, and what to make of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ..cells import Call
from ..state import tensors
from .finding import Finding
from .outcome import with_gradient
from .probes.slopes import FADING, per_step
from .thresholds import Thresholds

_MOST_NODES = 100_000
_SAME_CALL = 1e-2  # distance of arguments up to which a call may be the same one, run again


@dataclass(frozen=True, slots=True, eq=False)
class LayerOutput:
    """What one call of a layer gave."""

    h: Tensor  # (batch, time, unit)
    valid: Tensor | None  # (batch, time), None where all steps are real


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
        self.relu: set[str] = set()
        self.bounded: set[str] = set()
        self.back: dict[str, list[Tensor]] = {}  # layer -> size of the gradient at each step, (time,) for each call
        self.gradient = float("nan")  # of all parameters
        self.without: list[str] = []  # parameters without gradient
        self.nodes = 0
        self._waiting: list[_ExpectedGradient] = []  # of calls without a graph, which a backward pass may run again

    def enter(self, call: Call) -> Call:
        """See that gradients to the layer's input are noticed; return the call, with another input where need be."""
        sizes = self.back.setdefault(call.layer.name or "model", [])
        place = _ExpectedGradient(sizes, len(sizes), [] if torch.is_grad_enabled() else _arguments(call))
        sizes.append(torch.empty(0))
        if torch.is_grad_enabled():
            return _noticed(call, place)
        self._waiting.append(place)
        return call

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
        except Exception:  # a cell that returns something of its own: nothing to look at
            return
        name, module = call.layer.name or "model", call.layer.module
        valid = None if lengths is None else torch.arange(output.shape[1]) < lengths.unsqueeze(1)
        self.outputs.setdefault(name, []).append(LayerOutput(output, valid))
        if isinstance(module, nn.RNN | nn.RNNCell) and module.nonlinearity == "relu":
            self.relu.add(name)
        elif isinstance(module, nn.RNNBase | nn.RNNCellBase) and not getattr(module, "proj_size", 0):
            self.bounded.add(name)

    def end(self, result: Any) -> None:
        """Count the graph behind what the model, or a module of it, returned."""
        waiting = [t.grad_fn for t in tensors(result).values() if t.grad_fn is not None]
        seen: set[Any] = set()
        while waiting and len(seen) < _MOST_NODES:
            node = waiting.pop()
            if node not in seen:
                seen.add(node)
                waiting.extend(inner for inner, _ in node.next_functions if inner is not None)
        self.nodes = max(self.nodes, len(seen))

    def update(self, model: nn.Module) -> None:
        """Measure the parameters' gradients, right before they are used."""
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


def judged(look: Look, limits: Thresholds) -> tuple[dict[str, float], list[Finding]]:
    """Return the numbers of a look, and what is wrong with them."""
    numbers: dict[str, float] = {}
    found: list[Finding] = []
    for name, pieces in look.outputs.items():
        h, valid = _joined(pieces)
        bad = _infinite(name, h, valid)
        if bad is not None:
            if not any(finding.code == "HS401" for finding in found):
                found.append(bad)  # layers after the first one only pass it on
            numbers[f"{name}.finite"] = 0.0
            continue
        values = h.flatten(0, 1) if valid is None else h[valid.to(h.device)]  # (steps of all rows, unit)
        found += _states(name, values, look, numbers=numbers, limits=limits)
    for name, back in look.back.items():
        found += _back(name, [piece for piece in back if len(piece)], numbers, limits)
    if look.gradient == look.gradient:
        numbers["gradient"] = look.gradient
    if look.without:
        found.append(_without(look.without))
    numbers["graph"] = float(look.nodes)
    return numbers, found


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
                    "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0), a smaller learning rate",
                    {"share": share, "limit": limits.saturated_share},
                )
            )
    limit = limits.dead_share_relu if name in look.relu else limits.dead_share
    if dead > limit and len(values) >= 8:
        found.append(
            Finding(
                "HS403",
                "warning",
                name,
                f"{dead:.0%} of {values.shape[1]} units vary by less than {limits.dead:g} over the batch (limit "
                f"{limit:.0%}).",
                "an update pushed them where no gradient brings them back",
                "a smaller learning rate; tanh instead of ReLU",
                {"share": dead, "limit": limit},
            )
        )
    return found


def _infinite(name: str, h: Tensor, valid: Tensor | None) -> Finding | None:
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
        "an update blew up, or the batch holds NaN",
        "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) before optimizer.step(); look at this batch",
        {"step": step, "row": row, "limit": 0.0},
    )


def _back(name: str, pieces: list[Tensor], numbers: dict[str, float], limits: Thresholds) -> list[Finding]:
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
                "with torch.no_grad(): lstm.bias_hh_l0[units:2 * units].fill_(1.0); shorter sequences",
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
                "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
                {"ratio": ratio, "limit": limits.exploding},
            )
        ]
    return []


def _without(names: list[str]) -> Finding:
    return Finding(
        "HS503",
        "warning",
        ", ".join(names[:3]) + (", …" if len(names) > 3 else ""),
        f"{len(names)} parameters have no gradient when the optimizer steps (limit 0).",
        "they are not used in forward, or detached on the way to the loss",
        "use the layer, remove it, or freeze it on purpose: layer.requires_grad_(False)",
        {"without": len(names), "limit": 0.0},
    )


def growing(sizes: list[tuple[int, int]], look: Look) -> Finding | None:
    """Note the size of the graph, and say whether it has grown from look to look, over as many steps in time."""
    steps = sum(output.h.shape[1] for outputs in look.outputs.values() for output in outputs)
    sizes.append((steps, look.nodes))
    recent = [nodes for steps_then, nodes in sizes[-3:] if steps_then == steps]
    if len(recent) < 3 or not recent[0] < recent[1] < recent[2] or recent[2] < 1.5 * recent[0]:
        return None
    return Finding(
        "HS203",
        "error",
        "the model",
        f"the graph behind the output had {recent[0]}, {recent[1]} and {recent[2]} nodes at the last three looks.",
        "a state is kept from call to call with its graph",
        "keep it without: self.hidden = tuple(part.detach() for part in hidden)",
        {"first": recent[0], "last": recent[2]},
    )
