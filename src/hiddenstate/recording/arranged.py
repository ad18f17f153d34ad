"""Runs put where they belong: in the user's rows, one segment after another, reverse ones in the order of positions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..unrolling import Places
from .takes import Source


@dataclass(frozen=True, slots=True, eq=False)
class Arranged:
    """A run as its user sees it, whose rows were sorted, cut into segments or turned round to be run."""

    source: Source
    places: Places
    run_lengths: Tensor  # (places,) of what was run
    reverse: bool = False  # each row was run from its end
    every: int = 1  # steps that the source left out: it holds steps 0, every, 2 * every, …

    @property
    def lengths(self) -> Tensor:
        """How many steps each of the user's rows had, `(batch,)`."""
        found = torch.zeros(self.places.batch, dtype=torch.int64)
        return found.scatter_reduce(0, self.places.rows, self.places.starts + self.run_lengths, "amax")

    def rows(self, first: Tensor) -> Tensor:
        """Return the state before the first step of each place as `(batch, unit)`; zero for rows that wait."""
        begins = (self.places.starts == 0).nonzero().squeeze(1)
        found = first.new_zeros(self.places.batch, *first.shape[1:])
        return found.index_copy(0, self.places.rows[begins].to(first.device), first[begins.to(first.device)])

    def states(self) -> dict[str, Tensor]:
        """Return each part of the state, `(time, batch, unit)`."""
        return {name: self._placed(part) for name, part in self.source.states().items()}

    @property
    def gates(self) -> dict[str, Tensor]:
        """Each gate by name."""
        return {name: self._placed(gate) for name, gate in self.source.gates.items()}

    def grads(self) -> dict[str, Tensor]:
        """Return the gradient of each part at every step."""
        return {name: self._placed(grad) for name, grad in self.source.grads().items()}

    def expects_grads(self) -> bool:
        """Say whether a backward pass may still bring the first gradients."""
        return self.source.expects_grads()

    def _placed(self, values: Tensor) -> Tensor:
        step = torch.arange(len(values)).unsqueeze(1)  # (time, 1)
        lengths = (self.run_lengths + self.every - 1) // self.every
        at = self.places.starts + (lengths - 1 - step if self.reverse else step)  # (time, places)
        there = (step < lengths).flatten().nonzero().squeeze(1)
        target = (at * self.places.batch + self.places.rows).flatten()[there].to(values.device)
        time = -(-int(self.lengths.max()) // self.every)
        flat = values.new_zeros(time * self.places.batch, values.shape[-1])
        flat.index_copy_(0, target, values.flatten(0, 1)[there.to(values.device)])
        return flat.view(time, self.places.batch, -1)


@dataclass(slots=True, eq=False)
class Joined:
    """Several calls of a layer, each of which went on from the one before, as one run."""

    pieces: list[Source]

    def states(self) -> dict[str, Tensor]:
        """Return each part of the state, `(time, batch, unit)`."""
        return _joined([piece.states() for piece in self.pieces])

    @property
    def gates(self) -> dict[str, Tensor]:
        """Each gate by name."""
        return _joined([piece.gates for piece in self.pieces])

    def grads(self) -> dict[str, Tensor]:
        """Return the gradient of each part; zero in pieces that no gradient has reached."""
        found = [piece.grads() for piece in self.pieces]
        names = {name for grads in found for name in grads}
        if not names:
            return {}
        states = [piece.states() for piece in self.pieces]
        filled = [{n: g.get(n, torch.zeros_like(s[n])) for n in names} for g, s in zip(found, states, strict=True)]
        return _joined(filled)

    def expects_grads(self) -> bool:
        """Say whether a backward pass may still bring the first gradients."""
        return all(piece.expects_grads() for piece in self.pieces)


def _joined(pieces: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}
