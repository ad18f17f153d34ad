"""Which operands an operation writes, and which part of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .operation import Op

# In-place operations whose result does not depend on what was there before.
OVERWRITES = {
    "copy_",
    "zero_",
    "fill_",
    "normal_",
    "uniform_",
    "random_",
    "bernoulli_",
    "exponential_",
    "set_",
    "__set__",
}


_WRITERS = {"__setitem__", "__set__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "__iand__"}
_WRITERS |= {"__ior__", "__ixor__", "__imod__", "__ifloordiv__"}


def in_place(name: str) -> bool:
    """Say whether an operation writes its first operand, by its name: `add_`, `__iadd__`, `__setitem__`."""
    return name[-1:] == "_" and (name[-2:] != "__" or name in _WRITERS)


def written_by(
    name: str, given: tuple[list[Tensor], list[int]], moved: list[Tensor], kwargs: Mapping[str, Any]
) -> list[Tensor]:
    """Return the operands that an operation wrote, one for each storage: views on it move their version too."""
    out, (tensors, versions) = kwargs.get("out"), given
    if isinstance(out, Tensor):
        return [out]
    if tensors and (name == "__set__" or (versions[0] == -1 and in_place(name))):
        return [tensors[0]]  # inference tensors do not count writes: the name tells
    found: dict[int, Tensor] = {}
    for tensor in moved:
        key = tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)
        found.setdefault(key, tensor)
    return list(found.values())


def region_of(op: Op, target: Tensor) -> Tensor:
    """Return the part of `target` that an operation wrote, where that is known: all of it, or a basic index."""
    if op.name != "__setitem__" or id(op.args[0]) != id(target):
        return target
    index = op.args[1] if isinstance(op.args[1], tuple) else (op.args[1],)
    if not all(i is None or i is Ellipsis or (isinstance(i, int | slice) and not isinstance(i, bool)) for i in index):
        return target
    region: Tensor = target.detach()[op.args[1]]
    rows = isinstance(index[0], slice) and index[0].start in (None, 0) and index[0].stop is not None
    if not any(isinstance(i, int) for i in index) and (rows or 4 * region.numel() >= target.numel()):
        return target  # a large part of a tensor is rewritten: the tensor is what goes on, not the part
    return region
