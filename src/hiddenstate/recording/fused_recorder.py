"""Recording fused layers: torch's kernels are run layer by layer, and calls that continue each other make one run."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from ..cells import Call, EndState, Layer, OpenRun, Proceed, may_be_recomputed, random_streams_kept
from ..errors import NotRecurrent, StateMismatch
from ..state import State, tensors
from ..unrolling import places
from . import layerwise
from .frames import FUSED, Frame, Intercept, KernelCall, innermost, parse, run_in
from .padded import Layout, Padded, pad
from .recording import Options
from .runs import Arranged, Joined, OpenRuns, RecordedRun, RunValues, warn_and_go_on

_OUTPUTS = "a layer that does not call torch's kernels shows only its last outputs"


@dataclass(frozen=True, slots=True, eq=False)
class TrackCall:
    """One call of a fused layer, reduced to one of its tracks."""

    kind: str
    source: RunValues
    lengths: Tensor  # (batch,)
    initial: Mapping[str, Tensor]  # part -> (batch, unit)
    nbytes: int

    @property
    def whole(self) -> bool:
        """Whether all rows have all steps, so that another call may continue it."""
        return bool((self.lengths == self.lengths.max()).all())


@dataclass(slots=True, eq=False)
class _FusedRun:
    """A run that is under way: the calls that make it up."""

    calls: list[TrackCall]
    written: int = 0  # pieces of it that were written to disk
    number: int | None = None  # of the run on disk, set by the first piece that is written

    def takes(self, call: TrackCall) -> bool:
        """Say whether a call can continue this run: it has the rows of the last one, and none of them has ended."""
        last = self.calls[-1]
        return last.whole and len(last.lengths) == len(call.lengths)

    @property
    def nbytes(self) -> int:
        """The size of the calls that are not on disk, in bytes."""
        return sum(call.nbytes for call in self.calls)


class FusedRuns(OpenRuns[_FusedRun]):
    """Joins the calls of a fused layer that is stepped: each is given the state in which the one before ended."""

    def add(self, track: str, call: TrackCall, *, of: OpenRun, goes_on: bool) -> None:
        """Add a call to one of the track's runs, or begin a new run with it."""
        key = threading.current_thread(), track, of
        run = self.open.get(key)
        streamed = self.options.to is not None and not self.options.grads and self.options.every == 1
        large = run is not None and self.options.to is not None and run.nbytes > self.piece_bytes
        if run is not None and not (goes_on and run.takes(call) and (streamed or not large)):
            self.close_one(key)
            run = None
        if run is None:
            self.open[key] = _FusedRun([call])
            return
        if large:
            piece = self.recorded(track, run)
            self.keep(piece, last=False)
            run.calls, run.written, run.number = [], run.written + 1, piece.number
        run.calls.append(call)

    def close_pieces(self, thread: threading.Thread) -> None:
        """End a thread's runs whose last call made several steps, so that they need not stay in memory."""
        for key, run in list(self.open.items()):
            if key[0] is thread and int(run.calls[-1].lengths.max()) > 1:
                self.close_one(key)

    def recorded(self, track: str, run: _FusedRun) -> RecordedRun:
        """Return the calls of a run that are not on disk yet, joined along time."""
        first, *others = run.calls
        source: RunValues = Joined([call.source for call in run.calls]) if others else first.source
        lengths = sum((call.lengths for call in others), first.lengths)
        return RecordedRun(
            track, first.kind, self.options, lengths, first.initial, source, piece=run.written, number=run.number
        )


