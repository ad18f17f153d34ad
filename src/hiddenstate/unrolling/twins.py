"""Twins: a second module with the tensors and settings of another one, which can be changed without changing that."""

from __future__ import annotations

from torch import nn

from ..cells import attributes


def twin(module: nn.Module) -> nn.Module:
    """Return a module of the same types, tensors and attributes, whose own are not touched when it is used."""
    return _twin(module, {}, whole=True)


def unheard_twin(module: nn.Module) -> nn.Module:
    """Return a module without what is ours in its attributes, or those of modules in it; the rest stands for itself."""
    return _twin(module, {}, whole=False)


def _twin(module: nn.Module, made: dict[nn.Module, nn.Module], *, whole: bool) -> nn.Module:
    if module in made:
        return made[module]
    if not whole and not heard(members(module)):
        made[module] = module
        return module
    copy: nn.Module = module.__class__.__new__(module.__class__)
    made[module] = copy
    own = attributes(module)
    # Where it is run, lists and dicts of its own: a cell may write down in them what it sees.
    copy.__dict__ = {
        **own,
        **{key: value.copy() for key, value in own.items() if whole and isinstance(value, list | dict | set)},
        "_modules": module._modules.copy(),
    }
    for name, child in module._modules.items():
        copy._modules[name] = None if child is None else _twin(child, made, whole=whole)
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


def heard(inside: list[nn.Module]) -> bool:
    """Say whether something of ours stands in the attributes of one of these modules."""
    return any(attributes(member) is not member.__dict__ for member in inside)
