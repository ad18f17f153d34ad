"""One look at one training call: what each layer did, how gradients came back, and what to make of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from ..cells import Layer
from .fading import FADING, per_step
from .finding import Finding
from .thresholds import Thresholds
from .tree import tensors

_MOST_NODES = 100_000


class Look:
    """Gathers tensors during a call and its backward; numbers are made of them once, afterwards."""

    def __init__(self, step: int) -> None:
        """Begin at this training call."""
        self.step = step
        self.ended = False
        self.outputs: dict[str, list[Tensor]] = {}  # layer -> (batch, time, unit) of each call
        self.valid: dict[str, Tensor | None] = {}  # layer -> (batch, time)
        self.relu: set[str] = set()
        self.bounded: set[str] = set()
        self.back: dict[str, list[Tensor]] = {}  # layer -> size of the gradient at each step, (time,) for each call
        self.gradient = float("nan")  # of all parameters
        self.without: list[str] = []  # parameters without gradient
        self.nodes = 0
        self._slots: dict[str, int] = {}

    def enter(self, layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See that gradients to the layer's input are noticed; return the arguments where they had to be changed."""
        if not args or not torch.is_grad_enabled():
            return None
        x = args[0]
        data = x.data if isinstance(x, PackedSequence) else x
        if not isinstance(data, Tensor) or not data.is_floating_point():
            return None
        changed = None
        if not data.requires_grad:
            data = data.detach().requires_grad_()
            x = x._replace(data=data) if isinstance(x, PackedSequence) else data
            changed = ((x, *args[1:]), kwargs)
        name, place = layer.name or "model", self._slots.get(layer.name, 0)
        self._slots[layer.name] = place + 1
        seen = self.back.setdefault(name, [])
        seen.append(torch.empty(0))

        def arrived(gradient: Tensor) -> None:
            seen[place] = _by_step(gradient.detach(), x, layer)

        data.register_hook(arrived)  # type: ignore[no-untyped-call]
        return changed

    def leave(self, layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Keep what a layer gave."""
        try:
            output, _ = layer.split(result)
        except Exception:  # a cell that returns something of its own: nothing to look at
            return
        name = layer.name or "model"
        valid = None
        if isinstance(output, PackedSequence):
            output, lengths = pad_packed_sequence(output, batch_first=True)
            valid = torch.arange(output.shape[1]) < lengths.unsqueeze(1)
        elif not layer.fused:
            output = (output if output.dim() > 1 else output[None]).unsqueeze(1)
        elif output.dim() == 2:
            output = output[None]
        elif not layer.spec.batch_first:
            output = output.transpose(0, 1)
        self.outputs.setdefault(name, []).append(output.detach())
        self.valid[name] = valid
        module = layer.module
        if isinstance(module, nn.RNN | nn.RNNCell) and module.nonlinearity == "relu":
            self.relu.add(name)
        elif layer.kind != "cell" and not getattr(module, "proj_size", 0):
            self.bounded.add(name)

    def end(self, result: Any) -> None:
        """Count the graph behind what the model returned."""
        self.ended = True
        waiting = [t.grad_fn for t in tensors(result).values() if t.grad_fn is not None]
        seen: set[Any] = set()
        while waiting and len(seen) < _MOST_NODES:
            node = waiting.pop()
            if node not in seen:
                seen.add(node)
                waiting.extend(inner for inner, _ in node.next_functions if inner is not None)
        self.nodes = len(seen)

    def update(self, model: nn.Module) -> None:
        """Measure the parameters' gradients, right before they are used."""
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        grads = [p.grad.detach() for _, p in named if p.grad is not None and not p.grad.is_sparse]
        if grads:
            self.gradient = float(torch.stack([g.norm() for g in grads]).norm())
        self.without = [name for name, p in named if p.grad is None]


def _by_step(gradient: Tensor, x: Any, layer: Layer) -> Tensor:
    if isinstance(x, PackedSequence):
        sizes: Tensor = gradient.flatten(1).norm(dim=1).square()
        ends = x.batch_sizes.cumsum(0).tolist()
        starts = [0, *ends[:-1]]
        return torch.stack([sizes[a:b].sum().sqrt() for a, b in zip(starts, ends, strict=True)])
    if not layer.fused:
        whole: Tensor = gradient.norm()
        return whole.reshape(1)
    steps = gradient if gradient.dim() == 2 else gradient.transpose(0, 1) if layer.spec.batch_first else gradient
    by_step: Tensor = steps.flatten(1).norm(dim=1)
    return by_step


def judged(look: Look, limits: Thresholds) -> tuple[dict[str, float], list[Finding]]:
    """Return the numbers of a look, and what is wrong with them."""
    numbers: dict[str, float] = {}
    found: list[Finding] = []
    for name, pieces in look.outputs.items():
        same = all(piece.shape[::2] == pieces[0].shape[::2] for piece in pieces)
        h = torch.cat(pieces, dim=1) if same else pieces[-1]  # (batch, time, unit)
        bad = _infinite(name, h, look.valid[name])
        if bad is not None:
            if not any(finding.code == "HS401" for finding in found):
                found.append(bad)  # layers after the first one only pass it on
            numbers[f"{name}.finite"] = 0.0
            continue
        found += _states(name, h, look, numbers=numbers, limits=limits)
    for name, back in look.back.items():
        found += _back(name, [piece for piece in back if len(piece)], numbers, limits)
    if look.gradient == look.gradient:
        numbers["gradient"] = look.gradient
    if look.without:
        found.append(_without(look.without))
    numbers["graph"] = float(look.nodes)
    return numbers, found


def _states(name: str, h: Tensor, look: Look, *, numbers: dict[str, float], limits: Thresholds) -> list[Finding]:
    valid = look.valid[name]
    values = h[valid.to(h.device)] if valid is not None else h.flatten(0, 1)  # (steps of all rows, unit)
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
                f"{dead:.0%} of {h.shape[2]} units vary by less than {limits.dead:g} over the batch (limit "
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
    steps = sum(piece.shape[1] for pieces in look.outputs.values() for piece in pieces)
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
