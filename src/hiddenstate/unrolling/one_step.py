"""One step of a cell that was stepped like this before, as an agent or a server steps it: nothing is checked twice.

What a first call went through is kept as a `StepForm`: how the cell takes and returns its state, and what input and
state were like when they passed all checks. A call that is unlike that in anything goes through all of it again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..cells import (
    CellAdapter,
    Layer,
    TorchCellAdapter,
    flatten,
    rebuild,
    registrations,
    state_before_output,
    weights_like,
)
from ..state import State
from .checks import Task
from .deciding import LoopTime, clock
from .loop import explain_failure, rows_first

_MOST = 8  # kinds of calls that are remembered for one cell
_Part = tuple[str, tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]  # name, sizes before rows, after them


@dataclass(frozen=True, slots=True, eq=False)
class StepForm:
    """One step of a cell that went well, as far as another one may be like it."""

    adapter: CellAdapter | TorchCellAdapter
    axes: dict[str, int]  # part -> where its rows are
    parts: tuple[_Part, ...]
    single: bool  # the state is one tensor, else a tuple of them, or nested in another way
    state_first: bool | None  # in the pair that a cell with one tensor may return; None where there is no such pair
    build: Callable[[Mapping[str, Tensor]], Any]  # from parts to the cell's own form
    spent: LoopTime

    def takes(self, parts: Mapping[str, Tensor], rows: int) -> bool:
        """Say whether tensors are like those of the state that passed all checks."""
        for name, before, after, dtype, device in self.parts:
            part = parts[name]
            if part.shape != (*before, rows, *after) or part.dtype != dtype or part.device != device:
                return False
        return True

    def named(self, native: Any, rows: int) -> State | None:
        """Return what is nested and sized as the state was as a State; None for anything else."""
        given: tuple[Any, ...] = (native,) if self.single else native
        if type(given) is not tuple or len(given) != len(self.parts):
            return None
        for value, (_, before, after, _, _) in zip(given, self.parts, strict=True):
            if not isinstance(value, Tensor) or value.shape != (*before, rows, *after):
                return None
        return State.alike(dict(zip(self.axes, given, strict=True)), self.axes)

    def parted(self, result: Any, rows: int) -> tuple[Any, State] | None:
        """Return the output and the next state that a step returned, where they are plain to see; else None."""
        after = self.named(result, rows)
        if after is not None:
            return next(iter(after.values())), after
        if self.state_first is None or type(result) is not tuple or len(result) != 2:
            return None
        out, native = reversed(result) if self.state_first else result
        after = self.named(native, rows) if isinstance(out, Tensor) else None
        return None if after is None else (out, after)

    def stack(self, native: Any, cells: int, rows: int) -> dict[str, Tensor] | None:
        """Return the parts of the state of several such cells, with one axis more in front; None for anything else."""
        given: tuple[Any, ...] = (native,) if self.single else native
        if type(given) is not tuple or len(given) != len(self.parts):
            return None
        for value, (_, before, after, dtype, device) in zip(given, self.parts, strict=True):
            if not isinstance(value, Tensor) or value.shape != (cells, *before, rows, *after):
                return None
            if value.dtype != dtype or value.device != device:
                return None
        return dict(zip(self.axes, given, strict=True))


# Never in the module itself, which would no longer be pickled.
_known: WeakKeyDictionary[nn.Module, dict[Hashable, StepForm]] = WeakKeyDictionary()


def known_form(cell: nn.Module, x: Tensor) -> StepForm | None:
    """Return how a cell was stepped along inputs like `x (batch, 1, ...)`; None where it was not."""
    forms = _known.get(cell)
    return None if forms is None else forms.get(_conditions(cell, x))


def step_again(
    cell: nn.Module, x: Tensor, state: Any, *, timed: bool, form: StepForm | None = None
) -> tuple[Tensor, State] | None:
    """Step a cell that was stepped like this before; None where it was not, or where it may run by a schedule.

    `x` is `(batch, 1, ...)`; `timed`, where a schedule is made in the end; `form` is the known one, where that was
    asked for.
    """
    form = known_form(cell, x) if form is None else form
    if form is None or (timed and form.spent.fewest == 1 and form.spent.is_due(x.device.type)):
        return None
    rows, adapter = x.shape[0], form.adapter
    if state is None:
        state = adapter.initial(cell, rows)
    elif not isinstance(state, State):
        state = form.named(state, rows)
    if state is None or state.batch_axis != form.axes or not form.takes(state, rows):
        return None
    start, layer = clock(), Layer("", cell, adapter)
    try:
        result = cell(x[:, 0], form.build(state))
        found = form.parted(result, rows)
        if found is None:
            out, native = adapter.split(cell, result)
            found = out, adapter.to_state(cell, native, batch=rows)
        out, after = found
        outputs = torch.stack([rows_first(layer, out, after, rows)], dim=1)
    except (RuntimeError, ValueError, TypeError) as error:
        explain_failure(layer, Task(x, state), error)
        raise
    if timed:
        form.spent.add(clock() - start, 1, grad=outputs.requires_grad)
    return outputs, after


def remember_step(layer: Layer, x: Tensor, after: State) -> None:
    """Keep how a cell was stepped along `x (batch, 1, ...)`, for steps like this one."""
    cell, adapter = layer.module, layer.adapter
    if not isinstance(adapter, CellAdapter | TorchCellAdapter) or adapter.fused:
        return
    conditions, forms = _conditions(cell, x), _known.setdefault(cell, {})
    if conditions in forms:
        return
    native = layer.to_native(after)
    alike = {(part.device, part.dtype) for part in after.values()} == {weights_like(cell)}
    if not layer.takes_state_second(x[:, 0], native) or not (alike or isinstance(adapter, CellAdapter)):
        return
    from .cache import cell_known, kind_of  # all of the fast engine, which a plain import can do without

    axes = dict(after.batch_axis)
    parts = tuple(
        (name, (*part.shape[: axes[name]],), (*part.shape[axes[name] + 1 :],), part.dtype, part.device)
        for name, part in after.items()
    )
    form = flatten(native)[1]
    flat = type(form) is tuple and len(form) > 1 and all(isinstance(name, str) for name in form)
    build = itemgetter(form) if isinstance(form, str) else itemgetter(*form) if flat else partial(rebuild, form)
    single, spent = isinstance(native, Tensor), cell_known(cell).loop_time(kind_of(x))
    pairs = isinstance(adapter, CellAdapter) and (single or flat)
    first = (state_before_output(cell) if single else False) if pairs else None
    forms[conditions] = StepForm(adapter, axes, parts, single, first, build, spent)
    while len(forms) > _MOST:
        forms.pop(next(iter(forms)))


def is_single(x: Any) -> bool:
    """Say whether this is an input `(batch, 1, ...)` of one step."""
    return type(x) is Tensor and x.dim() > 1 and x.shape[1] == 1


def _conditions(cell: nn.Module, x: Tensor) -> Hashable:
    """Return what decides how a cell is called and what its state has to be, beside the state itself."""
    weights = weights_like(cell) if isinstance(cell, nn.RNNCellBase) else None
    kind = (type(cell), type(cell).forward, registrations(), vars(cell).get("hidden_size"), weights)
    return (kind, x.shape[2:], x.dtype, x.device, torch.is_grad_enabled())
