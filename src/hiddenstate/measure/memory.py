"""How far back an input still moves the output."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..cells import (
    Call,
    InputAxes,
    Layer,
    as_layer,
    cell_along,
    input_axes,
    is_around_cells,
    is_data_set,
    is_step,
    layer_axes,
    layers,
    read_batch,
    started,
    unwrap_to_call,
)
from ..errors import BadInput, NotRecurrent
from ..state import shown_in_short
from ..unrolling import Recurrent, unroll
from .invented import invented
from .output_steps import steps_second
from .progress import tracked
from .sensitivity import Leaf, Sensitivity, at_steps, by_autograd, by_closed_form, tensor_of
from .series import valid_steps
from .system import System, at_rest, check_sequence
from .torch_system import TorchSystem, as_system

_JACOBIANS = 256  # a state's size up to which whole Jacobians are quicker than going back once for each direction


@shown_in_short
@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """How strongly the last output depends on the input at each distance before it."""

    curve: Tensor  # (lag,) ‖d output / d input‖, lag 0 first, mean over rows
    length: int  # lags, from 0 on, within which the curve is at or above the threshold
    half_life: float  # lag at which half of the peak is left; beyond the last lag extrapolated, inf where nothing fades
    low: Tensor  # (lag,) the ends of a 95% confidence band of the mean over rows
    high: Tensor  # (lag,)
    threshold: float  # share of the curve's peak
    rows: Tensor  # (batch, lag) each row's own curve, NaN before its start
    cut_off: bool  # the curve is still above the threshold where the sequences begin
    exact: bool  # every output was differentiated, rather than random directions of it
    input_reaches: bool = True  # False: the input moves nothing, and half_life is that of the state
    interrupted: bool = False  # stopped by Ctrl-C: from the outputs, or up to the lags, that were done
    axes: InputAxes | None = None  # where time and rows are in the input
    tap: int | None = None  # the step that lags are counted from, where the output is made of steps before the last

    def spread(self, share: float = 0.8) -> tuple[Tensor, Tensor]:
        """Return the curves (lag,) between which the middle `share` of the rows lies: never below 0, as a log scale."""
        ends = torch.tensor([(1 - share) / 2, (1 + share) / 2], dtype=self.rows.dtype, device=self.rows.device)
        low, high = self.rows.nanquantile(ends, dim=0)
        return low, high

    def __str__(self) -> str:
        """Return one line."""
        if not self.input_reaches:
            return f"the input does not move the output at all; the state's own half-life is {self.half_life:.4g} steps"
        at_least = "at least " if self.cut_off else ""
        half = f"half-life {self.half_life:.4g}" if self.half_life < math.inf else "without fading"
        half += " (extrapolated)" if len(self.curve) <= self.half_life < math.inf else ""
        ending = "; the sequences are too short to see its end" if self.cut_off else ""
        estimate = "" if self.exact else "; norms estimated from random directions of the output"
        stopped = "; interrupted, from what was done until then" if self.interrupted else ""
        stopped += f"; {self.axes.noted}" if self.axes is not None and self.axes.noted else ""
        tapped = f"; counted from step {self.tap}, the last that moves the output" if self.tap is not None else ""
        return (
            f"memory of {at_least}{self.length} steps (down to {self.threshold:.3g} of the peak), {half}, "
            f"over {len(self.rows)} rows{ending}{tapped}{estimate}{stopped}"
        )


def memory(
    model: nn.Module,
    x: Tensor | Iterable[Any] | None = None,
    threshold: float = 0.01,
    *,
    steps: int = 100,
    trials: int = 8,
    lengths: Tensor | None = None,
    at: int = -1,
    time_axis: int | None = None,
    batch_axis: int | None = None,
    output: Callable[[Any], Tensor] | None = None,
    args: Sequence[Any] = (),
    probes: int | None = None,
) -> Memory:
    """Return the norm of d output / d input at each distance back in time: a curve, its length and its half-life.

    `model` is a whole model or a recurrent layer, and `x` is as it takes it: which axis is time is deduced as in
    `check_split`, and the result's `axes` say what was found. Tokens are followed back to the model's embedding of
    them. The norm is that of the whole matrix (Frobenius); for an output of more than 64 units it is estimated without
    bias in its square from 16 random directions, or from `probes` of them where given.

    Args:
        model: A model or a layer; it is measured in eval mode and comes back untouched.
        x: Its input; more arguments of the model go into `args`. Without it random numbers or tokens are made up. Of a
            DataLoader all rows count, one batch at a time.
        steps: How many steps of input are made up, where there is no x.
        trials: How many rows of it.
        threshold: The share of the peak down to which the memory's length is counted.
        lengths: The real steps of each row; what lies behind them never counts.
        at: The step whose output is asked about, counted from each row's start, or from its end where negative.
        time_axis: Which axis is time in the model's input and output, 0 or 1, where it is not to be deduced.
        batch_axis: Which axis holds the rows.
        output: Takes what the model returns and gives the tensor that is meant.
        args: Further arguments for the model.
        probes: Random directions of the output, instead of all its units.

    >>> leaky = torch.nn.RNN(1, 1, nonlinearity="relu", bias=False, batch_first=True)
    >>> _ = torch.nn.init.constant_(leaky.weight_ih_l0, 0.1), torch.nn.init.constant_(leaky.weight_hh_l0, 0.9)
    >>> print(memory(leaky, torch.ones(1, 60, 1)))
    memory of 44 steps (down to 0.01 of the peak), half-life 6.579, over 1 rows
    """
    if not isinstance(model, nn.Module):
        raise NotRecurrent(f"memory is measured of an nn.Module, but this is {type(model).__name__}.")
    if is_data_set(x):
        told = {"at": at, "time_axis": time_axis, "batch_axis": batch_axis, "output": output, "probes": probes}
        return _over_batches(model, x, threshold, told)  # type: ignore[arg-type]
    if x is None:
        first = any(each.fused and not each.spec.batch_first for each in layers(model))
        turned = time_axis == 0 or batch_axis == 1 or (time_axis is None and batch_axis is None and first)
        x = invented(model, trials, steps, time_axis=0 if turned else 1, args=args)
    if not isinstance(x, Tensor) or x.dim() < 2:
        seen = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise BadInput(f"the input is (batch, time, ...), but this is {seen}. One sequence wants x.unsqueeze(0).")
    model = unwrap_to_call(model)
    layer = _itself_a_layer(model, x, turned=time_axis == 0 or batch_axis == 1) if not args else None
    call = _called(model, x, args) if layer is None else model
    axes = _axes(layer, model, x, call, time_axis=time_axis, batch_axis=batch_axis)
    time_axis = axes.time
    if layer is not None:  # layers are run batch-first here, whatever their own layout
        x, time_axis = axes.rows_first(x), 1
    with at_rest(model):
        valid, ends = _last_steps(x, lengths, at=at, time_axis=time_axis)
        leaf = Leaf(x, valid, time_axis=time_axis)
        system = None if layer is None or layer.spec.bidirectional else as_system(model, x)
        by_step = True
        inputs = leaf.x if system is None else check_sequence(system, leaf.x)
        if isinstance(system, TorchSystem) and output is None and system.size <= _JACOBIANS:
            found, dtype = by_closed_form(system, inputs, valid, ends, probes=probes), inputs.dtype
        else:
            run = _runner(layer, call, valid.sum(1), output)
            with leaf.attached(model):
                result = run(leaf.x)
            if layer is None or output is not None:

                def again(steps: int) -> Tensor:
                    return run(leaf.x.detach().narrow(time_axis, 0, steps))

                result, by_step = steps_second(result, valid, time_axis=time_axis, again=again)
            y = at_steps(result, ends, valid, time_axis=1 if by_step else time_axis)  # (batch, unit)
            found, dtype = by_autograd(y, leaf, probes), y.dtype
        rows = by_lag(found.squares.sqrt().to(dtype), ends)
        rows, tap = from_tap(rows, found, ends, wanted=at == -1 and not by_step)
        own = None  # the half-life of the state itself, where the input moves nothing
        if system is not None and not bool(rows.nansum()):
            own = _half_life_of_state(system, leaf.x.detach(), ends)
    return replace(_memory(rows, threshold, found, own), axes=axes, tap=tap)


def _over_batches(model: nn.Module, batches: Iterable[Any], threshold: float, told: dict[str, Any]) -> Memory:
    """Return the memory over all rows of a data set; Ctrl-C keeps the batches that are done."""
    found: list[Memory] = []
    interrupted = False
    try:
        for batch in tracked(batches, "memory", len(batches) if isinstance(batches, Sized) else 0):
            read = read_batch(model, batch)
            found.append(memory(model, read.args[0], threshold, lengths=read.lengths, args=read.args[1:], **told))
            interrupted = found[-1].interrupted
            if interrupted:
                break
    except KeyboardInterrupt:
        interrupted = True
    if not found:
        raise BadInput("the data set has no batches, or none was done: there is nothing to measure.")
    longest = max(one.rows.shape[1] for one in found)
    rows = torch.cat([functional.pad(one.rows, (0, longest - one.rows.shape[1]), value=math.nan) for one in found])
    sensed = Sensitivity(rows, exact=all(one.exact for one in found), interrupted=interrupted)
    taps = {one.tap for one in found}
    own = found[0].half_life if not any(one.input_reaches for one in found) else None
    return replace(
        _memory(rows, threshold, sensed, own), axes=found[0].axes, tap=taps.pop() if len(taps) == 1 else None
    )


def _last_steps(x: Tensor, lengths: Tensor | None, *, at: int, time_axis: int) -> tuple[Tensor, Tensor]:
    """Return which steps are real, (batch, time), and the step of each row whose output is asked about, (batch,)."""
    valid = valid_steps(x if time_axis == 1 else x.transpose(0, 1), lengths)  # (batch, time)
    if not bool(valid.any()):
        raise BadInput(f"there is nothing to measure: the input has {len(valid)} rows and no real step.")
    real = valid.sum(1)
    ends = real + at if at < 0 else torch.full_like(real, at)
    outside = ((ends < 0) | (ends >= real)) & (real > 0)
    ends = ends.masked_fill(real == 0, -1)  # an empty row has no output to ask about, and does not count
    if bool(outside.any()):
        row = int(outside.nonzero()[0])
        raise BadInput(f"the output at step {at} is asked for, but row {row} has {int(real[row])} steps.")
    return valid, ends


def _called(model: nn.Module, x: Tensor, args: Sequence[Any]) -> Callable[[Tensor], Any]:
    """Return what is called with the sequence alone."""
    return (lambda some: model(some, *args)) if args else started(model, x)


def _axes(
    layer: Layer | None, model: nn.Module, x: Tensor, call: Callable[[Tensor], Any], **told: int | None
) -> InputAxes:
    axes = layer_axes(layer, x, **told) if layer is not None else input_axes(model, x, call=call, **told)
    if axes.batch is None:
        raise BadInput(
            f"the input has shape {tuple(x.shape)} and no rows ({axes.how}), but (batch, time, ...) is needed. "
            f"One sequence wants x.unsqueeze(0), or x.unsqueeze(1) where the model takes time first."
        )
    if {axes.time, axes.batch} != {0, 1}:
        raise BadInput(
            f"time_axis is 1 for (batch, time, ...) or 0 for (time, batch, ...), but this is {axes}. "
            f"A model that takes time elsewhere is measured within a module that moves it."
        )
    return axes


def _itself_a_layer(model: nn.Module, x: Tensor, *, turned: bool) -> Layer | None:
    """Return the model as a layer where it is one itself, rather than holding some."""
    sample = (x[0] if turned else x[:, 0]) if x.numel() else None
    cell = cell_along(model, x)
    found = layers(model)
    if (
        cell is not None
        or (len(found) == 1 and found[0].module is model)
        or (is_step(model) and is_around_cells(model))
    ):
        return as_layer(model, sample)
    return None


def _runner(
    layer: Layer | None, call: Callable[[Tensor], Any], lengths: Tensor, output: Callable[[Any], Tensor] | None
) -> Callable[[Tensor], Tensor]:
    """Return what is called with an input and gives the output that is meant."""

    def run(x: Tensor) -> Tensor:
        result = call(x) if layer is None else _run_layer(layer, x, lengths.clamp(max=x.shape[1]))
        return tensor_of(result) if output is None else output(result)

    return run


def _run_layer(layer: Layer, x: Tensor, lengths: Tensor) -> Tensor:
    """Return the outputs of a layer, (batch, time, unit), for `x (batch, time, feature)`."""
    if not layer.fused:
        return _run_cell(layer, x)
    spec = layer.spec
    if spec.bidirectional and bool((lengths < x.shape[1]).any()):
        # A reverse direction begins at the last real step, and must not read what lies behind it.
        return unroll(layer.module, x, lengths=lengths.clamp(min=1), time_axis=1, engine="loop")[0]
    options = {"engine": "loop"} if isinstance(layer.module, Recurrent) else {}
    given = x if spec.batch_first else x.transpose(0, 1)
    return Call(layer, (given,), result=layer.module(given, **options)).output


def _run_cell(layer: Layer, x: Tensor) -> Tensor:
    native = layer.to_native(layer.initial(len(x)))
    outputs = []
    for step in x.unbind(1):  # not x[:, t]: the backward of each slice would be as large as x
        output, native = layer.call(step, native)
        outputs.append(tensor_of(output).flatten(1))
    return torch.stack(outputs, dim=1)


def _half_life_of_state(system: System, x: Tensor, ends: Tensor) -> float:
    """Return the half-life of a push to the state itself, for a layer that its input does not move.

    The push is felt in the layer's visible part, at the step `ends (batch,)` of each row.
    """
    width = system.layout[0].shape.numel()
    vectors = system.initial(len(x))
    pushes, seen = [], []
    for step in x.detach().unbind(1):
        push = torch.zeros_like(vectors, requires_grad=True)
        vectors = system.step(step, vectors + push)
        pushes.append(push)
        seen.append(vectors[:, :width])
    last = torch.stack(seen, dim=1)[torch.arange(len(x), device=x.device), ends]  # (batch, unit)
    squares = torch.zeros(x.shape[:2], dtype=last.dtype, device=x.device)
    for unit in range(width):
        found = torch.autograd.grad(last[:, unit].sum(), pushes, retain_graph=True, allow_unused=True)
        squares += torch.stack([last.new_zeros(len(x)) if g is None else g.square().sum(1) for g in found], dim=1)
    return half_life(by_lag(squares.sqrt(), ends).nanmean(0))


def _memory(rows: Tensor, threshold: float, found: Sensitivity, own_half_life: float | None) -> Memory:
    rows = rows[:, (~rows.isnan()).any(0)]  # an interruption leaves the farthest lags unknown
    curve = rows.nanmean(0)
    low, high = band(rows)
    length = reach(curve, threshold)
    return Memory(
        curve=curve,
        length=length,
        half_life=half_life(curve) if own_half_life is None else own_half_life,
        low=low,
        high=high,
        threshold=threshold,
        rows=rows,
        cut_off=length == len(curve),
        exact=found.exact,
        input_reaches=bool(curve.any()),
        interrupted=found.interrupted,
    )


def band(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the ends of a 95% confidence band of the mean over `rows (batch, lag)`, (lag,) each; NaN is left out.

    It is one of the mean's logarithm (delta method): influence is positive, and so is all that its mean could be.
    """
    curve = rows.nanmean(0)
    count = (~rows.isnan()).sum(0)
    spread = ((rows - curve) ** 2).nansum(0) / (count - 1).clamp(min=1)
    margin = torch.where(curve > 0, 1.96 * (spread / count).sqrt() / curve, 0.0)
    return curve * torch.exp(-margin), curve * torch.exp(margin)


