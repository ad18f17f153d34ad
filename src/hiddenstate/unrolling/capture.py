"""A whole pass over all steps as one CUDA graph: recorded once for a shape, then replayed."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

Pass = Callable[[list[Tensor]], list[Tensor]]
_MOST = 4  # recordings kept for one pass; each holds the memory of its shape


class Captured:
    """A function of tensors, recorded for the shapes of its first arguments."""

    def __init__(self, function: Pass, samples: Sequence[Tensor]) -> None:
        """Run the function a few times to warm up, then record it."""
        device = samples[0].device
        self._inputs = [sample.detach().clone() for sample in samples]
        self._lock, self._free = threading.Lock(), torch.cuda.Event()  # type: ignore[no-untyped-call]
        aside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(aside):
            for _ in range(2):
                function(self._inputs)
        torch.cuda.current_stream(device).wait_stream(aside)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._outputs = function(self._inputs)
        self._free.record()

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the function's results for these tensors, in memory of their own."""
        with self._lock:
            # The recording has one set of buffers: whoever used it last, on whichever stream, goes first.
            torch.cuda.current_stream(self._inputs[0].device).wait_event(self._free)
            torch._foreach_copy_(self._inputs, [tensor.detach() for tensor in tensors])
            self._graph.replay()
            results = [torch.empty_like(output) for output in self._outputs]
            torch._foreach_copy_(results, self._outputs)
            self._free.record()
        return results


class Captures:
    """Recordings of one pass, by shape; those not used for longest are given up."""

    def __init__(self, function: Callable[[int], Pass]) -> None:
        """Record the pass that `function` gives for a number of steps."""
        self._function = function
        self._known: OrderedDict[Hashable, Captured] = OrderedDict()
        self._lock = threading.Lock()

    def __call__(self, steps: int, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Replay the recording for this many steps, made now if there is none."""
        key = (steps, tuple(tensor.dtype for tensor in tensors))
        with self._lock:
            captured = self._known.get(key)
            if captured is None:
                captured = self._known[key] = Captured(self._function(steps), tensors)
            self._known.move_to_end(key)
            while len(self._known) > _MOST:
                self._known.popitem(last=False)
        return captured(tensors)
