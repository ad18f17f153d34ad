"""A trace of one call of a model: each operation, where it happened, and the origin of every operand."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .bytecode import CodeLoop
from .memory import Origin, Slot, TracedMemory, TracedStorage, Value, Write, box_of, storage_of, version_of
from .names import Binding, held_in_frame, names_in_forward, tensors_in
from .operation import (
    ESCAPES,
    OVERWRITES,
    PASSIVE,
    SHAPE_OF,
    SHAPE_ONLY,
    ModuleCall,
    Op,
    in_place,
    leaves,
    operands,
    region_of,
    written_by,
)
from .places import Scope, StackTracker

_NAMES_AT = (1, 2)  # the turns at whose beginning the names of variables are read


_SMALL = 16_384  # a tensor with at most so many numbers is copied whenever a part of it is written
_MOST = 4 * 2**30  # bytes of tensors that a trace keeps alive
_NAMES_IN = 4  # calls of a module in which the names in its own code are read
_NAMES_UNTIL = 10_000  # turns of one loop, over all its runs, after which names are no longer read


class Enough(BaseException):
    """Ends a traced call from inside, once enough was seen."""


class TooMuch(Exception):
    """A call's values do not fit into memory beside the model."""


class Function:
    """What is known of a torch function by its name."""

    __slots__ = ("func", "in_place", "name", "passive", "shape_of", "shape_only")

    def __init__(self, func: Any, name: str) -> None:
        """Look the function up by its name."""
        self.func, self.name = func, name
        self.passive, self.in_place = name in PASSIVE, in_place(name)
        self.shape_only, self.shape_of = name in SHAPE_ONLY, name in SHAPE_OF

    @classmethod
    def of(cls, func: Any) -> Function:
        """Return the entry of a function, using its name."""
        name = getattr(func, "__name__", "") or type(func).__name__
        return cls(func, getattr(func.__self__, "__name__", name) if name == "__get__" else name)


_functions: dict[Any, Function] = {}


