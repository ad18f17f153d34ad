"""How each kind of layer is recorded: a fused layer, a cell, a stack of cells."""

from __future__ import annotations

import contextlib
import warnings
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from ..cells import Call, Layer, Proceed, may_be_recomputed, random_streams_kept
from ..errors import NotRecurrent, RecordingWarning, StateMismatch
from ..unrolling import places
from . import layerwise, stepping
from .arranged import Arranged
from .cell_runs import CellRuns, CellTrack
from .exact import judge, same_bits, trusted
from .frames import Frame, innermost, run_in
from .fused_runs import FusedRuns, Piece
from .kernel_call import FUSED, GATES, STEPS, Intercept, KernelCall, Weights, parse
from .outputs import outputs
from .padded import Layout, pad
from .reconstruction import activated_gates
from .step import Step
from .steps import Named
from .takes import Options


class LayerRecorder(Protocol):
    """Records the calls of one layer."""

    layer: Layer

    def record(self, call: Call, proceed: Proceed) -> Call:
        """Run a call, and keep what it did."""


@dataclass(slots=True, eq=False)
class FusedRecorder:
    """Records a layer that runs whole sequences; torch's kernels are run layer by layer, each layer's pass is kept."""

    layer: Layer
    options: Options
    tracks: dict[int, str]  # place in the layer's state -> track
    runs: FusedRuns
    told: bool = False  # that something could not be recorded

    def record(self, call: Call, proceed: Proceed) -> Call:
        """Step in where the kernel is called."""
        frame = Frame(self.layer.module, self.options.gates or self.options.grads, self.options.grads)
        done: Call = run_in(frame, lambda: proceed(call), Intercept(FUSED, _kernel))
        for kernel_call, passes, ends in frame.notes:
            packed = call.input if isinstance(call.input, PackedSequence) else None
            layout = Layout.of(passes[0].h, kernel_call.batch_sizes, packed)
            need = layerwise.Need(self.options.gates, self.options.grads)
            found = {self.tracks[at]: pad(one, layout, need) for at, one in enumerate(passes) if at in self.tracks}
            if self.options.grads and found and all(one.direct is None for one in passes):
                self._warn("its gradients are", "it runs inside activation checkpointing, which throws its graph away")
            states = (dict(zip("hc", kernel_call.state, strict=False)), dict(zip("hc", ends, strict=False)))
            self._keep(found, *states)
        if not frame.notes:
            self._keep_outputs(done)
        return done

    def _keep_outputs(self, call: Call) -> None:
        """Keep what a layer gives out that does not call torch's kernels."""
        try:
            found = {self.tracks[at]: seen for at, seen in outputs(call).items() if at in self.tracks}
            given, after = call.given, call.state
        except (NotRecurrent, StateMismatch) as error:
            self._warn("it is", str(error))
            return
        if missing := [track for track in self.tracks.values() if track not in found]:
            what = f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'}"
            self._warn(what, f"{_OUTPUTS}, which are not these states")
        elif others := [part for part in after if part != self.layer.spec.parts[0]]:
            self._warn(f"{', '.join(others)} {'is' if len(others) == 1 else 'are'}", _OUTPUTS)
        self._keep(found, {} if given is None else dict(given), dict(after))

    def _keep(self, found: dict[str, Any], given: dict[str, Tensor], after: dict[str, Tensor]) -> None:
        for track, source in found.items():
            lengths, initial, nbytes, where = source.layout.lengths, source.initial, source.h.nbytes, places()
            if where is not None:
                source = Arranged(source, where, lengths)
                lengths, initial = source.lengths, {name: source.rows(part) for name, part in initial.items()}
            self.runs.add(track, Piece(self.layer.kind, source, lengths, initial, given, after, nbytes))

    def _warn(self, what: str, why: str) -> None:
        if not self.told:
            self.told = True
            _warn(f"{self.layer.label!r}: {what} not recorded, because {why.rstrip('.')}.")


_OUTPUTS = "of a layer that does not call torch's kernels only the last outputs are seen"


def _kernel(function: Any, args: tuple[Any, ...]) -> Any:
    """Run a fused kernel layer by layer, for all recordings that hear its layer."""
    call, frames = parse(function, args), innermost()
    if call is None or not frames:
        return function(*args)
    need = layerwise.Need(any(frame.gates for frame in frames), any(frame.grads for frame in frames))
    result, passes = _beside(call, args, need) if may_be_recomputed(grad_before=False) else layerwise.run(call, need)
    ends = tuple(end.detach() for end in result[1:])
    for frame in frames:
        frame.notes.append((call, passes, ends))
    return result


