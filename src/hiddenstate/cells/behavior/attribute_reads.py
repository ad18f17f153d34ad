"""What a model's own code reads of what an earlier call left: at all, in its forward, and again in a backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CodeType
from typing import TypeAlias

from torch import Tensor, nn

from ..._compiling import CHECKPOINT
from .bytecode import may_read_first
from .memory import Value
from .operation import MOVES
from .places import Scope, in_torch
from .trace import Trace

Key: TypeAlias = tuple[str, str]  # module and name


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


def read_again(
    trace: Trace, model: nn.Module, kept: Mapping[Key, Tensor], *, home: Callable[[nn.Module, Key, Tensor], str]
) -> set[Key]:
    """Return what is kept that checkpointed code reads as it was before the call, or makes, and may name itself.

    Activation checkpointing runs such code once more, within the backward pass. `home` tells the attribute in which it
    lies. What comes as an argument and leaves as a result is the same again.
    """
    if not any(scope.code.co_filename.endswith(CHECKPOINT) for scope in trace.places.scopes):
        return set()
    inside = [op for op in trace.ops if _is_rerun(op.scope)]
    read = {value.label for op in inside for value in op.ins if value.op < 0}
    made = {value.number for op in inside for value in op.outs}
    ends = {key: trace.peek(tensor) for key, tensor in kept.items()}
    written = {key for key, end in ends.items() if end is not None and end.number in made}
    found = written | {key for key in kept if ".".join(filter(None, key)) in read}
    names = _names(model, [scope.code for scope in trace.places.scopes if _is_rerun(scope)]) if found else set()
    return {key for key in found if home(model, key, kept[key]) in names}


def _is_rerun(scope: Scope | None) -> bool:
    while scope is not None and not scope.code.co_filename.endswith(CHECKPOINT):
        scope = scope.parent
    return scope is not None


def _names(model: nn.Module, codes: Iterable[CodeType]) -> set[str]:
    """Return all names that these functions use, and those of the model's own that they may call."""
    kinds = dict.fromkeys(kind for module in model.modules() for kind in type(module).__mro__)
    own = {name: getattr(thing, "fget", thing) for kind in kinds for name, thing in vars(kind).items()}
    todo = [code for code in codes if not in_torch(code)]
    found: set[str] = set()
    for code in todo:
        for name in _used(code):
            called = getattr(own.get(name), "__code__", None)
            if name not in found and isinstance(called, CodeType) and not in_torch(called):
                todo.append(called)
            found.add(name)
    return found


def _used(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, str):  # getattr(self, "h")
            yield constant
        elif isinstance(constant, CodeType):
            yield from _used(constant)


def is_cut(trace: Trace, value: Value, label: str) -> bool:
    """Say whether what an attribute holds after a call was cut from its graph, or what it held before is when read."""
    held = {one.number for one in trace.memory.values if one.label == label and one.op < 0}
    readers = [op for op in trace.ops if any(one.number in held for one in op.ins)]
    if readers and all(op.name in _CUTS for op in readers):
        return True
    while value.op >= 0:
        op = trace.ops[value.op]
        if op.name in _CUTS:
            return any(one.tensor.requires_grad for one in op.ins)
        if op.name not in MOVES or len(op.ins) != 1:
            return False
        value = op.ins[0]
    return False


_CUTS = {"detach", "detach_", "data"}
