"""Runs a loop by compiled code."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from ..scan import Loop, Ran, strided
from .compiling import load, torch_products
from .products import addresses, own_around_loops, parallel, product
from .values import Unsupported
from .writing import LoopWriter

__all__ = ["CompiledRunner", "Unsupported"]

_FEWEST = 4  # rows that are worth a thread
_KERNEL = ("pack_float", "pack_double", "multiply_float", "multiply_double")


class CompiledRunner:
    """A loop as one call into C, for float32 and float64 on the CPU."""

    def __init__(self, loop: Loop) -> None:
        """Write, compile and load the loop, or raise `Unsupported`."""
        self.loop = loop
        writer = LoopWriter(loop)
        self.source = writer.source()
        self._scratch, self._rows = writer.memory.scratch, writer.rows
        self._function = load(self.source)
        kernel = addresses() if writer.factors.packs else {}
        self._tools = [*torch_products(), *(kernel.get(name, 0) for name in _KERNEL), parallel()]
        self._own = own_around_loops()
        self._strides = [tuple(node.meta["val"].stride()) for node in writer.fixed]
        self._kept = [(tuple(n.meta["val"].shape), n.meta["val"].dtype) for n in writer.results[loop.carried :]]

    def __call__(self, carry: Sequence[Tensor], fixed: Sequence[Tensor], along: Sequence[Tensor], *, steps: int) -> Ran:
        """Run the loop from `carry`, with `along (time, ...)`."""
        loop, parts = self.loop, self._parts()
        rooms = [self._room(place, part, steps=steps, parts=parts) for place, part in enumerate(carry)]
        same = [strided(tensor, strides) for tensor, strides in zip(fixed, self._strides, strict=True)]
        streams = [tensor.contiguous() for tensor in along]
        kept = [torch.empty((steps, *shape), dtype=dtype, device="cpu") for shape, dtype in self._kept]
        tensors = [*rooms, *same, *streams, *kept]
        work, mine = _bytes(self._scratch["work"]), _bytes(self._scratch["mine"] * parts)
        spaces = [(space.data_ptr() + 63) // 64 * 64 for space in (work, mine)]
        pointers = (ctypes.c_void_p * (len(tensors) + 2))(*(tensor.data_ptr() for tensor in tensors), *spaces)
        tools = (ctypes.c_void_p * (len(self._tools) + 1))(torch.get_num_threads(), *self._tools)
        self._function(steps, parts, ctypes.addressof(pointers), ctypes.addressof(tools))
        last = [self._last(place, room, steps=steps) for place, room in enumerate(rooms)]
        return Ran(last, [room if wanted else None for room, wanted in zip(rooms, loop.path, strict=True)], kept)

    @property
    def own_products(self) -> bool:
        """Say whether large products around the loop are computed by our own code, where that is the quicker one."""
        return self._own

    def multiply(self, a: Tensor, b: Tensor) -> Tensor:
        """Return one product around the loop."""
        return product(a, b) if self._own else a @ b

    def _parts(self) -> int:
        """Return how many threads take rows of their own."""
        if not self._rows.apart or not self._tools[-1]:
            return 1
        return max(1, min(torch.get_num_threads(), self._rows.count // _FEWEST))

    def _room(self, place: int, first: Tensor, *, steps: int, parts: int) -> Tensor:
        """Return memory for a carried value: at all steps, or at this one and the next, with the first put in."""
        if self._rows.sums[place]:
            room = first.new_zeros((parts, 2, *first.shape))
            room[0, 0].copy_(first)
            return room
        wanted = self.loop.path[place]
        room = first.new_empty((steps + 1 if wanted else 2, *first.shape))
        room[steps if self.loop.backward and wanted else 0].copy_(first)
        return room

    def _last(self, place: int, room: Tensor, *, steps: int) -> Tensor:
        if self._rows.sums[place]:
            return room[:, steps % 2].sum(0)
        if not self.loop.path[place]:
            return room[steps % 2].clone()
        return room[0 if self.loop.backward else steps].clone()


def _bytes(count: int) -> Tensor:
    return torch.empty(max(count, 1) + 64, dtype=torch.uint8, device="cpu")
