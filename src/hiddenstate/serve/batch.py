"""Inputs of one kind for one call of the model: a row for each session."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..state import State
from .facts import At, beside
from .inputs import Chain, Many, Output, Push
from .stores import Blobs, Ints
from .trial import Layout

Unit: TypeAlias = "Push | Chain"
_tuple = tuple.__new__  # makes a named tuple in half the time, which counts with hundreds in a tick


class Kind(NamedTuple):
    """What inputs must have in common to go side by side."""

    steps: int  # of one input
    alone: bool  # which is one bare step
    inputs: int = 1  # one after another, in each row

    @staticmethod
    def of(unit: Push | Chain | Many) -> Kind:
        """Return the kind of some inputs."""
        if type(unit) is Chain:
            first = unit.pushes[0]
            return Kind(first.steps, first.alone, len(unit.pushes))
        assert not isinstance(unit, Chain)
        return Kind(unit.steps, unit.alone)


@dataclass(slots=True)
class Batch:
    """Inputs, each with the slot of its session; of different lengths until they have been run."""

    units: list[Unit] | Many
    slots: Ints
    anew: bool  # all of these sessions start from the initial state
    at: At = field(init=False)  # the slots, by the quickest way

    def __post_init__(self) -> None:
        """See whether they lie side by side."""
        self.at = beside(self.slots)

    def __len__(self) -> int:
        """Return how many rows there are."""
        return len(self.slots)

    @property
    def apart(self) -> Sequence[Unit]:
        """The inputs one by one."""
        return self.units.apart() if isinstance(self.units, Many) else self.units

    @property
    def sessions(self) -> list[str]:
        """The session of each row."""
        return self.units.sessions if isinstance(self.units, Many) else [unit.session for unit in self.units]

    def kinds(self) -> list[Kind]:
        """Return the kinds of input there are."""
        if isinstance(self.units, Many):
            return [Kind.of(self.units)]
        if all([type(unit) is Push for unit in self.units]):
            return [Kind(*kind) for kind in {(unit.steps, unit.alone) for unit in self.units}]  # type: ignore[union-attr]
        return list(set(map(Kind.of, self.units)))

    def select(self, rows: Sequence[int]) -> Batch:
        """Return these rows alone."""
        units = self.apart
        return Batch([units[row] for row in rows], self.slots[list(rows)], self.anew)

    def lengths(self) -> list[int]:
        """Return the steps of each row."""
        return [kind.steps * kind.inputs for kind in map(Kind.of, self.apart)]

    def joined(self, like: Layout, *, padded: bool) -> Tensor:
        """Return all inputs as one tensor `(row, step, ...)`, padded where their steps differ."""
        if isinstance(self.units, Many):
            return self.units.source
        pushes = [push for unit in self.units for push in (unit.pushes if type(unit) is Chain else (unit,))]
        if padded:
            whole = [torch.cat([push.piece(like) for push in _pushes(unit)]) for unit in self.units]
            return torch.nn.utils.rnn.pad_sequence(whole, batch_first=True)
        return _stacked(pushes, like).reshape(len(self), -1, *like.step_shape)  # type: ignore[arg-type]


@dataclass(slots=True)
class Ran:
    """A batch of one kind that the model took, and what it made of it."""

    batch: Batch
    kind: Kind
    after: State  # of as many rows
    leaves: list[Tensor | None]  # outputs, each (input, ...): those of the first row, then those of the second
    answers: Blobs | None  # the same as they are to be kept

    def settle(self, seqs: Ints) -> None:
        """Give every input its result, and the number that it got; `seqs` are those of each row's last."""
        if isinstance(self.batch.units, Many) and self.batch.units.pushes is None:
            self.batch.units.result = self.leaves
            return
        leaves, answers, ahead = self.leaves, self.answers, self.kind.inputs - 1
        place = 0
        for unit, last in zip(self.batch.apart, seqs.tolist(), strict=True):
            for seq, push in enumerate(unit.pushes if type(unit) is Chain else (unit,), last - ahead):
                push.seq = seq  # type: ignore[union-attr]
                push.result = _tuple(Output, (leaves, place, answers))
                place += 1

    def select(self, rows: Sequence[int]) -> Ran:
        """Return these rows alone."""
        index = torch.tensor(list(rows))
        inputs = (index[:, None] * self.kind.inputs + torch.arange(self.kind.inputs)).flatten()
        return Ran(
            self.batch.select(rows),
            self.kind,
            self.after.select(index),
            [None if leaf is None else leaf.index_select(0, inputs.to(leaf.device)) for leaf in self.leaves],
            None if self.answers is None else self.answers.select(inputs.tolist()),
        )


def _pushes(unit: Unit) -> Sequence[Push]:
    return unit.pushes if isinstance(unit, Chain) else (unit,)


def _stacked(pushes: Sequence[Push], like: Layout) -> Tensor:
    """Return pieces of as many steps as one tensor `(input, step, ...)`."""
    sources = [push.source for push in pushes]
    if not any([isinstance(source, Tensor) for source in sources]):
        return torch.frombuffer(bytearray().join(sources), dtype=like.dtype)  # type: ignore[arg-type]
    source, first = sources[0], pushes[0].row
    if isinstance(source, Tensor) and all([other is source for other in sources]):
        rows = [push.row for push in pushes]
        if rows == list(range(first, first + len(rows))):
            return source[first : first + len(rows)]
    if all([isinstance(source, Tensor) and len(source) == 1 for source in sources]):
        return torch.cat(sources)  # type: ignore[arg-type]
    return torch.stack([push.piece(like) for push in pushes])
