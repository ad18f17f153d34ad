"""Whether a model's own code may read an attribute that an earlier call left."""

from __future__ import annotations

from types import CodeType

from torch import nn

from .bytecode import may_read_first


def may_be_read(model: nn.Module, name: str) -> bool:
    """Say whether any function of a model's classes may read an attribute that an earlier call left."""
    found = [code for kind in _own_kinds(model) for code in _functions(kind).values()]
    # What is in a dict or a list is read by the name of that, which is not known here.
    return not any(name in code.co_names for code in found) or any(may_read_first(code, name) for code in found)


def read_in_forward(model: nn.Module, name: str) -> bool:
    """Say whether a forward of a model's classes, with the methods that it calls, may read it before it is written."""
    for kind in {type(module) for module in model.modules()}:
        functions = {
            key: code for each in reversed(kind.__mro__) if _is_own(each) for key, code in _functions(each).items()
        }
        forward = functions.pop("forward", None)
        if forward is not None and may_read_first(forward, name, functions):
            return True
    return False


def _own_kinds(model: nn.Module) -> list[type]:
    return [
        kind for kind in dict.fromkeys(k for module in model.modules() for k in type(module).__mro__) if _is_own(kind)
    ]


def _is_own(kind: type) -> bool:
    return not kind.__module__.startswith(("torch.", "builtins"))


def _functions(kind: type) -> dict[str, CodeType]:
    codes = {key: getattr(getattr(thing, "fget", thing), "__code__", None) for key, thing in vars(kind).items()}
    return {key: code for key, code in codes.items() if isinstance(code, CodeType)}
