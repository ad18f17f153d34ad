"""A recording that is under way: who listens where, and where the runs go."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from os import PathLike
from types import TracebackType
from typing import Any
from weakref import WeakSet

from torch import nn

from ..cells import Call, Handle, Layer, Listener, Proceed, as_layer, layers, listen
from ..errors import BadInput, NotRecurrent, RecordingWarning, UnknownTrack
from ..unrolling import Recurrent
from .cell_runs import CellRuns, CellTrack
from .folder import Folder, Loaded
from .fused_runs import FusedRuns
from .layer_recorders import CellRecorder, FusedRecorder, LayerRecorder, StackRecorder
from .opening import Tracks
from .recording import Recording
from .takes import Options, Take
from .trajectory import Trajectory


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
        self.options = options
        self._chosen = choose(found, tracks)
        self._model = model
        self._cells = CellRuns(options, self.keep, streaming=to is not None)
        self._fused = FusedRuns(options, self.keep, streaming=to is not None)
        self._hearing = _Hearing(self, self._recorders(found))
        self._runs: dict[str, list[Take]] = {}
        self._lock = threading.RLock()
        self._handle: Handle | None = None
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
        self._handle = listen(self._model, [each.layer for each in self._hearing.recorders.values()], self._hearing)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop listening, leave no hook behind, and close the runs that are still open."""
        assert self._handle is not None
        self._handle.remove()
        _under_way.remove(self)
        self._thread = None
        self.close_runs()
        if kind is None:
            self._hearing.report_silent()
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

    def model_call(self, entry: nn.Module, run: Callable[[], Any]) -> Any:
        """Let runs begin and end with a call of the model; a layer that is called by itself makes no such call."""
        here = threading.current_thread()
        if not self.hears() or entry in self._hearing.recorders:
            try:
                return run()
            finally:
                self._fused.close_all(here)
        self.close_runs(here)
        self._cells.inside.add(here)
        try:
            return run()
        finally:
            self._cells.inside.discard(here)
            self.close_runs(here)

    def close_runs(self, thread: threading.Thread | None = None) -> None:
        """End the runs that are under way, or those of one thread."""
        self._cells.close_all(thread)
        self._fused.close_all(thread)

    def keep(self, take: Take, *, last: bool = True) -> None:
        """Keep a run, in memory or on disk."""
        with self._lock:
            if self._folder is not None and not last:
                self._folder.add(take, last=False)
                return
            if self._folder is not None or self.options.device is not None or self.every > 1:
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
        for track in (*self._cells.under_way(), *self._fused.under_way()):
            counts[track] += 1
        return {track: count for track, count in counts.items() if count}

    def _known(self) -> tuple[str, ...]:
        return self._chosen

    def _load(self, track: str, first: int | None = None) -> list[Trajectory]:
        on_disk: list[Trajectory] = []
        if self._folder is not None:
            self._folder.flush()
            on_disk = Loaded(self._folder.path)._load(track, first)
        takes = [*self._runs.get(track, []), *self._cells.takes(track), *self._fused.takes(track)]
        rest = None if first is None else max(0, first - len(on_disk))
        return [*on_disk, *(take.trajectory() for take in takes[:rest])]

    def _recorders(self, found: list[Layer]) -> list[LayerRecorder]:
        made: list[LayerRecorder] = []
        for layer in found:
            wanted = {place: track for place, track in enumerate(layer.tracks) if track in self._chosen}
            if wanted and isinstance(layer.module, Recurrent):
                cells, ends = layer.module.cells(), 2 if layer.module.bidirectional else 1
                inner = [
                    self._cell(as_layer(cells[place]), track, stacked=True, reverse=place % ends == 1)
                    for place, track in wanted.items()
                ]
                made += [StackRecorder(layer, inner), *inner]
            elif wanted and layer.fused:
                made.append(FusedRecorder(layer, self.options, wanted, self._fused))
            elif wanted:
                made.append(self._cell(layer, wanted[0]))
        return made

    def _cell(self, layer: Layer, track: str, **how: bool) -> CellRecorder:
        return CellRecorder(layer, self.options, CellTrack(track, layer.kind, **how), self._cells)


class _Hearing(Listener):
    """What a recording hears of its model, and who records which layer."""

    def __init__(self, recorder: Recorder, recorders: list[LayerRecorder]) -> None:
        self.recorders = {each.layer.module: each for each in recorders}
        self._recorder = recorder
        self._silent = {each.layer.module: each.layer for each in recorders if each.layer.name}
        self._heard = False

    @property
    def observes(self) -> bool:
        """Whether a cell may run by a schedule: its steps are then seen apart from its graph."""
        return not self._recorder.options.grads

    def model_call(self, entry: nn.Module, run: Callable[[], Any]) -> Any:
        return self._recorder.model_call(entry, run)

    def layer_call(self, call: Call, proceed: Proceed) -> Call:
        if not self._recorder.hears():
            return proceed(call)
        self._heard = True
        self._silent.pop(call.layer.module, None)
        return self.recorders[call.layer.module].record(call, proceed)

    def report_silent(self) -> None:
        """Say which layers were never called, while others were."""
        if self._heard and self._silent:
            names = ", ".join(repr(layer.name) for layer in self._silent.values())
            warnings.warn(
                f"{names} {'was' if len(self._silent) == 1 else 'were'} found in the model, but never called, so "
                f"nothing of it is recorded. Usually these calls take another way through the model; a layer whose "
                f"weights are used without calling it is not heard.",
                RecordingWarning,
                stacklevel=3,
            )


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
