"""A buffer for the steps of a run, which come one by one and are joined along time."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TypeAlias, TypeVar
from weakref import ref

import torch
from torch import Tensor

from ..errors import BadInput
from ..unrolling import RowPlaces
from .gradients import GraphToken, add_up_gradients
from .recording import Options

K = TypeVar("K")
Named: TypeAlias = "str | tuple[str, ...]"  # the name of one gate, or of several side by side


@dataclass(frozen=True, slots=True)
class Placed:
    """A part of a state as the cell returned it, with its batch axis; None if it has no batch axis."""

    tensor: Tensor
    axis: int | None = 0

    @property
    def rows(self) -> int:
        """The number of rows."""
        return 1 if self.axis is None else self.tensor.shape[self.axis]

    @property
    def units(self) -> int:
        """The number of units in each row."""
        return self.tensor.numel() // max(self.rows, 1)

    def flat(self, values: Tensor) -> Tensor:
        """Return values shaped like the part as `(batch, unit)`."""
        if self.axis == 0 and values.dim() == 2:
            return values
        values = values.unsqueeze(0) if self.axis is None else values.movedim(self.axis, 0)
        return flat(values)


@dataclass(slots=True, eq=False)
class StepBuffer:
    """The steps of a run: the state after each, gates and gradients.

    If the batch shrinks on the way, the missing rows have ended.
    """

    options: Options
    batch: int
    initial: dict[str, Tensor]  # part -> (batch, unit)
    count: int = 0  # steps that were run
    nbytes: int = 0
    lengths: list[int] = field(default_factory=list)  # rows at each step
    rows: list[int] = field(default_factory=list)  # rows at each kept step
    parts: dict[str, list[Tensor]] = field(default_factory=dict)
    named: list[dict[Named, Tensor]] = field(default_factory=list)  # the gates of each kept step
    seen: list[dict[str, Tensor]] = field(default_factory=list)  # the gradients of each kept step
    graph: ref[GraphToken] | None = None
    axes: dict[str, int | None] = field(default_factory=dict)
    places: RowPlaces | None = None  # where each row belongs; None if rows are in the user's order
    alive: int = 0  # rows at the last step
    pieces: int = 0  # pieces that were split off
    number: int | None = None  # of the run on disk, set once a piece of it is written
    last: dict[str, Tensor] = field(default_factory=dict)  # the state after the last step, in the cell's own memory

    def add(self, state: dict[str, Placed], gates: dict[Named, Tensor]) -> None:
        """Add one step: the state after it, with its graph, and its gates."""
        rows = next(iter(state.values())).rows
        self.lengths.append(rows)
        self.alive = rows
        self.axes = {name: part.axis for name, part in state.items()}
        self.last = {name: part.tensor.detach() for name, part in state.items()}  # so that its memory is not reused
        self.count += 1
        if (self.count - 1) % self.options.every:
            return
        self.rows.append(rows)
        for name, part in state.items():
            kept = self.options.cast(part.flat(self.options.taken(part.tensor)))
            kept = kept.clone() if kept.data_ptr() == part.tensor.data_ptr() else kept
            self.parts.setdefault(name, []).append(kept)
            self.nbytes += kept.nbytes
        self.named.append({name: self._gate(name, gate, rows) for name, gate in gates.items()})
        self.seen.append({})
        if self.options.grads:
            self._listen(state)

    def fits(self, state: dict[str, Placed]) -> bool:
        """Say whether a state can follow the last one: rows may have ended, but not been added."""
        if state.keys() != self.last.keys():
            return False
        for name, part in state.items():
            before = self.last[name]
            if part.tensor.shape != before.shape and (
                part.rows > self.alive or part.units != Placed(before, self.axes[name]).units
            ):
                return False
        return True

    def _gate(self, name: Named, value: Tensor, rows: int) -> Tensor:
        if value.dim() == 0:
            value = value.expand(rows)
        if value.shape[0] != rows:
            raise BadInput(
                f"hs.tap({name!r}, ...) was given a tensor of shape {tuple(value.shape)} in a step of {rows} rows, "
                f"but a value for each row is needed, (batch, unit). One for all rows: value.expand(batch, -1)."
            )
        kept = self.options.cast(flat(value))
        self.nbytes += kept.nbytes
        return kept

    def _listen(self, state: dict[str, Placed]) -> None:
        graph = self.graph() if self.graph is not None else None
        if graph is None:
            graph = GraphToken()
            self.graph = ref(graph)
        for name, part in state.items():
            add_up_gradients(part.tensor, self.seen[-1], name, graph)

    def expects_grads(self) -> bool:
        """Say whether a backward pass may still bring the first gradients."""
        return not any(self.seen) and self.graph is not None and self.graph() is not None

    def split(self) -> StepBuffer:
        """Return the steps so far as a separate buffer, and continue with the steps that follow."""
        head = replace(self)
        self.batch, self.nbytes = self.lengths[-1], 0
        self.lengths, self.rows, self.parts, self.named, self.seen = [], [], {}, [], []
        self.pieces += 1
        return head

    def row_lengths(self) -> Tensor:
        """Return the number of steps of each row."""
        rows = torch.tensor(self.lengths, dtype=torch.int64)
        return (torch.arange(self.batch) < rows.unsqueeze(1)).sum(0)

    def states(self) -> dict[str, Tensor]:
        """Return each part of the state, `(time, batch, unit)`."""
        return {name: self._join(steps) for name, steps in self.parts.items()}

    @property
    def gates(self) -> dict[str, Tensor]:
        """Each gate by name; NaN at steps where the cell did not tap it."""
        found: dict[str, Tensor] = {}
        for name in dict.fromkeys(name for step in self.named for name in step):
            joined = self._join(self._filled(name, self.named, float("nan")))
            if isinstance(name, str):
                found[name] = joined
            else:
                found |= dict(zip(name, joined.chunk(len(name), -1), strict=True))
        return found

    def grads(self) -> dict[str, Tensor]:
        """Return the gradient of each part at every step."""
        flat = [{name: Placed(grad, self.axes[name]).flat(grad) for name, grad in step.items()} for step in self.seen]
        names = dict.fromkeys(name for step in flat for name in step)
        return {name: self._join(self._filled(name, flat, 0.0)) for name in names}

    def _filled(self, name: K, steps: list[dict[K, Tensor]], value: float) -> list[Tensor]:
        like = next(step[name] for step in steps if name in step)
        return [
            step[name] if name in step else like.new_full((count, like.shape[1]), value)
            for step, count in zip(steps, self.rows, strict=True)
        ]

    def _join(self, steps: list[Tensor]) -> Tensor:
        if all(len(step) == self.batch for step in steps):
            return torch.stack(steps)
        whole = steps[0].new_zeros(len(steps), self.batch, steps[0].shape[1])
        for t, step in enumerate(steps):
            whole[t, : len(step)] = step
        return whole


def flat(value: Tensor) -> Tensor:
    """Return `(batch, ...)` as `(batch, unit)`."""
    if value.dim() == 2:
        return value
    return value.reshape(value.shape[0], -1) if value.numel() else value.new_zeros(value.shape[0], 0)
