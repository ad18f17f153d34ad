"""The place of a value in memory while a body runs, and how it is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

C_TYPES = {torch.float32: "float", torch.float64: "double", torch.bool: "uint8_t", torch.int64: "int64_t"}


class Unsupported(Exception):
    """A body that cannot be written as C; it runs by torch's own operations instead."""


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor in memory: a pointer in the C code, and steps along each axis."""

    base: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    ctype: str
    offset: int = 0

    def at(self, index: Sequence[str]) -> str:
        """Return the C expression for one element; axes are lined up from the right."""
        shift = len(index) - len(self.shape)
        terms = [str(self.offset)] if self.offset else []
        for axis, (size, stride) in enumerate(zip(self.shape, self.strides, strict=True)):
            if size != 1 and stride:
                name = index[axis + shift]
                terms.append(name if stride == 1 else f"{name} * {stride}L")
        return f"{self.base}[{' + '.join(terms) or '0'}]"

    def pointer(self) -> str:
        """Return the C expression for the address of the first element."""
        return f"{self.base} + {self.offset}L" if self.offset else self.base

    @property
    def contiguous(self) -> bool:
        """Whether elements follow each other without gaps, the last axis fastest."""
        return self.strides == dense(self.shape) or all(
            size == 1 or stride == full
            for size, stride, full in zip(self.shape, self.strides, dense(self.shape), strict=True)
        )

    def moved(self, shape: Sequence[int], strides: Sequence[int], offset: int = 0) -> Place:
        """Return a view of the same memory."""
        return replace(self, shape=tuple(shape), strides=tuple(strides), offset=self.offset + offset)


def dense(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a tensor without gaps."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """Return the shape of a node's value."""
    return tuple(int(size) for size in node.meta["val"].shape)


def ctype_of(node: fx.Node) -> str:
    """Return the C type of a node's elements."""
    return c_type(node.meta["val"].dtype)


def c_type(dtype: torch.dtype) -> str:
    """Return the C type of a dtype."""
    if dtype not in C_TYPES:
        raise Unsupported(f"{dtype} has no C type here")
    return C_TYPES[dtype]
