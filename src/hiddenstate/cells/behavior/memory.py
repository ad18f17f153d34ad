"""Which value a tensor holds: writes make new values of a storage and of all views on it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch
from torch import Tensor

Origin: TypeAlias = Literal["parameter", "buffer", "attribute", "argument", "made", "outside", "unseen"]
Box: TypeAlias = "tuple[tuple[int, int], ...] | None"  # from and to along each axis of the base; None: anywhere in it

_BUDGET = 256 * 2**20  # bytes of copies that are kept of tensors that are written in place
_READS = 64  # writes that one read looks back through before it takes the whole storage as its source


@dataclass(slots=True, eq=False, repr=False)
class Value:
    """What a tensor held at one time, and where that came from."""

    number: int
    op: int  # the operation that made it, or -1
    origin: Origin
    tensor: Tensor | None  # the tensor that held it; by now it may hold something else
    label: str = ""
    copy: Tensor | None = None  # what it was, where the tensor was written later
    store: Store | None = None
    box: Box = None
    epoch: int = 0
    place: int = 0  # which of the operation's results
    shape: tuple[int, ...] = ()

    def data(self) -> Tensor | None:
        """Return what the value was, or None where that is lost."""
        if self.copy is not None:
            return self.copy
        if self.tensor is None:
            return None
        if self.store is None or not any(_meet(self.box, w.box) for w in self.store.writes[self.epoch :]):
            return self.tensor.detach()
        first = self.store.first
        if self.epoch == 0 and first is not None and first.copy is not None and first.copy.stride() == self.store.stride:
            offset = int(self.tensor.storage_offset()) - self.store.offset
            return first.copy.as_strided(self.tensor.shape, self.tensor.stride(), offset)
        return None


@dataclass(slots=True, eq=False, repr=False)
class Write:
    """One write to a storage."""

    box: Box
    value: Value


@dataclass(slots=True, eq=False, repr=False)
class Store:
    """A storage: its first known tensor gives the axes, and every write is remembered."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    first: Value | None = None
    writes: list[Write] = field(default_factory=list)


@dataclass(slots=True, eq=False, repr=False)
class Entry:
    """What is known of one tensor object."""

    tensor: Tensor  # held, so that its id stays its own
    value: Value
    store: Store | None
    box: Box
    epoch: int
    version: int


class Memory:
    """The values of all tensors seen so far."""

    def __init__(self) -> None:
        """Start with nothing known."""
        self.entries: dict[int, Entry] = {}
        self.values: list[Value] = []
        self._stores: dict[int, Store] = {}
        self._copied = 0

    def new(self, op: int, origin: Origin, tensor: Tensor | None, label: str = "") -> Value:
        """Make a value."""
        value = Value(len(self.values), op, origin, tensor, label)
        if tensor is not None:
            value.shape = tuple(tensor.shape)
        self.values.append(value)
        return value

    def hold(self, tensor: Tensor, value: Value) -> Entry:
        """Remember that `tensor` holds `value` now."""
        store, box = self._place(tensor)
        if store is not None and store.first is None:
            store.first = value
        epoch = len(store.writes) if store is not None else 0
        value.store, value.box, value.epoch = store, box, epoch
        entry = Entry(tensor, value, store, box, epoch, version_of(tensor))
        self.entries[id(tensor)] = entry
        return entry

    def store_of(self, tensor: Tensor) -> Store | None:
        """Return the known storage that a tensor lies in."""
        return self._stores.get(tensor.untyped_storage()._cdata) if _plain(tensor) else None

    def sources(self, tensor: Tensor) -> list[Value] | None:
        """Return the values that a view on a known storage is made of now; None where nothing was ever written."""
        store, box = self._place(tensor)
        if store is None or not store.writes:
            return None
        found: list[Value] = []
        for write in reversed(store.writes[-_READS:]):
            if _meet(box, write.box):
                found.append(write.value)
                if _covers(write.box, box):
                    return found
        if len(store.writes) > _READS and (box is None or not found):
            exact = next((w for w in reversed(store.writes) if _covers(w.box, box)), None)
            if exact is not None:
                return [*found, exact.value]
            found += [w.value for w in store.writes[:-_READS] if _meet(box, w.box)]
        return [*found, store.first] if store.first is not None else found

    def keep(self, value: Value, tensor: Tensor) -> None:
        """Copy what a value is, because its tensor is written or will be."""
        size = tensor.numel() * tensor.element_size() if _plain(tensor) else 0
        if value.copy is None and size and self._copied + size <= _BUDGET:
            self._copied += size
            value.copy = tensor.detach().clone()

    def _place(self, tensor: Tensor) -> tuple[Store | None, Box]:
        if not _plain(tensor):
            return None, None
        key = tensor.untyped_storage()._cdata
        store = self._stores.get(key)
        if store is None:
            store = self._stores[key] = Store(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))
            return store, tuple([(0, size) for size in store.size])
        return store, _box(tensor, store)


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was written; inference tensors do not count."""
    return -1 if tensor.is_inference() else tensor._version


def _plain(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and torch._C._has_storage(tensor)


def _box(tensor: Tensor, store: Store) -> Box:
    """Return the part of the storage's first tensor that a view covers, where it is a box in its axes."""
    shape, strides = tuple(tensor.shape), tensor.stride()
    rest = int(tensor.storage_offset()) - store.offset
    if shape == store.size and strides == store.stride and rest == 0:
        return tuple([(0, size) for size in shape])
    if rest < 0 or any(step <= 0 for size, step in zip(store.size, store.stride, strict=True) if size > 1):
        return None
    used = {step: size for size, step in zip(shape, strides, strict=True) if size > 1}
    if len(used) != sum(size > 1 for size in shape):
        return None
    box: dict[int, tuple[int, int]] = {}
    for axis in sorted(range(len(store.size)), key=lambda a: -store.stride[a]):
        size, step = store.size[axis], store.stride[axis]
        if size == 1:
            box[axis] = (0, 1)
            continue
        start, rest = divmod(rest, step)
        long = used.pop(step, 1)
        if start + long > size:
            return None
        box[axis] = (start, start + long)
    return None if used or rest else tuple([box[axis] for axis in range(len(store.size))])


def _meet(one: Box, other: Box) -> bool:
    if one is None or other is None:
        return True
    return all(a < d and c < b for (a, b), (c, d) in zip(one, other, strict=True))


def _covers(one: Box, other: Box) -> bool:
    if one is None or other is None:
        return False
    return all(a <= c and d <= b for (a, b), (c, d) in zip(one, other, strict=True))
