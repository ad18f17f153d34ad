"""Which axis of a model's input is time and which is the batch: told by the user, or deduced in one way for all."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import BadInput
from ..state import tensors
from .discovery import cell_along, is_around_cells, layers
from .layer import Call, Layer
from .listener import Listener, Proceed, listen, unheard
from .snapshot import untouched
from .wrappers import unwrap_to_call

_SIZES = (5, 7)  # rows and steps of the piece that is tried: different, so that neither can be mistaken for the other
_STEPPED = "assumed, since a cell is stepped along (batch, time, ...); time_axis= says otherwise"
_LAYOUTS = ((0, 1), (1, 0), (0, 2))  # axes of rows and of steps; the last one is that of convolutions


@dataclass(frozen=True, slots=True)
class InputAxes:
    """Which axes of an input are time and batch, and how that is known."""

    time: int
    batch: int | None  # None: a single sequence without a batch axis
    how: str
    sure: bool = True  # told or observed, not assumed

    @property
    def usual(self) -> bool:
        """Whether this is (batch, time, ...)."""
        return (self.batch, self.time) == (0, 1)

    @property
    def noted(self) -> str:
        """What a result should mention about the axes: nothing if they are (batch, time, ...) for sure."""
        return "" if self.usual and self.sure else str(self)

    def __str__(self) -> str:
        """Return the axes in words."""
        rows = "one sequence without rows" if self.batch is None else f"rows on axis {self.batch}"
        return f"time on axis {self.time}, {rows}: {self.how}"

    def rows_first(self, x: Tensor) -> Tensor:
        """Return an input with these axes as `(batch, time, ...)`."""
        if self.batch is None:
            return x.unsqueeze(0)
        return x if self.usual else x.movedim((self.batch, self.time), (0, 1))

    def as_given(self, x: Tensor) -> Tensor:
        """Return a `(batch, time, ...)` tensor in the layout of the input."""
        if self.batch is None:
            return x.squeeze(0)
        return x if self.usual else x.movedim((0, 1), (self.batch, self.time))


def input_axes(
    model: nn.Module,
    x: Tensor,
    *,
    time_axis: int | None = None,
    batch_axis: int | None = None,
    call: Callable[[Tensor], Any] | None = None,
) -> InputAxes:
    """Return which axes of `x` are time and batch when `model` is called with it, as `model(x)` or as `call(x)`.

    Axes that the user gives are taken as they are. A layer says them with `batch_first`, and a cell is stepped along
    (batch, time, ...). Any other model is called with a piece of `x` whose rows and steps differ in number: the calls
    of its layers show which axis is which. If they do not, one entry of the input is changed, and the outputs that
    change with it tell. The model comes back unchanged.

    >>> print(input_axes(torch.nn.GRU(3, 4), torch.randn(9, 2, 3)))
    time on axis 0, rows on axis 1: the model itself has batch_first=False
    """
    if time_axis is not None or batch_axis is not None:
        return _told(x, time_axis, batch_axis)
    if x.dim() < 2:
        return InputAxes(0, None, "the input has one axis")
    model = unwrap_to_call(model)
    found = layers(model)
    if len(found) == 1 and found[0].module is model:
        return _of_layer(found[0], x)
    if is_step(model, x):
        return InputAxes(1, 0, _STEPPED, sure=False)
    return _seen(model, found, x, call or model)


def layer_axes(layer: Layer, x: Tensor, *, time_axis: int | None = None, batch_axis: int | None = None) -> InputAxes:
    """Return the time and batch axes in the input of a layer, or of a cell that is stepped along the input."""
    if time_axis is not None or batch_axis is not None:
        return _told(x, time_axis, batch_axis)
    return _of_layer(layer, x)


def is_step(model: nn.Module, x: Tensor | None = None) -> bool:
    """Say whether a model is a cell of one step: it cannot be called without a state, and runs no layer along time.

    A step of the sequence `x`, if given, may teach what the names in the model do not tell.
    """
    if x is not None and cell_along(model, x) is not None:
        return True
    found = layers(model)
    if len(found) == 1 and found[0].module is model:
        return not found[0].fused
    if any(layer.fused for layer in found) or (found and not is_around_cells(model)):
        return False
    try:
        parameters = list(inspect.signature(model.forward).parameters.values())
    except (TypeError, ValueError):
        return False
    return len(parameters) == 2 and all(parameter.default is parameter.empty for parameter in parameters)


def rows_beside_steps(x: Tensor, states: Sequence[Tensor]) -> int | None:
    """Return the number of rows if the first axis of `x` holds rows times steps, as `states` of fewer rows show.

    Agents pass observations that way: one axis of steps times environments, and one state for each environment.
    None means that the states do not show it.
    """
    # Shapes of states: (layers, rows, units), or (rows, layers, units) and (rows, units).
    found = {state.shape[-2] if state.shape[-2] > 1 else state.shape[0] for state in states}
    if len(found) != 1 or any(state.shape[:1] == x.shape[:1] for state in states):
        return None
    (rows,) = found
    if x.dim() > 1 and x.shape[1] == rows and (x.dim() > 2 or not x.is_floating_point()):
        return None  # the second axis of x holds the rows, so the first holds steps alone
    return None if rows < 2 or len(x) == rows or len(x) % rows else rows


def _told(x: Tensor, time_axis: int | None, batch_axis: int | None) -> InputAxes:
    for name, axis in (("time_axis", time_axis), ("batch_axis", batch_axis)):
        if axis is not None and (type(axis) is not int or not -x.dim() <= axis < x.dim()):
            raise BadInput(f"{name} is {axis!r}, but the input has shape {tuple(x.shape)}: it has no such axis.")
    time, batch = (None if axis is None else axis % x.dim() for axis in (time_axis, batch_axis))
    if time == batch:
        raise BadInput(f"time_axis and batch_axis are both {time}, but steps and rows lie on axes of their own.")
    if time is None:
        time = 1 if batch == 0 else 0
    if batch is None and x.dim() > 1:
        batch = 1 if time == 0 else 0
    return InputAxes(time, batch, "as told")


def _of_layer(layer: Layer, x: Tensor) -> InputAxes:
    if not layer.fused:
        return InputAxes(1, 0, _STEPPED, sure=False)
    if not layer.rows((x,), {})[1]:
        return InputAxes(0, None, f"{layer.label} takes it for one sequence")
    first = layer.spec.batch_first
    return InputAxes(int(first), int(not first), f"{layer.label} has batch_first={first}")


def _seen(model: nn.Module, found: list[Layer], x: Tensor, call: Callable[[Tensor], Any]) -> InputAxes:
    """Call the model with a piece of `x` and watch its layers; use all of `x` if the model refuses the piece."""
    seen: list[_CallSizes] = []
    with _quietly(model):
        for piece in _pieces(x):
            sizes = _CallSizes()
            handle = listen(model, found, sizes)
            try:
                call(piece)
            except Exception:  # a trial call: some models take only certain numbers of rows or steps
                continue
            finally:
                handle.remove()
            seen.append(sizes)
            # The model took other sizes along these axes, so they are rows and steps, not features.
            axes = sizes.matched(x, _LAYOUTS) if piece is x else sizes.matched(piece) or _by_reach(piece, call)
            if axes is not None:
                return axes
    loose = [axes for sizes in seen if (axes := sizes.resembling(x)) is not None]
    return loose[0] if loose else _assumed(found)


def _assumed(found: list[Layer]) -> InputAxes:
    fused = [layer for layer in found if layer.fused]
    if fused:
        first = fused[0].spec.batch_first
        how = f"assumed, since {fused[0].label} has batch_first={first}; time_axis= says otherwise"
        return InputAxes(int(first), int(not first), how, sure=False)
    return InputAxes(1, 0, "assumed, since nothing tells; time_axis= says otherwise", sure=False)


@contextmanager
def _quietly(model: nn.Module) -> Iterator[None]:
    with untouched(model), unheard(), torch.no_grad():
        model.eval()
        yield


def _pieces(x: Tensor) -> Iterator[Tensor]:
    """Yield a piece of `x` with 5 and 7 entries, repeated if `x` has fewer, and then all of `x`."""
    if x.shape[0] and x.shape[1]:
        first, second = (torch.arange(many, device=x.device) % x.shape[axis] for axis, many in enumerate(_SIZES))
        yield x[first][:, second]
    yield x


@dataclass(slots=True, eq=False)
class _CallSizes(Listener):
    """Notes the numbers of rows and steps in the calls of each layer."""

    of: dict[str, list[tuple[int, int, bool]]] = field(default_factory=dict)  # layer -> (rows, steps, batched)

    def layer_call(self, call: Call, proceed: Proceed) -> Call:
        rows, batched = call.layer.rows(call.args, call.kwargs)
        self.of.setdefault(call.layer.label, []).append((rows, call.steps, batched))
        return proceed(call)

    def matched(self, x: Tensor, layouts: tuple[tuple[int, int], ...] = _LAYOUTS[:2]) -> InputAxes | None:
        """Return the axes on which all layers that saw the rows and steps of `x` agree; None if they disagree."""
        told: dict[tuple[int, int], InputAxes] = {}
        for name, calls in self.of.items():
            rows, steps = calls[0][0], sum(steps for _, steps, _ in calls)
            fits = [(b, t) for b, t in layouts if t < x.dim() and (rows, steps) == (x.shape[b], x.shape[t])]
            if not calls[0][2] and steps == x.shape[0]:
                return InputAxes(0, None, f"{name} takes it for one sequence")
            if len(fits) == 1:
                batch, time = fits[0]
                told.setdefault((batch, time), InputAxes(time, batch, f"so {name} took it"))
        return next(iter(told.values())) if len(told) == 1 else None

    def resembling(self, x: Tensor) -> InputAxes | None:
        """Return the axes by the first layer that saw either the rows or the steps of `x`, but not both."""
        for name, calls in self.of.items():
            rows, steps = calls[0][0], sum(steps for _, steps, _ in calls)
            for time in (1, 0):
                others = (x.shape[1 - time], x.shape[time])
                if x.shape[0] != x.shape[1] and (rows == others[0] or steps == others[1]):
                    how = f"assumed, since {name} took {steps} steps of {rows} rows; time_axis= says otherwise"
                    return InputAxes(time, 1 - time, how, sure=False)
        return None


def _by_reach(x: Tensor, call: Callable[[Tensor], Any]) -> InputAxes | None:
    """Tell rows from steps by changing one entry: the first row changes its own output alone, the first step more."""
    try:
        before = list(tensors(call(x)).values())
        after = [list(tensors(call(_other(x, axis))).values()) for axis in (0, 1)]
    except Exception:  # a trial call
        return None
    alone = [_reached(before, after[axis]) <= 1 / x.shape[axis] for axis in (0, 1)]
    if alone[0] == alone[1]:
        return None
    batch = 0 if alone[0] else 1
    return InputAxes(1 - batch, batch, f"another input in one place along axis {batch} reached that row alone")


def _other(x: Tensor, axis: int) -> Tensor:
    """Return `x` with another value in its first entry along an axis."""
    changed = x.clone()
    first = changed.select(axis, 0)
    if x.is_floating_point() or x.is_complex():
        first += 1
    elif x.dtype == torch.bool:
        first.logical_not_()
    else:  # tokens: use one from elsewhere in the input, which the model is known to take
        low, many = x.min(), x.max() - x.min() + 1
        first.copy_(low + (first - low + 1) % many)
    return changed


def _reached(before: list[Tensor], after: list[Tensor]) -> float:
    """Return the share of outputs that changed; 1 if their shape changed, or if none of them did."""
    if [tensor.shape for tensor in before] != [tensor.shape for tensor in after]:
        return 1.0
    changed = sum(int((a != b).sum()) for a, b in zip(before, after, strict=True))
    return changed / sum(tensor.numel() for tensor in before) if changed else 1.0
