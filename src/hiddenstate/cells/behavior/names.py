"""The names of tensors in the code (variables, keys, attributes), which become the names of a recurrence's parts."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from types import FrameType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from .bytecode import loops_of

if TYPE_CHECKING:
    from .memory import Value
    from .places import Scope
    from .trace import Trace


_DEPTH = 4
_MOST = 512  # tensors to look at in one frame


@dataclass(frozen=True, slots=True)
class Binding:
    """The name under which a tensor is held."""

    name: str
    module: nn.Module | None = None  # set if the name is an attribute of this module


def variables_of(frame: FrameType) -> dict[str, Any]:
    """Return the variables of a frame, except those of a comprehension that is running in it."""
    hidden = loops_of(frame.f_code).hidden(frame.f_lasti)
    return {name: value for name, value in frame.f_locals.items() if name not in hidden}


def held_in_frame(frame: FrameType, first: tuple[str, ...]) -> dict[int, Binding]:
    """Return the names of the tensors in a frame, by id; `first` names win, and locals over attributes."""
    variables = variables_of(frame)
    found: dict[int, Binding] = {}
    # A variable that a turn reads before writing it is what continues; and a variable is a better name than an index.
    live = {name: variables[name] for name in first if name in variables}
    rest = {name: value for name, value in variables.items() if name not in live}
    modules = dict.fromkeys(m for v in variables.values() if isinstance(v, nn.Module) for m in v.modules())
    for name, value in live.items():
        if isinstance(value, Tensor):
            found.setdefault(id(value), Binding(name))
    for module in modules:
        for label, tensor in module_tensors(module):
            found.setdefault(id(tensor), Binding(label, module))
    for scope in (live, rest):
        for name, value in sorted(scope.items(), key=lambda item: not isinstance(item[1], Tensor)):
            for label, tensor in tensors_in(value, name):
                found.setdefault(id(tensor), Binding(label))
    return found


def names_in_forward(frame: FrameType | None, module: nn.Module) -> dict[int, str]:
    """Return the names of tensors in a module's forward, by id, if one is running above this frame."""
    while frame is not None:
        code = frame.f_code
        if code.co_name == "forward" and code.co_argcount and frame.f_locals.get(code.co_varnames[0]) is module:
            return {id(value): name for name, value in variables_of(frame).items() if isinstance(value, Tensor)}
        frame = frame.f_back
    return {}


def module_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers and tensor attributes of one module by name, also those in containers, but not parameters."""
    for name, buffer in module._buffers.items():
        if buffer is not None:
            yield name, buffer
    for name, value in list(module.__dict__.items()):
        if name not in _TORCHS_OWN and not name.startswith("_forward") and not name.startswith("_backward"):
            yield from tensors_in(value, name)


_TORCHS_OWN = {"_parameters", "_buffers", "_modules", "forward"}


def tensors_in(value: Any, name: str, depth: int = _DEPTH) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in a value with a name: the key or field if there is one, otherwise the index."""
    if isinstance(value, Tensor):
        if not isinstance(value, nn.Parameter):
            yield name, value
    elif depth == 0 or isinstance(value, str | bytes | int | float | nn.Module | type) or value is None:
        return
    elif isinstance(value, Mapping):
        items: list[tuple[Any, Any]] = []
        with suppress(Exception):  # reading a user's own mapping may raise anything
            items = list(islice(value.items(), _MOST))
        for key, inner in items:
            yield from tensors_in(inner, str(key), depth - 1)
    elif isinstance(value, tuple) and (fields := getattr(value, "_fields", None)):
        for key, inner in zip(fields, value, strict=False):
            yield from tensors_in(inner, str(key), depth - 1)
    elif isinstance(value, list | tuple | deque):
        for place, inner in enumerate(islice(value, _MOST)):
            yield from tensors_in(inner, f"{name}[{place}]", depth - 1)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for each in dataclasses.fields(value):
            yield from tensors_in(getattr(value, each.name, None), each.name, depth - 1)
    elif isinstance(value, SimpleNamespace) or (
        type(value).__module__ not in _LIBRARIES and hasattr(value, "__dict__")
    ):
        for key, inner in list(vars(value).items())[:_MOST]:
            yield from tensors_in(inner, key, depth - 1)


_LIBRARIES = {"builtins", "numpy", "torch", "random", "types", "functools"}


@dataclass(slots=True)
class Namer:
    """Names parts as the code does, using each name once."""

    held: dict[int, dict[int, Binding]]  # by boundary between turns
    trace: Trace
    taken: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, trace: Trace, scope: Scope | None) -> Namer:
        """Use the names that were seen in the first turns of a loop."""
        return cls(trace.held.get(scope, {}) if scope is not None else {}, trace)

    def seen(self, values: list[Value | None]) -> Binding | None:
        """Return the name that holds a part at the beginning of turns; `values` are those after each turn."""
        for boundary in (2, 1):
            held = self.held.get(boundary)
            value = values[boundary - 1] if len(values) >= boundary else None
            if held is None or value is None:
                continue
            if id(value.tensor) in held:
                return self._lasting(values, held[id(value.tensor)])
            entries = self.trace.memory.entries
            for number, name in held.items():  # held as a part of a larger tensor, or written in place
                entry = entries.get(number)
                if entry is not None and entry.store is not None and entry.store is value.store:
                    return name
        return None

    def listed(self, first: Value | None) -> str:
        """Return the name of the list that holds the value made in the first turn."""
        held = self.held.get(2, {}).get(id(first.tensor)) if first is not None else None
        return held.name[: held.name.rindex("[")] if held is not None and held.name.endswith("]") else ""

    def _lasting(self, values: list[Value | None], now: Binding) -> Binding:
        """Name the last item of a growing list after the list."""
        first, before = values[0] if values else None, self.held.get(1, {})
        then = before.get(id(first.tensor)) if first is not None else None
        if then is None or then.name == now.name or not now.name.endswith("]"):
            return now
        base = now.name[: now.name.rindex("[")]
        return Binding(base, now.module) if then.name.startswith(f"{base}[") else now

    def name(self, values: list[Value | None], otherwise: str, inside: str = "") -> str:
        """Return a name for a part: its variable, key or attribute; else that `inside` a module; else `otherwise`."""
        held = self.seen(values)
        name = held.name if held is not None else otherwise
        if inside and (held is None or name.endswith("]")):
            name = inside
        base, count = name, 2
        while name in self.taken:
            name, count = f"{base}_{count}", count + 1
        self.taken.add(name)
        return name
