"""The runs of cells that are under way: which steps belong together."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from ..unrolling import Places, places
from .arranged import Arranged
from .step import Step
from .steps import Placed, Steps
from .takes import Options, Source, Take

PART = 32 * 2**20  # bytes of a run that goes on and on, after which a part of it goes to disk


@dataclass(frozen=True, slots=True, eq=False)
class CellTrack:
    """A cell, alone or in a stack, whose steps make runs of one track."""

    name: str
    kind: str
    stacked: bool = False  # whether it is one of an `hs.Recurrent`'s
    reverse: bool = False


class Keep(Protocol):
    """Where a run goes when it has ended."""

    def __call__(self, take: Take, *, last: bool = True) -> None:
        """Keep a run, or a piece of one that goes on."""


class CellRuns:
    """Joins a cell's steps along time: all steps within one call of the model are one run.

    A cell that is stepped outside any call of the model, as where it is the model, starts a new run when it is
    given no state, zeros, or the state that the run began with.
    """

    def __init__(self, options: Options, keep: Keep, *, streaming: bool) -> None:
        """Hand each run to `keep` when it ends."""
        self.inside: set[threading.Thread] = set()  # threads in which a call of the model is under way
        self._options = options
        self._keep = keep
        self._streaming = streaming
        self._open: dict[tuple[threading.Thread, CellTrack], Steps] = {}

    def step(self, cell: CellTrack, step: Step, after: dict[str, Placed]) -> None:
        """Add one step to a cell's run, or start a new one."""
        key = threading.current_thread(), cell
        rows = next(iter(after.values())).rows
        steps = self._open.get(key)
        alone = key[0] not in self.inside and not cell.stacked
        if steps is not None and (not steps.fits(after) or (alone and not steps.goes_on(step.given()))):
            self.close(cell)
            steps = None
        if steps is None:
            given = step.given()
            first = step.initial() if given is None else given
            fits = all(p.rows == rows for p in first.values())  # else it is a start without a shape, `torch.zeros(0)`
            initial = {name: self._options.cast(p.flat(p.tensor.detach())).clone() for name, p in first.items() if fits}
            # A reverse cell in a stack sees its last position first: which steps to keep is known at the end.
            options = replace(self._options, every=1) if cell.reverse else self._options
            steps = self._open[key] = Steps(options, rows, initial, places=places())
        steps.add(after, step.gates)
        if self._streaming and steps.nbytes > PART and not cell.stacked and not self._options.grads:
            self._keep(self._take(cell, steps.split()), last=False)

    def close(self, cell: CellTrack) -> None:
        """End a cell's run in this thread, if there is one."""
        self._close((threading.current_thread(), cell))

    def drop(self, cell: CellTrack) -> None:
        """Forget a cell's run in this thread."""
        self._open.pop((threading.current_thread(), cell), None)

    def close_all(self, thread: threading.Thread | None = None) -> None:
        """End all runs, or those of one thread."""
        for key in list(self._open):
            if thread in (None, key[0]):
                self._close(key)

    def forget(self, track: str) -> None:
        """Forget the runs of a track that are under way."""
        self._open = {key: steps for key, steps in self._open.items() if key[1].name != track}

    def under_way(self) -> list[str]:
        """Return the tracks whose runs are under way."""
        return [cell.name for _, cell in list(self._open)]

    def takes(self, track: str) -> list[Take]:
        """Return the runs of a track that are under way, as far as they have come."""
        return [self._take(cell, steps) for (_, cell), steps in list(self._open.items()) if cell.name == track]

    def _close(self, key: tuple[threading.Thread, CellTrack]) -> None:
        steps = self._open.pop(key, None)
        if steps is not None:
            self._keep(self._take(key[1], steps))

    def _take(self, cell: CellTrack, steps: Steps) -> Take:
        lengths, initial = steps.row_lengths(), steps.initial
        source: Source = steps
        where = steps.places
        if where is None and cell.reverse:
            where = Places(torch.arange(steps.batch), torch.zeros(steps.batch, dtype=torch.int64), steps.batch)
        if where is not None:
            source = arranged = Arranged(steps, where, lengths, reverse=cell.reverse, every=steps.options.every)
            lengths, initial = arranged.lengths, {name: arranged.rows(part) for name, part in initial.items()}
        take = Take(cell.name, cell.kind, self._options, lengths, initial, source)
        take.thinned, take.piece = not cell.reverse, steps.pieces
        return take
