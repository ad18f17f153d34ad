"""The front function: any cell or layer, run along time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from ..cells import as_layer, uncompiled
from ..errors import BadInput
from ..state import State
from .checks import Lengths, read
from .engines import Engine, check_engine, run_cell
from .fused import run_fused
from .recurrent import Recurrent
from .waiting import run_others


@uncompiled
def unroll(
    cell: nn.Module,
    x: Tensor,
    state: State | Any = None,
    *,
    lengths: Lengths | None = None,
    resets: Tensor | None = None,
    initial: Callable[[int], State] | None = None,
    engine: Engine = "auto",
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
        x: `(batch, time, feature)`, whatever the layer's own `batch_first`.
        state: The state before the first step, as a `State` or in the cell's own form. None: its initial state.
        lengths: The steps of each row, in any order. Outputs are zero beyond them, and what `x` holds there
            is never looked at; each row's final state is the one at its own end. A row of 0 steps waits: its state
            is the one that came in.
        resets: bool `(batch, time)`, True where a row starts anew before that step, from the initial state,
            with gradients cut there.
        initial: From the number of rows to the State they start anew from; None: the layer's own initial state.
        engine: `"loop"` calls the cell once for each step; `"fast"` runs it by a schedule made from its trace, or
            says why it cannot; `"auto"` is fast where that pays. A fused layer runs in its own kernel.

    Returns:
        The outputs `(batch, time, unit)` and the final State.
    """
    check_engine(engine)
    tensor = isinstance(x, Tensor) and x.dim() > 1 and x.shape[1] > 0
    layer = as_layer(cell, x[:, 0] if tensor else None)
    if isinstance(layer.module, Recurrent):
        if initial is not None:
            raise BadInput("initial is given for a Recurrent, whose cells start anew each from its own initial_state.")
        return _run_recurrent(layer.module, x, state, lengths=lengths, resets=resets, engine=engine)
    task = replace(read(layer, x, state, lengths=lengths, resets=resets), initial=initial)
    run = run_fused if layer.fused else run_cell
    return run_others(task, lambda some: run(layer, some, engine), layer.initial)


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
    out, after = stack(task.x, *native, lengths=task.lengths, resets=task.resets, **options)
    return out, layer.to_state(after, batch=x.shape[0])
