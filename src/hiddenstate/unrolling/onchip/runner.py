"""Runs a loop by one kernel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..native.values import Unsupported
from ..scan import Loop, Ran, strided
from .compiling import Launchable
from .kernel import Kernel
from .plan import Plan
from .writing import slots

_OLDEST = (8, 0)  # compute capability with the instructions for tf32 and bfloat16


class OnChipRunner:
    """A loop as one launch, for float32, bfloat16 and float16 on a GPU."""

    def __init__(self, loop: Loop, device: torch.device, *, exact: bool) -> None:
        """Write, compile and load the loop's kernel, or raise `Unsupported`."""
        if torch.version.cuda is None or torch.cuda.get_device_capability(device) < _OLDEST:
            raise Unsupported("this device has no kernel here")
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._prepare(loop, Kernel(Plan(loop), processors=processors, exact=exact))
        self._launch = Launchable(self.kernel.source(), device, shared=self.kernel.shared)

    def _prepare(self, loop: Loop, kernel: Kernel) -> None:
        plan = kernel.plan
        self.loop, self.kernel = loop, kernel
        self._slots = [slots(plan, place) for place in range(loop.carried)]
        self._strides = [tuple(node.meta["val"].stride()) for node in plan.fixed]
        self._kept = [(tuple(n.meta["val"].shape), n.meta["val"].dtype) for n in plan.results[loop.carried :]]

    def __call__(self, carry: Sequence[Tensor], fixed: Sequence[Tensor], along: Sequence[Tensor], *, steps: int) -> Ran:
        """Run the loop from `carry`, with `along (time, ...)`."""
        loop, kernel, device = self.loop, self.kernel, carry[0].device
        rooms = [
            part.new_empty((count or steps + 1, *part.shape)) for part, count in zip(carry, self._slots, strict=True)
        ]
        for room, part, count in zip(rooms, carry, self._slots, strict=True):
            room[steps if loop.backward and not count else 0].copy_(part)
        same = [strided(tensor, strides) for tensor, strides in zip(fixed, self._strides, strict=True)]
        streams = [tensor.contiguous() for tensor in along]
        kept = [torch.empty((steps, *shape), dtype=dtype, device=device) for shape, dtype in self._kept]
        work = torch.empty(max(2 * kernel.work, 1), dtype=torch.uint8, device=device)
        bars = torch.zeros(32 * kernel.sizes.groups, dtype=torch.int32, device=device)
        tensors = [*rooms, *same, *streams, *kept, work, bars]
        self._launch(steps, tensors, grid=kernel.grid, threads=kernel.sizes.threads)
        last = [
            room[(0 if loop.backward else steps) if not count else steps % 2 if count == 2 else 0]
            for room, count in zip(rooms, self._slots, strict=True)
        ]
        return Ran(last, [None if count else room for room, count in zip(rooms, self._slots, strict=True)], kept)
