"""The way a call takes through a model's code: what was proven for one way need not hold for another.

A way is a set of places in the code, each with the places that made its operands. It depends neither on the number of
steps nor on the values in tensors. A branch that was not taken before shows, even if it only picks another tensor.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from threading import get_ident
from types import CodeType, FrameType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..cells import Call, eager, tells_now, watching
from ..state import tensors

# A place is a function and the user's instruction that calls it (the code object by its id, since hashing it is slow),
# or a layer, and whether a layer was called before: operations before the first layer work on starts.
Place: TypeAlias = "tuple[Any, ...]"
# By place: its number, and the numbers of the places that made its operands, each with its position; or neighbors' in
# lists.
Steps: TypeAlias = "dict[Place, tuple[int, set[Any]]]"
_POSITIONS = 8  # bits for a position

_NOT_THEIRS = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.dirname(__file__)) + os.sep)
_codes: dict[int, tuple[bool, CodeType]] = {}  # by id: whether the code is the user's; the code, to keep its id in use
_LISTED = (tuple, list)
_MADE = (Tensor, *_LISTED)


class CallWay(TorchFunctionMode):
    """Notes where a call leaves the known ways, while it is active; operations inside layers are not noted.

    Every operation of a model passes here, so each is compared with the known ways at once, and only news is kept.
    """

    def __init__(self, known: Steps, numbers: dict[Place, int], mode: bytes, starts: Mapping[str, set[int]]) -> None:
        """Start without news; places get their numbers from `numbers`, beginning with 1, or new ones."""
        super().__init__()
        self.mode = mode
        self.ours = True  # until the model itself runs
        self.news: Steps = {}  # steps that are not known, in the same form
        self._known, self._numbers = known, numbers
        self._made: dict[int, int] = {}  # by id of a tensor: the number of the place that last made it
        self.begun: dict[str, set[int]] = {}  # by layer that was called: the places that made its first state
        self.started: set[int] = set()  # places in this call that make what layers were seen to start from
        self._starts = set[int]().union(*starts.values())
        self._begun = False
        self._inside = self._depth = 0
        self._thread = get_ident()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one operation, and note its place and the origin of its operands."""
        result = func(*args, **kwargs) if kwargs else func(*args)
        if not self.ours:
            self.heed(func, args, kwargs, result, sys._getframe(1))
        return result

    def heed(self, func: Any, args: tuple[Any, ...], kwargs: Any, result: Any, frame: FrameType) -> None:
        """Note an operation that was called from `frame`."""
        if self._inside or not (result is None or isinstance(result, _MADE)):
            return
        if get_ident() == self._thread and type(result) is not torch.Size:
            known = _codes.get(id(frame.f_code))
            if known is None or not known[0]:
                frame = users_frame(frame)
            self._note((func, id(frame.f_code), frame.f_lasti, self._begun), args, kwargs, result)

    def _note(self, place: Place, args: tuple[Any, ...], kwargs: Any, result: Any) -> None:
        made, (number, origins) = self._made, self._known.get(place) or self._new(place)
        for position, arg in enumerate((*args, *kwargs.values()) if kwargs else args):
            if isinstance(arg, Tensor):
                if (origin := made.get(id(arg), 0) << _POSITIONS | position) not in origins:
                    self._new(place)[1].add(origin)
            elif isinstance(arg, _LISTED):  # in order, however long
                before = -1
                for each in [made.get(id(tensor), 0) for tensor in _tensors(arg)]:
                    if each != before and (position, before, each) not in origins:
                        self._new(place)[1].add((position, before, each))
                    before = each
        if number in self._starts:
            self.started.add(number)
        if isinstance(result, Tensor):
            made[id(result)] = number
        elif result is not None:
            made.update(dict.fromkeys(map(id, _tensors(result)), number))

    def _new(self, place: Place) -> tuple[int, set[Any]]:
        if place not in self.news:
            self.news[place] = self._numbers.setdefault(place, len(self._numbers) + 1), set()
        return self.news[place]

    def along(self, run: Callable[[], Any]) -> Any:
        """Return the result of `run()`, noting its way; Dynamo is off, since nothing is visible inside a graph."""
        taps = tells_now()
        if taps is None or taps.way is not None:
            with eager(), watching(self), self:
                self._depth = torch._C._len_torch_function_stack()
                return run()
        taps.way, self._depth = self, -1  # the taps see all operations already, and one mode costs less than two
        try:
            with eager(), watching(self):
                return run()
        finally:
            taps.way = None

    def through(self, call: Call, run: Callable[[], Call]) -> Call:
        """Run a call of a layer without noting its operations."""
        if call.layer.name not in self.begun:
            given = tensors(call.given_native).values()
            self.begun[call.layer.name] = {self._made.get(id(tensor), 0) for tensor in given}
        on_top = torch._C._len_torch_function_stack() == self._depth  # otherwise a mode of the model's own is active
        self._inside += 1
        if on_top:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            done = run()
        finally:
            if on_top:
                self.__enter__()  # type: ignore[no-untyped-call]
            self._inside -= 1
        place = call.layer.name, self._begun
        self._note(place, call.args, call.kwargs, done.result)
        if isinstance(done.result, _LISTED):  # its output does not count as its state
            for which, tensor in enumerate(_tensors(done.result)):
                self._made[id(tensor)] = self._numbers.setdefault((*place, which), len(self._numbers) + 1)
        self._begun = True
        return done


