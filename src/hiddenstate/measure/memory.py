"""Memory: how far back an input still affects the output."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sized
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..cells import (
    Call,
    GivenCall,
    InputAxes,
    Layer,
    as_layer,
    cell_along,
    given_call,
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
from .lag_curve import band, by_lag, half_life, reach
from .output_steps import steps_second
from .progress import tracked
from .sensitivity import Leaf, Sensitivity, at_steps, by_autograd, by_closed_form, tensor_of
from .series import valid_steps
from .system import System, at_rest, check_sequence
from .torch_system import TorchSystem, as_system

_JACOBIANS = 256  # for larger states, going back once per direction is quicker than whole Jacobians


@shown_in_short
@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """How strongly the last output depends on the input at each distance before it."""

    curve: Tensor  # (lag,) ‖d output / d input‖, lag 0 first, mean over rows
    length: int  # lags, from 0 on, within which the curve is at or above the threshold
    half_life: float  # lag at which half of the peak is left; extrapolated beyond the last lag, inf if nothing fades
    low: Tensor  # (lag,) the ends of a 95% confidence band of the mean over rows
    high: Tensor  # (lag,)
    threshold: float  # share of the curve's peak
    rows: Tensor  # (batch, lag) each row's own curve, NaN before its start
    cut_off: bool  # whether the curve is still above the threshold where the sequences begin
    exact: bool  # whether every output was differentiated, not only random directions
    input_reaches: bool = True  # False: the input does not move the output, and half_life is that of the state
    interrupted: bool = False  # stopped by Ctrl-C: covers the outputs or lags that were done
    axes: InputAxes | None = None  # which axes of the input are time and batch
    tap: int | None = None  # the step from which lags are counted, if the output does not depend on later ones

    def spread(self, share: float = 0.8) -> tuple[Tensor, Tensor]:
        """Return the curves (lag,) that enclose the middle `share` of the rows; they are never below 0."""
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
    *inputs: Any,
    threshold: float = 0.01,
    steps: int = 100,
    trials: int = 8,
    lengths: Tensor | None = None,
    at: int = -1,
    time_axis: int | None = None,
    batch_axis: int | None = None,
    output: Callable[[Any], Tensor] | None = None,
    probes: int | None = None,
    call: Callable[..., Any] | None = None,
    **kwargs: Any,
) -> Memory:
    """Return the norm of d output / d input at each distance back in time: a curve, its length and its half-life.

    `model` is a whole model or a recurrent layer, called as `model(*inputs, **kwargs)`. Which axis of its sequence is
    time is deduced as in `check_split`; the result's `axes` say what was found. Tokens are followed back to their
    embedding in the model. The norm is the Frobenius norm. For an output of more than 64 units, its square is estimated
    without bias from 16 random directions, or from as many as `probes` says.

    Args:
        model: A model or a layer; it is measured in eval mode and comes back unchanged.
        inputs: What the model is called with; by default random numbers or tokens. Of a DataLoader, all rows count; one
            batch is held at a time.
        steps: The number of steps in made-up inputs.
        trials: The number of rows in made-up inputs.
        threshold: The share of the peak down to which the memory's length is counted.
        lengths: The real steps of each row; later ones never count. Lengths or a mask among the inputs
            are read as well.
        at: The step whose output is measured, counted from each row's start, or from its end if negative.
        time_axis: Which axis of the model's input and output is time, 0 or 1, if it should not be deduced.
        batch_axis: Which axis holds the rows.
        output: A function from the model's result to the tensor to measure.
        probes: The number of random directions of the output to use instead of all its units.
        call: How to call the model, if not through its forward: `call=lambda model: model.act(x, state)`, or
            `call(model, *inputs)`; for a DataLoader `call(model, batch)`.
        kwargs: What the model is called with by name.

    >>> leaky = torch.nn.RNN(1, 1, nonlinearity="relu", bias=False, batch_first=True)
    >>> _ = torch.nn.init.constant_(leaky.weight_ih_l0, 0.1), torch.nn.init.constant_(leaky.weight_hh_l0, 0.9)
    >>> print(memory(leaky, torch.ones(1, 60, 1)))
    memory of 44 steps (down to 0.01 of the peak), half-life 6.579, over 1 rows
    """
    if not isinstance(model, nn.Module):
        raise NotRecurrent(f"memory is measured of an nn.Module, but this is {type(model).__name__}.")
    told: dict[str, Any] = {
        "at": at,
        "time_axis": time_axis,
        "batch_axis": batch_axis,
        "output": output,
        "probes": probes,
    }
    if len(inputs) == 1 and is_data_set(inputs[0]):
        return _over_batches(model, inputs[0], call, threshold=threshold, told=told)
    if not inputs and not kwargs and call is None:
        first = any(each.fused and not each.spec.batch_first for each in layers(model))
        turned = time_axis == 0 or batch_axis == 1 or (time_axis is None and batch_axis is None and first)
        inputs = (invented(model, trials, steps, time_axis=0 if turned else 1),)
    options = {"lengths": lengths, "threshold": threshold, "steps": steps, "trials": trials, **told}
    given = given_call(memory, model, inputs, kwargs=kwargs, call=call, options=options)
    return _measured(given, lengths, threshold=threshold, **told)


def _measured(
    given: GivenCall,
    lengths: Tensor | None,
    *,
    threshold: float,
    at: int,
    time_axis: int | None,
    batch_axis: int | None,
    output: Callable[[Any], Tensor] | None,
    probes: int | None,
) -> Memory:
    """Return the memory of a model, measured in one call of it."""
    x = given.x
    if not isinstance(x, Tensor) or x.dim() < 2:
        seen = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise BadInput(f"the input is (batch, time, ...), but this is {seen}. One sequence wants x.unsqueeze(0).")
    inner = unwrap_to_call(given.model)
    layer = _itself_a_layer(inner, x, turned=time_axis == 0 or batch_axis == 1) if given.alone else None
    call: Callable[[Tensor], Any] = given if layer is not None or not given.alone else started(inner, x)
    axes = _axes(layer, inner, x, call, time_axis=time_axis, batch_axis=batch_axis)
    lengths = lengths if lengths is not None else given.lengths(axes)
    time = axes.time
    if layer is not None:  # layers are run batch-first here, whatever their own layout
        x, time = axes.rows_first(x), 1
    elif {axes.time, axes.batch} != {0, 1}:  # time comes after the features, as in convolutions
        x, time, call = axes.rows_first(x), 1, partial(_moved_back, call, axes)
    with at_rest(inner):
        valid, ends = _last_steps(x, lengths, at=at, time_axis=time)
        leaf = Leaf(x, valid, time_axis=time)
        system = None if layer is None or layer.spec.bidirectional else as_system(inner, x)
        by_step = True
        sequence = leaf.x if system is None else check_sequence(system, leaf.x)
        if isinstance(system, TorchSystem) and output is None and system.size <= _JACOBIANS:
            found, dtype = by_closed_form(system, sequence, valid, ends, probes=probes), sequence.dtype
        else:
            go = _runner(layer, call, valid.sum(1), output)
            with leaf.attached(inner):
                result = go(leaf.x)
            if layer is None or output is not None:

                def again(steps: int) -> Tensor:
                    return go(leaf.x.detach().narrow(time, 0, steps))

                result, by_step = steps_second(result, valid, time_axis=time, again=again)
            y = at_steps(result, ends, valid, time_axis=1 if by_step else time)  # (batch, unit)
            found, dtype = by_autograd(y, leaf, probes), y.dtype
        rows = by_lag(found.squares.sqrt().to(dtype), ends)
        rows, tap = from_tap(rows, found, ends, wanted=at == -1 and not by_step)
        own = None  # the half-life of the state itself, if the input does not move it
        if system is not None and not bool(rows.nansum()):
            own = _half_life_of_state(system, leaf.x.detach(), ends)
    return replace(_memory(rows, threshold, found, own), axes=axes, tap=tap)


def _over_batches(
    model: nn.Module,
    batches: Iterable[Any],
    call: Callable[..., Any] | None,
    *,
    threshold: float,
    told: dict[str, Any],
) -> Memory:
    """Return the memory over all rows of a data set; after Ctrl-C, over the batches that are done."""
    found: list[Memory] = []
    interrupted = False
    try:
        for batch in tracked(batches, "memory", len(batches) if isinstance(batches, Sized) else 0):
            if call is not None:
                inputs, lengths = (batch,), None
            else:
                read = read_batch(model, batch)
                inputs, lengths = read.args, read.lengths
            given = given_call(memory, model, inputs, kwargs={}, call=call, options={})
            found.append(_measured(given, lengths, threshold=threshold, **told))
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
    """Return which steps are real, (batch, time), and the step of each row whose output is measured, (batch,)."""
    valid = valid_steps(x if time_axis == 1 else x.transpose(0, 1), lengths)  # (batch, time)
    if not bool(valid.any()):
        raise BadInput(f"there is nothing to measure: the input has {len(valid)} rows and no real step.")
    real = valid.sum(1)
    ends = real + at if at < 0 else torch.full_like(real, at)
    outside = ((ends < 0) | (ends >= real)) & (real > 0)
    ends = ends.masked_fill(real == 0, -1)  # an empty row has no output to measure, and does not count
    if bool(outside.any()):
        row = int(outside.nonzero()[0])
        raise BadInput(f"the output at step {at} is asked for, but row {row} has {int(real[row])} steps.")
    return valid, ends


def _axes(
    layer: Layer | None, model: nn.Module, x: Tensor, call: Callable[[Tensor], Any], **told: int | None
) -> InputAxes:
    axes = layer_axes(layer, x, **told) if layer is not None else input_axes(model, x, call=call, **told)
    if axes.batch is None:
        raise BadInput(
            f"the input has shape {tuple(x.shape)} and no rows ({axes.how}), but (batch, time, ...) is needed. "
            f"One sequence wants x.unsqueeze(0), or x.unsqueeze(1) where the model takes time first."
        )
    if layer is not None and {axes.time, axes.batch} != {0, 1}:
        raise BadInput(f"time_axis is 1 for (batch, time, ...) or 0 for (time, batch, ...), but this is {axes}.")
    return axes


def _moved_back(call: Callable[[Tensor], Any], axes: InputAxes, x: Tensor) -> Any:
    """Call a model with `x (batch, time, ...)` converted to the model's own layout."""
    return call(axes.as_given(x))


