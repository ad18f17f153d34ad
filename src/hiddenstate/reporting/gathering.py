"""Everything a report shows, measured first and drawn later; what cannot be measured says why."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..cells import Layer, layers, unwrap
from ..diagnosis import Report, diagnose
from ..errors import BadInput
from ..measure import Comparison, Jacobians, Memory, Saturation, compare, jacobians, memory, saturation
from ..recording import Trajectory
from ..state import State
from .naming import Tokens, labels_of, lengths_of, tokens_of
from .running import Run, describe, run

_WORK = 1e9  # of S³: eigenvalues that take a second or two
_WIDEST = 1500  # coordinates of a state beyond which one Jacobian alone takes too long

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Unmeasured:
    """Why there is no number."""

    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class Track:
    """One track and what was measured of it."""

    name: str
    traj: Trajectory
    runs: int
    saturation: Saturation | Unmeasured


@dataclass(frozen=True, slots=True, eq=False)
class Evidence:
    """All that a report is made of."""

    model: str
    parameters: int
    inputs: tuple[str, ...]
    run: Run
    findings: Report | Unmeasured
    tracks: tuple[Track, ...]
    memory: Memory | Unmeasured
    comparison: Comparison | Unmeasured
    jacobians: dict[str, Jacobians | Unmeasured]  # layer -> at some steps of the first row
    labels: list[str]
    tokens: list[list[str]] = field(default_factory=list)  # of the first rows

    def rows_of(self, traj: Trajectory) -> list[str]:
        """Return a name for each row of a track; a layer that takes the batch for time has rows of its own."""
        return self.labels if len(self.labels) == len(traj.h) else labels_of(None, len(traj.h))

    def tokens_of(self, traj: Trajectory) -> list[list[str]]:
        """Return the tokens of the first rows of a track, none where they are not its own steps."""
        assert traj.lengths is not None
        known = len(self.labels) == len(traj.h)
        return self.tokens if known and self.tokens and len(self.tokens[0]) == int(traj.lengths[0]) else []


def gather(
    model: nn.Module,
    inputs: tuple[Any, ...],
    *,
    tokens: Tokens | None,
    labels: Sequence[str] | None,
    lengths: Tensor | None,
    batch_axis: int,
    doctor: dict[str, Any],
    tell: Callable[[str], None],
) -> Evidence:
    """Run, diagnose and measure `model`; `tell` hears what is being done."""
    tell("running the model")
    ran = run(model, inputs)
    found = [(name, ran.recording.runs(name)) for name in ran.recording]
    if not found:
        names = ", ".join(layer.label for layer in ran.layers)
        raise BadInput(f"the model was called, but none of its recurrent layers ({names}) was: nothing to report on.")
    first = found[0][1][0]
    steps = lengths_of(inputs[0], first, batch_axis=batch_axis)
    named, written = labels_of(labels, len(steps)), tokens_of(tokens, steps)  # refused before anything takes long
    tell("asking the doctor")
    findings = _try(lambda: diagnose(model, *inputs, lengths=lengths, batch_axis=batch_axis, **doctor))
    tell("measuring states")
    tracks = tuple(Track(name, runs[0], len(runs), _try(lambda t=runs[0]: saturation(t))) for name, runs in found)  # type: ignore[misc]
    tell("measuring memory")
    remembered = _try(lambda: _memory(model, inputs, first, lengths=lengths, batch_axis=batch_axis))
    tell("comparing rows")
    compared = _try(lambda: _comparison(tracks[-1].traj, named, given=labels is not None))
    tell("measuring Jacobians")
    local = {layer.name: _try(lambda one=layer: _jacobians(one, ran)) for layer in ran.layers if layer.seen is None}  # type: ignore[misc]
    inner = unwrap(model)
    return Evidence(
        model=type(inner).__name__,
        parameters=sum(weight.numel() for weight in inner.parameters()),
        inputs=tuple(describe(value) for value in inputs),
        run=ran,
        findings=findings,
        tracks=tracks,
        memory=remembered,
        comparison=compared,
        jacobians=local,
        labels=named,
        tokens=written,
    )


def _try(measure: Callable[[], T]) -> T | Unmeasured:
    """Return what `measure` returns, or why it could not: one number that fails takes no other along."""
    try:
        return measure()
    except Exception as error:
        return Unmeasured(" ".join(str(error).split()) or type(error).__name__)


def _memory(
    model: nn.Module, inputs: tuple[Any, ...], first: Trajectory, *, lengths: Tensor | None, batch_axis: int
) -> Memory:
    x, *more = inputs
    if not isinstance(x, Tensor):
        raise BadInput(f"the input is {describe(x)}: memory is measured back to a tensor.")
    inner = unwrap(model)
    if isinstance(inner, nn.RNNBase):  # measured batch-first, however the layer itself is called
        x = x.unsqueeze(0) if x.dim() == 2 else x if inner.batch_first else x.transpose(0, 1)
        return memory(inner, x, lengths=lengths)
    if lengths is None and first.lengths is not None and x.dim() > 1:
        rows, steps = (x.shape[0], x.shape[1]) if batch_axis == 0 else (x.shape[1], x.shape[0])
        if first.h.shape[:2] == (rows, steps) and int(first.lengths.min()) < steps:
            lengths = first.lengths.to("cpu")
    if len(cells := layers(inner)) == 1 and cells[0].module is inner and not cells[0].fused:
        return memory(inner, x.unsqueeze(1))  # a cell, and one step of its input
    try:
        return memory(inner, x, lengths=lengths, args=more, time_axis=1 - batch_axis)
    except BadInput:  # a decoder has steps of its own: its last one is asked about
        return memory(inner, x, args=more, time_axis=1 - batch_axis, output=lambda made: _last(made, batch_axis))


def _last(made: Any, batch_axis: int) -> Tensor:
    """Return the last step of the first output that has steps, (batch, unit)."""
    while not isinstance(made, Tensor):
        made = next(iter(made.values() if isinstance(made, dict) else made))
    steps = made.transpose(0, 1) if batch_axis == 1 else made
    return steps[:, -1] if steps.dim() > 2 else steps


def _comparison(traj: Trajectory, labels: list[str], *, given: bool) -> Comparison:
    if len(traj.h) < 2:
        raise BadInput("the input has one row: there is nothing to compare it with.")
    if len(traj.h) != len(labels):
        raise BadInput(f"the layer has {len(traj.h)} rows, but the input has {len(labels)}.")
    # Where every row has a label of its own, no neighbor can share it.
    return compare(traj, labels=labels if given and len(set(labels)) < len(labels) else None)


def _jacobians(layer: Layer, ran: Run) -> Jacobians:
    """Measure at steps spread evenly over the first row, each as a row of its own that starts where the run was."""
    spec = layer.spec
    if spec.bidirectional:
        raise BadInput("it runs in both directions: there is no single next state.")
    size = sum(spec.sizes.values()) * spec.layers
    if size > _WIDEST:
        raise BadInput(f"its state has {size:,} coordinates: eigenvalues of matrices that large take minutes.")
    x = ran.inputs.get(layer.name)
    tracks = [ran.recording.runs(track)[0] for track in layer.tracks if track in ran.recording]
    if x is None or len(tracks) < len(layer.tracks):
        raise BadInput("it was not run, or not with a plain tensor.")
    assert tracks[0].lengths is not None
    steps = min(int(tracks[0].lengths[0]), x.shape[1])
    if not steps:
        raise BadInput("the first row has no steps.")
    count = int(max(1, min(steps, 64, _WORK // max(1, size**3))))
    at = torch.linspace(0, steps - 1, count).long()
    with _one_thread():
        found = jacobians(layer.module, x[0, at].unsqueeze(1), state=_before(layer, tracks, at))
        _ = found.eigenvalues  # worked out here, and kept
    return found


@contextmanager
def _one_thread() -> Iterator[None]:
    """Hold torch to one thread: for eigenvalues of small matrices more only stand in each other's way."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _before(layer: Layer, tracks: list[Trajectory], at: Tensor) -> State:
    """Return the states of the first row before the steps `at`, as one state with a row for each."""
    start = layer.initial(1)
    parts = {}
    for part in layer.spec.parts:
        levels = []
        for depth, traj in enumerate(tracks):
            walked = traj.states[part][0]  # (time, unit)
            known = traj.initial[part][0] if traj.initial is not None and part in traj.initial else None
            first = known if known is not None else _level(start[part], depth, fused=layer.fused)
            levels.append(torch.cat([first.to(walked).unsqueeze(0), walked])[at.to(walked.device)])  # (count, unit)
        parts[part] = torch.stack(levels) if layer.fused else levels[0]
    axis = start.batch_axis if not layer.fused else 1
    return State(parts, batch_axis=axis)


def _level(initial: Tensor, depth: int, *, fused: bool) -> Tensor:
    return initial[depth, 0] if fused else initial[0]
