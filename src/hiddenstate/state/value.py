"""The value everything else is built on: named tensors that know where their batch axis is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..errors import StateMismatch
from .files import write
from .rows import Rows, row_index


class State(Mapping[str, Tensor]):
    """Named tensors at one instant, each with one row for each sequence of a batch.

    A State never changes: every verb returns a new one.

    >>> state = State({"h": torch.zeros(2, 5, 8), "c": torch.zeros(2, 5, 8)}, batch_axis=1)
    >>> state.batch
    5
    >>> state.select([4, 0])["h"].shape
    torch.Size([2, 2, 8])
    """

    __slots__ = ("__weakref__", "_axes", "_parts")

    _parts: dict[str, Tensor]
    _axes: dict[str, int]

    def __init__(self, parts: Mapping[str, Tensor], batch_axis: int | Mapping[str, int] = 0) -> None:
        """Name the `parts` and say where each one's batch axis is."""
        parts = dict(parts)
        axes = dict(batch_axis) if isinstance(batch_axis, Mapping) else dict.fromkeys(parts, batch_axis)
        _check_names(parts, axes)
        axes = {name: _axis(name, part, axes[name]) for name, part in parts.items()}
        _check_rows(parts, axes)
        object.__setattr__(self, "_parts", parts)
        object.__setattr__(self, "_axes", axes)

    @classmethod
    def _trusted(cls, parts: dict[str, Tensor], axes: dict[str, int]) -> State:
        # For results that are right by construction: the checks cost more than a small state's arithmetic.
        state = object.__new__(cls)
        object.__setattr__(state, "_parts", parts)
        object.__setattr__(state, "_axes", axes)
        return state

    def __getitem__(self, part: str) -> Tensor:
        """Return the tensor of one part."""
        try:
            return self._parts[part]
        except KeyError:
            raise KeyError(f"no part named {part!r}; this state has {', '.join(self._parts)}") from None

    def __iter__(self) -> Iterator[str]:
        """Iterate over part names, in the order they were given."""
        return iter(self._parts)

    def __len__(self) -> int:
        """Return the number of parts."""
        return len(self._parts)

    # A Mapping compares values, which tensors answer elementwise; a state is compared by identity.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __setattr__(self, name: str, value: object) -> NoReturn:
        """Refuse: a State never changes."""
        raise AttributeError(f"a State never changes, so {name!r} cannot be set; put, map and to return new ones")

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle by parts and axes."""
        return State, (self._parts, self._axes)

    def __repr__(self) -> str:
        """Return part names, shapes, dtypes and batch axes on one line."""
        parts = ", ".join(f"{name} {_kind(part)}" for name, part in self._parts.items())
        return f"State({parts}; batch of {self.batch})"

    @property
    def batch(self) -> int:
        """The number of rows."""
        name = next(iter(self._parts))
        return self._parts[name].shape[self._axes[name]]

    @property
    def batch_axis(self) -> Mapping[str, int]:
        """Where each part's batch axis is."""
        return MappingProxyType(self._axes)

    @property
    def nbytes(self) -> int:
        """The bytes of all parts together."""
        return sum(part.numel() * part.element_size() for part in self._parts.values())

    @property
    def device(self) -> torch.device:
        """The device all parts are on."""
        devices = {part.device for part in self._parts.values()}
        if len(devices) > 1:
            where = ", ".join(f"{name} on {part.device}" for name, part in self._parts.items())
            raise StateMismatch(f"the parts lie on different devices ({where}). Bring them together with state.to(device).")
        return devices.pop()

    def map(self, fn: Callable[[Tensor], Tensor]) -> State:
        """Apply `fn`, which keeps the batch axis where it is, to every part."""
        return State({name: fn(part) for name, part in self._parts.items()}, self._axes)

    def detach(self) -> State:
        """Return the same values cut from the graph."""
        return State._trusted({name: part.detach() for name, part in self._parts.items()}, self._axes)

    def clone(self) -> State:
        """Return a copy that shares no memory."""
        return State._trusted({name: part.clone() for name, part in self._parts.items()}, self._axes)

    def to(self, *args: Any, **kwargs: Any) -> State:
        """Move or cast as `Tensor.to` does; like `nn.Module.to`, a dtype casts floating parts only."""
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)

        def move(part: Tensor) -> Tensor:
            floating = part.is_floating_point() or part.is_complex()
            return part.to(device=device, dtype=dtype if floating else None, non_blocking=non_blocking)

        return State._trusted({name: move(part) for name, part in self._parts.items()}, self._axes)

    def select(self, rows: Rows) -> State:
        """Return these rows, by index or bool mask, in that order; a slice is a view."""
        if isinstance(rows, slice) and (rows.step or 1) > 0:
            return State._trusted(
                {n: p[(slice(None),) * self._axes[n] + (rows,)] for n, p in self._parts.items()}, self._axes
            )
        pick = self._picker(rows, unique=False)
        return State._trusted({n: p.index_select(self._axes[n], pick(p)) for n, p in self._parts.items()}, self._axes)

    def put(self, rows: Rows, other: State) -> State:
        """Return this state with `rows` replaced by those of `other`, which has as many.

        >>> state = State({"h": torch.zeros(3, 2)})
        >>> state.put([1], State({"h": torch.ones(1, 2)}))["h"].sum(1)
        tensor([0., 2., 0.])
        """
        pick = self._picker(rows, unique=True)
        self._check_fits(other)
        count = len(pick(next(iter(self._parts.values()))))
        if other.batch != count:
            raise StateMismatch(
                f"{count} rows are to be replaced, but the other state has {other.batch} rows. "
                f"Select them first: state.put(rows, other.select(rows))."
            )
        return State._trusted(
            {n: p.index_copy(self._axes[n], pick(p), other[n]) for n, p in self._parts.items()}, self._axes
        )

    def repeat(self, n: int) -> State:
        """Return each row `n` times, copies next to each other, as beam search wants them."""
        if not isinstance(n, int) or n < 1:
            raise StateMismatch(f"each row can be repeated 1 time or more, not {n!r}.")
        return State._trusted(
            {name: part.repeat_interleave(n, dim=self._axes[name]) for name, part in self._parts.items()}, self._axes
        )

    @staticmethod
    def cat(states: Sequence[State]) -> State:
        """Return the rows of all `states`, one after another."""
        states = list(states)
        if not states:
            raise StateMismatch("there is no state to put together: State.cat needs one or more.")
        first = states[0]
        for other in states[1:]:
            first._check_fits(other)
        return State._trusted(
            {name: torch.cat([state[name] for state in states], dim=first._axes[name]) for name in first}, first._axes
        )

    def save(self, path: str | PathLike[str]) -> None:
        """Write a safetensors file that `hiddenstate.load` reads; an older file survives until this one is whole."""
        write(path, self._parts, self._axes)

    def _picker(self, rows: Rows, *, unique: bool) -> Callable[[Tensor], Tensor]:
        # One index, checked once, and moved once to each device on which parts lie.
        index = row_index(rows, self.batch, next(iter(self._parts.values())).device, unique=unique)
        return lambda part: index.to(part.device)

    def _check_fits(self, other: State) -> None:
        if not isinstance(other, State):
            raise StateMismatch(f"a State is needed, but this is {type(other).__name__}. Layer.to_state makes one.")
        if set(other) != set(self):
            raise StateMismatch(
                f"this state has the parts {', '.join(self)}, but the other has {', '.join(other)}. "
                f"States of different kinds of layers cannot be mixed; hs.Bridge leads from one to the other."
            )
        for name, part in self._parts.items():
            _check_part(name, (part, self._axes[name]), (other._parts[name], other._axes[name]))