def _itself_a_layer(model: nn.Module, x: Tensor, *, turned: bool) -> Layer | None:
    """Return the model as a layer if it is one itself; None if it only contains some."""
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
    """Return a function from an input to the output to measure."""

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
        # A reverse direction begins at the last real step, and must not read the padding after it.
        return unroll(layer.module, x, lengths=lengths.clamp(min=1), time_axis=1, engine="loop")[0]
    options = {"engine": "loop"} if isinstance(layer.module, Recurrent) else {}
    given = x if spec.batch_first else x.transpose(0, 1)
    return Call(layer, (given,), result=layer.module(given, **options)).output


def _run_cell(layer: Layer, x: Tensor) -> Tensor:
    native = layer.to_native(layer.initial(len(x)))
    outputs = []
    for step in x.unbind(1):  # not x[:, t]: the backward pass of each slice would be as large as x
        output, native = layer.call(step, native)
        outputs.append(tensor_of(output).flatten(1))
    return torch.stack(outputs, dim=1)


def _half_life_of_state(system: System, x: Tensor, ends: Tensor) -> float:
    """Return the half-life of a perturbation of the state, for a layer whose input does not move it.

    The effect is measured in the layer's visible part, at the step `ends (batch,)` of each row.
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
    rows = rows[:, (~rows.isnan()).any(0)]  # after an interruption, the farthest lags are unknown
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


def from_tap(rows: Tensor, found: Sensitivity, ends: Tensor, *, wanted: bool) -> tuple[Tensor, int | None]:
    """Return the curves counted from the last step that moves any row's output, and that step if it is not the end."""
    moved = (found.squares > 0).any(0).nonzero().flatten()
    if not wanted or not len(moved) or int(moved[-1]) >= int(ends.max()):
        return rows, None
    tap = int(moved[-1])
    return by_lag(found.squares.sqrt().to(rows.dtype), ends.clamp(max=tap)), tap
