"""`unroll`: the public function that runs any cell or layer along time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from .._compiling import compiling
from ..cells import InputAxes, Layer, as_layer, layer_axes, uncompiled
from ..errors import BadInput
from ..state import State
from .checks import Lengths, read
from .engines import Engine, chosen_engine, layer_for, run_cell
from .fused import run_fused
from .one_step import is_single, remember_step, step_again
from .recurrent import Recurrent
from .waiting import run_others


def unroll(
    cell: nn.Module,
    x: Tensor,
    state: State | Any = None,
    *,
    lengths: Lengths | None = None,
    resets: Tensor | None = None,
    initial: Callable[[int], State] | None = None,
    time_axis: int | None = None,
    batch_axis: int | None = None,
    engine: Engine | None = None,
) -> tuple[Tensor, State]:
    """Run `cell` along `x` and return its outputs with the state it ends in.

    A long sequence may be fed in pieces:

    >>> cell, x = torch.nn.GRUCell(3, 4), torch.randn(2, 9, 3)
    >>> whole, _ = unroll(cell, x)
    >>> head, middle = unroll(cell, x[:, :5])
    >>> tail, _ = unroll(cell, x[:, 5:], middle)
    >>> torch.allclose(torch.cat([head, tail], dim=1), whole)
    True

    Args:
        cell: A `Cell` of your own or of torch's, an `nn.RNN`, `nn.LSTM` or `nn.GRU`, or a `Recurrent`.
        x: As the layer takes it: `(time, batch, feature)` for one with `batch_first=False`. A cell is stepped along
            `(batch, time, feature)`.
        state: The state before the first step, as a `State` or in the cell's own form. None: its initial state.
        lengths: The steps of each row, in any order. Outputs are zero beyond them, and what `x` holds there
            is never looked at; each row's final state is the one at its own end. A row of 0 steps waits: its state
            is the one that came in.
        resets: bool `(batch, time)`, True where a row starts anew before that step, from the initial state,
            with gradients cut there.
        initial: From the number of rows to the State they start anew from; None: the layer's own initial state.
        time_axis: Which axis of `x` is time, where it is not as said above; lengths and resets stay as they are.
        batch_axis: Which axis of `x` holds the rows.
        engine: `"loop"` calls the cell once for each step; `"fast"` runs it by a schedule made from its trace, or
            says why it cannot; `"auto"` is fast where that pays. A fused layer runs in its own kernel. None: `"auto"`,
            or what a `Recurrent` was made with. With `HIDDENSTATE_ENGINE=loop` in the environment all is `"loop"`.

    Returns:
        The outputs, in the layout of `x`, and the final State.
    """
    if compiling():
        options = {"initial": initial, "time_axis": time_axis, "batch_axis": batch_axis, "engine": engine}
        from .in_graph import stay_outside  # which a plain import can do without

        found = _in_graph(cell, x, state, lengths, resets, options)
        if not isinstance(found, str):
            return found
        stay_outside(found)
    return _unroll(
        cell,
        x,
        state,
        lengths=lengths,
        resets=resets,
        initial=initial,
        time_axis=time_axis,
        batch_axis=batch_axis,
        engine=engine,
    )


def _in_graph(
    cell: nn.Module, x: Any, state: Any, lengths: Any, resets: Any, options: dict[str, Any]
) -> tuple[Tensor, State] | str:
    """Run a call as one operator of the graph that is being compiled, or say why it stays outside."""
    from .in_graph import run_in_graph  # which a plain import can do without

    if options["initial"] is not None:
        return "initial is a function, which no graph can hold"
    places = (options["time_axis"], options["batch_axis"])
    if not isinstance(x, Tensor) or x.dim() < 2 or not all(place in (None, 0, 1) for place in places):
        return "x is no tensor with time and rows as its first two axes"
    own = cell.engine if isinstance(cell, Recurrent) else "auto"
    if not torch.compiler.is_dynamo_compiling() and chosen_engine(options["engine"], own) == "loop":
        return "the loop writes all steps out"
    rows = _rows_axis(cell, options["time_axis"], options["batch_axis"])
    return run_in_graph(
        cell, x, state, lengths=lengths, resets=resets, runner=_unroll, rows=rows, options=tuple(options.items())
    )


def _rows_axis(cell: nn.Module, time_axis: int | None, batch_axis: int | None) -> int:
    if batch_axis is not None:
        return batch_axis
    if time_axis is not None:
        return 1 - time_axis
    return 0 if getattr(cell, "batch_first", True) else 1


@uncompiled
def _unroll(
    cell: nn.Module,
    x: Tensor,
    state: State | Any,
    *,
    lengths: Lengths | None,
    resets: Tensor | None,
    initial: Callable[[int], State] | None,
    time_axis: int | None,
    batch_axis: int | None,
    engine: Engine | None,
) -> tuple[Tensor, State]:
    usual = lengths is None and resets is None and initial is None and time_axis is None and batch_axis is None
    single = usual and is_single(x) and isinstance(cell, nn.Module) and not isinstance(cell, Recurrent)
    if single and (way := chosen_engine(engine)) != "fast":
        again = step_again(cell, x, state, timed=way == "auto")
        if again is not None:
            return again
    told = isinstance(x, Tensor) and x.dim() > 1 and (time_axis == 0 or batch_axis == 1)
    layer = layer_for(cell, x.transpose(0, 1) if told else x)
    axes = _axes(layer, x, time_axis, batch_axis)
    if axes is not None and not axes.usual:
        x = axes.rows_first(x)
    options = {"lengths": lengths, "resets": resets}
    engine = chosen_engine(engine, layer.module.engine if isinstance(layer.module, Recurrent) else "auto")
    if isinstance(layer.module, Recurrent):
        if initial is not None:
            raise BadInput("initial is given for a Recurrent, whose cells start anew each from its own initial_state.")
        out, after = _run_recurrent(layer.module, x, state, engine=engine, **options)
    else:
        task = read(layer, x, state, lengths=lengths, resets=resets)
        task = task if initial is None else replace(task, initial=initial)
        run = run_fused if layer.fused else run_cell
        out, after = run_others(task, lambda some: run(layer, some, engine), layer.initial)
        if single and layer.module is cell:
            remember_step(layer, x, after)
    return (out if axes is None or axes.usual else axes.as_given(out)), after


def _axes(layer: Layer, x: Any, time_axis: int | None, batch_axis: int | None) -> InputAxes | None:
    """Return where time and rows are in `x`; None for what is refused where inputs are read."""
    if not isinstance(x, Tensor) or x.dim() < 2:
        return None
    axes = layer_axes(layer, x, time_axis=time_axis, batch_axis=batch_axis)
    return None if axes.batch is None else axes


def _run_recurrent(stack: Recurrent, x: Tensor, state: State | Any, **options: Any) -> tuple[Tensor, State]:
    if isinstance(x, Tensor) and x.dim() == stack.unbatched_axes(x):
        raise BadInput(
            f"x has shape {tuple(x.shape)}, but (batch, time, feature) is needed. "
            f"A single sequence becomes a batch of one with x.unsqueeze(0)."
        )
    layer = as_layer(stack)
    task = read(layer, x, state, lengths=options.pop("lengths"), resets=options.pop("resets"))
    native = () if task.state is None else (layer.to_native(task.state),)
    # Through __call__, so that whoever hooks the stack sees the call.
    given = task.x if stack.batch_first else task.x.transpose(0, 1)
    out, after = stack(given, *native, lengths=task.lengths, resets=task.resets, **options)
    return (out if stack.batch_first else out.transpose(0, 1)), layer.to_state(after, batch=x.shape[0])
