"""Where the rows and the steps of a model's input are: told, or deduced in one way wherever there is an input."""

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
from .layer import Call, Layer, unwrap_to_call
from .listener import Listener, Proceed, listen, unheard
from .snapshot import untouched

_SIZES = (5, 7)  # of the piece that is tried: they cannot be taken for each other
_STEPPED = "assumed, since a cell is stepped along (batch, time, ...); time_axis= says otherwise"
_LAYOUTS = ((0, 1), (1, 0), (0, 2))  # axes of rows and of steps; the last as convolutions have it


@dataclass(frozen=True, slots=True)
class InputAxes:
    """Where time and rows are in an input, and how that is known."""

    time: int
    batch: int | None  # None: one sequence without rows
    how: str
    sure: bool = True  # told or seen, rather than assumed

    @property
    def usual(self) -> bool:
        """Whether this is (batch, time, ...)."""
        return (self.batch, self.time) == (0, 1)

    @property
    def noted(self) -> str:
        """What a result says of it: nothing where the input is (batch, time, ...) and that is sure."""
        return "" if self.usual and self.sure else str(self)

    def __str__(self) -> str:
        """Return the axes in words."""
        rows = "one sequence without rows" if self.batch is None else f"rows on axis {self.batch}"
        return f"time on axis {self.time}, {rows}: {self.how}"

    def rows_first(self, x: Tensor) -> Tensor:
        """Return such an input as `(batch, time, ...)`."""
        if self.batch is None:
            return x.unsqueeze(0)
        return x if self.usual else x.movedim((self.batch, self.time), (0, 1))

    def as_given(self, x: Tensor) -> Tensor:
        """Return what is `(batch, time, ...)` in the layout of the input."""
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
    """Return where time and rows are in `x`, which `model` takes; `call(x)`, where it is called in another way.

    What is told holds. A layer says it by its `batch_first`, and a cell is stepped along (batch, time, ...). Any other
    model is tried on a piece of `x` with a different number of rows and steps: its layers show which is which, or else
    what another input in one place reaches. The model comes back untouched.

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
    """Return where time and rows are in the input of a layer, or of a cell that is stepped."""
    if time_axis is not None or batch_axis is not None:
        return _told(x, time_axis, batch_axis)
    return _of_layer(layer, x)


def is_step(model: nn.Module, x: Tensor | None = None) -> bool:
    """Say whether a model is a cell of one step, as it insists on its state and runs no other layer along time.

    A step of a sequence `x`, where it is given, may teach what the model's names do not.
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
    """Return how many rows share the first axis of `x` with its steps, as states of fewer rows tell, or None.

    Agents take observations that way: steps times environments, and a state for each environment.
    """
    # (layers, rows, units), or (rows, layers, units) and (rows, units).
    found = {state.shape[-2] if state.shape[-2] > 1 else state.shape[0] for state in states}
    if len(found) != 1 or any(state.shape[:1] == x.shape[:1] for state in states):
        return None
    (rows,) = found
    if x.dim() > 1 and x.shape[1] == rows and (x.dim() > 2 or not x.is_floating_point()):
        return None  # these are the rows: steps of features, or of tokens
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
    """Try the model on a piece of `x`, and on all of it where it takes no piece."""
    seen: list[_CallSizes] = []
    with _quietly(model):
        for piece in _pieces(x):
            sizes = _CallSizes()
            handle = listen(model, found, sizes)
            try:
                call(piece)
            except Exception:  # a trial: a model may take so many rows or steps and no others
                continue
            finally:
                handle.remove()
            seen.append(sizes)
            # A model that takes other sizes has rows and steps there, and not its features.
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
    """Yield a piece of `x` with 5 and 7 entries, repeated where it has fewer, and all of it."""
    if x.shape[0] and x.shape[1]:
        first, second = (torch.arange(many, device=x.device) % x.shape[axis] for axis, many in enumerate(_SIZES))
        yield x[first][:, second]
    yield x


@dataclass(slots=True, eq=False)
class _CallSizes(Listener):
    """Notes how many rows and steps each layer saw."""

    of: dict[str, list[tuple[int, int, bool]]] = field(default_factory=dict)  # layer -> rows, steps, whether batched

    def layer_call(self, call: Call, proceed: Proceed) -> Call:
        rows, batched = call.layer.rows(call.args, call.kwargs)
        self.of.setdefault(call.layer.label, []).append((rows, call.steps, batched))
        return proceed(call)

    def matched(self, x: Tensor, layouts: tuple[tuple[int, int], ...] = _LAYOUTS[:2]) -> InputAxes | None:
        """Return the axes on which all layers agree that saw the rows and the steps of `x`; None where they do not."""
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
        """Return the axes as the first layer has them that saw the rows or the steps of `x`, but not both."""
        for name, calls in self.of.items():
            rows, steps = calls[0][0], sum(steps for _, steps, _ in calls)
            for time in (1, 0):
                others = (x.shape[1 - time], x.shape[time])
                if x.shape[0] != x.shape[1] and (rows == others[0] or steps == others[1]):
                    how = f"assumed, since {name} took {steps} steps of {rows} rows; time_axis= says otherwise"
                    return InputAxes(time, 1 - time, how, sure=False)
        return None


def _by_reach(x: Tensor, call: Callable[[Tensor], Any]) -> InputAxes | None:
    """Tell rows from steps by what another input reaches: the first row reaches itself alone, the first step more."""
    try:
        before = list(tensors(call(x)).values())
        after = [list(tensors(call(_other(x, axis))).values()) for axis in (0, 1)]
    except Exception:  # a trial
        return None
    alone = [_reached(before, after[axis]) <= 1 / x.shape[axis] for axis in (0, 1)]
    if alone[0] == alone[1]:
        return None
    batch = 0 if alone[0] else 1
    return InputAxes(1 - batch, batch, f"another input in one place along axis {batch} reached that row alone")


def _other(x: Tensor, axis: int) -> Tensor:
    """Return `x` with something else in its first place along an axis."""
    changed = x.clone()
    first = changed.select(axis, 0)
    if x.is_floating_point() or x.is_complex():
        first += 1
    elif x.dtype == torch.bool:
        first.logical_not_()
    else:  # tokens that the input has elsewhere, which the model is known to take
        low, many = x.min(), x.max() - x.min() + 1
        first.copy_(low + (first - low + 1) % many)
    return changed


def _reached(before: list[Tensor], after: list[Tensor]) -> float:
    """Return the share of numbers in the output that changed, 1 where its shape did or none of them changed."""
    if [tensor.shape for tensor in before] != [tensor.shape for tensor in after]:
        return 1.0
    changed = sum(int((a != b).sum()) for a, b in zip(before, after, strict=True))
    return changed / sum(tensor.numel() for tensor in before) if changed else 1.0