def _beside(call: KernelCall, args: tuple[Any, ...], need: layerwise.Need) -> tuple[Any, list[layerwise.Pass]]:
    """Let the kernel itself make the graph, which has to be the same when it is run again; look at a second run."""
    with torch.no_grad(), random_streams_kept():
        _, passes = layerwise.run(call, layerwise.Need(need.gates))
    return call.function(*args), passes


@dataclass(slots=True, eq=False)
class CellRecorder:
    """Records a cell, alone or in a stack: each call is a step, and `hs.tap` names what happens inside it."""

    layer: Layer
    options: Options
    track: CellTrack
    runs: CellRuns
    heard: bool = False  # a step of it has been taken in
    deaf: bool = False  # it turned out to be no cell

    def record(self, call: Call, proceed: Proceed) -> Call:
        """Step in where torch's own cells do their step, if their gates are wanted."""
        frame = Frame(self.layer.module, self.options.gates, False)
        watched = self.options.gates and self.layer.kind in ("lstm_cell", "gru_cell")
        done: Call = run_in(frame, lambda: proceed(call), Intercept(STEPS, _step) if watched else None)
        gates: dict[Named, Tensor] = {name: value for name, value in frame.taps.items()}
        for kind, activated in frame.notes if self.options.gates else ():
            gates[GATES[kind]] = activated  # taken apart when it is read
        if not self.deaf:
            self._keep(Step(done, gates))
        return done

    def _keep(self, step: Step) -> None:
        try:
            after = step.after(first=not self.heard)
        except (NotRecurrent, StateMismatch) as error:  # it only looked like a cell: the run goes on without us
            self.deaf = True
            _warn(f"{self.track.name!r} is not recorded: {error}")
        else:
            self.heard = True
            self.runs.step(self.track, step, after)


@dataclass(slots=True, eq=False)
class StackRecorder:
    """Records an `hs.Recurrent`: a run of its own for each of its cells."""

    layer: Layer
    cells: list[CellRecorder] = field(default_factory=list)

    def record(self, call: Call, proceed: Proceed) -> Call:
        """Start and end the cells' runs; where the call fails, nobody can put their rows in order any more."""
        for cell in self.cells:
            cell.runs.close(cell.track)
        try:
            done = proceed(call)
        except BaseException:
            for cell in self.cells:
                cell.runs.drop(cell.track)
            raise
        for cell in self.cells:
            cell.runs.close(cell.track)
        return done


def _step(function: Any, args: tuple[Any, ...]) -> Any:
    """Run a step of one of torch's cells, for all recordings that hear it."""
    result, gates = _torch_step(STEPS[function], function, args)
    for frame in innermost():
        frame.notes.append((STEPS[function], gates))
    return result


def _torch_step(kind: str, function: Any, args: tuple[Any, ...]) -> tuple[Any, Tensor]:
    """Run a step of `nn.LSTMCell` or `nn.GRUCell`, and return its gates too."""
    x, hx, *flat = args
    weights = Weights(*flat)
    state = tuple(hx) if kind == "lstm" else (hx,)
    cast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    key = ("cell", kind, x.dtype, cast, weights.bias_ih is None)
    recomputed = may_be_recomputed(grad_before=False)  # then it will be by the plain function, which must match
    if x.device.type != "cpu" or trusted(key) is False or recomputed:
        return function(*args), activated_gates(kind, x, state[0], weights)
    kept = stepping.Kept()
    if trusted(key):
        after = stepping.STEP[kind](x, state, weights, kept, projected=False)
        result = after if kind == "lstm" else after[0]
    else:
        result = function(*args)
        with torch.no_grad():
            after = stepping.STEP[kind](x, state, weights, kept, projected=False)
            plain = result if kind == "lstm" else (result,)
            if not judge(key, lambda: same_bits(after, plain)):
                return result, activated_gates(kind, x, state[0], weights)
    return result, kept.join(packed=True)[0]


def _warn(text: str) -> None:
    with contextlib.suppress(RecordingWarning):  # made an error by a filter, it would stop the user's run after all
        warnings.warn(text, RecordingWarning, stacklevel=2)
