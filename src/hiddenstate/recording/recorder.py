"""A recording that is under way: who listens where, and where the runs go."""

from __future__ import annotations

import threading
from os import PathLike
from types import TracebackType
from typing import Any
from weakref import WeakSet

from torch import nn

from ..cells import Handle, Hook, Layer, as_layer, layers
from ..errors import BadInput, NotRecurrent, UnknownTrack
from ..unrolling import Recurrent
from . import scenes
from .cellruns import CellRuns
from .ears import CellEar, FusedEar, StackEar
from .folder import Folder, Loaded
from .opening import Tracks
from .recording import Recording
from .takes import Options, Take
from .trajectory import Trajectory
from .watching import unwatch, unwind, watch


class Recorder(Recording):
    """A recording under way, or just ended; see `record`."""

    def __init__(
        self, model: nn.Module, options: Options, *, tracks: Tracks | None, to: str | PathLike[str] | None
    ) -> None:
        """Find the layers; nothing is touched before the block begins."""
        found = layers(model)
        if not found:
            raise NotRecurrent(
                f"{type(model).__name__} has no recurrent layer, so there is no state to record. A cell of your own is "
                f"found by its initial_state(batch), or by hidden_size and forward(x, state); else by hs.register."
            )
        self.every = options.every
        self._options = options
        self._chosen = choose(found, tracks)
        self._model = model
        self._cells = CellRuns(options, self.keep, streaming=to is not None)
        self._ears = self._listeners(found)
        self._runs: dict[str, list[Take]] = {}
        self._lock = threading.RLock()
        self._handles: list[Handle] = []
        self._thread: threading.Thread | None = None
        self._older: WeakSet[threading.Thread] = WeakSet()
        self._to = to
        self._folder: Folder | None = None

    def __enter__(self) -> Recorder:
        """Begin to listen."""
        if self._thread is not None:
            raise BadInput("this recording is under way already: open another one with hs.record for a nested block.")
        if self._to is not None and self._folder is None:
            self._folder = Folder(self._to, {"every": self.every, "tracks": list(self._chosen)})
        self._thread = threading.current_thread()
        self._older = WeakSet(threading.enumerate())
        _under_way.append(self)
        for ear, scene in self._ears:
            watch(ear.layer.module, scene, ear)
        if not any(ear.layer.module is self._model for ear, _ in self._ears):
            self._handles = [
                Hook(lambda *_: self._cells.enter(self.hears())).before(self._model),
                Hook(lambda *_: self._cells.leave()).after(self._model, always=True),
            ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop listening, leave no hook behind, and close the runs that are still open."""
        for ear, _ in self._ears:
            unwatch(ear.layer.module, ear)
        for handle in self._handles:
            handle.remove()
        self._handles = []
        unwind([ear for ear, _ in self._ears])
        _under_way.remove(self)
        self._thread = None
        self._cells.close_all()
        if self._folder is not None:
            self._hand_over(everything=True)
            self._folder.close()

    def hears(self) -> bool:
        """Say whether calls in this thread are recorded: the one of the block, and those started in it.

        A thread that has a recording of its own is heard by that one alone. A full disk ends the listening.
        """
        if self._folder is not None and self._folder.stopped is not None:
            return False
        here = threading.current_thread()
        if here is self._thread:
            return True
        return here not in self._older and not any(other._thread is here for other in _under_way)

    def flush(self) -> None:
        """Write to disk what is still waiting to be; without `to` there is nothing to do."""
        if self._folder is not None:
            with self._lock:
                self._hand_over()
                self._folder.flush()

    @property
    def cells(self) -> CellRuns:
        """The runs of cells that are under way."""
        return self._cells

    def keep(self, take: Take, *, last: bool = True) -> None:
        """Keep a run, in memory or on disk."""
        with self._lock:
            if self._folder is not None and not last:
                self._folder.add(take, last=False)
                return
            if self._folder is not None or self._options.device is not None or self.every > 1:
                take.settle()
            self._runs.setdefault(take.track, []).append(take)
            if self._folder is not None:
                self._hand_over()

    def _hand_over(self, *, everything: bool = False) -> None:
        # A run whose gradients are still to come waits for them, as long as its graph lives.
        assert self._folder is not None
        for track, takes in self._runs.items():
            ready = [take for take in takes if everything or not take.waits()]
            for take in ready:
                self._folder.add(take)
            self._runs[track] = [take for take in takes if take not in ready]

    @property
    def stopped(self) -> str | None:  # type: ignore[override]
        """Why and where a recording to disk ended early."""
        return None if self._folder is None else self._folder.stopped

    def _tracks(self) -> dict[str, int]:
        written = {} if self._folder is None else self._folder.counts
        counts = {track: written.get(track, 0) + len(self._runs.get(track, ())) for track in self._chosen}
        for ear in self._cells.under_way():
            counts[ear.track] += 1
        return {track: count for track, count in counts.items() if count}

    def _known(self) -> tuple[str, ...]:
        return self._chosen

    def _load(self, track: str, first: int | None = None) -> list[Trajectory]:
        on_disk: list[Trajectory] = []
        if self._folder is not None:
            self._folder.flush()
            on_disk = Loaded(self._folder.path)._load(track, first)
        takes = [*self._runs.get(track, []), *self._cells.takes(track)]
        rest = None if first is None else max(0, first - len(on_disk))
        return [*on_disk, *(take.trajectory() for take in takes[:rest])]

    def _listeners(self, found: list[Layer]) -> list[tuple[Any, Any]]:
        ears: list[tuple[Any, Any]] = []
        for layer in found:
            wanted = {place: track for place, track in enumerate(layer.tracks) if track in self._chosen}
            if not wanted:
                continue
            if isinstance(layer.module, Recurrent):
                stack = StackEar(self, layer, self._options)
                cells, ends = layer.module.cells(), 2 if layer.module.bidirectional else 1
                stack.cells = [
                    CellEar(self, as_layer(cells[place]), self._options, track, True, place % ends == 1)
                    for place, track in wanted.items()
                ]
                ears += [(stack, scenes.STACK), *((cell, scenes.CELL) for cell in stack.cells)]
            elif layer.fused:
                ears.append((FusedEar(self, layer, self._options, wanted), scenes.FUSED))
            else:
                ears.append((CellEar(self, layer, self._options, wanted[0]), scenes.CELL))
        return ears


_under_way: list[Recorder] = []


def choose(found: list[Layer], tracks: Tracks | None) -> tuple[str, ...]:
    """Return the tracks that a choice names, in the model's order."""
    everything = {track: layer for layer in found for track in layer.tracks}
    if tracks is None:
        return tuple(everything)
    if callable(tracks):
        chosen = {track for track in everything if tracks(track)}
    else:
        chosen = set()
        for name in [tracks] if isinstance(tracks, str) else tracks:
            named = {track for track, layer in everything.items() if name in (track, layer.name)}
            if not named:
                raise UnknownTrack(f"no track or layer is named {name!r}. The tracks are: {', '.join(everything)}.")
            chosen |= named
    if not chosen:
        raise BadInput(f"tracks={tracks!r} chooses nothing. The tracks are: {', '.join(everything)}.")
    return tuple(track for track in everything if track in chosen)
