"""Everything that a report shows: measured here, drawn later. If a number cannot be measured, the reason is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..cells import BegunDataSet, GivenCall, Layer, input_axes, layers, unwrap
from ..diagnosis import Report, diagnose
from ..errors import BadInput
from ..measure import (
    Comparison,
    Jacobians,
    Lyapunov,
    Memory,
    Saturation,
    Survey,
    compare,
    jacobians,
    lyapunov,
    memory,
    saturation,
)
from ..plot import readable
from ..recording import Trajectory
from ..state import State
from .model_run import ModelRun, along_time, describe, run_model

_WORK = 1e9  # limit for S³, with S coordinates: eigenvalues that take a second or two
_FEWEST = 20  # the least number of steps for a meaningful mean growth
_LONGEST = 400  # the largest number of steps along which it is measured
_WIDEST = 1500  # a state with more coordinates has a Jacobian that takes too long

T = TypeVar("T")
Tokens = Sequence[str] | Sequence[Sequence[str]]  # of the first row, or of several


@dataclass(frozen=True, slots=True)
class Unmeasured:
    """The reason why a number could not be measured."""

    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredTrack:
    """One track: its first run, the number of its runs, and its saturation."""

    name: str
    traj: Trajectory
    runs: int
    saturation: Saturation | Unmeasured


@dataclass(frozen=True, slots=True, eq=False)
class Evidence:
    """All that a report is made of; the reason takes the place of a number that could not be measured."""

    model: str
    parameters: int
    inputs: tuple[str, ...]
    run: ModelRun
    findings: Report | Unmeasured
    tracks: tuple[MeasuredTrack, ...]
    memory: Memory | Unmeasured
    comparison: Comparison | Unmeasured
    jacobians: dict[str, Jacobians | Unmeasured]  # layer -> Jacobians at some steps of the first row
    exponents: dict[str, Lyapunov | Unmeasured]  # layer -> the largest exponent along the first row
    labels: list[str]
    tokens: list[list[str]] = field(default_factory=list)  # of the first rows
    survey: Survey | None = None  # of all batches, if the input is a data set

    def rows_of(self, traj: Trajectory) -> list[str]:
        """Return a name for each row of a track; a layer that takes the batch for time has other rows."""
        return self.labels if len(self.labels) == len(traj.h) else _labels(None, len(traj.h))

    def tokens_of(self, traj: Trajectory) -> list[list[str]]:
        """Return the tokens of a track's first rows; none if the tokens do not match its steps."""
        assert traj.lengths is not None
        known = len(self.labels) == len(traj.h)
        return self.tokens if known and self.tokens and len(self.tokens[0]) == int(traj.lengths[0]) else []


def gather(
    given: GivenCall,
    data: BegunDataSet | None = None,
    *,
    tokens: Tokens | None,
    labels: Sequence[str] | None,
    lengths: Tensor | None,
    batch_axis: int | None,
    doctor: dict[str, Any],
    tell: Callable[[str], None],
) -> Evidence:
    """Run, diagnose and measure a model; before each of these, `tell` is called with a few words.

    `given` is one call of the model, with the first batch of `data` if there is a data set.
    """
    tell("running the model")
    model = along_time(given.model, given.args, batch_axis=batch_axis or 0)  # the doctor itself steps a cell
    ran = run_model(model, given.args)
    real = lengths if lengths is not None else _told_lengths(given, batch_axis)
    inputs = ran.given
    given = replace(given, args=inputs)  # including the first states that the model requires
    found = [(name, [_cut(run, real) for run in ran.recording.runs(name)]) for name in ran.recording]
    if not found:
        names = ", ".join(layer.label for layer in ran.layers)
        raise BadInput(f"the model was called, but none of its recurrent layers ({names}) was: nothing to report on.")
    first = found[0][1][0]
    steps = _lengths(given.x, first, batch_axis=batch_axis, rows=None if labels is None else len(labels))
    named, written = _labels(labels, len(steps)), _tokens(tokens, steps)  # checked before anything takes long
    tell("asking the doctor")
    findings = _try(lambda: _diagnosed(given, data, lengths=lengths, batch_axis=batch_axis, **doctor))
    tell("measuring states")
    tracks = tuple(MeasuredTrack(name, runs[0], len(runs), _try(partial(saturation, runs[0]))) for name, runs in found)
    tell("measuring memory")
    asked = given if model is given.model else replace(given, model=model)
    remembered = _try(lambda: _memory(asked, first, lengths=real, batch_axis=batch_axis))
    tell("comparing rows")
    compared = _try(lambda: _comparison(tracks[-1].traj, named, given=labels is not None))
    tell("measuring Jacobians")
    local = {layer.name: _try(partial(_jacobians, layer, ran, steps[0])) for layer in ran.layers if layer.seen is None}
    tell("measuring Lyapunov exponents")
    grown = {layer.name: _try(partial(_exponent, layer, ran, steps[0])) for layer in ran.layers if layer.seen is None}
    inner = unwrap(given.own)
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
        exponents=grown,
        labels=named,
        tokens=written,
        survey=findings.survey if isinstance(findings, Report) else None,
    )