def reach(curve: Tensor, threshold: float) -> int:
    """Return how many lags, from 0 on, lie within the last one that has `threshold` of the peak or more."""
    felt = (curve >= threshold * curve.max()) & (curve > 0)
    return int(felt.nonzero()[-1]) + 1 if bool(felt.any()) else 0


def half_life(curve: Tensor) -> float:
    """Return the lag at which the curve has fallen to half its peak, exact for an exponential; inf if it never falls.

    Between two lags the logarithm is taken to be straight, and so it is beyond the last one, where the curve ends
    above the half. NaN for a curve that is zero throughout.

    >>> half_life(torch.tensor([8.0, 4.0, 2.0]))
    1.0
    """
    values = curve.double()
    peak = int(values.argmax())
    half = float(values[peak]) / 2
    if not half > 0:
        return math.nan
    below = (values[peak:] <= half * (1 + 1e-9)).nonzero()  # the curve may meet the half exactly, but for rounding
    if not len(below):
        lost = math.log(float(values[peak]) / float(values[-1]))
        return peak + math.log(2) * (len(values) - 1 - peak) / lost if lost > 0 else math.inf
    lag = peak + int(below[0])
    high, low = float(values[lag - 1]), float(values[lag])
    if low <= 0:
        return lag - 1 + (high - half) / high
    return lag - 1 + math.log(high / half) / math.log(high / low)


def from_tap(rows: Tensor, found: Sensitivity, ends: Tensor, *, wanted: bool) -> tuple[Tensor, int | None]:
    """Return the curves counted from the last step that moves any row's output, where that is not its end, and it."""
    moved = (found.squares > 0).any(0).nonzero().flatten()
    if not wanted or not len(moved) or int(moved[-1]) >= int(ends.max()):
        return rows, None
    tap = int(moved[-1])
    return by_lag(found.squares.sqrt().to(rows.dtype), ends.clamp(max=tap)), tap


def by_lag(norms: Tensor, ends: Tensor) -> Tensor:
    """Turn `norms (batch, time)` by step into (batch, lag) by distance from each row's end; NaN before its start."""
    lags = torch.arange(int(ends.max()) + 1, device=norms.device)
    steps = ends.unsqueeze(1) - lags  # (batch, lag)
    return norms.gather(1, steps.clamp(min=0)).masked_fill(steps < 0, torch.nan)
