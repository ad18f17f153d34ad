"""A trajectory: one track along time. Recordings are made of them; measures, heads and plots take them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .._compiling import compiling
from ..errors import BadInput, MissingExtra
from ..state import State, shown_in_short

_frozen = WeakTensorKeyDictionary()  # recorded states without a graph -> the name of their track


@shown_in_short
@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """One track at every step, with the true length of each sequence; padding is zero.

    >>> walk = Trajectory(torch.randn(2, 5, 3), torch.tensor([5, 3]))
    >>> walk.valid.sum(1)
    tensor([5, 3])
    """

    h: Tensor  # (batch, time, unit); for a cell without a part named h, its first part
    lengths: Tensor | None = None  # (batch,) int64; None means that every row has all steps
    c: Tensor | None = None  # (batch, time, unit)
    gates: Mapping[str, Tensor] = field(default_factory=dict)  # name -> (batch, time, unit)
    grads: Mapping[str, Tensor] = field(default_factory=dict)  # part -> (batch, time, unit), dL/d of that state
    others: Mapping[str, Tensor] = field(default_factory=dict)  # other parts of a custom cell's state
    initial: State | None = None  # the state before the first step
    track: str = ""
    kind: str = ""  # the layer's kind: lstm, gru, rnn, lstm_cell, cell, …
    every: int = 1  # the steps kept are 0, every, 2 * every, …
    name: str = "h"  # the layer's own name for the part h

    def __post_init__(self) -> None:
        """Check that all parts agree; if no lengths are given, use the full length for all rows."""
        if self.h.dim() != 3:
            raise BadInput(
                f"a trajectory is (batch, time, unit), but h has shape {tuple(self.h.shape)}. "
                f"One sequence without a batch axis becomes one with h.unsqueeze(0)."
            )
        batch, time, _ = self.h.shape
        if self.lengths is None:
            object.__setattr__(self, "lengths", torch.full((batch,), time, dtype=torch.int64, device=self.h.device))
        assert self.lengths is not None
        if self.lengths.shape != (batch,):
            raise BadInput(
                f"lengths have shape {tuple(self.lengths.shape)}, but h has {batch} rows: one length for each."
            )
        if batch and not 0 <= int(self.lengths.min()) <= int(self.lengths.max()) <= time:
            raise BadInput(
                f"lengths go from {int(self.lengths.min())} to {int(self.lengths.max())}, but h has {time} steps."
            )
        for part in self.states.values() if self.kind else ():
            if not part.requires_grad:
                _frozen[_owner(part)] = self.track

    @property
    def valid(self) -> Tensor:
        """Which steps are real: bool (batch, time)."""
        assert self.lengths is not None
        return torch.arange(self.h.shape[1], device=self.h.device) < self.lengths.to(self.h.device).unsqueeze(1)

    @property
    def states(self) -> dict[str, Tensor]:
        """All parts of the state by the names that the layer gives them, each (batch, time, unit)."""
        return {self.name: self.h, **({"c": self.c} if self.c is not None else {}), **self.others}

    def part(self, name: str) -> Tensor:
        """Return a part of the state, a gate, or the gradient of a part, `"grads.h"`: (batch, time, unit).

        `"h"` is the first part, whatever the layer calls it.
        """
        there = {**self.states, **self.gates, **{f"grads.{name}": grad for name, grad in self.grads.items()}}
        if name in there:
            return there[name]
        if name == "h":
            return self.h
        hint = "" if self.gates else " Gates are there after hs.record(model, gates=True)."
        if name.startswith("grads."):
            hint = " Gradients are there after hs.record(model, grads=True) and a backward pass."
        raise BadInput(f"the trajectory has no {name!r}; it has {', '.join(there)}.{hint}")

    def trainable(self) -> Tensor:
        """Return h; raise if gradients are on, but h was recorded without the graph that they would need."""
        return trainable(self.h)

    def without_padding(self, lengths: Any) -> Trajectory:
        """Return the run with true lengths that its layer did not know of; values beyond them become zero.

        A run that knows shorter lengths, or has other rows or steps than these lengths, is returned unchanged.

        >>> walk = Trajectory(torch.ones(2, 4, 1)).without_padding([4, 2])
        >>> walk.h[1, :, 0]
        tensor([1., 1., 0., 0.])
        """
        assert self.lengths is not None
        batch, time = self.h.shape[:2]
        real = torch.as_tensor(lengths, dtype=torch.int64, device=self.h.device)
        fits = real.shape == (batch,) and (not batch or 0 <= int(real.min()) <= int(real.max()) <= time)
        if not fits or bool((self.lengths < time).any()):
            return self
        run = replace(self, lengths=real)
        padding = ~run.valid

        def cut(part: Tensor) -> Tensor:
            return part.masked_fill(padding.reshape(*padding.shape, *[1] * (part.dim() - 2)), 0)

        return replace(
            run,
            h=cut(self.h),
            c=None if self.c is None else cut(self.c),
            gates={name: cut(gate) for name, gate in self.gates.items()},
            grads={name: cut(grad) for name, grad in self.grads.items()},
            others={name: cut(part) for name, part in self.others.items()},
        )

    @property
    def nbytes(self) -> int:
        """The size of all values, in bytes."""
        return sum(value.numel() * value.element_size() for value in self._named().values())

    def __getitem__(self, where: Any) -> Trajectory:
        """Return some rows, and some of their steps: `walk[:4]`, `walk[[0, 2], 10:20]`, `walk[:, -5:]`.

        Rows are chosen by a slice, a number, several numbers or a bool mask; steps by a slice. A single row stays a
        batch of one. The state before the first chosen step is kept.

        >>> walk = Trajectory(torch.arange(12.0).view(2, 6, 1), torch.tensor([6, 3]))
        >>> walk[1, 2:].lengths
        tensor([1])
        """
        rows, steps = where if isinstance(where, tuple) and len(where) == 2 else (where, slice(None))
        start, stop, stride = _span(steps, self.h.shape[1])
        index = _rows(rows, self.h.shape[0]).to(self.h.device)

        def cut(value: Tensor) -> Tensor:
            return value.index_select(0, index)[:, start:stop:stride]

        assert self.lengths is not None
        inside = self.lengths.index_select(0, index.to(self.lengths.device)).clamp(max=stop) - start
        return replace(
            self,
            h=cut(self.h),
            lengths=(inside.clamp(min=0) + stride - 1) // stride,
            c=None if self.c is None else cut(self.c),
            gates={name: cut(gate) for name, gate in self.gates.items()},
            grads={name: cut(grad) for name, grad in self.grads.items()},
            others={name: cut(part) for name, part in self.others.items()},
            initial=self._before(start, index),
            every=self.every * stride,
        )

    def _before(self, step: int, rows: Tensor) -> State | None:
        if step == 0:
            return None if self.initial is None else self.initial.select(rows)
        if self.every > 1:
            return None  # that state was not recorded
        return State({name: part[:, step - 1].index_select(0, rows) for name, part in self.states.items()})

    def numpy(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return all values by name: `h`, `c`, `gates.input`, `grads.h`, …, and `lengths`. bfloat16 becomes float32."""
        assert self.lengths is not None
        values = {**self._named(), "lengths": self.lengths}
        narrow = {name: v.float() if v.dtype == torch.bfloat16 else v for name, v in values.items()}
        return {name: value.detach().cpu().numpy() for name, value in narrow.items()}

    def to_xarray(self) -> Any:
        """Return an `xarray.Dataset` with dims batch, time and unit; `time` counts steps of the run.

        A part with another width than `h`, such as c in an LSTM with a projection, gets a dim of its own: `unit_c`.
        """
        try:
            xarray = import_module("xarray")
        except ImportError as error:
            raise MissingExtra(
                "to_xarray needs xarray, which is not installed: pip install 'hiddenstate[analysis]'."
            ) from error
        arrays = self.numpy()
        width = self.h.shape[2]
        data: dict[str, Any] = {"lengths": ("batch", arrays.pop("lengths"))}
        for name, array in arrays.items():
            unit = "unit" if array.shape[2] == width else f"unit_{name.rpartition('.')[2]}"
            data[name] = (("batch", "time", unit), array)
        time = np.arange(self.h.shape[1]) * self.every
        return xarray.Dataset(data, coords={"time": time}, attrs={"track": self.track, "kind": self.kind})

    def to_pandas(self, part: str = "h") -> Any:
        """Return a `pandas.DataFrame` of one part, gate or gradient: a line for each real step, a column for each unit.

        The index is `row` and `step`, so that `table.loc[3]` is row 3. Padding is left out.
        """
        try:
            pandas = import_module("pandas")
        except ImportError as error:
            raise MissingExtra(
                "to_pandas needs pandas, which is not installed: pip install 'hiddenstate[analysis]'."
            ) from error
        row, step = self.valid.cpu().nonzero(as_tuple=True)
        values = self.real(part).cpu()
        values = values.float() if values.dtype == torch.bfloat16 else values
        index = pandas.MultiIndex.from_arrays([row.numpy(), (step * self.every).numpy()], names=["row", "step"])
        units = pandas.RangeIndex(values.shape[1], name="unit")
        return pandas.DataFrame(values.numpy(), index=index, columns=units)

    def real(self, part: str = "h") -> Tensor:
        """Return all real steps of one part, gate or gradient, row after row: (step, unit), detached.

        >>> hs.Trajectory(torch.zeros(2, 5, 3), torch.tensor([5, 2])).real().shape
        torch.Size([7, 3])
        """
        values = self.part(part).detach()
        return values[self.valid.to(values.device)]

    def _named(self) -> dict[str, Tensor]:
        gates = {f"gates.{name}": gate for name, gate in self.gates.items()}
        return {**self.states, **gates, **{f"grads.{name}": grad for name, grad in self.grads.items()}}