def _told_lengths(given: GivenCall, batch_axis: int | None) -> Tensor | None:
    """Return the real steps of each row, if another input of the model says them."""
    x = given.x
    if given.alone or not isinstance(x, Tensor) or x.dim() < 2:
        return None
    return given.lengths(input_axes(given.model, x, batch_axis=batch_axis, call=given))


def _cut(run: Trajectory, lengths: Tensor | None) -> Trajectory:
    return run if lengths is None else run.without_padding(lengths)


def _labels(labels: Sequence[str] | None, rows: int) -> list[str]:
    """Return one label for each row, made up if none are given; raise if their number is wrong."""
    if labels is None:
        return [f"row {row}" for row in range(rows)]
    if isinstance(labels, str) or len(labels) != rows:
        count = 1 if isinstance(labels, str) else len(labels)
        raise BadInput(f"there are {count} labels, but {rows} rows: one for each row is needed.")
    return [str(label) for label in labels]


def _lengths(x: Any, first: Trajectory, *, batch_axis: int | None, rows: int | None) -> list[int]:
    """Return the steps of each row as the user counts them; `rows` is the number of labels.

    They come from the first track, unless a layer takes the batch for time: then they come from the input itself.
    """
    labeled, (rows, steps) = rows, first.h.shape[:2]
    if batch_axis is None and labeled == steps != rows:
        batch_axis = 0  # as many labels as the first axis has entries: rows come first
    if isinstance(x, Tensor) and x.dim() > 1 and batch_axis is not None:
        own = (x.shape[batch_axis], x.shape[1 - batch_axis])
        if own == (steps, rows) and rows != steps:
            return [own[1]] * own[0]
    assert first.lengths is not None
    return [int(length) for length in first.lengths]


def _tokens(tokens: Tokens | None, steps: list[int]) -> list[list[str]]:
    """Return the visible tokens of each row that has some; `steps` are the numbers of steps of the rows."""
    if tokens is None:
        return []
    if isinstance(tokens, str) or all(isinstance(token, str) for token in tokens):
        flat: list[str] = [str(token) for token in tokens]
        if len(flat) != steps[0] and [len(row) for row in flat] == steps:  # a string for each row: characters
            return [readable(list(row), count) for row, count in zip(flat, steps, strict=True)]
        return [_checked_tokens(flat, 0, steps[0])]
    if len(tokens) > len(steps):
        raise BadInput(f"there are tokens for {len(tokens)} rows, but the input has {len(steps)}.")
    return [_checked_tokens(list(row), number, steps[number]) for number, row in enumerate(tokens)]


def _checked_tokens(tokens: list[str], row: int, steps: int) -> list[str]:
    if len(tokens) != steps:
        raise BadInput(
            f"there are {len(tokens)} tokens for row {row}, but it has {steps} steps: one for each step is needed. "
            f"Special tokens that the model is given, such as a start token, count too."
        )
    return readable(tokens, steps)


def _try(measure: Callable[[], T]) -> T | Unmeasured:
    """Return the result of `measure`, or the reason why it failed, so that one failure does not stop the others."""
    try:
        return measure()
    except Exception as error:
        return Unmeasured(" ".join(str(error).split()) or type(error).__name__)


def _diagnosed(given: GivenCall, data: BegunDataSet | None, **told: Any) -> Report:
    if data is None:
        return given.ask(diagnose, **told)
    return diagnose(given.own, data, call=given.given[2], **told)


