"""State that modules keep from call to call: attributes and buffers that a forward changes and a later one reads."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from .memory import version_of
from .names import module_tensors
from .repetition import from_input
from .trace import Trace


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Kept:
    """An attribute at one time."""

    tensor: Tensor
    version: int
    content: Tensor


def kept_by(model: nn.Module) -> dict[tuple[str, str], Kept]:
    """Return every tensor that a model's modules keep and that is no parameter, by module and name."""
    return {
        (path, name): Kept(tensor, version_of(tensor), tensor.detach().clone())
        for path, module in model.named_modules()
        for name, tensor in module_tensors(module)
    }


def changed(before: dict[tuple[str, str], Kept], after: dict[tuple[str, str], Kept]) -> list[tuple[str, str]]:
    """Return what a call has changed."""
    found = []
    for key, now in after.items():
        old = before.get(key)
        if old is None or old.tensor is not now.tensor or old.version != now.version:
            found.append(key)
    return found


@dataclass(frozen=True, slots=True)
class Look:
    """What a traced call tells of one attribute after it."""

    from_input: bool
    from_itself: bool
    line: str


def look(trace: Trace, kept: Kept) -> Look | None:
    """Return where an attribute's present content came from; None where the trace does not know."""
    value = trace.peek(kept.tensor)
    if value is None:
        return None
    marks = from_input(trace)
    if value.op < 0:
        return Look(bool(marks[value.number]), False, "")
    return Look(bool(marks[value.number]), False, trace.ops[value.op].where)


def read_in(trace: Trace, label: str) -> bool:
    """Say whether an operation of this call reads what the attribute held before the call."""
    held = {value.number for value in trace.memory.values if value.label == label and value.op < 0}
    stores = {id(value.store) for value in trace.memory.values if value.number in held and value.store is not None}
    for op in trace.ops:
        for value in op.ins:
            if value.number in held:
                return True
            if value.op < 0 and value.store is not None and id(value.store) in stores and value.origin != "argument":
                return True
    return False
