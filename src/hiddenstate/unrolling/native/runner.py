"""Runs a loop by compiled code."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from ..scan import Loop, Ran
from .compiling import load, products
from .values import Unsupported
from .writing import Writer

__all__ = ["CompiledRunner", "Unsupported"]


class CompiledRunner:
    """A loop as one call into C, for float32 and float64 on the CPU."""

    def __init__(self, loop: Loop) -> None:
        """Write, compile and load the loop, or raise `Unsupported`."""
        self.loop = loop
        writer = Writer(loop)
        self.source = writer.source()
        self._scratch = writer.memory.scratch
        self._function, self._products = load(self.source), products()
        self._strides = [tuple(node.meta["val"].stride()) for node in writer.fixed]
        self._kept = [(tuple(n.meta["val"].shape), n.meta["val"].dtype) for n in writer.results[loop.carried :]]

    def __call__(self, carry: Sequence[Tensor], fixed: Sequence[Tensor], along: Sequence[Tensor], *, steps: int) -> Ran:
        """Run the loop from `carry`, with `along (time, ...)`."""
        loop = self.loop
        rooms = [
            part.new_empty((steps + 1 if wanted else 2, *part.shape))
            for part, wanted in zip(carry, loop.path, strict=True)
        ]
        for room, part, wanted in zip(rooms, carry, loop.path, strict=True):
            room[steps if loop.backward and wanted else 0].copy_(part)
        same = [_strided(tensor, strides) for tensor, strides in zip(fixed, self._strides, strict=True)]
        streams = [tensor.contiguous() for tensor in along]
        kept = [torch.empty((steps, *shape), dtype=dtype) for shape, dtype in self._kept]
        work = torch.empty(max(self._scratch, 1) + 64, dtype=torch.uint8)
        tensors = [*rooms, *same, *streams, *kept]
        start = (work.data_ptr() + 63) // 64 * 64
        pointers = (ctypes.c_void_p * (len(tensors) + 1))(*(tensor.data_ptr() for tensor in tensors), start)
        self._function(steps, ctypes.addressof(pointers), *self._products)
        last = [
            room[(0 if loop.backward else steps) if wanted else steps % 2].clone()
            for room, wanted in zip(rooms, loop.path, strict=True)
        ]
        return Ran(last, [room if wanted else None for room, wanted in zip(rooms, loop.path, strict=True)], kept)


def _strided(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    if tuple(tensor.stride()) == strides:
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype).copy_(tensor)