def _memory(given: GivenCall, first: Trajectory, *, lengths: Tensor | None, batch_axis: int | None) -> Memory:
    x, inner = given.x, unwrap(given.model)
    if not isinstance(x, Tensor):
        raise BadInput(f"the input is {describe(x)}: memory is measured back to a tensor.")
    if isinstance(inner, nn.RNNBase):  # measured along the axis that the layer itself takes for time
        return memory(inner, x.unsqueeze(0), time_axis=1) if x.dim() == 2 else memory(inner, x, lengths=lengths)
    if batch_axis is None and x.dim() > 1:
        batch_axis = input_axes(inner, x, call=given).batch
    batch_axis = batch_axis or 0
    if lengths is None and first.lengths is not None and x.dim() > 1:
        rows, steps = (x.shape[0], x.shape[1]) if batch_axis == 0 else (x.shape[1], x.shape[0])
        if first.h.shape[:2] == (rows, steps) and int(first.lengths.min()) < steps:
            lengths = first.lengths.to("cpu")
    if len(cells := layers(inner)) == 1 and cells[0].module is inner and not cells[0].fused:
        return memory(inner, x.unsqueeze(1), time_axis=1)  # a cell with one step of input
    try:
        return given.ask(memory, lengths=lengths, time_axis=1 - batch_axis)
    except BadInput:  # a decoder makes its own steps: use the last one
        return given.ask(memory, time_axis=1 - batch_axis, output=lambda made: _last(made, batch_axis))


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
    # If every row has a label of its own, no neighbor can share it.
    return compare(traj, labels=labels if given and len(set(labels)) < len(labels) else None)


def _jacobians(layer: Layer, ran: ModelRun, real: int) -> Jacobians:
    """Measure at steps spread evenly over the first row; each step is a row that starts in the run's state there."""
    size = sum(layer.spec.sizes.values()) * layer.spec.layers
    if size > _WIDEST and not layer.spec.bidirectional:
        raise BadInput(f"its state has {size:,} coordinates: eigenvalues of matrices that large take minutes.")
    x, tracks = _first_row(layer, ran, real)
    count = int(max(1, min(len(x), 64, _WORK // max(1, size**3))))
    at = torch.linspace(0, len(x) - 1, count).long()
    with _one_thread():
        found = jacobians(layer.module, x[at].unsqueeze(1), state=_before(layer, tracks, at), time_axis=1)
        _ = found.eigenvalues  # computed and cached here
    return found


def _exponent(layer: Layer, ran: ModelRun, real: int) -> Lyapunov:
    """Measure the largest Lyapunov exponent along the first row, from the state it began with."""
    x, tracks = _first_row(layer, ran, real)
    if len(x) < _FEWEST:
        raise BadInput(f"the first row has {len(x)} steps: a Lyapunov exponent is a mean over {_FEWEST} or more.")
    start = _before(layer, tracks, torch.tensor([0]))
    with _one_thread():
        return lyapunov(layer.module, x[:_LONGEST].unsqueeze(0), k=1, state=start, time_axis=1)


def _first_row(layer: Layer, ran: ModelRun, real: int) -> tuple[Tensor, list[Trajectory]]:
    """Return a layer's input along the first row, (time, feature), and the tracks it produced."""
    if layer.spec.bidirectional:
        raise BadInput("it runs in both directions: there is no single next state.")
    x = ran.inputs.get(layer.name)
    tracks = [ran.recording.runs(track)[0] for track in layer.tracks if track in ran.recording]
    if x is None or len(tracks) < len(layer.tracks):
        raise BadInput("it was not run, or not with a plain tensor.")
    assert tracks[0].lengths is not None
    steps = min(int(tracks[0].lengths[0]), x.shape[1], real)
    if not steps:
        raise BadInput("the first row has no steps.")
    return x[0, :steps], tracks


@contextmanager
def _one_thread() -> Iterator[None]:
    """Limit torch to one thread: more threads slow down the eigenvalues of small matrices."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _before(layer: Layer, tracks: list[Trajectory], at: Tensor) -> State:
    """Return the states of the first row before the steps `at`, as one state with a row for each step."""
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
