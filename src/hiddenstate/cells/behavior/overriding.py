"""Replacing the starts of loops by other tensors while a call of the model runs."""

from __future__ import annotations

import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import nullcontext
from functools import partial
from types import FrameType
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..listener import Rank, around, watchers, watching
from ..signature import Arguments
from .names import module_tensors
from .operation import leaves, operands, replaced
from .starts import OwnStart
from .taps import Chain, Site, chain_of, may_be_at, offsets_of
from .trace import Trace

Put: TypeAlias = Callable[[OwnStart, Tensor], "Tensor | None"]


class _ThreadOverriding(threading.local):
    tapped: Overriding | None = None  # the taps of the next call do this object's work


_here = _ThreadOverriding()


def overriding_now() -> Overriding | None:
    """Return the replacement of starts that the taps of the present call are to make."""
    return _here.tapped


def _held(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a model by their names in a trace."""
    found: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        found.update({f"{path}.{name}".strip("."): tensor for name, tensor in module_tensors(module)})
    return found | dict(model.named_buffers()) | dict(model.named_parameters())


def _memory(tensor: Tensor) -> Any:
    return tensor.data_ptr(), tensor.shape, tensor.stride()


class Overriding(TorchFunctionMode):
    """Replaces the starts of loops by other tensors while it is active."""

    def __init__(self, model: nn.Module, starts: Iterable[OwnStart], put: Put, *, ends: bool) -> None:
        """Replace each of `starts` by what `put` returns for it, or leave it if that is None.

        With `ends`, also keep the last value made at the place of each part.
        """
        super().__init__()
        self.ours = True  # nothing is replaced before the model runs
        self.met: dict[OwnStart, Tensor] = {}  # the model's own starts
        self.read: set[OwnStart] = set()  # the starts that were replaced
        self.ends: dict[OwnStart, Tensor] = {}  # the last value of each part that is made in a single place
        self._put = put
        self._instead: dict[OwnStart, Tensor | None] = {}
        self._at: dict[Any, list[OwnStart]] = defaultdict(list)
        self._reading: dict[Any, set[Chain]] = defaultdict(set)  # functions that read a start, with their places
        self._made: Counter[Site] = Counter()
        self._times: Counter[Any] = Counter()  # by tensor and place: how often it was read there
        self._by_id: dict[int, list[OwnStart]] = defaultdict(list)
        self._by_memory: dict[Any, list[OwnStart]] = defaultdict(list)  # starts that are read through another tensor
        self._thread = threading.get_ident()
        self._modules: set[nn.Module] = set()  # modules that read a start or make an end
        self._runs = False  # whether the model is running
        starts = list(starts)
        held = _held(model) if any(start.label for start in starts) else {}
        self._ends: dict[Any, list[OwnStart]] = defaultdict(list)
        for start in starts:
            if ends and start.end is not None:
                self._ends[start.end[0]].append(start)
                self._modules |= {start.end[0]} if isinstance(start.end[0], nn.Module) else set()
            for function, chain, *_ in start.readers:
                if isinstance(function, nn.Module):
                    self._modules.add(function)
                else:
                    self._reading[function].add(chain)
            if start.site is not None:
                self._at[start.site[0]].append(start)
            elif start.label in held:
                self._meet(start, held[start.label])
        chains: dict[Any, set[Chain]] = {function: set(read) for function, read in self._reading.items()}
        for site in [site for start in starts for site in (start.site, start.end) if site is not None]:
            chains.setdefault(site[0], set()).add(site[1])
        # For each function that reads or makes a start or makes an end: the offsets of these calls in the code.
        self.offsets: Mapping[Any, Set[int]] = {function: offsets_of(each) for function, each in chains.items()}

    def beneath(self, run: Callable[[], Any], through: Callable[[Callable[[], Any]], Any], *, tapped: bool) -> Any:
        """Return the result of `through(run)`, with this mode beneath all modes that `through` puts around `run`.

        If `through` only taps the call, the taps do this work too, so that each operation passes through one mode only.
        """

        def inner() -> Any:
            self.ours, self._runs = False, True
            try:
                return run()
            finally:
                self.ours, self._runs = True, False

        mode = nullcontext() if tapped else self
        before, _here.tapped = _here.tapped, self if tapped else None
        handles = [around(module, partial(self._through, module), rank=Rank.CARRY) for module in self._modules]
        try:
            with mode, watching(self):
                return through(inner)
        finally:
            _here.tapped = before
            for handle in handles:
                handle.remove()

    def _through(self, module: nn.Module, arguments: Arguments, run: Callable[[Arguments], Any]) -> Any:
        """Run a call of a module that reads a start or makes an end."""
        if not self._runs or threading.get_ident() != self._thread:
            return run(arguments)
        frame = sys._getframe(1)
        chain = chain_of(frame)[-1:]
        args, kwargs = self._handed((module, chain), *arguments)
        result = run((args, kwargs))
        if module in self._ends:
            self._note_ends(self._ends[module], result, chain)
        return result

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one operation with replaced starts."""
        kwargs, frame = kwargs or {}, sys._getframe(1)
        if self.ours or not may_be_at(frame, self.offsets.get(func)) or threading.get_ident() != self._thread:
            return func(*args, **kwargs)
        args, kwargs = self.handed(func, args, kwargs, frame)
        return self.made(func, func(*args, **kwargs), frame)

    def handed(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], frame: FrameType
    ) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """Return the arguments for an operation, with starts replaced."""
        if self._by_id and func in self._reading and any(self._starts_of(tensor) for tensor in operands(args, kwargs)):
            chain = chain_of(frame)
            if chain in self._reading[func]:
                return self._handed((func, chain), args, kwargs)
        return args, kwargs

    def made(self, func: Any, result: Any, frame: FrameType) -> Any:
        """Return the result of an operation, with starts replaced."""
        if func in self._ends:
            self._note_ends(self._ends[func], result, chain_of(frame))
        starts = self._at.get(func)
        return result if starts is None else self._noted(starts, func, result, frame)

    def _note_ends(self, starts: list[OwnStart], result: Any, chain: Chain) -> None:
        made = [result] if isinstance(result, Tensor) else [tensor for _, tensor in leaves(result)]
        for start in starts:
            if start.end is not None and start.end[1] == chain and start.end[2] < len(made):
                self.ends[start] = made[start.end[2]]

    def _noted(self, starts: list[OwnStart], func: Any, result: Any, frame: FrameType) -> Any:
        chain = chain_of(frame)
        here = [start for start in starts if start.site is not None and start.site[1] == chain]
        if not here:
            return result
        made = [result] if isinstance(result, Tensor) else [tensor for _, tensor in leaves(result)]
        for place, tensor in enumerate(made):
            site = (func, chain, place)
            number = self._made[site]
            self._made[site] += 1
            for start in here:
                if start.site == site and start.number == number:
                    self._meet(start, tensor)
                    if not start.readers and tensor is result:
                        instead = self._for(start)
                        result = result if instead is None else instead.clone()  # the model writes into it
        return result

    def _meet(self, start: OwnStart, tensor: Tensor) -> None:
        self.met[start] = tensor
        self._by_id[id(tensor)].append(start)
        if start.alias:
            self._by_memory[_memory(tensor)].append(start)

    def _starts_of(self, tensor: Tensor) -> Sequence[OwnStart]:
        """Return the parts that start from a tensor, or from one in the same memory."""
        found = self._by_id.get(id(tensor), ())
        return found if found or not self._by_memory else self._by_memory.get(_memory(tensor), ())

    def _handed(
        self, where: tuple[Any, Chain], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        position = -1

        def instead(tensor: Tensor) -> Tensor:
            nonlocal position
            position += 1
            starts = self._starts_of(tensor)
            here = (id(tensor), *where, position)
            ways = {(*where, place, nth) for place in (-1, position) for nth in (-1, self._times[here])}
            self._times[here] += bool(starts)
            for start in starts:
                if not ways.isdisjoint(start.readers):
                    found = self._for(start)
                    return tensor if found is None else found
            return tensor

        made = tuple([replaced(arg, instead) for arg in args])
        return made, {key: replaced(arg, instead) for key, arg in kwargs.items()}

    def _tell(self, start: OwnStart) -> None:
        """Tell the trace of this call which numbers were read; if several parts share a start, it cannot be told."""
        other, shared = self._instead[start], len(self._by_id[id(self.met[start])]) > 1
        for watcher in watchers():
            if isinstance(watcher, Trace) and other is not None:
                if shared:
                    watcher.replayable = False
                else:
                    watcher.instead(self.met[start], other)

    def _for(self, start: OwnStart) -> Tensor | None:
        if start not in self._instead:
            before, self.ours = self.ours, True
            try:
                self._instead[start] = self._put(start, self.met[start])
            finally:
                self.ours = before
            self._tell(start)
        self.read.add(start)
        return self._instead[start]
