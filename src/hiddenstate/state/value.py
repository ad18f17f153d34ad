"""State: named tensors that know which of their axes is the batch. The rest of the library is built on it."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from operator import index
from os import PathLike, fspath
from types import MappingProxyType
from typing import Any, NoReturn, SupportsIndex

import torch
from torch import Tensor
from torch.utils import _pytree  # how torch.func, torch.export and torch.compile find the tensors in a State

from ..errors import BadInput, StateMismatch
from .checks import check_axes, check_fit, check_parts
from .display import as_table
from .files import damaged, parts_and_axes, read, save
from .nested import detached
from .rows import Rows, row_index


class State(Mapping[str, Tensor]):
    """Named tensors at one instant, with one row for each sequence of a batch.

    A State never changes: each method returns a new one.

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
        """Take tensors by name, and the batch axis: one number for all of them, or one for each name."""
        check_parts(parts)
        parts = dict(parts)
        object.__setattr__(self, "_parts", parts)
        object.__setattr__(self, "_axes", check_axes(parts, batch_axis))

    @classmethod
    def _trusted(cls, parts: dict[str, Tensor], axes: dict[str, int]) -> State:
        # For results that are right by construction: checking a small state costs more than computing it.
        state = object.__new__(cls)
        object.__setattr__(state, "_parts", parts)
        object.__setattr__(state, "_axes", axes)
        return state

    def __getitem__(self, part: str) -> Tensor:
        """Return the tensor of one part."""
        try:
            return self._parts[part]
        except (KeyError, TypeError):  # TypeError: a list of rows is not hashable
            hint = "" if isinstance(part, str) else ". To take rows of all parts at once, use state.select([0, 2])"
            raise KeyError(f"no part named {part!r}; this state has {', '.join(self._parts)}{hint}") from None

    def __iter__(self) -> Iterator[str]:
        """Iterate over part names, in the order they were given."""
        return iter(self._parts)

    def __len__(self) -> int:
        """Return the number of parts."""
        return len(self._parts)

    # The views of the dict itself: those of Mapping would look up each part again.

    def keys(self) -> KeysView[str]:
        """Return the part names."""
        return self._parts.keys()

    def values(self) -> ValuesView[Tensor]:
        """Return the tensors."""
        return self._parts.values()

    def items(self) -> ItemsView[str, Tensor]:
        """Return part names and tensors."""
        return self._parts.items()

    # Compared by identity: Mapping would compare values, and tensors compare elementwise.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __setattr__(self, name: str, value: object) -> NoReturn:
        """Refuse: a State never changes."""
        raise AttributeError(f"a State never changes, so {name!r} cannot be set; put, map and to return new ones")

    def __delattr__(self, name: str) -> NoReturn:
        """Refuse: a State never changes."""
        raise AttributeError(f"a State never changes, so {name!r} cannot be deleted")

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle a State as its parts and axes."""
        return State, (self._parts, self._axes)

    def __repr__(self) -> str:
        """Return part names, shapes and dtypes, and the number of rows, on one line."""
        parts = ", ".join(f"{name} {_kind(part)}" for name, part in self._parts.items())
        return f"State({parts}; {self._rows()})"

    def _repr_html_(self) -> str:
        """Return a table for notebooks: the shape, dtype and batch axis of each part."""
        told = ((name, *_kind(part).rsplit(" ", 1), f"rows on axis {self._axes[name]}") for name, part in self.items())
        return as_table("State", self._rows(), told)

    def _rows(self) -> str:
        rows = dict.fromkeys(part.shape[self._axes[name]] for name, part in self._parts.items())
        return f"batch of {' and '.join(map(str, rows))}"

    @property
    def batch(self) -> int:
        """The number of rows."""
        batch = -1
        for name, axis in self._axes.items():
            rows = self._parts[name].shape[axis]
            if batch not in (-1, rows):
                seen = ", ".join(f"{name} {part.shape[self._axes[name]]}" for name, part in self._parts.items())
                raise StateMismatch(
                    f"the layers of this state have different numbers of rows ({seen}), so as a whole it has none "
                    f"to count, select or put. Take the parts of one layer: State({{'h': state['encoder.h']}})."
                )
            batch = rows
        return batch

    @property
    def batch_axis(self) -> Mapping[str, int]:
        """The batch axis of each part."""
        return MappingProxyType(self._axes)

    @property
    def nbytes(self) -> int:
        """The size of all parts together, in bytes."""
        return sum(part.numel() * part.element_size() for part in self._parts.values())

    @property
    def device(self) -> torch.device:
        """The device that all parts are on."""
        devices = {part.device for part in self._parts.values()}
        if len(devices) > 1:
            where = ", ".join(f"{name} on {part.device}" for name, part in self._parts.items())
            raise StateMismatch(
                f"the parts lie on different devices ({where}). Bring them together with state.to(device)."
            )
        return devices.pop()

    def map(self, fn: Callable[[Tensor], Tensor]) -> State:
        """Apply `fn` to every part. It must leave the batch axis where it is."""
        return State({name: fn(part) for name, part in self._parts.items()}, self._axes)

    @staticmethod
    def detached(state: Any) -> Any:
        """Return a state of any form, detached from its graph: a tensor, `(h, c)`, nested tuples, a State, or None.

        The form stays as it is. This is the one line between two pieces of truncated backpropagation:

        >>> _, hidden = torch.nn.LSTM(3, 4)(torch.randn(5, 2, 3))
        >>> hidden = State.detached(hidden)
        >>> type(hidden).__name__, hidden[0].requires_grad
        ('tuple', False)
        """
        return state.detach() if isinstance(state, State) else detached(state)

    def detach(self) -> State:
        """Return the same values, detached from their graph."""
        return State._trusted({name: part.detach() for name, part in self._parts.items()}, self._axes)

    def clone(self) -> State:
        """Return a copy that shares no memory."""
        return State._trusted({name: part.clone() for name, part in self._parts.items()}, self._axes)

    def pin_memory(self) -> State:
        """Return the same values in page-locked memory. A DataLoader with `pin_memory=True` calls this."""
        return State._trusted({name: part.pin_memory() for name, part in self._parts.items()}, self._axes)

    def to(
        self,
        target: str | int | torch.device | torch.dtype | Tensor | None = None,
        dtype: torch.dtype | None = None,
        non_blocking: bool = False,
        *,
        device: str | int | torch.device | None = None,
        copy: bool = False,
    ) -> State:
        """Move or cast, with the arguments of `Tensor.to`. A part that need not change is not copied.

        As in `nn.Module.to`, a dtype casts floating-point parts only. A complex part is cast only to another complex
        dtype, so it never loses its imaginary half.

        >>> State({"h": torch.zeros(2, 3), "count": torch.zeros(2).long()}).to(torch.float64)
        State(h (2, 3) float64, count (2,) int64; batch of 2)
        """
        if isinstance(target, Tensor):
            device, dtype = target.device, target.dtype
        elif isinstance(target, torch.dtype):
            dtype = target
        elif target is not None:
            device = target
        if dtype is not None and not (dtype.is_floating_point or dtype.is_complex):
            raise BadInput(
                f"a state is cast to floating or complex dtypes, not to {dtype}, which would round it off. "
                f"To follow a tensor of integers to its device use state.to(tensor.device)."
            )

        def move(part: Tensor) -> Tensor:
            casts = dtype is not None and (part.is_floating_point() or (part.is_complex() and dtype.is_complex))
            return part.to(device, dtype if casts else None, non_blocking=non_blocking, copy=copy)

        return State._trusted({name: move(part) for name, part in self._parts.items()}, self._axes)

    def select(self, rows: Rows) -> State:
        """Return these rows, by index or bool mask, in the given order; a slice returns a view."""
        if isinstance(rows, slice) and (rows.step or 1) > 0:
            return State._trusted(
                {n: p[(slice(None),) * self._axes[n] + (rows,)] for n, p in self._parts.items()}, self._axes
            )
        pick = self._index(rows, unique=False)
        return State._trusted({n: p.index_select(self._axes[n], pick(p)) for n, p in self._parts.items()}, self._axes)

    def put(self, rows: Rows, other: State) -> State:
        """Return this state with `rows` replaced by the rows of `other`, of which there must be as many.

        >>> state = State({"h": torch.zeros(3, 2)})
        >>> state.put([1], State({"h": torch.ones(1, 2)}))["h"].sum(1)
        tensor([0., 2., 0.])
        """
        pick = self._index(rows, unique=True)
        _check_state(other)
        check_fit(self, other)
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
        """Return each row `n` times, with the copies of a row next to each other, as beam search needs them."""
        if not isinstance(n, SupportsIndex) or index(n) < 1:
            raise StateMismatch(f"each row can be repeated 1 time or more, not {n!r}.")
        return State._trusted(
            {name: part.repeat_interleave(index(n), dim=self._axes[name]) for name, part in self._parts.items()},
            self._axes,
        )

    @staticmethod
    def alike(parts: dict[str, Tensor], axis: int | dict[str, int]) -> State:
        """Return a State of tensors that are known to be valid; if all have one shape, nothing is checked."""
        axes = axis if isinstance(axis, dict) else dict.fromkeys(parts, axis)
        shape = place = None
        for name, part in parts.items():
            if shape is None:
                shape, place = part.shape, axes[name]
            elif part.shape != shape or axes[name] != place:
                return State(parts, axes)
        return State._trusted(parts, axes)

    @staticmethod
    def cat(states: Iterable[State]) -> State:
        """Return the rows of all `states`, one after another."""
        states = list(states)
        if not states:
            raise StateMismatch("there is no state to put together: State.cat needs one or more.")
        first = states[0]
        for other in states:
            _check_state(other)
            check_fit(first, other)
        return State._trusted(
            {name: torch.cat([state[name] for state in states], dim=first._axes[name]) for name in first}, first._axes
        )

    def save(self, path: str | PathLike[str]) -> None:
        """Write a safetensors file that `hiddenstate.load` reads. An existing file stays until it is whole."""
        save(self, path)

    def _index(self, rows: Rows, *, unique: bool) -> Callable[[Tensor], Tensor]:
        # The check is made once; the index is copied only to the devices that need it.
        where = row_index(rows, self.batch, next(iter(self._parts.values())).device, unique=unique)
        return lambda part: where.to(part.device)


def from_bytes(data: bytes, *, source: str = "these bytes", device: str | torch.device = "cpu") -> State:
    """Return the State that `to_bytes` wrote into `data`. Errors call the data by the name of their `source`.

    >>> from hiddenstate.state import to_bytes
    >>> from_bytes(to_bytes(State({"h": torch.ones(2, 3)})))
    State(h (2, 3) float32; batch of 2)
    """
    parts, axes = parts_and_axes(data, source)
    try:
        state = State(parts, axes)
    except (StateMismatch, TypeError) as error:
        raise damaged(source, error) from error
    return state.to(device)


def load(path: str | PathLike[str], *, device: str | torch.device = "cpu") -> State:
    """Read a State that `State.save` wrote.

    >>> import tempfile, pathlib
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "state.safetensors"
    >>> State({"h": torch.ones(2, 3)}).save(path)
    >>> load(path)
    State(h (2, 3) float32; batch of 2)
    """
    return from_bytes(read(path), source=fspath(path), device=device)


def _check_state(other: Any) -> None:
    if not isinstance(other, State):
        raise StateMismatch(f"a State is needed, but this is {type(other).__name__}. Layer.to_state makes one.")


def _kind(part: Tensor) -> str:
    return f"{tuple(part.shape)} {str(part.dtype).removeprefix('torch.')}"


def _flatten(state: State) -> tuple[list[Tensor], tuple[tuple[str, int], ...]]:
    return list(state._parts.values()), tuple(state._axes.items())


def _flatten_with_keys(state: State) -> tuple[list[tuple[Any, Tensor]], tuple[tuple[str, int], ...]]:
    return [(_pytree.MappingKey(name), part) for name, part in state._parts.items()], tuple(state._axes.items())


def _unflatten(leaves: Iterable[Any], axes: tuple[tuple[str, int], ...]) -> State:
    # Not checked: a tree may hold anything for a while, such as shapes, names, or tensors that vmap has yet to wrap.
    return State._trusted({name: leaf for (name, _), leaf in zip(axes, leaves, strict=True)}, dict(axes))


_pytree.register_pytree_node(
    State,
    _flatten,
    _unflatten,
    serialized_type_name="hiddenstate.State",
    to_dumpable_context=list,
    from_dumpable_context=lambda axes: tuple((name, axis) for name, axis in axes),
    flatten_with_keys_fn=_flatten_with_keys,
)
# A State is made of tensors and numbers only, so a checkpoint that holds one can be read with weights_only=True.
torch.serialization.add_safe_globals([State])
