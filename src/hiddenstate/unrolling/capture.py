"""A whole pass over all steps as one CUDA graph: recorded for a shape that comes back, then replayed."""

from __future__ import annotations

import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from ..errors import Untraceable

Pass = Callable[[list[Tensor]], list[Tensor]]
_MOST = 4  # recordings kept for one pass; each holds the memory of its shape
_AFTER = 2  # calls with one number of steps before it is worth a recording: lengths that change are not
_AGAIN = 100  # calls before a recording that was given up is made again: some data has more lengths than recordings
_SHARE = 16  # recordings of one pass hold no more than this part of the device's memory
_COUNTED = 256  # numbers of steps whose calls are counted


class Captured:
    """A function of tensors, recorded for the shapes of its first arguments."""

    def __init__(self, function: Pass, samples: Sequence[Tensor]) -> None:
        """Run the function a few times to warm up, then record it."""
        device = samples[0].device
        self._index = device.index if device.index is not None else torch.cuda.current_device()
        self._inputs = [sample.detach().clone() for sample in samples]
        self._lock = threading.Lock()
        aside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(aside):
            for _ in range(2):
                function(self._inputs)
        torch.cuda.current_stream(device).wait_stream(aside)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._outputs = function(self._inputs)
        self._stream, self._number = torch.cuda.current_stream(device), self._current()

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the function's results for these tensors, in memory of their own."""
        with self._lock:
            self._take_turns()
            torch._foreach_copy_(self._inputs, list(tensors))
            self._graph.replay()
            results = [torch.empty_like(output) for output in self._outputs]
            torch._foreach_copy_(results, self._outputs)
        return results

    @property
    def bytes(self) -> int:
        """Memory that the recording holds, beside what it works in."""
        return sum(tensor.nbytes for tensor in (*self._inputs, *self._outputs))

    def _take_turns(self) -> None:
        # The recording has one set of buffers: whoever used it last, on whichever stream, goes first.
        if self._current() != self._number:
            stream = torch.cuda.current_stream(self._index)
            stream.wait_stream(self._stream)
            self._stream, self._number = stream, self._current()

    def _current(self) -> int:
        return int(torch._C._cuda_getCurrentRawStream(self._index))


class Captures:
    """One pass, recorded for each number of steps that comes back; beyond a few, the oldest recording is given up."""

    def __init__(self, run: Pass, record: Pass, check: Callable[[list[Tensor], list[Tensor]], None]) -> None:
        """Call `run`, and record `record` where that pays and `check` finds that it gives the same."""
        self._run, self._record, self._check = run, record, check
        self._known: OrderedDict[Hashable, Captured | None] = OrderedDict()
        self._calls: OrderedDict[Hashable, int] = OrderedDict()
        self._lock = threading.Lock()

    def __call__(self, steps: int, tensors: list[Tensor]) -> list[Tensor]:
        """Return the pass's results for this many steps."""
        key = (steps, tuple(tensor.dtype for tensor in tensors))
        captured = self._known.get(key)
        if captured is None:
            with self._lock:
                captured = self._captured(key, tensors)
        if captured is not None and not torch.cuda.is_current_stream_capturing():  # no recording within another
            return captured(tensors)
        return self._run([tensor.detach() for tensor in tensors])  # compiled code would ask where they come from

    def _captured(self, key: Hashable, tensors: list[Tensor]) -> Captured | None:
        """Return the recording, made now if this number of steps keeps coming back."""
        if key in self._known or self._count(key) <= _AFTER or torch.cuda.is_current_stream_capturing():
            return self._known.get(key)
        room = torch.cuda.get_device_properties(tensors[0].device).total_memory // _SHARE
        if sum(tensor.nbytes for tensor in tensors) > room // 2:
            self._known[key] = None  # long enough for launches not to matter
            return None
        made: Captured | None = None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of what torch's compiler thinks of the user's settings
                made = Captured(self._record, tensors)
                self._check(made(tensors), self._run([tensor.detach() for tensor in tensors]))
        except (Untraceable, RuntimeError):  # whatever its compiler meets, the pass runs as it did before
            made = None
        self._known[key] = made
        while len(self._known) > _MOST or self._held() > room:
            given_up, _ = self._known.popitem(last=False)
            self._calls[given_up] = _AFTER - _AGAIN
        return made

    def _held(self) -> int:
        return sum(captured.bytes for captured in self._known.values() if captured is not None)

    def _count(self, key: Hashable) -> int:
        self._calls[key] = self._calls.get(key, 0) + 1
        self._calls.move_to_end(key)
        while len(self._calls) > _COUNTED:
            self._calls.popitem(last=False)
        return self._calls[key]
