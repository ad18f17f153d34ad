"""Recording cells: each call is one step, and consecutive steps are joined to a run."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..cells import Call, Layer, OpenRun, Proceed, may_be_recomputed, untouched
from ..errors import NotRecurrent, StateMismatch
from ..unrolling import RowPlaces, places
from . import cpu_loop
from .frames import CELL_STEPS, GATES, Frame, Intercept, TrackWeights, innermost, run_in
from .layerwise import judge, same_bits, trusted
from .padded import activated_gates
from .recording import Options
from .runs import Arranged, Keep, ModelCalls, OpenRuns, RecordedRun, RunValues, warn_and_go_on
from .step_buffer import Named, Placed, StepBuffer

_TORCH_CELLS = ("lstm_cell", "gru_cell", "rnn_cell")


@dataclass(frozen=True, slots=True, eq=False)
class CellTrack:
    """A cell, alone or in a stack, and the name of the track that its steps are recorded as."""

    name: str
    kind: str
    stacked: bool = False  # whether it is a cell of an `hs.Recurrent`
    reverse: bool = False  # whether it reads each sequence from the end


@dataclass(frozen=True, slots=True, eq=False)
class CellStep:
    """One call of a cell; its states are read only when needed."""

    call: Call
    gates: dict[Named, Tensor]

    def given(self) -> dict[str, Placed] | None:
        """Return the state that the step was given, or None."""
        native = self.call.given_native
        return None if native is None else self._placed(native)

    def initial(self) -> dict[str, Placed]:
        """Return the state that a step without a given one starts from; nothing if only the cell itself knows it."""
        layer = self.call.layer
        try:
            with untouched(layer.module), torch.no_grad():
                first = layer.initial(self.call.rows)
        except Exception:  # the cell makes its first state inside forward
            return {}
        return {name: Placed(part, first.batch_axis[name]) for name, part in first.items()}

    def after(self, *, first: bool) -> dict[str, Placed]:
        """Return the state after the step. `first` says that it is the first recorded step of this cell."""
        if self.call.layer.kind in _TORCH_CELLS:
            return self._placed(self.call.result)
        if first and (given := self.call.given_native) is not None:
            self._placed(given)  # teaches the adapter the form of the state, which saves a trial
        return self._placed(self.call.state_native)

    def _placed(self, native: Any) -> dict[str, Placed]:
        layer = self.call.layer
        rows, batched = layer.rows(self.call.args, self.call.kwargs)
        if layer.kind in _TORCH_CELLS:
            own = native if isinstance(native, tuple | list) else (native,)
            return {name: Placed(part, 0 if batched else None) for name, part in zip("hc", own, strict=False)}
        state = layer.to_state(native, batch=rows)
        return {name: Placed(part, state.batch_axis[name]) for name, part in state.items()}


class CellRuns(OpenRuns[tuple[CellTrack, StepBuffer]]):
    """Joins a cell's steps along time: each is given the state in which the one before ended."""

    def __init__(self, options: Options, keep: Keep, calls: ModelCalls | None = None) -> None:
        """Start without any runs."""
        super().__init__(options, keep, calls)
        self.of_stack: dict[tuple[threading.Thread, str], OpenRun] = {}  # for each cell of a stack, the stack's run

    def add(
        self, cell: CellTrack, step: CellStep, after: dict[str, Placed], *, run: OpenRun | None, goes_on: bool
    ) -> None:
        """Add one step to a cell's run, or begin a new run; a cell in a stack belongs to the run of its stack."""
        here = threading.current_thread()
        key = here, cell.name, self.of_stack.setdefault((here, cell.name), OpenRun(())) if run is None else run
        rows = next(iter(after.values())).rows
        _, steps = self.open.get(key, (cell, None))
        if steps is not None and not (goes_on and steps.fits(after) and steps.places is places()):
            self.close_one(key)
            steps = None
        if steps is None:
            given = step.given()
            first = step.initial() if given is None else given
            fits = all(p.rows == rows for p in first.values())  # not a start without a shape, `torch.zeros(0)`
            initial = {name: self.options.cast(p.flat(p.tensor.detach())).clone() for name, p in first.items() if fits}
            # A reverse cell in a stack begins with its last position, so which steps to keep is known only at the end.
            options = replace(self.options, every=1) if cell.reverse else self.options
            steps = StepBuffer(options, rows, initial, places=places())
            self.open[key] = cell, steps
        steps.add(after, step.gates)
        streamed = self.options.to is not None and not self.options.grads and not cell.stacked
        if streamed and steps.nbytes > self.piece_bytes:
            piece = self.recorded(cell.name, (cell, steps.split()))
            self.keep(piece, last=False)
            steps.number = piece.number

    def may_go_on(self, cell: CellTrack, run: OpenRun) -> bool:
        """Say whether the next call may continue a stacked cell's run: rows and steps must be in the user's order."""
        _, steps = self.open.get((threading.current_thread(), cell.name, run), (cell, None))
        return steps is not None and steps.places is None and not cell.reverse and self.options.to is None

    def drop(self, track: str, run: OpenRun) -> None:
        """Discard one of a track's runs in this thread."""
        self.open.pop((threading.current_thread(), track, run), None)

    def recorded(self, track: str, run: tuple[CellTrack, StepBuffer]) -> RecordedRun:
        """Return the steps of a run so far, in the user's order."""
        cell, steps = run
        lengths, initial = steps.row_lengths(), steps.initial
        source: RunValues = steps
        where = steps.places
        if where is None and cell.reverse:
            where = RowPlaces(torch.arange(steps.batch), torch.zeros(steps.batch, dtype=torch.int64), steps.batch)
        if where is not None:
            source = arranged = Arranged(steps, where, lengths, reverse=cell.reverse, every=steps.options.every)
            lengths, initial = arranged.lengths, {name: arranged.rows(part) for name, part in initial.items()}
        thinned = not cell.reverse
        return RecordedRun(
            track, cell.kind, self.options, lengths, initial, source, thinned, piece=steps.pieces, number=steps.number
        )