@dataclass(slots=True, eq=False)
class FusedRecorder:
    """Records a layer that runs whole sequences: torch's kernels are run layer by layer, so that each is seen."""

    layer: Layer
    options: Options
    tracks: dict[int, str]  # index in the layer's state -> track
    runs: FusedRuns
    told: bool = False  # whether a warning was given that something could not be recorded
    inside: Options = field(init=False)  # what to record inside its calls

    def __post_init__(self) -> None:
        """Record gates if gradients are wanted, since gradients are computed from the gates."""
        self.inside = replace(self.options, gates=self.options.gates or self.options.grads)

    def record(self, call: Call, proceed: Proceed) -> Call:
        """Run a call, its kernels layer by layer, and keep the states of each track."""
        frame = Frame(self.layer.module, self.inside)
        (run, goes_on), before = self.runs.run_of(call), None
        done: Call = run_in(frame, lambda: proceed(call), Intercept(FUSED, _kernel))
        for kernel_call, passes, ends in frame.notes:
            packed = call.input if isinstance(call.input, PackedSequence) else None
            layout = Layout.of(passes[0].h, kernel_call.batch_sizes, packed)
            found = {
                self.tracks[at]: pad(one, layout, self.options) for at, one in enumerate(passes) if at in self.tracks
            }
            could = found and any(one.requires_grad for one in tensors(done.result).values())  # not of a frozen layer
            if self.options.graph and torch.is_grad_enabled() and could and not any(p.h.requires_grad for p in passes):
                self._warn("its graph is", "it runs inside activation checkpointing, which throws it away")
            if self.options.grads and could and all(one.outside is None for one in passes):
                self._warn("its gradients are", "it runs inside activation checkpointing, which throws its graph away")
            self._keep(found, run, goes_on if before is None else before.handed_on(kernel_call.state))
            before = EndState.of(ends)
        if not frame.notes:
            self._keep_outputs(done, run, goes_on)
        self.runs.ended(done, run)
        return done

    def _keep_outputs(self, call: Call, run: OpenRun, goes_on: bool) -> None:
        """Keep the outputs of a layer that does not call torch's kernels."""
        try:
            found = {self.tracks[at]: seen for at, seen in _outputs(call, self.options).items() if at in self.tracks}
            after = call.state
        except (NotRecurrent, StateMismatch) as error:
            self._warn("it is", str(self.layer.unnamed(error)))
            return
        if missing := [track for track in self.tracks.values() if track not in found]:
            what = f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'}"
            self._warn(what, f"{_OUTPUTS}, which are not these states")
        elif others := [part for part in after if part != self.layer.spec.parts[0]]:
            self._warn(f"{', '.join(others)} {'is' if len(others) == 1 else 'are'}", _OUTPUTS)
        self._keep(found, run, goes_on)

    def _keep(self, found: Mapping[str, Padded | OutputsOnly], run: OpenRun, goes_on: bool) -> None:
        for track, source in found.items():
            values: RunValues = source
            lengths, initial, where = source.layout.lengths, source.initial, places()
            if where is not None:
                values = arranged = Arranged(source, where, lengths)
                lengths, initial = arranged.lengths, {name: arranged.rows(part) for name, part in initial.items()}
            call = TrackCall(self.layer.kind, values, lengths, initial, source.h.nbytes)
            self.runs.add(track, call, of=run, goes_on=goes_on)

    def _warn(self, what: str, why: str) -> None:
        if not self.told:
            self.told = True
            warn_and_go_on(f"{self.layer.label!r}: {what} not recorded, because {why.rstrip('.')}.")


def _kernel(function: Any, args: tuple[Any, ...]) -> Any:
    """Run a fused kernel layer by layer, for all recordings that hear its layer."""
    call, frames = parse(function, args), innermost()
    if call is None or not frames:
        return function(*args)
    gates, grads = any(frame.options.gates for frame in frames), any(frame.options.grads for frame in frames)
    if may_be_recomputed(grad_before=False):
        result, passes = _beside(call, args, gates)
    else:
        result, passes = layerwise.run(call, gates=gates, grads=grads)
    ends = tuple(end.detach() for end in result[1:])
    for frame in frames:
        frame.notes.append((call, passes, ends))
    return result


def _beside(call: KernelCall, args: tuple[Any, ...], gates: bool) -> tuple[Any, list[layerwise.Pass]]:
    """Run the kernel itself and a second, recorded run: checkpointing compares the kernel's graph with a later one."""
    with torch.no_grad(), random_streams_kept():
        _, passes = layerwise.run(call, gates=gates)
    return call.function(*args), passes


@dataclass(frozen=True, slots=True, eq=False)
class OutputsOnly:
    """The recorded values of a layer that does not call torch's kernels: one direction of its last layer's outputs."""

    h: Tensor  # (time, batch, unit)
    layout: Layout
    initial: dict[str, Tensor]  # part -> (batch, unit)

    def states(self) -> dict[str, Tensor]:
        """Return h, `(time, batch, unit)`."""
        return {"h": self.h}

    @property
    def gates(self) -> dict[str, Tensor]:
        """Nothing: the gates were not computed by torch's kernels."""
        return {}

    def grads(self) -> dict[str, Tensor]:
        """Return nothing: the gradient of an output is not that of the state, which also acts on later steps."""
        return {}

    def expects_grads(self) -> bool:
        """Return False: no gradient will come."""
        return False


def _outputs(call: Call, options: Options) -> dict[int, OutputsOnly]:
    """Return the outputs of the last layer by their index in the state; nothing if they are not equal to h."""
    layer, spec, out = call.layer, call.layer.spec, call.output_native
    units = spec.sizes[spec.parts[0]]
    packed = out if isinstance(out, PackedSequence) else None
    values = options.taken(call.output).transpose(0, 1).flatten(2) if packed is None else options.taken(packed.data)
    if values.shape[-1] != units * spec.directions:
        return {}
    layout = Layout.of(values, None if packed is None else packed.batch_sizes, packed)
    first = (spec.layers - 1) * spec.directions
    given = call.given
    state = layer.initial(call.rows) if given is None else given
    found = {}
    for d in range(spec.directions):
        h = layout.pad(values[..., d * units : (d + 1) * units]).clone()
        end = h[0] if d else h[layout.lengths.to(h.device) - 1, torch.arange(h.shape[1], device=h.device)]
        if torch.allclose(end, _rows(call.state, spec.parts[0], first + d).to(end), 1e-3, 1e-5):
            found[first + d] = OutputsOnly(h, layout, {name: _rows(state, name, first + d) for name in state})
    return found


def _rows(state: State, name: str, place: int) -> Tensor:
    """Return one part of one layer and direction, `(batch, unit)`; if the layer is not stacked, the whole part."""
    part, axis = state[name].detach(), state.batch_axis[name]
    rows = part[place] if axis == 1 and part.dim() == 3 else part.movedim(axis, 0).flatten(1)
    return rows.clone()