class Trace(TorchFunctionMode):
    """Records every operation of this thread while it is active."""

    def __init__(self, root: FrameType, enough: Callable[[Trace], bool] | None = None) -> None:
        """Trace the calls made from `root`."""
        super().__init__()
        self.memory = TracedMemory()
        self.ops: list[Op] = []
        self.calls: list[ModuleCall] = []
        self.held: dict[Scope, dict[int, dict[int, Binding]]] = {}  # by loop and turn: what was held as the turn began
        self.ended: dict[Scope, dict[str, Tensor]] = {}  # by loop: what was held after it, by name
        self.places = StackTracker(root, self._on_turn, self._on_end)
        self.paths: dict[nn.Module, str] = {}
        self.blind: dict[tuple[str, str], str] = {}  # modules whose results were made unseen, with the reason
        self.turned: Counter[CodeLoop | None] = Counter()  # turns of each loop, over all its runs
        self.called: Counter[nn.Module] = Counter()
        self.names_inside: dict[nn.Module, dict[int, str]] = {}  # by module and id: the names in its own code
        self.paused = 0
        self.ours = False
        self.lazy = False  # the call's argument is an iterator, which brings tensors from outside
        self.replayable = True  # whether what was read is what was recorded
        self.broken: Exception | None = None  # an error in the trace itself
        self._open: list[int] = []
        self._thread = threading.get_ident()
        self._enough = enough

    def name_values(self, origin: Any, named: Mapping[str, Tensor]) -> None:
        """Record the origin of tensors that exist before the call."""
        for label, tensor in named.items():
            if id(tensor) not in self.memory.entries:
                value = self.memory.new(-1, origin, tensor, label)
                store = self.memory.store_of(tensor)
                self.memory.hold(tensor, value)
                if store is not None and store.first.origin == "argument":
                    value.origin = "argument"  # a view on an argument belongs to the argument

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one operation and record it."""
        kwargs = kwargs or {}
        if self.paused or self.ours or threading.get_ident() != self._thread:
            return func(*args, **kwargs)
        known = _functions.get(func)
        if known is None:
            known = _functions[func] = Function.of(func)
        if known.passive:
            return func(*args, **kwargs)
        tensors = operands(args, kwargs)
        if known.in_place and args and isinstance(args[0], Tensor):
            self._before_write(args[0])
        try:
            versions = [tensor._version for tensor in tensors]
        except RuntimeError:  # an inference tensor has no version counter
            versions = [version_of(tensor) for tensor in tensors]
        result = func(*args, **kwargs)
        try:
            self.record(known, (args, kwargs), (tensors, versions), result, sys._getframe(1))
        except Exception as error:
            self._fail(error)
        return result

    def instead(self, own: Tensor, other: Tensor) -> None:
        """Note that `other` is read wherever this call reads what `own` holds now."""
        entry = self.memory.entries.get(id(own))
        if entry is not None:
            entry.value.instead = other.detach()

    @property
    def listening(self) -> bool:
        """Whether operations are recorded now: not our own work, nor that of other threads."""
        return not self.paused and not self.ours and threading.get_ident() == self._thread

    def safely(self, work: Callable[..., Any], *args: Any) -> Any:
        """Do a piece of our own work; if it fails, the trace ends, and the model's call continues."""
        try:
            return work(*args)
        except Exception as error:
            self._fail(error)
            return None

    def _fail(self, error: Exception) -> None:
        self.broken = error
        self.paused += 1
        self.memory = TracedMemory()  # release what the call itself has released
        self.ops.clear()
        self.calls.clear()

    def record(
        self,
        function: Function,
        called: tuple[Any, Any],
        given: tuple[list[Tensor], list[int]],
        result: Any,
        frame: FrameType,
    ) -> None:
        """Record an operation that has just run; `given` are its operands with their version before it."""
        name, memory, (tensors, versions) = function.name, self.memory, given
        made = [result] if isinstance(result, Tensor) else [tensor for _, tensor in leaves(result)]
        try:
            moved = [tensor for tensor, version in zip(tensors, versions, strict=True) if tensor._version != version]
        except RuntimeError:
            moved = [t for t, version in zip(tensors, versions, strict=True) if version_of(t) != version]
        plain = not moved and not function.in_place and "out" not in called[1]
        written = [] if plain else written_by(name, (tensors, versions), moved, called[1])
        if not made and not written and name not in ESCAPES:
            return
        scope, offset = self.places.here(frame, len(self.ops))
        # A list may grow after the call: keep its present content.
        args = tuple([list(arg) if type(arg) is list else arg for arg in called[0]])
        op = Op(function.func, name, (args, called[1]), (scope, offset, self.inside))
        # A view reads only its part of a storage, and a write by index reads none: do not count the whole.
        keys = [storage_of(tensor) for tensor in made]
        stores = [memory.stores.get(key) for key in keys]
        apart = [store for store in stores if store is not None and store.writes]
        part = written and name == "__setitem__" and region_of(op, written[0]) is not written[0]
        target, entries = written[0] if part else None, memory.entries
        for tensor, version in zip(tensors, versions, strict=True):
            entry = entries.get(id(tensor))
            if entry is not None and entry.version == version and not entry.store_writes and target is None:
                op.reads.append((tensor, entry.value))  # never written: the usual case
            else:
                op.reads.append((tensor, self._operand(op, (tensor, version), apart, target)))
        if not function.shape_only:
            op.ins = [value for _, value in (op.reads[:1] if function.shape_of else op.reads)]
        number = len(self.ops)
        if self._open and self.calls[self._open[-1]].start == number:
            module = self.calls[self._open[-1]].module
            if self.called[module] <= _NAMES_IN:
                self.names_inside.setdefault(module, {}).update(names_in_forward(frame, module))
        self.ops.append(op)
        for target in written:
            self._write(op, number, target)
        same = {id(tensor) for tensor in tensors}
        for place, tensor in enumerate(made):
            if id(tensor) not in same:
                self._make(op, number, (tensor, stores[place], keys[place]), place)
        if memory.held > _MOST:
            raise TooMuch(f"what it makes takes more than {_MOST >> 30} GiB: call it with fewer rows or steps")
        if self._enough is not None and self._enough(self):
            raise Enough

    def value_of(self, tensor: Tensor, op: Op, version: int) -> Value:
        """Return the value of `tensor` as an operand of `op`, when it had been written `version` times."""
        memory = self.memory
        entry = memory.entries.get(id(tensor))
        if entry is None:
            return self._stranger(tensor, op)
        store = entry.store
        if store is not None and entry.epoch < len(store.writes):
            entry.value = self._rewritten(entry, store, op)
            entry.epoch, entry.version = len(store.writes), version
        elif version != entry.version:
            entry.value = memory.new(-1, "unseen", tensor, f"written unseen before {op.where}")
            entry = memory.hold(tensor, entry.value)
            entry.version = version
        return entry.value

    def _operand(self, op: Op, given: tuple[Tensor, int], apart: list[TracedStorage], target: Tensor | None) -> Value:
        tensor, version = given
        entry = self.memory.entries.get(id(tensor))
        if entry is not None and (tensor is target or (entry.store is not None and entry.store in apart)):
            return entry.value
        return self.value_of(tensor, op, version)

    def open(self, call: ModuleCall) -> None:
        """Enter a module."""
        self.calls.append(call)
        self.called[call.module] += 1
        self._open.append(call.number)
        self.places.owner = call.number

    def shut(self, call: ModuleCall) -> None:
        """Leave a module."""
        call.end = len(self.ops)
        while self._open and self._open.pop() != call.number:
            pass
        self.places.owner = self._open[-1] if self._open else -1

    @property
    def inside(self) -> int:
        """The innermost open module call."""
        return self._open[-1] if self._open else -1

    def peek(self, tensor: Tensor) -> Value | None:
        """Return the known value of a tensor, without recording anything."""
        entry = self.memory.entries.get(id(tensor))
        if entry is None:
            return None
        if entry.store is not None and entry.epoch < len(entry.store.writes):
            sources = self.memory.sources(tensor)
            return sources[0] if sources and len(sources) == 1 else None
        return entry.value

    def _stranger(self, tensor: Tensor, op: Op) -> Value:
        """Make the value of an operand that was not met before."""
        memory = self.memory
        store = memory.store_of(tensor)
        if store is not None and (store.writes or not self.lazy):  # made unseen, in a storage that is known
            sources = memory.sources(tensor) or [store.first]
            value = self._alias(op, sources, tensor)
        else:
            origin: Origin = "argument" if self.lazy else "outside" if tensor.grad_fn is None else "unseen"
            value = memory.new(-1, origin, tensor, f"an operand of {op.name}, {op.where}")
        memory.hold(tensor, value)
        return value

    def _rewritten(self, entry: Slot, store: TracedStorage, op: Op) -> Value:
        """Return the value of a tensor after its storage was written through other tensors."""
        tensor = entry.tensor
        sources = self.memory.sources(tensor) or []
        whole = len(sources) == 1 and sources[0].shape == tuple(tensor.shape)
        if whole and box_of(sources[0].tensor, store) == box_of(tensor, store):
            return sources[0]
        if sources == [entry.value] or all(source is entry.value for source in sources):
            return entry.value  # another part of the storage was written
        recent = [write.value for write in store.writes[entry.epoch :]]
        if not any(source in recent for source in sources):
            return entry.value
        value = self._alias(op, sources, tensor)
        value.store, value.epoch = store, len(store.writes)
        self.memory.keep(value, tensor)
        return value

    def _alias(self, op: Op, sources: list[Value], tensor: Tensor) -> Value:
        """Record an operation of our own that combines the several values a tensor consists of."""
        alias = Op(_alias, "alias", ((), {}), (op.scope, op.offset, op.call))
        alias.ins = list(sources)
        value = self.memory.new(len(self.ops), "made", tensor)
        alias.outs.append(value)
        self.ops.append(alias)
        return value

    def _before_write(self, target: Tensor) -> None:
        """Copy the content of a tensor that is about to be written."""
        entry = self.memory.entries.get(id(target))
        if entry is None or entry.store is None:
            return
        first = entry.store.first
        if first.origin == "parameter" and first.copy is None:
            first.copy = entry.store.base.detach().clone()  # a weight, which must be restored
        elif entry.epoch == len(entry.store.writes):
            self.memory.keep(entry.value, target)

    def _write(self, op: Op, number: int, target: Tensor) -> None:
        """Make a new value for an operand that an operation has written."""
        memory = self.memory
        region = region_of(op, target)
        value = memory.new(number, "made", region)
        entry = memory.entries[id(target)]
        old = entry.value
        if region is not target or op.name in OVERWRITES or op.kwargs.get("out") is target:
            position = next(i for i, (tensor, _) in enumerate(op.reads) if tensor is target)
            op.ins = [v for i, v in enumerate(op.ins) if i != position]
        if op.name == "__set__" or entry.store is None:
            memory.hold(target, value)
            memory.keep(value, target)
            op.outs.append(value)
            return
        held = memory.hold(region, value)
        store = held.store
        assert store is not None  # it shares the target's storage
        store.writes.append(Write(box_of(region, store), value))
        value.epoch = held.epoch = len(store.writes)
        memory.keep(value, region)
        op.outs.append(value)
        if region is not target:
            entry.value = old
            if entry.epoch == len(store.writes) - 1 and target.numel() <= _SMALL:
                # A later read of the whole gets what this turn made of it, not its pieces.
                entry.value = self._alias(op, [value, old], target)
                entry.value.store, entry.value.epoch = store, len(store.writes)
                entry.epoch, entry.version = len(store.writes), version_of(target)
                memory.keep(entry.value, target)

    def _make(self, op: Op, number: int, made: tuple[Tensor, TracedStorage | None, int], place: int) -> None:
        memory, (tensor, store, key) = self.memory, made
        entry = memory.entries.get(id(tensor))
        if entry is not None and not op.ins:
            return  # an operand returned unchanged
        if store is not None and store.writes and op.outs == []:
            sources = memory.sources(tensor)
            if sources:
                op.ins = [*sources, *(v for v in op.ins if v.store is not store)]
        value = memory.new(number, "made", tensor)
        value.place = place
        memory.hold(tensor, value, key)
        op.outs.append(value)

    def _on_turn(self, loop: Scope, frame: FrameType) -> None:
        number = len(loop.turns) - 1
        self.turned[loop.loop] += 1
        if (
            number in _NAMES_AT
            and self.turned[loop.loop] < _NAMES_UNTIL
            and not loop.code.co_filename.startswith(_TORCH)
        ):
            lives = loop.loop.lives if loop.loop is not None else ()
            self.paused += 1
            try:
                self.held.setdefault(loop, {})[number] = held_in_frame(frame, lives)
            finally:
                self.paused -= 1

    def _on_end(self, loop: Scope, frame: FrameType) -> None:
        lives = loop.loop.lives if loop.loop is not None else ()
        if len(loop.turns) > 2 and self.turned[loop.loop] < _NAMES_UNTIL:
            held = frame.f_locals
            self.ended[loop] = dict(each for name in lives if name in held for each in tensors_in(held[name], name))


_TORCH = torch.__path__[0]


def _alias(*_: Any) -> None:
    """Stand for a read of a tensor that was written through another one."""
