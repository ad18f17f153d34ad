"""A recording that is under way: it listens to layers, and keeps the runs they make."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, TypeAlias
from weakref import WeakSet

from torch import Tensor, nn

from ..cells import (
    Call,
    Handle,
    Layer,
    Layers,
    Listener,
    OuterCall,
    Proceed,
    ambiguous,
    as_layer,
    foreseen,
    has_own_code,
    layers,
    listen,
    state_first,
    warn,
    watched,
    when_reached,
)
from ..errors import BadInput, NotRecurrent, RecordingWarning, StateMismatch
from ..unrolling import Recurrent
from .cell_recorder import CellRecorder, CellRuns, CellTrack, StackRecorder
from .folder import Folder, Loaded
from .fused_recorder import FusedRecorder, FusedRuns
from .loop_recorder import (
    attribute_run,
    attribute_values,
    is_loop,
    keeps_state,
    not_shown,
    run_before,
    runs_of,
    shown_otherwise,
    starts_of,
)
from .recording import Options, Recording
from .runs import ModelCalls, RecordedRun
from .trajectory import Trajectory

LayerRecorder: TypeAlias = FusedRecorder | CellRecorder | StackRecorder


class Recorder(Recording):
    """A recording that is under way or has just ended; see `record`."""

    def __init__(self, model: nn.Module, options: Options) -> None:
        """Find the layers; the model is not touched before the block begins."""
        self._found, self._own_code = layers(model), has_own_code(model)
        if not self._found and not self._own_code:
            raise _not_recurrent(model)
        self.every = options.every
        self.options = options
        self._model = model
        self._chosen = options.choose(self._found, final=not self._own_code)
        self._calls = ModelCalls()
        self._cells = CellRuns(options, self.keep, self._calls)
        self._fused = FusedRuns(options, self.keep, self._calls)
        self._listener = _ModelListener(self, self._recorders(self._found))
        self._examined = False  # whether a call of the model was watched for other recurrence
        self._loops = False  # whether there is recurrence that only watching shows
        self._looks = 0  # calls that were watched without a decision
        self._seen: Layers | None = None  # what the watched calls showed
        self._told: set[str] = set()
        self._stateful: list[Layer] = []  # modules that keep a state in attributes from call to call
        self._runs: dict[str, list[RecordedRun]] = {}
        self._lock = threading.RLock()
        self._handles: list[Handle] = []
        self._thread: threading.Thread | None = None
        self._older: WeakSet[threading.Thread] = WeakSet()
        self._folder: Folder | None = None

    def __enter__(self) -> Recorder:
        """Begin to listen."""
        if self._thread is not None:
            raise BadInput("this recording is under way already: open another one with hs.record for a nested block.")
        if self.options.to is not None and self._folder is None:
            self._folder = Folder(self.options.to, {"every": self.every, "tracks": list(self._chosen)})
        self._thread = threading.current_thread()
        self._older = WeakSet(threading.enumerate())
        _under_way.append(self)
        self._handles = [self._listen(self._listener.recorders.values())]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop listening, remove everything from the model, and close the runs that are still open."""
        for handle in self._handles:
            handle.remove()
        _under_way.remove(self)
        self._thread = None
        self.close_runs()
        if kind is None:
            self._listener.report_silent()
            seen = self._seen.seen if self._seen is not None else None
            if seen is not None and seen.later:
                self._warn(list(seen.later))
            elif self._own_code and not self._examined and not self._tracks():
                self._warn(["anything: the model was not called as a whole, with steps enough to tell what recurs"])
        if self._folder is not None:
            self._write_ready(everything=True)
            self._folder.close()
        if kind is None:
            self._report_states()

    def _report_states(self) -> None:
        """Warn if a loop outside the model does not pass the states on."""
        for recorder in self._listener.recorders.values():
            for runs in (self._cells, self._fused):
                for (_, module), succession in runs.successions.items():
                    if module is recorder.layer.module and (complaint := succession.complaint()) is not None:
                        who = repr(recorder.layer.name) if recorder.layer.name else recorder.layer.label
                        warnings.warn(f"{who} was {complaint}.", RecordingWarning, stacklevel=3)

    def hears(self) -> bool:
        """Say whether calls in this thread are recorded: it is the thread of the block, or was started in it.

        In a thread with a recording of its own, only that one records. After a full disk, nothing does.
        """
        if self._folder is not None and self._folder.stopped is not None:
            return False
        here = threading.current_thread()
        if here is self._thread:
            return True
        return here not in self._older and not any(other._thread is here for other in _under_way)

    def flush(self) -> None:
        """End this thread's runs and write them to disk; without `to`, this does nothing."""
        if self._folder is not None:
            with self._lock:
                self.close_runs(threading.current_thread())
                self._write_ready()
                self._folder.flush()

    def model_call(self, entry: OuterCall, run: Callable[[], Any]) -> Any:
        """Note that a call of the model begins; the next call may continue its runs, if it is given their states."""
        here = threading.current_thread()
        if not self.hears():
            return run()
        if entry.module is self._model and self._own_code and not self._examined and ambiguous(self._model):
            found = foreseen(entry)
            if found is not None:
                self._begin_with(found)
        if entry.module is self._model and not self._found and not self._examined:
            run = self._begin_with_cell(entry, run)
        if entry.module is self._model and self._watches():
            run = partial(watched, entry, run, self._look, before=self._seen if self._examined else None)
        self._calls.begin(entry.given)
        before = {layer: attribute_values(layer) for layer in self._stateful}
        try:
            result = run()
        except BaseException:
            self.close_runs(here)
            raise
        if self._folder is not None:
            self._fused.close_pieces(here)
        for layer, values in before.items():
            if (kept := attribute_run(layer, values, self.options)) is not None:
                self.keep(kept)
        return result

    def _watches(self) -> bool:
        """Say whether to watch a call: until one has shown what recurs in the model, or if only watching shows it."""
        return self._own_code and (self._loops or not self._examined)

    def _look(self, found: Layers) -> None:
        """Keep what a watched call has shown."""
        known = {layer.name for layer in self._stateful}
        first = self._begin_with(found) if not self._examined or self._shows_more(found) else []
        self._seen = found.settled()
        self._warn(found.doubts(heard=True))
        runs = runs_of(found, first, self.options)
        for layer in self._stateful:
            if layer.name not in known:  # this call's start shows the state that the one before left
                runs += [run_before(layer, self.options)] if self._looks > 1 else []
                runs.append(attribute_run(layer, starts_of(layer), self.options))
        for run in runs:
            if run is not None and run.track in self._chosen:
                self.keep(run)

    def _begin_with_cell(self, entry: OuterCall, run: Callable[[], Any]) -> Callable[[], Any]:
        """Record the model itself from this call on, if the step that it is given shows that it is a cell."""
        if len(entry.args) + len(entry.kwargs) < 2 or not entry.args or not isinstance(entry.args[0], Tensor):
            return run
        with suppress(NotRecurrent, StateMismatch):
            as_layer(self._model, entry.args[0], _second(entry))
        self._found = layers(self._model)
        if not self._found:
            return run
        self._begin_with(self._found)
        call = Call(self._found[0], entry.args, entry.kwargs)
        return lambda: self._listener.layer_call(call, lambda same: same.returned(run())).result

    def _shows_more(self, found: Layers) -> bool:
        """Say whether a later call has shown tracks that earlier ones did not."""
        return not set(self.options.choose(found, final=False)) <= set(self._chosen)

    def _begin_with(self, found: Layers) -> list[Layer]:
        """Listen also to what a watched call has shown; return the cells that were not heard in that call."""
        if not found and not found.doubts() and found.decided:
            raise _not_recurrent(self._model)
        adapters = {(layer.module, layer.adapter) for layer in found}
        for layer in self._found:
            if (layer.module, layer.adapter) not in adapters:  # it was only named like a cell
                self._listener.recorders.pop(layer.module, None)
                self._forget(layer.tracks)
        self._chosen = tuple(dict.fromkeys([*self.options.choose(found), *(self._chosen if self._examined else ())]))
        if self._folder is not None:
            self._folder.name_tracks(self._chosen)
        wanted = [layer for layer in found if set(layer.tracks) & set(self._chosen)]
        self._loops = self._loops or any(map(is_loop, wanted))
        self._stateful += [
            layer for layer in wanted if keeps_state(layer) and layer.name not in {k.name for k in self._stateful}
        ]
        called = [layer for layer in wanted if layer.seen is None or layer.kind == "cell"]
        unheard = [layer for layer in called if layer.module not in self._listener.recorders]
        self._listener.recorders.update({each.layer.module: each for each in self._recorders(unheard)})
        before, self._handles = self._handles, [self._listen(self._listener.recorders.values())]
        self._handles += when_reached(self._model, found, self._on_reached)
        for handle in before:  # after the new handle is in place: a call is under way
            handle.remove()
        self._warn(not_shown(found, wanted))
        self._warn(shown_otherwise(found, wanted, called), what="recorded, but mind: ")
        self._looks += 1
        self._examined = self._examined or found.decided or self._looks == _LOOKS
        return [layer for layer in unheard if layer.seen is not None]

    def _on_reached(self, name: str) -> None:
        """Warn that a call reached a module that no watched call has reached, and watch the next calls."""
        if self._examined and not self._loops and self.hears():
            self._examined, self._looks = False, 0
            self._warn([f"{name}, which no call reached before: calls are watched from the next one on"])

    def _forget(self, tracks: Iterable[str]) -> None:
        """Discard the recorded values of tracks that turn out not to be tracks."""
        for track in tracks:
            self._runs.pop(track, None)
            self._cells.forget(track)
            self._fused.forget(track)

    def _warn(self, doubts: list[str], what: str = "not recorded: ") -> None:
        new = [doubt for doubt in doubts if doubt not in self._told]
        self._told.update(new)
        if new:
            more = "hs.layers(model, *inputs).explain() says more; hs.register teaches what is missing."
            warn(f"{what}{'; '.join(new)}. {more}", RecordingWarning)

    def _listen(self, recorders: Iterable[LayerRecorder]) -> Handle:
        return listen(self._model, [each.layer for each in recorders], self._listener)

    def close_runs(self, thread: threading.Thread | None = None) -> None:
        """End all runs that are under way, or those of one thread."""
        self._cells.close_all(thread)
        self._fused.close_all(thread)

    def keep(self, run: RecordedRun, *, last: bool = True) -> None:
        """Keep a run, in memory or on disk."""
        with self._lock:
            if self._folder is not None and not last:
                self._folder.add(run, last=False)
                return
            if self._folder is not None or self.options.device is not None or self.every > 1:
                run.settle()
            self._runs.setdefault(run.track, []).append(run)
            if self._folder is not None and (self._examined or not self._own_code):
                self._write_ready()

    def _write_ready(self, *, everything: bool = False) -> None:
        # A run whose gradients may still come is held back as long as its graph lives.
        assert self._folder is not None
        for track, runs in self._runs.items():
            ready = [run for run in runs if everything or not run.waits()]
            for run in ready:
                self._folder.add(run)
            self._runs[track] = [run for run in runs if run not in ready]

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
        in_memory = [*self._runs.get(track, []), *self._cells.so_far(track), *self._fused.so_far(track)]
        rest = None if first is None else max(0, first - len(on_disk))
        return [*on_disk, *(run.trajectory() for run in in_memory[:rest])]

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


