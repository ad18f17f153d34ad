"""The replay law: a repetition run again from what crossed into it gives the same as it gave."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from .flat import leaves, replaced
from .memory import Value
from .operation import Op
from .operations import DRAWS, MOVES, UNWRITTEN
from .repetition import Windows, reaching
from .trace import Trace

_RTOL, _ATOL = 1e-3, 1e-5
_CHECKED = 3  # repetitions that are run again: early, in the middle, the last


class Lost(Exception):
    """A value that a replay needs is no longer there."""


def replay(windows: Windows, targets: list[list[Value]]) -> str:
    """Run some repetitions again up to their `targets`; return a reason where the law does not hold, else nothing."""
    count = windows.count
    for turn in sorted({min(1, count - 1), count // 2, count - 1})[:_CHECKED]:
        try:
            again = _run(windows.trace, targets[turn], windows.span(turn))
        except Lost as lost:
            return f"repetition {turn} could not be run again: {lost}"
        except Exception as error:  # whatever an operation raises out of its place
            return f"repetition {turn} could not be run again ({type(error).__name__}: {str(error)[:80]})"
        for value in targets[turn]:
            before, after = value.data(), again.get(value.number)
            if before is None:
                return "what crosses was overwritten, and its values are lost"
            if after is not None and not _close(before, after):
                return f"repetition {turn}, run again from what crossed, gives something else"
    return ""


def _run(trace: Trace, targets: list[Value], span: tuple[int, int]) -> dict[int, Tensor]:
    made: dict[int, Tensor] = {}

    def data(value: Value) -> Tensor:
        if value.number in made:
            return made[value.number]
        found = value.data()
        if found is None:
            raise Lost(f"a tensor of shape {value.shape} was overwritten")
        return found

    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for number in sorted(reaching(trace, targets, span)):
            _again(trace.ops[number], made, data)
    return made


def _again(op: Op, made: dict[int, Tensor], data: Any) -> None:
    if op.name in DRAWS or op.name in UNWRITTEN or op.name == "grad" or not op.outs:
        made.update({value.number: data(value) for value in op.outs})
        return
    if op.name == "alias" or (op.name in MOVES and any(value not in op.ins for _, value in op.reads)):
        _again_in_memory(op, made, data)
        return
    held = {id(tensor): value for tensor, value in op.reads}
    copies: dict[int, Tensor] = {}

    def put(tensor: Tensor) -> Tensor:
        if id(tensor) not in held:
            return tensor
        if id(tensor) not in copies:
            found = data(held[id(tensor)])
            written = any(value.tensor is tensor for value in op.outs)
            copies[id(tensor)] = found.clone() if written else found
        return copies[id(tensor)]

    with ExitStack() as casts:
        for device, dtype in op.cast:
            casts.enter_context(torch.autocast(device, dtype))
        result = op.func(*replaced(op.args, put), **{key: replaced(arg, put) for key, arg in op.kwargs.items()})
    results = [tensor for _, tensor in leaves(result)]
    for value in op.outs:
        if id(value.tensor) in copies:
            made[value.number] = copies[id(value.tensor)]
        elif value.place < len(results):
            made[value.number] = results[value.place]


def _again_in_memory(op: Op, made: dict[int, Tensor], data: Any) -> None:
    """Follow numbers that went through a part of a tensor: written by index, read by index."""
    for value in op.outs:
        if len(op.ins) == 1 and _size(op.ins[0]) == _size(value):
            made[value.number] = data(op.ins[0]).reshape(value.shape)
        else:
            made[value.number] = data(value)


def _size(value: Value) -> int:
    size = 1
    for each in value.shape:
        size *= each
    return size


def _close(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return one.numel() == other.numel() and _close(one.reshape(-1), other.reshape(-1))
    if not one.is_floating_point() and not one.is_complex():
        return bool(torch.equal(one, other.to(one.dtype)))
    coarse = 16 if one.dtype in (torch.float16, torch.bfloat16) else 1
    return bool(torch.allclose(one, other.to(one.dtype), _RTOL * coarse, _ATOL * coarse, equal_nan=True))
