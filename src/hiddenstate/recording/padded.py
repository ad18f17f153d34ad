"""The values of one track in one call: rows in the user's order, padded with zeros, in memory of their own.

Gates and cells that the kernel did not leave behind are reconstructed: given h at every step, all gates of all steps
are one matrix product, and an LSTM's cells follow from its gates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.nn.utils.rnn import PackedSequence

from .._torch_names import lookup
from . import gradients
from .frames import GATES, TrackWeights
from .layerwise import Pass
from .recording import Options

_MANY = 256  # rows from which on a product is worth a call of oneDNN's
_onednn_linear: Any = lookup("torch.ops.mkldnn._linear_pointwise") if torch.backends.mkldnn.is_available() else None  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the rows of a packed sequence belong; the identity if the input was not packed."""

    time: int
    batch: int
    lengths: Tensor  # (batch,) int64, on the CPU
    places: Tensor | None = None  # (rows,) for each packed row: time * batch + row
    order: Tensor | None = None  # (batch,) the user's order of rows

    @staticmethod
    def of(h: Tensor, sizes: Tensor | None, packed: PackedSequence | None) -> Layout:
        """Read the layout from a call's batch sizes and the sequence that its module was given."""
        if sizes is None:
            time, batch = h.shape[:2]
            return Layout(time, batch, torch.full((batch,), time, dtype=torch.int64))
        sizes = sizes.cpu()
        time, batch = len(sizes), int(sizes[0])
        present = torch.arange(batch) < sizes.unsqueeze(1)  # (time, batch)
        lengths = present.sum(0)
        order = None if packed is None else packed.unsorted_indices
        step, row = present.nonzero(as_tuple=True)
        if order is not None:
            order = order.cpu()
            lengths, row = lengths[order], order.argsort()[row]
        return Layout(time, batch, lengths, (step * batch + row).to(h.device), order)

    def pad(self, data: Tensor) -> Tensor:
        """Return packed `(rows, unit)` as `(time, batch, unit)`, with zeros as padding."""
        if self.places is None:
            return data
        flat = data.new_zeros(self.time * self.batch, data.shape[-1])
        return flat.index_copy_(0, self.places, data).view(self.time, self.batch, -1)

    def rows(self, part: Tensor) -> Tensor:
        """Return the rows of `(batch, unit)` in the user's order."""
        return part if self.order is None else part.index_select(0, self.order.to(part.device))


