"""The runs of fused layers that are under way: calls of one layer in a row, each going on from the last, are one."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from .arranged import Joined
from .cell_runs import PART, Keep
from .steps import goes_on
from .takes import Options, Source, Take


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """One call of a fused layer, one of its tracks."""

    kind: str
    source: Source
    lengths: Tensor  # (batch,)
    initial: Mapping[str, Tensor]  # part -> (batch, unit)
    given: dict[str, Tensor]  # the whole layer's state before the call, and after it
    after: dict[str, Tensor]
    nbytes: int

    @property
    def whole(self) -> bool:
        """Whether all its rows have all its steps, so that something may follow it."""
        return bool((self.lengths == self.lengths.max()).all())


@dataclass(slots=True, eq=False)
class _Run:
    """A run that is under way."""

    first: Piece
    pieces: list[Piece]
    written: int = 0  # parts of it that went to disk already

    def goes_on_with(self, piece: Piece) -> bool:
        """Say whether a call is this run's next one."""
        last = self.pieces[-1]
        fits = len(last.lengths) == len(piece.lengths) and last.after.keys() == piece.given.keys()
        return last.whole and fits and goes_on(piece.given, last.after, self.first.given)


class FusedRuns:
    """Joins the calls of a fused layer that is stepped within one call of the model."""

    def __init__(self, options: Options, keep: Keep, *, streaming: bool) -> None:
        """Hand each run to `keep` when it ends; with `streaming`, long ones part by part."""
        self._options, self._keep = options, keep
        self._parts = streaming and options.every == 1 and not options.grads
        self._open: dict[tuple[threading.Thread, str], _Run] = {}

    def add(self, track: str, piece: Piece) -> None:
        """Take in a call: it goes on with the track's run, or starts a new one."""
        key = threading.current_thread(), track
        run = self._open.get(key)
        if run is not None and not run.goes_on_with(piece):
            self._close(key)
            run = None
        if run is None:
            self._open[key] = _Run(piece, [piece])
            return
        if self._parts and sum(each.nbytes for each in run.pieces) > PART:
            self._keep(self._take(track, run), last=False)
            run.pieces, run.written = [], run.written + 1
        run.pieces.append(piece)

    def close_all(self, thread: threading.Thread | None = None) -> None:
        """End all runs, or those of one thread."""
        for key in list(self._open):
            if thread in (None, key[0]):
                self._close(key)

    def forget(self, track: str) -> None:
        """Forget the runs of a track that are under way."""
        self._open = {key: run for key, run in self._open.items() if key[1] != track}

    def under_way(self) -> list[str]:
        """Return the tracks whose runs are under way."""
        return [track for _, track in list(self._open)]

    def takes(self, track: str) -> list[Take]:
        """Return the runs of a track that are under way, as far as they have come."""
        return [self._take(track, run) for (_, other), run in list(self._open.items()) if other == track]

    def _close(self, key: tuple[threading.Thread, str]) -> None:
        run = self._open.pop(key, None)
        if run is not None:
            self._keep(self._take(key[1], run))

    def _take(self, track: str, run: _Run) -> Take:
        first, *others = run.pieces
        source: Source = Joined([piece.source for piece in run.pieces]) if others else first.source
        lengths = sum((piece.lengths for piece in others), first.lengths)
        take = Take(track, first.kind, self._options, lengths, first.initial, source)
        take.piece = run.written
        return take