def _span(steps: Any, time: int) -> tuple[int, int, int]:
    if not isinstance(steps, slice) or (steps.step or 1) < 1:
        raise BadInput(f"steps are chosen by a forward slice, as walk[:, 10:20], but this is {steps!r}.")
    start, stop, stride = steps.indices(time)
    return start, max(start, stop), stride


def _rows(rows: Any, batch: int) -> Tensor:
    try:
        given = rows if isinstance(rows, slice) else np.asarray(rows)
        whole = not isinstance(given, slice) and given.size == 0  # an empty list has no dtype that could be an index
        return torch.from_numpy(np.atleast_1d(np.arange(batch)[[] if whole else given]).copy())
    except (IndexError, TypeError) as error:
        raise BadInput(f"rows {rows!r} are asked for, but there are {batch}, 0 to {batch - 1}: {error}.") from error


def trainable(h: Tensor) -> Tensor:
    """Return states; raise if gradients are on, but the states, or their base tensor, were recorded without a graph.

    Any other tensor is returned unchanged, also `h.detach()` of recorded states.
    """
    if h.requires_grad or not torch.is_grad_enabled() or compiling():
        return h
    if _owner(h) in _frozen:
        raise BadInput(
            f"the states of {_frozen[_owner(h)]!r} were recorded without their graph, so what is made of them trains "
            f"nothing of the model. Record with hs.record(model, graph=True), with gradients on; under "
            f"torch.no_grad() they are taken as numbers, and run.h.detach(), run.lengths train a head on frozen "
            f"states, as those of a model whose weights are frozen are in any case."
        )
    return h


def _owner(h: Tensor) -> Tensor:
    """Return the base of a view; a tensor that is not a view is returned itself."""
    return h if h._base is None else h._base
