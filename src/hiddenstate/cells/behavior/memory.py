"""The value that a tensor holds: each write makes a new value for a storage and all views on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch import Tensor

Origin: TypeAlias = Literal["parameter", "buffer", "attribute", "argument", "made", "outside", "unseen"]
Box: TypeAlias = "tuple[tuple[int, int], ...] | None"  # first and end along each axis of the base; None: unknown

_BUDGET = 256 * 2**20  # bytes for copies of tensors that are written in place
_READS = 64  # writes that a read goes back through; beyond that, it depends on the whole storage


class Value:
    """The content of a tensor at one time, and its origin."""

    __slots__ = ("copy", "epoch", "instead", "label", "number", "op", "origin", "place", "store", "tensor")

    def __init__(self, number: int, op: int, origin: Origin, tensor: Tensor, label: str = "") -> None:
        """Make the value that `tensor` holds now; `op` is the operation that made it, or -1."""
        self.number = number
        self.op = op
        self.origin: Origin = origin
        self.tensor = tensor  # it may hold another value by now
        self.label = label
        self.copy: Tensor | None = None  # the content, if the tensor was written later
        self.instead: Tensor | None = None  # the tensor that was read instead of it
        self.store: TracedStorage | None = None
        self.epoch = 0  # the number of writes to the storage before it
        self.place = 0  # its index among the operation's results

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor."""
        return tuple(self.tensor.shape)

    def data(self) -> Tensor | None:
        """Return the content, or None if it is lost."""
        if self.instead is not None or self.copy is not None:
            return self.instead if self.instead is not None else self.copy
        tensor, store = self.tensor, self.store
        if store is None or not self.overwritten:
            return tensor.detach()
        first = store.first.copy
        if self.epoch == 0 and first is not None and first.stride() == store.base.stride():
            offset = int(tensor.storage_offset()) - int(store.base.storage_offset())
            return first.as_strided(tensor.shape, tensor.stride(), offset)
        return None

    @property
    def overwritten(self) -> bool:
        """Whether its tensor holds, or may hold, another value by now."""
        if self.store is None or len(self.store.writes) == self.epoch:
            return False
        box = box_of(self.tensor, self.store)
        return any(_meet(box, write.box) for write in self.store.writes[self.epoch :])

    def alive(self) -> Tensor | None:
        """Return the content, with its graph if the tensor still has it."""
        current = self.store is None or len(self.store.writes) == self.epoch
        return self.tensor if current and self.tensor.grad_fn is not None else self.data()


@dataclass(slots=True, eq=False, repr=False)
class Write:
    """One write to a storage."""

    box: Box
    value: Value


class TracedStorage:
    """A storage: its first known tensor defines the axes, and every write is remembered."""

    __slots__ = ("base", "first", "writes")

    def __init__(self, base: Tensor, first: Value) -> None:
        """Begin with the first known tensor in this storage, and its value."""
        self.base = base
        self.first = first
        self.writes: list[Write] = []


_NONE: list[Write] = []  # for tensors without a storage of their own


class Slot:
    """What is known of one tensor object, which is kept alive so that its id stays unique."""

    __slots__ = ("epoch", "store", "store_writes", "tensor", "value", "version")

    def __init__(self, tensor: Tensor, value: Value, store: TracedStorage | None, version: int) -> None:
        """Remember the tensor's present value."""
        self.tensor = tensor
        self.value = value
        self.store = store
        self.store_writes: list[Write] = store.writes if store is not None else _NONE
        self.epoch = len(self.store_writes)
        self.version = version


class TracedMemory:
    """The values of all tensors seen so far."""

    def __init__(self) -> None:
        """Start without any tensors."""
        self.entries: dict[int, Slot] = {}
        self.values: list[Value] = []
        self.stores: dict[int, TracedStorage] = {}
        self._copied = 0
        self.held = 0  # bytes in storages made during the call

    def new(self, op: int, origin: Origin, tensor: Tensor, label: str = "") -> Value:
        """Make a value."""
        value = Value(len(self.values), op, origin, tensor, label)
        self.values.append(value)
        return value

    def hold(self, tensor: Tensor, value: Value, key: int | None = None) -> Slot:
        """Remember that `tensor` holds `value` now; `key` is its storage's key, if known."""
        key = storage_of(tensor) if key is None else key
        store = self.stores.get(key)
        if store is None and key:
            store = self.stores[key] = TracedStorage(tensor, value)
            if value.op >= 0:
                self.held += tensor.untyped_storage().nbytes()
        entry = Slot(tensor, value, store, version_of(tensor))
        value.store, value.epoch = store, entry.epoch
        self.entries[id(tensor)] = entry
        return entry

    def store_of(self, tensor: Tensor) -> TracedStorage | None:
        """Return the known storage of a tensor."""
        return self.stores.get(storage_of(tensor))

    def sources(self, tensor: Tensor) -> list[Value] | None:
        """Return the values that a view on a known storage consists of now; None if nothing was ever written to it."""
        store = self.store_of(tensor)
        if store is None or not store.writes:
            return None
        box = box_of(tensor, store)
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
        return [*found, store.first]

    def keep(self, value: Value, tensor: Tensor) -> None:
        """Copy a value's content, because its tensor is or will be written."""
        size = tensor.numel() * tensor.element_size() if storage_of(tensor) else 0
        if value.copy is None and size and self._copied + size <= _BUDGET:
            self._copied += size
            value.copy = tensor.detach().clone()


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was written; -1 for inference tensors, which do not count."""
    try:
        return tensor._version
    except RuntimeError:
        return -1


def storage_of(tensor: Tensor) -> int:
    """Return the identity of a tensor's storage; 0 if it has none, as for sparse tensors."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return 0


def box_of(tensor: Tensor, store: TracedStorage) -> Box:
    """Return the part of the storage's first tensor that a view covers, if it is a box in that tensor's axes."""
    shape, strides, base = tuple(tensor.shape), tensor.stride(), store.base
    sizes, steps = tuple(base.shape), base.stride()
    rest = int(tensor.storage_offset()) - int(base.storage_offset())
    if shape == sizes and strides == steps and rest == 0:
        return tuple([(0, size) for size in shape])
    if rest < 0 or any(step <= 0 for size, step in zip(sizes, steps, strict=True) if size > 1):
        return None
    used = {step: size for size, step in zip(shape, strides, strict=True) if size > 1}
    if len(used) != sum(size > 1 for size in shape):
        return None
    box: dict[int, tuple[int, int]] = {}
    for axis in sorted(range(len(sizes)), key=lambda a: -steps[a]):
        size, step = sizes[axis], steps[axis]
        if size == 1:
            box[axis] = (0, 1)
            continue
        start, rest = divmod(rest, step)
        long = used.pop(step, 1)
        if start + long > size:
            return None
        box[axis] = (start, start + long)
    return None if used or rest else tuple([box[axis] for axis in range(len(sizes))])


def _meet(one: Box, other: Box) -> bool:
    if one is None or other is None:
        return True
    return all(a < d and c < b for (a, b), (c, d) in zip(one, other, strict=True))


def _covers(one: Box, other: Box) -> bool:
    if one is None or other is None:
        return False
    return all(a <= c and d <= b for (a, b), (c, d) in zip(one, other, strict=True))
