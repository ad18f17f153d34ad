"""Which model a state belongs to: a hash over all that makes its next state."""

from __future__ import annotations

import enum
import functools
import hashlib
import types
from collections.abc import Iterator, Mapping, Set
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..cells import layers, unwrap

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.Size, torch.layout)
_NO_SETTINGS = frozenset(vars(nn.Module())) | {"forward", "__getstate__"}  # hooks, modes, and who listens
_DEPTH = 5  # of containers and objects within attributes


def fingerprint(model: nn.Module) -> str:
    """Return 32 hexadecimal digits that change with any weight, buffer, setting, name, shape, dtype or module.

    A setting is a plain attribute, of a module, of its class or of an object that it holds: a number, a text, a tensor,
    a function, and containers of these. Modes, gradients, devices and hooks are none.

    >>> model = torch.nn.GRU(2, 3)
    >>> before = fingerprint(model)
    >>> before == fingerprint(model)
    True
    >>> _ = torch.nn.init.zeros_(model.bias_hh_l0)
    >>> before == fingerprint(model)
    False
    """
    digest = _of_layers(model)
    bare = unwrap(model)
    named = {**dict(bare.named_buffers()), **bare.state_dict()}  # those that are not saved are buffers too
    weights = {name: tensor for name, tensor in named.items() if isinstance(tensor, Tensor)}
    for name, tensor in sorted(weights.items()):
        _add_tensor(digest, name, tensor)
    known = {tensor.data_ptr() for tensor in (*weights.values(), *bare.parameters())}
    for path, module in bare.named_modules():
        for name, value in _settings(module):
            for where, end in _ends(value, f"{path}.{name}", 0):
                if not isinstance(end, Tensor):
                    digest.update(f"{where} {end}".encode("utf-8", "surrogatepass"))
                elif end.data_ptr() not in known:
                    _add_tensor(digest, where, end)
    return digest.hexdigest()


def first_fingerprint(model: nn.Module) -> str:
    """Return what the fingerprint was in the first edition, without settings and buffers that are not saved.

    Sessions that were stored then can be told by nothing else.
    """
    digest = _of_layers(model)
    for name, tensor in sorted(unwrap(model).state_dict().items()):
        if isinstance(tensor, Tensor):
            _add_tensor(digest, name, tensor)
    return digest.hexdigest()


def _of_layers(model: nn.Module) -> hashlib.blake2b:
    """Return a digest of the recurrent layers, to be gone on with."""
    digest = hashlib.blake2b(digest_size=16)
    for layer in layers(model):
        kind = type(layer.module)
        spec = layer.spec
        # torch's plain RNN has its nonlinearity in its mode and nowhere in its weights.
        mode = getattr(layer.module, "mode", "")
        facts = (
            layer.name,
            kind.__qualname__,
            layer.kind,
            mode,
            sorted(spec.sizes.items()),
            spec.layers,
            spec.directions,
        )
        digest.update(repr(facts).encode())
    return digest


def _settings(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a module that its author set, by name: of torch's own modules, their constants."""
    if _is_torchs(type(module)):
        names = [name for name in getattr(module, "__constants__", ()) if hasattr(module, name)]
        yield from ((name, getattr(module, name)) for name in sorted(names))
        return
    found: dict[str, Any] = {}
    for kind in reversed(type(module).__mro__):
        if issubclass(kind, nn.Module) and not _is_torchs(kind):
            # Of a class its values, not its methods: code is not part of a fingerprint.
            values = {name: value for name, value in vars(kind).items() if isinstance(value, _CONSTANTS)}
            found |= {name: value for name, value in values.items() if not name.startswith("__")}
    found |= {name: value for name, value in vars(module).items() if name not in _NO_SETTINGS}
    yield from sorted(found.items())


_CONSTANTS = (*_PLAIN, Tensor, tuple, list, dict, set, frozenset, enum.Enum)


def _is_torchs(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "torch"


def _ends(value: Any, where: str, depth: int) -> Iterator[tuple[str, Any]]:
    """Yield each tensor within a value, and of everything else what tells it apart as text, with its place."""
    if isinstance(value, Tensor):
        yield where, value
    elif isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        yield where, torch.from_numpy(np.ascontiguousarray(value))
    elif isinstance(value, enum.Enum):
        yield where, f"{type(value).__qualname__}.{value.name}"
    elif isinstance(value, _PLAIN):
        yield where, f"{type(value).__name__} {value!r}"
    else:
        yield where, type(value).__qualname__
        if depth < _DEPTH:
            for name, inner in _within(value):
                yield from _ends(inner, f"{where}.{name}", depth + 1)


def _within(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the named parts of a value that is no end by itself."""
    if isinstance(value, Mapping):
        yield from sorted(((repr(key), inner) for key, inner in value.items() if isinstance(key, _PLAIN)), key=_first)
    elif isinstance(value, Set):
        yield from enumerate(sorted(inner for inner in map(repr, value) if " at 0x" not in inner))
    elif isinstance(value, tuple | list):
        yield from enumerate(value)
    elif isinstance(value, functools.partial):
        yield from {"func": value.func, "args": value.args, "keywords": value.keywords}.items()
    elif isinstance(value, types.FunctionType):
        code = value.__code__
        consts = tuple(const for const in code.co_consts if isinstance(const, _PLAIN) and const != value.__doc__)
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        yield from {"name": value.__qualname__, "names": code.co_names, "consts": consts, "cells": cells}.items()
        yield "defaults", (value.__defaults__, value.__kwdefaults__)
    elif isinstance(value, types.BuiltinFunctionType | types.MethodType | type):
        yield "name", f"{value.__module__}.{value.__qualname__}"
    elif not isinstance(value, nn.Module) and type(value).__module__.partition(".")[0] not in _FOREIGN:
        yield from sorted(getattr(value, "__dict__", {}).items())


# Libraries whose objects are no settings of a model: locks, loggers, devices, random streams.
_FOREIGN = {"torch", "numpy", "builtins", "threading", "logging", "random", "weakref", "_thread", "hiddenstate"}


def _first(pair: tuple[str, Any]) -> str:
    return pair[0]


def _is_filled(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _add_tensor(digest: hashlib.blake2b, name: str, tensor: Tensor) -> None:
    digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    if plain.is_quantized:
        plain = plain.int_repr()
    if plain.numel():
        digest.update(plain.reshape(-1).view(torch.uint8).numpy().data)