@dataclass(slots=True, eq=False)
class CellRecorder:
    """Records a cell, alone or in a stack: each call is a step, and `hs.tap` records values inside it as gates."""

    layer: Layer
    options: Options
    track: CellTrack
    runs: CellRuns
    heard: bool = False  # whether any step of it was recorded
    refused: bool = False  # whether it turned out not to be a cell

    def record(self, call: Call, proceed: Proceed) -> Call:
        """Run a call as one step; if gates are wanted, torch's own cells compute theirs where they can be recorded."""
        frame = Frame(self.layer.module, self.options)
        alone = not self.track.stacked and not self.refused
        run, goes_on = self.runs.run_of(call) if alone else (None, True)
        watched = self.options.gates and self.layer.kind in ("lstm_cell", "gru_cell")
        done: Call = run_in(frame, lambda: proceed(call), Intercept(CELL_STEPS, _step) if watched else None)
        gates: dict[Named, Tensor] = {name: value for name, value in frame.taps.items()}
        for kind, activated in frame.notes if self.options.gates else ():
            gates[GATES[kind]] = activated  # side by side: split when they are read
        if not self.refused:
            self._keep(CellStep(done, gates), run, goes_on)
        return done

    def _keep(self, step: CellStep, run: OpenRun | None, goes_on: bool) -> None:
        try:
            after = step.after(first=not self.heard)
        except (NotRecurrent, StateMismatch) as error:  # it only looked like a cell: leave it unrecorded
            self.refused = True
            warn_and_go_on(f"{self.track.name!r} is not recorded: {self.layer.unnamed(error)}")
        else:
            self.heard = True
            self.runs.add(self.track, step, after, run=run, goes_on=goes_on)
            if run is not None:
                self.runs.ended(step.call, run)


@dataclass(slots=True, eq=False)
class StackRecorder:
    """Records an `hs.Recurrent`: each of its cells has a run of its own."""

    layer: Layer
    cells: list[CellRecorder] = field(default_factory=list)

    def record(self, call: Call, proceed: Proceed) -> Call:
        """Continue or begin the cells' runs in this call. If it fails, close them, since their rows may be sorted."""
        runs = self.cells[0].runs
        run, goes_on = runs.run_of(call)
        here = threading.current_thread()
        runs.of_stack |= {(here, cell.track.name): run for cell in self.cells}
        if not goes_on:
            self._close(run)
        try:
            done = proceed(call)
        except BaseException:
            for cell in self.cells:
                if not (goes_on and runs.may_go_on(cell.track, run)):
                    runs.drop(cell.track.name, run)
            self._close(run)
            raise
        if not all(runs.may_go_on(cell.track, run) for cell in self.cells):
            self._close(run)
        runs.ended(done, run)
        return done

    def _close(self, run: OpenRun) -> None:
        for cell in self.cells:
            cell.runs.close(cell.track.name, run)


def _step(function: Any, args: tuple[Any, ...]) -> Any:
    """Run a step of one of torch's cells, for all recordings that hear it."""
    result, gates = _torch_step(CELL_STEPS[function], function, args)
    for frame in innermost():
        frame.notes.append((CELL_STEPS[function], gates))
    return result


def _torch_step(kind: str, function: Any, args: tuple[Any, ...]) -> tuple[Any, Tensor]:
    """Run a step of `nn.LSTMCell` or `nn.GRUCell`, and return its gates too."""
    x, hx, *flat = args
    weights = TrackWeights(*flat)
    state = tuple(hx) if kind == "lstm" else (hx,)
    cast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    key = ("cell", kind, x.dtype, cast, weights.bias_ih is None)
    recomputed = may_be_recomputed(grad_before=False)  # a second run would use the plain function, so this one must too
    if x.device.type != "cpu" or trusted(key) is False or recomputed:
        return function(*args), activated_gates(kind, x, state[0], weights)
    buffer = cpu_loop.GateBuffer()
    if trusted(key):
        after = cpu_loop.STEP[kind](x, state, weights, buffer, projected=False)
        result = after if kind == "lstm" else after[0]
    else:
        result = function(*args)
        with torch.no_grad():
            after = cpu_loop.STEP[kind](x, state, weights, buffer, projected=False)
            plain = result if kind == "lstm" else (result,)
            if not judge(key, lambda: same_bits(after, plain)):
                return result, activated_gates(kind, x, state[0], weights)
    return result, buffer.join(packed=True)[0]
