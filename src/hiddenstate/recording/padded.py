"""One track of one run as rectangles: rows in the user's order, padding zero, memory of its own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from . import gradients, reconstruction
from .kernel_call import GATES, Weights
from .layerwise import Need, Pass


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the rows of a packed sequence belong; nothing to do where the input was not packed."""

    time: int
    batch: int
    lengths: Tensor  # (batch,) int64, on the CPU
    places: Tensor | None = None  # (rows,) the place time * batch + row of each packed row
    order: Tensor | None = None  # (batch,) the user's order of rows

    @staticmethod
    def of(h: Tensor, sizes: Tensor | None, packed: PackedSequence | None) -> Layout:
        """Read the layout off a call's batch sizes and the sequence that its module was given."""
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
        """Return `(rows, unit)` as `(time, batch, unit)`, zero where there is no row."""
        if self.places is None:
            return data
        flat = data.new_zeros(self.time * self.batch, data.shape[-1])
        return flat.index_copy_(0, self.places, data).view(self.time, self.batch, -1)

    def rows(self, part: Tensor) -> Tensor:
        """Return the rows of `(batch, unit)` in the user's order."""
        return part if self.order is None else part.index_select(0, self.order.to(part.device))


@dataclass(slots=True, eq=False)
class Padded:
    """One track of one run; gates and cells that the run did not leave behind are worked out when first asked for."""

    kind: str
    reverse: bool
    h: Tensor  # (time, batch, unit)
    initial: dict[str, Tensor]  # part -> (batch, unit)
    layout: Layout
    weights: Weights
    x: Tensor | None  # (time, batch, feature), where something is still to be worked out
    activated: Tensor | None  # (time, batch, gates * hidden)
    c: Tensor | None
    direct: gradients.Direct | None

    @property
    def valid(self) -> Tensor:
        """Which steps are real: bool (time, batch)."""
        return (torch.arange(self.layout.time).unsqueeze(1) < self.layout.lengths).to(self.h.device)

    @property
    def last(self) -> Tensor:
        """The step each row ends at, in the order of computation."""
        lengths = self.layout.lengths.to(self.h.device)
        return torch.zeros_like(lengths) if self.reverse else lengths - 1

    def complete(self) -> Padded:
        """Work out what is missing; what it is worked out from is then let go."""
        if self.activated is None and self.x is not None:
            self.activated, self.c = reconstruction.from_states(self)
        elif self.kind == "lstm" and self.c is None:
            assert self.activated is not None
            self.c = reconstruction.cells(self, self.activated)
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
        """Return the part as it was before each step, `(time, batch, unit)`."""
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
        """Return the gradient of each part at every step, where a backward pass has brought any."""
        if self.direct is None:
            return {}
        out = self.direct.out
        ends = {part: self.direct.end(part) for part in self.initial}
        return gradients.through_time(
            self.complete(),
            None if out is None else self.layout.pad(out),
            {part: None if end is None else self.layout.rows(end) for part, end in ends.items()},
        )

    def expects_grads(self) -> bool:
        """Say whether a backward pass may still bring the first gradients."""
        return self.direct is not None and self.direct.expected()


def pad(run: Pass, layout: Layout, need: Need) -> Padded:
    """Return a pass as rectangles that share no memory with anything the user may change."""
    missing = run.gates is None and (run.kind == "lstm" or (bool(GATES[run.kind]) and (need.gates or need.grads)))
    keep_weights = missing or need.grads

    def own(data: Tensor) -> Tensor:
        return layout.pad(data) if layout.places is not None else data.clone()

    c = None if run.cells is None else layout.pad(run.cells)
    activated = None if run.gates is None else layout.pad(run.gates)
    padded = Padded(
        run.kind,
        run.reverse,
        own(run.h),
        {name: layout.rows(part).clone() for name, part in zip("hc", run.initial, strict=False)},
        layout,
        run.weights.map(lambda weight: weight.detach().clone()) if keep_weights else run.weights,
        own(run.x) if missing else None,
        activated,
        c,
        run.direct,
    )
    if activated is not None and not (need.gates or need.grads):  # a workspace is large: take the cells, let it go
        padded.complete().activated = None
    elif run.kind == "lstm" and activated is not None:
        padded.complete()
        padded.activated = activated.contiguous()
    return padded
