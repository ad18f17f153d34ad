"""How far back an input still moves the output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..cells import unwrap
from ..errors import BadInput, NotRecurrent
from .decay import by_lag, half_life, reach
from .fading import fading
from .leaf import Leaf
from .outputs import at_steps, tensor_of
from .rest import at_rest
from .running import itself_a_layer, run_layer
from .sensitivity import Sensitivity, by_autograd, by_closed_form
from .series import valid_steps
from .system import check_sequence
from .torch_system import TorchSystem, as_system


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

    def __str__(self) -> str:
        """Return one line."""
        if not self.input_reaches:
            return f"the input does not move the output at all; the state's own half-life is {self.half_life:.4g} steps"
        at_least = "at least " if self.cut_off else ""
        half = f"half-life {self.half_life:.4g}" if self.half_life < float("inf") else "without fading"
        half += " (extrapolated)" if len(self.curve) <= self.half_life < float("inf") else ""
        ending = "; the sequences are too short to see its end" if self.cut_off else ""
        estimate = "" if self.exact else "; norms estimated from random directions of the output"
        stopped = "; interrupted, from what was done until then" if self.interrupted else ""
        return (
            f"memory of {at_least}{self.length} steps (down to {self.threshold:.3g} of the peak), {half}, "
            f"over {len(self.rows)} rows{ending}{estimate}{stopped}"
        )


def memory(
    model: nn.Module,
    x: Tensor,
    threshold: float = 0.01,
    *,
    lengths: Tensor | None = None,
    at: int = -1,
    time_axis: int = 1,
    output: Callable[[Any], Tensor] | None = None,
    args: Sequence[Any] = (),
    probes: int | None = None,
) -> Memory:
    """Return the norm of d output / d input at each distance back in time: a curve, its length and its half-life.

    `model` is a whole model or a recurrent layer; `x` is (batch, time, ...), with the time axis first where
    `time_axis=0` (a layer always takes it batch-first). Tokens are followed back to the model's embedding of them.
    The norm is that of the whole matrix (Frobenius); for an output of more than 64 units it is estimated without bias
    in its square from 16 random directions, or from `probes` of them where given.

    Args:
        model: A model or a layer; it is measured in eval mode and comes back untouched.
        x: Its input; more arguments of the model go into `args`.
        threshold: The share of the peak down to which the memory's length is counted.
        lengths: The real steps of each row; what lies behind them never counts.
        at: The step whose output is asked about, counted from each row's start, or from its end where negative.
        time_axis: 1 or 0, of the model's input and output.
        output: Takes what the model returns and gives the tensor that is meant.
        args: Further arguments for the model.
        probes: Random directions of the output, instead of all its units.

    >>> leaky = torch.nn.RNN(1, 1, nonlinearity="relu", bias=False)
    >>> _ = torch.nn.init.constant_(leaky.weight_ih_l0, 0.1), torch.nn.init.constant_(leaky.weight_hh_l0, 0.9)
    >>> print(memory(leaky, torch.ones(1, 60, 1)))
    memory of 44 steps (down to 0.01 of the peak), half-life 6.579, over 1 rows
    """
    if not isinstance(model, nn.Module):
        raise NotRecurrent(f"memory is measured of an nn.Module, but this is {type(model).__name__}.")
    if not isinstance(x, Tensor) or x.dim() < 2:
        seen = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise BadInput(f"the input is (batch, time, ...), but this is {seen}. One sequence wants x.unsqueeze(0).")
    model = unwrap(model)
    layer = itself_a_layer(model, x) if not args else None
    if layer is not None and time_axis == 0:  # layers are run batch-first here, whatever their own layout
        x, time_axis = x.transpose(0, 1), 1
    with at_rest(model):
        valid, ends = _last_steps(x, lengths, at=at, time_axis=time_axis)
        leaf = Leaf(x, valid, time_axis=time_axis)
        system = None if layer is None or layer.spec.bidirectional else as_system(model, x)
        if isinstance(system, TorchSystem) and output is None:
            inputs = check_sequence(system, leaf.x)
            found, dtype = by_closed_form(system, inputs, valid, ends, probes=probes), inputs.dtype
        else:
            with leaf.planted(model):
                result = model(leaf.x, *args) if layer is None else run_layer(layer, leaf.x, valid.sum(1))
            result = tensor_of(result) if output is None else output(result)
            y = at_steps(result, ends, valid, time_axis=time_axis)  # (batch, unit)
            found, dtype = by_autograd(y, leaf, probes), y.dtype
        rows = by_lag(found.squares.sqrt().to(dtype), ends)
        own = None
        if system is not None and not bool(rows.nansum()):
            own = fading(system, leaf.x.detach(), ends)
    return _memory(rows, threshold, found, own)


def _last_steps(x: Tensor, lengths: Tensor | None, *, at: int, time_axis: int) -> tuple[Tensor, Tensor]:
    if time_axis not in (0, 1):
        raise BadInput(f"time_axis is 1 for (batch, time, ...) or 0 for (time, batch, ...), but is {time_axis!r}.")
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


def _memory(rows: Tensor, threshold: float, found: Sensitivity, own_half_life: float | None) -> Memory:
    rows = rows[:, (~rows.isnan()).any(0)]  # an interruption leaves the farthest lags unknown
    curve = rows.nanmean(0)
    count = (~rows.isnan()).sum(0)
    spread = ((rows - curve) ** 2).nansum(0) / (count - 1).clamp(min=1)
    margin = 1.96 * (spread / count).sqrt()
    length = reach(curve, threshold)
    return Memory(
        curve=curve,
        length=length,
        half_life=half_life(curve) if own_half_life is None else own_half_life,
        low=(curve - margin).clamp(min=0),
        high=curve + margin,
        threshold=threshold,
        rows=rows,
        cut_off=length == len(curve),
        exact=found.exact,
        input_reaches=bool(curve.any()),
        interrupted=found.interrupted,
    )
