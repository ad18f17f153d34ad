"""A second body for a module: the same tensors and settings, but nothing done to it is seen by the first."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..cells import attributes

_OWN = set(nn.Module().__dict__) - {"training"}


def twin(module: nn.Module) -> nn.Module:
    """Return a module of the same types, tensors and attributes, whose own are not touched when it is used."""
    return _twin(module, {})


def _twin(module: nn.Module, made: dict[nn.Module, nn.Module]) -> nn.Module:
    if module in made:
        return made[module]
    copy: nn.Module = module.__class__.__new__(module.__class__)
    made[module] = copy
    # Lists and dicts of its own: a cell may write down in them what it sees.
    copy.__dict__ = {
        key: value.copy() if isinstance(value, list | dict | set) else value
        for key, value in attributes(module).items()
    }
    for name, child in module._modules.items():
        copy._modules[name] = None if child is None else _twin(child, made)
    return copy


def members(module: nn.Module) -> list[nn.Module]:
    """Return a module and all modules in it, each once, in the order of `module.modules()`, which takes longer."""
    found: dict[nn.Module, None] = {}
    waiting = [module]
    while waiting:
        member = waiting.pop()
        if member not in found:
            found[member] = None
            waiting += [child for child in reversed(member._modules.values()) if child is not None]
    return list(found)


def fingerprint(module: nn.Module) -> tuple[Any, ...]:
    """Return everything about a module, beside its tensors' values, that its code may depend on."""
    return tuple(
        (
            type(member),
            *((name, id(child)) for name, child in member._modules.items()),
            *((key, _frozen(value)) for key, value in attributes(member).items() if key not in _OWN),
        )
        for member in members(module)
    )


def _frozen(value: Any, depth: int = 0) -> Any:
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return (type(value).__name__, value)
    if isinstance(value, Tensor):
        return (id(value), 0 if value.is_inference() else value._version, value.requires_grad)
    if depth < 3 and isinstance(value, list | tuple):
        return (type(value).__name__, *(_frozen(inner, depth + 1) for inner in value))
    if depth < 3 and isinstance(value, dict):
        return ("dict", *((str(key), _frozen(inner, depth + 1)) for key, inner in value.items()))
    return id(value)
