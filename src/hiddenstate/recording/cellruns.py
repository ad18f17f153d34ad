"""The runs of cells that are under way: which steps belong together."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from ..unrolling import row_order
from .arranging import Arranged
from .ears import CellEar
from .steps import Placed, Steps
from .takes import Options, Take

if TYPE_CHECKING:
    from .scenes import Step

_PIECE = 32 * 2**20  # bytes of a run that goes on and on, after which a piece of it goes to disk


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
        self._options = options
        self._keep = keep
        self._streaming = streaming
        self._open: dict[tuple[threading.Thread, CellEar], Steps] = {}
        self._depth: dict[threading.Thread, int] = {}  # calls of the model under way in each thread

    def enter(self, heard: bool) -> None:
        """Note that a call of the model begins."""
        here = threading.current_thread()
        if heard:
            if not self._depth.get(here):
                self.close_all(here)
            self._depth[here] = self._depth.get(here, 0) + 1

    def leave(self) -> None:
        """Note that a call of the model ends, also by an exception."""
        here = threading.current_thread()
        if self._depth.get(here):
            self._depth[here] -= 1
            if not self._depth[here]:
                self.close_all(here)

    def step(self, ear: CellEar, step: Step, after: dict[str, Placed]) -> None:
        """Add one step to a cell's run, or start a new one."""
        key = threading.current_thread(), ear
        ear.heard = True
        rows = next(iter(after.values())).rows
        steps = self._open.get(key)
        alone = not self._depth.get(key[0]) and not ear.stacked
        if steps is not None and (not steps.fits(after) or (alone and not steps.goes_on(step.given()))):
            self.close(ear)
            steps = None
        if steps is None:
            given = step.given()
            first = step.initial() if given is None else given
            initial = {name: self._options.cast(p.flat(p.tensor.detach())).clone() for name, p in first.items()}
            # A reverse cell in a stack sees its last position first: which steps to keep is known at the end.
            options = replace(self._options, every=1) if ear.reverse else self._options
            steps = self._open[key] = Steps(options, rows, initial, order=row_order())
        steps.add(after, step.gates)
        if self._streaming and steps.nbytes > _PIECE and not ear.stacked and not self._options.grads:
            self._keep(self._take(ear, steps.split()), last=False)

    def close(self, ear: CellEar) -> None:
        """End a cell's run in this thread, if there is one."""
        self._close((threading.current_thread(), ear))

    def drop(self, ear: CellEar) -> None:
        """Forget a cell's run in this thread."""
        self._open.pop((threading.current_thread(), ear), None)

    def close_all(self, thread: threading.Thread | None = None) -> None:
        """End all runs, or those of one thread."""
        for key in list(self._open):
            if thread in (None, key[0]):
                self._close(key)

    def under_way(self) -> list[CellEar]:
        """Return whose runs are under way."""
        return [ear for _, ear in list(self._open)]

    def takes(self, track: str) -> list[Take]:
        """Return the runs of a track that are under way, as far as they have come."""
        return [self._take(ear, steps) for (_, ear), steps in list(self._open.items()) if ear.track == track]

    def _close(self, key: tuple[threading.Thread, CellEar]) -> None:
        steps = self._open.pop(key, None)
        if steps is not None:
            self._keep(self._take(key[1], steps))

    def _take(self, ear: CellEar, steps: Steps) -> Take:
        source = Arranged(steps, ear.reverse)
        take = Take(ear.track, ear.layer.kind, self._options, source.lengths, source.initial(), source)
        take.thinned, take.piece = not ear.reverse, steps.pieces
        return take