def _kind(part: Tensor) -> str:
    return f"{tuple(part.shape)} {str(part.dtype).removeprefix('torch.')}"


def _check_names(parts: dict[str, Tensor], axes: dict[str, int]) -> None:
    if not parts:
        raise StateMismatch("a state needs at least one part, for example State({'h': h}).")
    for name, part in parts.items():
        if not isinstance(name, str):
            raise StateMismatch(f"part names are strings, but this one is {name!r}.")
        if not isinstance(part, Tensor):
            raise StateMismatch(
                f"part {name!r} is {type(part).__name__}, but a tensor is needed. "
                f"A native state, such as nn.LSTM's tuple, becomes a State with Layer.to_state."
            )
    if set(axes) != set(parts):
        raise StateMismatch(
            f"batch_axis speaks of {', '.join(axes) or 'no part'}, but the state has {', '.join(parts)}: "
            f"give one number for all, or one for each part."
        )


def _axis(name: str, part: Tensor, axis: int) -> int:
    if not -part.dim() <= axis < part.dim():
        raise StateMismatch(
            f"part {name!r} has shape {tuple(part.shape)}, so it has no axis {axis} for the batch. "
            f"An unbatched state is a batch of one row: part.unsqueeze({axis if axis >= 0 else 0})."
        )
    return axis % part.dim()


def _check_rows(parts: dict[str, Tensor], axes: dict[str, int]) -> None:
    first, *rest = parts
    batch = parts[first].shape[axes[first]]
    for name in rest:
        rows = parts[name].shape[axes[name]]
        if rows != batch:
            raise StateMismatch(
                f"part {first!r} has {batch} rows (axis {axes[first]} of {tuple(parts[first].shape)}), but part {name!r} "
                f"has {rows} (axis {axes[name]} of {tuple(parts[name].shape)}). "
                f"Often batch_axis is wrong: torch's recurrent layers have it at 1, cells at 0."
            )


def _check_part(name: str, mine: tuple[Tensor, int], theirs: tuple[Tensor, int]) -> None:
    (part, axis), (other, other_axis) = mine, theirs
    if axis != other_axis:
        raise StateMismatch(f"part {name!r} has its batch axis at {axis}, but the other state's is at {other_axis}.")
    shape, other_shape = list(part.shape), list(other.shape)
    del shape[axis], other_shape[axis]
    if shape != other_shape:
        raise StateMismatch(
            f"part {name!r} has shape {tuple(part.shape)}, but the other state's has {tuple(other.shape)}: they may "
            f"differ in rows (axis {axis}) only. Usually the states come from layers of different sizes."
        )
    if part.dtype != other.dtype:
        raise StateMismatch(
            f"part {name!r} is {part.dtype}, but the other state's is {other.dtype}. "
            f"Often one was made under autocast: cast it with other.to({part.dtype})."
        )
    if part.device != other.device:
        raise StateMismatch(
            f"part {name!r} is on {part.device}, but the other state's is on {other.device}. "
            f"Move it with other.to({str(part.device)!r})."
        )
