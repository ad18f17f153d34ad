"""Settings of a model: what its author set on modules beside weights, followed through any value down to its ends."""

from __future__ import annotations

import enum
import functools
import inspect
import logging
import re
import types
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_log = logging.getLogger(__name__)

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.Size, torch.layout)
_NO_SETTINGS = frozenset(vars(nn.Module())) | {"forward", "__getstate__"}  # hooks, modes, and who listens
_MOST = 200_000  # values within one attribute that are looked at
# Whose objects are no settings of a model: locks, loggers, random streams, whatever runs it.
_FOREIGN = {"threading", "logging", "random", "weakref", "_weakref", "_thread", "_random", "hiddenstate"}
_LIBRARIES = {"torch", "numpy", "builtins"}  # of whose functions and objects names and values count, not their insides
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def settings(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a module that its author set, by name: on itself, or on its class as a constant."""
    found: dict[str, Any] = {}
    torchs = _library(type(module)) == "torch"
    for kind in reversed(type(module).__mro__):
        if issubclass(kind, nn.Module) and _library(kind) != "torch":
            # Of a class its values, not its methods: code is not part of a fingerprint.
            found |= {name: value for name, value in vars(kind).items() if _is_constant(name, value)}
    # What torch's own modules keep for themselves, as the flat weights of a fused layer, follows from the rest.
    own = {name: value for name, value in vars(module).items() if not (torchs and name.startswith("_"))}
    found |= {name: value for name, value in own.items() if name not in _NO_SETTINGS}
    yield from sorted(found.items())


class Ends:
    """Follows values to their ends: tensors, and of everything else what tells it apart as text, each with its place.

    A value that was met before is named by where that was, so that values may hold each other.
    """

    def __init__(self, model: nn.Module) -> None:
        """Leave the modules of `model` out, which are looked at by themselves."""
        self._modules = {id(module) for module in model.modules()}
        self._met: dict[int, tuple[str, Any]] = {}  # the values too: an id is nobody else's as long as they are there

    def of(self, value: Any, where: str) -> Iterator[tuple[str, Any]]:
        """Yield the ends of one attribute; where there are too many of them, say so and leave the others out."""
        waiting = [(where, value)]
        for _ in range(_MOST):
            if not waiting:
                return
            place, inner = waiting.pop()
            end, more = self._look(inner, place)
            yield place, end
            waiting += [(f"{place}.{name}", part) for name, part in reversed(more)]
        _log.warning("%s holds more than %d values: a change in the others is not noticed", where, _MOST)

    def _look(self, value: Any, where: str) -> tuple[Any, list[tuple[Any, Any]]]:
        """Return what tells a value apart by itself, and the parts in which the rest is."""
        if isinstance(value, Tensor):
            return value, []
        if isinstance(value, _PLAIN) and not isinstance(value, enum.Enum):
            return f"{type(value).__name__} {value!r}", []
        if isinstance(value, np.generic):
            return f"{value.dtype} {value.tobytes().hex() if value.dtype.kind == 'V' else value.item()!r}", []
        if isinstance(value, torch.device):
            return "device", []
        name = type(value).__qualname__
        if id(value) in self._met:
            return f"{name} {self._met[id(value)][0]}", []
        self._met[id(value)] = where, value
        if isinstance(value, np.ndarray):
            return _array(value)
        if isinstance(value, nn.Module):
            return name, [] if id(value) in self._modules else _of_module(value)
        parts = _parts(value)
        return (_text(value) if parts is None else name), parts or []


def _array(value: Any) -> tuple[Any, list[tuple[Any, Any]]]:
    if value.dtype.kind in "biufc" and value.dtype.isnative:
        return torch.from_numpy(np.array(value, order="C")), []
    if value.dtype.hasobject:
        return f"array {value.shape}", list(enumerate(value.ravel().tolist()))
    return f"{value.dtype} {value.shape} {value.tobytes().hex()}", []


def _of_module(module: nn.Module) -> list[tuple[Any, Any]]:
    """Return all of a module that the model does not know to be one of its own, as one in a plain list."""
    weights = {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}
    return [*weights.items(), *module.named_children(), *settings(module)]


def _parts(value: Any) -> list[tuple[Any, Any]] | None:
    """Return the named parts of a value, None where its text tells all."""
    if isinstance(value, enum.Enum):
        return [("name", value.name), ("value", value.value)]
    if isinstance(value, functools.partial):
        return [("func", value.func), ("args", value.args), ("keywords", value.keywords)]
    if isinstance(value, types.FunctionType):
        return _of_function(value)
    if isinstance(value, types.MethodType):
        return [("name", value.__qualname__), ("self", value.__self__)]
    if isinstance(value, types.CodeType):
        return _of_code(value)
    if isinstance(value, types.BuiltinFunctionType | type):
        return [("name", f"{value.__module__}.{value.__qualname__}")]
    if isinstance(value, types.ModuleType):
        return [("name", value.__name__)]
    if _library(type(value)) in _FOREIGN:
        return []
    parts: list[tuple[Any, Any]] = []
    if isinstance(value, Mapping):
        parts += sorted(((_text(key), inner) for key, inner in value.items()), key=lambda pair: pair[0])
    elif isinstance(value, Set):
        parts += enumerate(sorted(map(_text, value)))
    elif isinstance(value, Sequence) and not isinstance(value, range | memoryview):
        parts += enumerate(value)
    attributes = _attributes(value)
    if not parts and not attributes and not isinstance(value, Mapping | Set | tuple | list):
        return None
    return parts + attributes


def _attributes(value: Any) -> list[tuple[str, Any]]:
    """Return what an object has in its dictionary and in slots, none where it is torch's own or numpy's."""
    kind = type(value)
    if _library(kind) in _LIBRARIES and not isinstance(value, torch.distributions.Distribution):
        return []
    slots = [name for base in kind.__mro__ for name in _slots(base) if hasattr(value, name)]
    return sorted({**{name: getattr(value, name) for name in slots}, **getattr(value, "__dict__", {})}.items())


def _slots(kind: type) -> list[str]:
    given = vars(kind).get("__slots__", ())
    names = [given] if isinstance(given, str) else list(given)
    hidden = [f"_{kind.__name__.lstrip('_')}{name}" if name[:2] == "__" != name[-2:] else name for name in names]
    return [name for name in hidden if name not in ("__dict__", "__weakref__")]


def _of_function(value: types.FunctionType) -> list[tuple[Any, Any]]:
    """Return what a function computes with; its code itself is no setting, and of a library its name tells all."""
    named = [("name", f"{value.__module__}.{value.__qualname__}")]
    if value.__module__ is not None and value.__module__.partition(".")[0] in _LIBRARIES:
        return named
    code = value.__code__
    cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
    read = [(name, value.__globals__[name]) for name in sorted(set(code.co_names)) if name in value.__globals__]
    numbers = [(name, found) for name, found in read if isinstance(found, (*_PLAIN, np.generic))]
    defaults = (value.__defaults__, value.__kwdefaults__)
    return [("name", value.__qualname__), ("code", code), ("cells", cells), ("reads", numbers), ("defaults", defaults)]


def _of_code(code: types.CodeType) -> list[tuple[Any, Any]]:
    """Return names and constants, without the docstring, which comes first if there is one."""
    documented = bool(code.co_consts) and isinstance(code.co_consts[0], str) and "<" not in code.co_name
    return [("names", code.co_names), ("consts", code.co_consts[1 if documented else 0 :])]


def _text(value: Any) -> str:
    """Return a value as text that is the same in another process."""
    return f"{type(value).__qualname__} {_ADDRESS.sub('', repr(value))}"


def _is_constant(name: str, value: Any) -> bool:
    if isinstance(value, types.BuiltinFunctionType):  # as torch.tanh, which is nobody's method
        return True
    if name.startswith("__") or isinstance(value, type) or inspect.isroutine(value):
        return False
    return not (hasattr(value, "__get__") or hasattr(value, "__set_name__"))


def _library(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _is_filled(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True