@dataclass(slots=True, eq=False)
class KnownWays:
    """The ways through a model on which pieces give what the whole gives, by which of its modules are training."""

    model: nn.Module
    _numbers: dict[Place, int] = field(default_factory=dict)
    _known: dict[bytes, Steps] = field(default_factory=dict)
    _modules: list[nn.Module] = field(default_factory=list)
    _starts: dict[str, set[int]] = field(default_factory=dict)  # by layer: the places that made its start

    def new(self) -> CallWay:
        """Return an object that notes the way of a call."""
        self._modules = self._modules or list(self.model.modules())
        return CallWay(self._known.get(mode := self._mode(), {}), self._numbers, mode, self._starts)

    def _mode(self) -> bytes:
        """Return which of the model's modules are training."""
        return bytes([module.training for module in self._modules])

    def unused(self, way: CallWay | None, kept: Iterable[str]) -> list[str]:
        """Return those of these layers whose start a call makes without calling the layer."""
        if way is None:
            return []
        for name, places in way.begun.items():
            self._starts.setdefault(name, set()).update(places - {0})
        left = [name for name in kept if name not in way.begun]
        return [name for name in left if not way.started.isdisjoint(self._starts.get(name, ()))]

    def reading(self, way: CallWay, layers: Iterable[str]) -> list[str]:
        """Return the lines at which a call reads the starts of layers and earlier calls did not."""
        starts = set[int]().union(*(self._starts.get(name, ()) for name in layers))
        found = []
        for place, (_, origins) in way.news.items():
            read = {origin[2] if isinstance(origin, tuple) else origin >> _POSITIONS for origin in origins}
            if len(place) > 2 and not read.isdisjoint(starts):
                found.append(line_of(_codes[place[1]][1], place[2]))
        return sorted(set(found))

    def learn(self, way: CallWay | None, like: CallWay | None = None) -> None:
        """Learn a proven way in its mode, or in the mode in which the way `like` was taken."""
        like = like or way
        if like is None:
            self._modules = list(self.model.modules())
        known = self._known.setdefault(self._mode() if like is None else like.mode, {})
        for place, (number, origins) in way.news.items() if way is not None else ():
            known.setdefault(place, (number, set()))[1].update(origins)

    def news(self, way: CallWay | None) -> str:
        """Describe where a call leaves the known ways, or is in a new mode; "" if it does not."""
        if (self._mode() if way is None else way.mode) not in self._known:
            return f"no call before had {type(self.model).__name__} {'training' if self.model.training else 'in eval'}"
        if way is None or not way.news:
            return ""
        lines = sorted({line_of(_codes[place[1]][1], place[2]) for place in way.news if len(place) > 2})
        names = sorted({repr(place[0]) for place in way.news if len(place) == 2})
        return f"it goes another way at {', '.join(lines[:3] or names[:3])}"


def users_frame(frame: FrameType) -> FrameType:
    """Return the innermost frame that is neither torch's nor ours."""
    while True:
        known = _codes.get(id(frame.f_code))
        if known is None:
            code = frame.f_code
            known = _codes[id(code)] = not code.co_filename.startswith(_NOT_THEIRS), code
        if known[0] or frame.f_back is None:
            return frame
        frame = frame.f_back


def line_now(frame: FrameType) -> str:
    """Return file and line of the user's code that is being run beneath a frame."""
    frame = users_frame(frame)
    return line_of(frame.f_code, frame.f_lasti)


def line_of(code: CodeType, offset: int) -> str:
    """Return file and line of an instruction."""
    found = [line for start, end, line in code.co_lines() if start <= offset < end and line is not None]
    return f"{os.path.basename(code.co_filename)}:{found[0] if found else code.co_firstlineno}"


def _tensors(things: tuple[Any, ...] | list[Any]) -> list[Tensor]:
    """Return the tensors in a list and in the lists within it."""
    found: list[Tensor] = []
    for each in things:
        if isinstance(each, Tensor):
            found.append(each)
        elif isinstance(each, _LISTED):
            found += _tensors(each)
    return found