class _ModelListener(Listener):
    """The listener of a recording, with the recorder of each layer."""

    title = "hs.record"

    def __init__(self, recorder: Recorder, recorders: list[LayerRecorder]) -> None:
        self.recorders = {each.layer.module: each for each in recorders}
        self._recorder = recorder
        self._silent = {each.layer.module: each.layer for each in recorders if each.layer.name}
        self._heard = False

    @property
    def observes(self) -> bool:
        """Whether a cell may run by a schedule, so that its steps are seen without their graph."""
        return not (self._recorder.options.grads or self._recorder.options.graph)

    def model_call(self, entry: OuterCall, run: Callable[[], Any]) -> Any:
        return self._recorder.model_call(entry, run)

    def layer_call(self, call: Call, proceed: Proceed) -> Call:
        if not self._recorder.hears():
            return proceed(call)
        self._heard = True
        self._silent.pop(call.layer.module, None)
        recorder = self.recorders.get(call.layer.module)
        return proceed(call) if recorder is None else recorder.record(call, proceed)

    def report_silent(self) -> None:
        """Warn of layers that were never called, although others were."""
        if self._heard and self._silent:
            names = ", ".join(repr(layer.name) for layer in self._silent.values())
            warnings.warn(
                f"{names} {'was' if len(self._silent) == 1 else 'were'} found in the model, but never called, so "
                f"nothing of it is recorded. Usually these calls take another way through the model; a layer whose "
                f"weights are used without calling it is not heard.",
                RecordingWarning,
                stacklevel=3,
            )


def _second(entry: OuterCall) -> Any:
    """Return the second argument of a call, if it has exactly two."""
    others = [*entry.args[1:], *entry.kwargs.values()]
    return others[0] if len(others) == 1 else None


_LOOKS = 3  # calls to watch at most, if they are too short to decide what recurs
_under_way: list[Recorder] = []


def _not_recurrent(model: nn.Module) -> NotRecurrent:
    return state_first(model) or NotRecurrent(
        f"{type(model).__name__} has no recurrent layer, so there is no state to record. A cell of your own is found "
        f"by its initial_state(batch), by hidden_size and forward(x, state), or by what it does when it is called: it "
        f"gives back a state as it was handed one, alone or behind its output; "
        f"hs.register teaches others, and hs.layers(model, *inputs).explain() shows what was looked at."
    )
