"""The gradient of a loss with respect to every state: the gradients of outputs, propagated back through time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar
from weakref import ref

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .padded import Padded

K = TypeVar("K")


class GraphToken:
    """A token that only the hooks on a graph hold: when a weak reference to it dies, no gradient can come any more."""


@dataclass(slots=True)
class OutsideGradients:
    """Gradients that reach a call's outputs and final states from outside, summed over backward passes."""

    seen: dict[str, Tensor] = field(default_factory=dict)  # for all tracks: "out 0", "out 1", …, "h", "c"
    graph: ref[GraphToken] | None = None
    layer: int = 0
    place: int = 0  # the index of the track in the state
    column: slice = field(default_factory=lambda: slice(None))  # the units of the track in its layer's output

    @classmethod
    def on(cls, outs: list[Tensor], finals: tuple[Tensor, ...], directions: int) -> list[OutsideGradients]:
        """Put hooks on each layer's output and on the final state, and return one object for each track."""
        graph, seen = GraphToken(), dict[str, Tensor]()
        for layer, out in enumerate(outs):
            add_up_gradients(out, seen, f"out {layer}", graph)
        for name, final in zip("hc", finals, strict=False):
            add_up_gradients(final, seen, name, graph)
        units = outs[0].shape[-1] // directions
        return [
            cls(seen, ref(graph), layer, layer * directions + d, slice(d * units, (d + 1) * units))
            for layer in range(len(outs))
            for d in range(directions)
        ]

    @property
    def out(self) -> Tensor | None:
        """The gradient of the track's outputs, if one has arrived."""
        grad = self.seen.get(f"out {self.layer}")
        return None if grad is None else grad[..., self.column]

    def end(self, part: str) -> Tensor | None:
        """Return the gradient of a part of the final state, if one has arrived."""
        grad = self.seen.get(part)
        return None if grad is None else grad[self.place]

    def expected(self) -> bool:
        """Say whether the first gradients may still come."""
        return not self.seen and self.graph is not None and self.graph() is not None


def add_up_gradients(tensor: Tensor, seen: dict[K, Tensor], key: K, graph: GraphToken) -> None:
    """Sum into `seen[key]` the gradients that backward passes bring to a tensor; nothing else changes."""

    def hook(grad: Tensor | None, _graph: GraphToken = graph) -> None:
        if grad is None:  # a kernel with several outputs, of which the backward pass used another one
            return
        grad = grad.detach()
        seen[key] = seen[key] + grad if key in seen else grad.clone()

    if tensor.requires_grad:
        tensor.register_hook(hook)  # type: ignore[no-untyped-call]


def through_time(track: Padded, out: Tensor | None, ends: dict[str, Tensor | None]) -> dict[str, Tensor]:
    """Return dL/dh and dL/dc at every step, `(time, batch, unit)`, from the gradients that came from outside."""
    if out is None and not any(end is not None for end in ends.values()):
        return {}
    step: _Lstm | _Gru | _Rnn = (
        _Lstm(track) if track.kind == "lstm" else _Gru(track) if track.kind == "gru" else _Rnn(track)
    )
    grads = {part: torch.zeros_like(values) for part, values in track.states().items()}
    later = {part: torch.zeros_like(values[0]) for part, values in track.states().items()}
    order = range(len(track.h)) if track.reverse else reversed(range(len(track.h)))
    for t in order:
        last = (track.last == t).unsqueeze(1)
        here = {p: g if (end := ends.get(p)) is None else torch.where(last, end, g) for p, g in later.items()}
        if out is not None:
            here["h"] = here["h"] + out[t]
        here, later = step.back(t, here)
        for part, grad in here.items():
            grads[part][t] = grad
        started = track.valid[t].unsqueeze(1)
        later = {part: torch.where(started, grad, torch.zeros_like(grad)) for part, grad in later.items()}
    return {part: grad * track.valid.unsqueeze(-1) for part, grad in grads.items()}


class _Lstm:
    def __init__(self, track: Padded) -> None:
        self.track = track
        self.gates = track.gates
        self.before = track.before("c")

    def back(self, t: int, grad: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the full gradient of step t's state, and the gradient it passes on to the step before."""
        i, f, g, o = (self.gates[name][t] for name in ("input", "forget", "candidate", "output"))
        assert self.track.c is not None
        squashed = self.track.c[t].tanh()
        weights = self.track.weights
        dh = grad["h"]
        raw = dh if weights.projection is None else dh @ weights.projection
        dc = grad["c"] + raw * o * (1 - squashed**2)
        pre = torch.cat(
            [
                dc * g * i * (1 - i),
                dc * self.before[t] * f * (1 - f),
                dc * i * (1 - g**2),
                raw * squashed * o * (1 - o),
            ],
            dim=1,
        )
        return {"h": dh, "c": dc}, {"h": pre @ weights.hh, "c": dc * f}


class _Gru:
    def __init__(self, track: Padded) -> None:
        self.track = track
        self.before = track.before("h")
        weights = track.weights
        units = track.h.shape[-1]
        bias = None if weights.bias_hh is None else weights.bias_hh[2 * units :]
        self.inner = torch.nn.functional.linear(self.before, weights.hh[2 * units :], bias)

    def back(self, t: int, grad: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the full gradient of step t's state, and the gradient it passes on to the step before."""
        r, z, n = (self.track.gates[name][t] for name in ("reset", "update", "candidate"))
        dh = grad["h"]
        dn = dh * (1 - z) * (1 - n**2)
        dz = dh * (self.before[t] - n) * z * (1 - z)
        dr = dn * self.inner[t] * r * (1 - r)
        return {"h": dh}, {"h": dh * z + torch.cat([dr, dz, dn * r], dim=1) @ self.track.weights.hh}


class _Rnn:
    def __init__(self, track: Padded) -> None:
        self.track = track

    def back(self, t: int, grad: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the full gradient of step t's state, and the gradient it passes on to the step before."""
        h, dh = self.track.h[t], grad["h"]
        slope = 1 - h**2 if self.track.kind == "rnn_tanh" else (h > 0).to(h)
        return {"h": dh}, {"h": (dh * slope) @ self.track.weights.hh}