@dataclass(slots=True, eq=False)
class Padded:
    """One track of one call; gates and cells that it did not leave behind are reconstructed when first needed."""

    kind: str
    reverse: bool
    h: Tensor  # (time, batch, unit)
    initial: dict[str, Tensor]  # part -> (batch, unit)
    layout: Layout
    weights: TrackWeights
    x: Tensor | None  # (time, batch, feature), as long as something is to be reconstructed from it
    activated: Tensor | None  # (time, batch, gates * hidden)
    c: Tensor | None
    outside: gradients.OutsideGradients | None

    @property
    def valid(self) -> Tensor:
        """Which steps are real: bool (time, batch)."""
        return (torch.arange(self.layout.time).unsqueeze(1) < self.layout.lengths).to(self.h.device)

    @property
    def last(self) -> Tensor:
        """The step at which each row ends, in the order of computation."""
        lengths = self.layout.lengths.to(self.h.device)
        return torch.zeros_like(lengths) if self.reverse else lengths - 1

    def complete(self) -> Padded:
        """Reconstruct what is missing, and drop the values that only the reconstruction needed."""
        if self.activated is None and self.x is not None:
            self.activated, c = self._reconstructed(self.x)
            self.c = c if self.c is None else self.c  # prefer the c that is there: it has its graph
        elif self.kind == "lstm" and self.c is None:
            assert self.activated is not None
            self.c = self._cells(self.activated)
        self.x = None
        return self

    @property
    def gates(self) -> dict[str, Tensor]:
        """Each gate by name, `(time, batch, hidden)`."""
        names = GATES[self.kind]
        if not names or self.complete().activated is None:
            return {}
        assert self.activated is not None
        return dict(zip(names, self.activated.chunk(len(names), -1), strict=True))

    def states(self) -> dict[str, Tensor]:
        """Each part of the state, `(time, batch, unit)`."""
        if self.kind != "lstm":
            return {"h": self.h}
        c = self.complete().c
        assert c is not None
        return {"h": self.h, "c": c}

    def before(self, part: str) -> Tensor:
        """Return a part's value before each step, `(time, batch, unit)`."""
        values, first = self.states()[part] if part == "c" else self.h, self.initial[part]
        first = first.to(values.dtype)
        if not self.reverse:
            return torch.cat([first.unsqueeze(0), values[:-1]])
        before = torch.cat([values[1:], torch.zeros_like(first).unsqueeze(0)])
        last = (self.layout.lengths - 1).to(values.device)
        return torch.where(
            (torch.arange(len(values), device=values.device).unsqueeze(1) == last).unsqueeze(-1), first, before
        )

    def grads(self) -> dict[str, Tensor]:
        """Return the gradient of each part at every step; nothing before a backward pass has brought any."""
        if self.outside is None:
            return {}
        out = self.outside.out
        ends = {part: self.outside.end(part) for part in self.initial}
        return gradients.through_time(
            self.complete(),
            None if out is None else self.layout.pad(out),
            {part: None if end is None else self.layout.rows(end) for part, end in ends.items()},
        )

    def expects_grads(self) -> bool:
        """Say whether a backward pass may still bring the first gradients."""
        return self.outside is not None and self.outside.expected()

    def _reconstructed(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the gates `(time, batch, gates * hidden)` after their activations, and an LSTM's cells."""
        if self.kind == "lstm" and (kernels := _kernels(x)) is not None:
            # One launch for all steps: one for each step would cost as much as the network itself.
            with torch.no_grad(), torch.autocast("cuda", enabled=False):
                flat_x, flat_h = _flat(x, self.weights), _flat(self.before("h"), self.weights)
                pre = _sums(flat_x, flat_h, self.weights, _in_tf32(flat_x)).view(*x.shape[:-1], -1)
                first = self.initial["c"].to(pre.dtype).contiguous()
                lengths = self.layout.lengths.to(pre.device)
                return pre, kernels.lstm_scan(pre, first, lengths, reverse=self.reverse)
        with torch.no_grad():
            gates = activated_gates(self.kind, x, self.before("h"), self.weights, like_cudnn=True)
            gates = self._only_valid(gates)
            return gates, self._cells(gates) if self.kind == "lstm" else None

    def _cells(self, activated: Tensor) -> Tensor:
        """Return an LSTM's cells `(time, batch, hidden)` from its gates."""
        i, f, g, _ = activated.chunk(4, -1)
        with torch.no_grad():
            c = i * g
            last = self.initial["c"].to(c.dtype)
            started = None if self.layout.places is None or not self.reverse else self.valid.unsqueeze(-1)
            order = range(len(c) - 1, -1, -1) if self.reverse else range(len(c))
            forget, steps = f.unbind(0), c.unbind(0)
            for t in order:
                steps[t].addcmul_(forget[t], last)
                if started is not None:  # read backwards, a short row starts at its own last step
                    steps[t].copy_(torch.where(started[t], steps[t], last))
                last = steps[t]
            return self._only_valid(c)

    def _only_valid(self, values: Tensor) -> Tensor:
        return values if self.layout.places is None else values.masked_fill_(~self.valid.unsqueeze(-1), 0)


def pad(run: Pass, layout: Layout, options: Options) -> Padded:
    """Return a pass padded, sharing no memory with any tensor that the user may change."""
    wants_gates = options.gates or options.grads
    c = _cells_in_graph(run, layout) if options.graph and run.kind == "lstm" and run.h.requires_grad else None
    needed = run.kind == "lstm" and c is None
    missing = run.gates is None and (needed or (bool(GATES[run.kind]) and wants_gates))
    keep_weights = missing or options.grads

    def own(data: Tensor) -> Tensor:
        return layout.pad(data) if layout.places is not None else data.clone()

    if c is None and run.cells is not None:
        c = layout.pad(run.cells)
    activated = None if run.gates is None else layout.pad(run.gates)
    padded = Padded(
        run.kind,
        run.reverse,
        own(options.taken(run.h)),
        {name: layout.rows(part.detach()).clone() for name, part in zip("hc", run.initial, strict=False)},
        layout,
        run.weights.map(lambda weight: weight.detach().clone()) if keep_weights else run.weights,
        own(run.x.detach()) if missing else None,
        activated,
        c,
        run.outside,
    )
    if activated is not None and not wants_gates:  # a workspace is large: copy the cells out of it and drop it
        padded.complete().activated = None
    elif run.kind == "lstm" and activated is not None:
        padded.complete()
        padded.activated = activated.contiguous()
    return padded


def _cells_in_graph(run: Pass, layout: Layout) -> Tensor:
    """Return an LSTM's cells `(time, batch, hidden)` with a graph that leads back to inputs, states and weights."""
    weights, initial = run.weights, {name: layout.rows(part) for name, part in zip("hc", run.initial, strict=False)}
    h, x = layout.pad(run.h), layout.pad(run.x).to(weights.ih.dtype)
    track = Padded("lstm", run.reverse, h, initial, layout, weights, None, None, None, None)
    with torch.autocast(x.device.type, enabled=False):
        before = track.before("h").to(weights.ih.dtype)
        gates = linear(x, weights.ih, weights.bias_ih) + linear(before, weights.hh, weights.bias_hh)
        i, f, g, _ = gates.chunk(4, -1)
        new, keep, last = (i.sigmoid() * g.tanh()).unbind(0), f.sigmoid().unbind(0), initial["c"].to(gates.dtype)
        cells: list[Tensor] = [last] * len(new)
        valid = track.valid.unsqueeze(-1)
        for t in range(len(new) - 1, -1, -1) if run.reverse else range(len(new)):
            last = torch.where(valid[t], keep[t] * last + new[t], last)
            cells[t] = last
        return torch.stack(cells).where(valid, 0.0) if cells else gates[..., : gates.shape[-1] // 4]


def activated_gates(kind: str, x: Tensor, before: Tensor, weights: TrackWeights, *, like_cudnn: bool = False) -> Tensor:
    """Return the gates `(..., gates * hidden)` of steps whose input is `x` and whose previous h is `before`.

    Torch's cells and cuDNN's layers round differently: with `like_cudnn`, products are in tf32 where cuDNN's are.
    """
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        flat_x, flat_h = _flat(x, weights), _flat(before, weights)
        tf32 = like_cudnn and _in_tf32(flat_x)
        gates = (_lstm_gates if kind == "lstm" else _gru_gates)(flat_x, flat_h, weights, tf32)
        return gates.view(*x.shape[:-1], -1)


def _lstm_gates(flat_x: Tensor, flat_h: Tensor, weights: TrackWeights, tf32: bool) -> Tensor:
    gates = _sums(flat_x, flat_h, weights, tf32)
    units = gates.shape[-1] // 4
    gates[:, : 2 * units].sigmoid_()
    gates[:, 2 * units : 3 * units].tanh_()
    gates[:, 3 * units :].sigmoid_()
    return gates


def _gru_gates(flat_x: Tensor, flat_h: Tensor, weights: TrackWeights, tf32: bool) -> Tensor:
    gates = _affine(flat_x, weights.ih, weights.bias_ih, tf32)
    from_h = _affine(flat_h, weights.hh, weights.bias_hh, tf32)
    units = gates.shape[-1] // 3
    gates[:, : 2 * units].add_(from_h[:, : 2 * units]).sigmoid_()
    gates[:, 2 * units :].addcmul_(gates[:, :units], from_h[:, 2 * units :]).tanh_()
    return gates


def _sums(flat_x: Tensor, flat_h: Tensor, weights: TrackWeights, tf32: bool) -> Tensor:
    """Return an LSTM's gates before their activations, `(rows, 4 * hidden)`."""
    if _in_onednn(flat_x):  # one product over both: what is read together is added together
        bias = None if weights.bias_ih is None or weights.bias_hh is None else weights.bias_ih + weights.bias_hh
        return _affine(torch.cat([flat_x, flat_h], 1), torch.cat([weights.ih, weights.hh], 1), bias, tf32)
    gates = _affine(flat_x, weights.ih, weights.bias_ih, tf32)
    if tf32 and (kernels := _kernels(gates)) is not None:
        return kernels.product(flat_h, weights.hh, weights.bias_hh, gates, add=True)
    gates.addmm_(flat_h, weights.hh.t())
    return gates if weights.bias_hh is None else gates.add_(weights.bias_hh)


def _affine(x: Tensor, weight: Tensor, bias: Tensor | None, tf32: bool) -> Tensor:
    if tf32 and (kernels := _kernels(x)) is not None:
        return kernels.product(x, weight, bias, x.new_empty(len(x), len(weight)), add=False)
    if _in_onednn(x):
        product: Tensor = _onednn_linear(x, weight, bias, "none", [], "")
        return product
    return linear(x, weight, bias)


def _in_onednn(x: Tensor) -> bool:
    """Say whether oneDNN does the products: on AMD's processors it takes half the time of torch's own choice, MKL."""
    return (
        _onednn_linear is not None
        and x.device.type == "cpu"
        and x.dtype == torch.float32
        and len(x) >= _MANY
        and bool(torch._C._get_mkldnn_enabled())
    )


def _in_tf32(x: Tensor) -> bool:
    """Say whether cuDNN ran the layer in tf32: a finer reconstruction would be slower, and no more exact."""
    if x.dtype != torch.float32 or not x.is_cuda:
        return False
    return bool(torch.backends.cudnn.allow_tf32) and torch.cuda.get_device_capability(x.device) >= (8, 0)


def _kernels(x: Tensor) -> Kernels | None:
    """Return the CUDA kernels if they can run; triton is loaded only then, since it is heavy."""
    if not x.is_cuda:
        return None
    from . import kernels

    return kernels if kernels.available() else None


def _flat(values: Tensor, weights: TrackWeights) -> Tensor:
    # Under autocast, a run's inputs and states may have a narrower dtype than its weights.
    return values.reshape(-1, values.shape[-1]).to(weights.ih.dtype).contiguous()


class Kernels(Protocol):
    """The module `kernels`, which needs triton."""

    def lstm_scan(self, pre: Tensor, first: Tensor, lengths: Tensor, *, reverse: bool) -> Tensor:
        """Activate gates in place and return the cells."""

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, *, add: bool) -> Tensor:
        """Write or add a product in tf32."""
