"""Which way a call takes through a model: what is proven of one way need not hold on another.

A way is a set of places in the code, each with where its operands were made, so that neither the number of steps nor
the numbers in tensors matter. A branch that was not taken before shows, also one that only picks another tensor.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from threading import get_ident
from types import CodeType, FrameType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..cells import Call, eager, watching

# By function and the user's instruction that leads to it (code object by its id, whose own hash is slow), or by layer;
# and whether a layer was called before: what is done earlier is done to starts. The places are numbered from 1.
Places: TypeAlias = "dict[tuple[Any, ...], int]"

_NOT_THEIRS = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.dirname(__file__)) + os.sep)
_codes: dict[int, tuple[bool, CodeType]] = {}  # by id: whether it is the user's, and what keeps the id its own
_LISTED = (tuple, list)
_MADE = (Tensor, *_LISTED)
_SHIFT = 32  # bits for the place where an operand was made


class CallWay(TorchFunctionMode):
    """Notes the way that a call takes, while it is on; what layers do inside is their own business."""

    def __init__(self, places: Places) -> None:
        """Begin with nothing; places get the numbers that they have in `places`, or new ones."""
        super().__init__()
        self.ours = True  # until the model itself runs
        self.taken: set[int] = set()  # number of a place, and of the one where an operand was made
        self._places = places
        self._made: dict[int, int] = {}  # by tensor: where it was made; the latest counts
        self._begun = False
        self._inside = self._depth = 0
        self._thread = get_ident()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one operation, and note where it is done, and on what."""
        result = func(*args, **kwargs) if kwargs else func(*args)
        # Every operation of a model comes by here: what tells most of them apart is asked first.
        if self.ours or self._inside or not (result is None or isinstance(result, _MADE)):
            return result
        if type(result) is not torch.Size and get_ident() == self._thread:
            frame = users_frame(sys._getframe(1))
            self._note((func, id(frame.f_code), frame.f_lasti, self._begun), (args, kwargs), result)
        return result

    def _note(self, place: tuple[Any, ...], given: tuple[tuple[Any, ...], Any], result: Any) -> None:
        number = self._places.setdefault(place, len(self._places) + 1)
        base, args = number << _SHIFT, given[0]
        self.taken.add(base)
        for arg in (*args, *given[1].values()) if given[1] else args:
            if isinstance(arg, Tensor):
                self.taken.add(base | self._made.get(id(arg), 0))
            elif isinstance(arg, _LISTED):
                self.taken.update([base | self._made.get(id(each), 0) for each in _tensors(arg)])
        if isinstance(result, Tensor):
            self._made[id(result)] = number
        elif result is not None:
            self._made.update(dict.fromkeys(map(id, _tensors(result)), number))

    def along(self, run: Callable[[], Any]) -> Any:
        """Return what `run()` does, noted from beginning to end, and as it was written: nobody sees into a graph."""
        with eager(), watching(self), self:
            self._depth = torch._C._len_torch_function_stack()
            return run()

    def through(self, call: Call, run: Callable[[], Call]) -> Call:
        """Run a call of a layer, as if nobody looked."""
        on_top = torch._C._len_torch_function_stack() == self._depth  # else a mode of the model's own goes on
        self._inside += 1
        if on_top:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            done = run()
        finally:
            if on_top:
                self.__enter__()  # type: ignore[no-untyped-call]
            self._inside -= 1
        self._note((call.layer.name, self._begun), (call.args, call.kwargs), done.result)
        self._begun = True
        return done


@dataclass(slots=True, eq=False)
class KnownWays:
    """The ways through a model on which pieces give what the whole gives, by which of its modules are training."""

    model: nn.Module
    _places: Places = field(default_factory=dict)
    _taken: dict[bytes, set[int]] = field(default_factory=dict)
    _modules: list[nn.Module] = field(default_factory=list)

    def new(self) -> CallWay:
        """Return what notes the way of a call."""
        return CallWay(self._places)

    @property
    def mode(self) -> bytes:
        """Which of the model's modules are training."""
        return bytes([module.training for module in self._modules])

    def learn(self, way: CallWay | None) -> None:
        """Take note of a way that holds."""
        self._modules = list(self.model.modules())
        self._taken.setdefault(self.mode, set()).update(way.taken if way is not None else ())

    def news(self, way: CallWay | None) -> str:
        """Say what is new in a call: where it leaves the ways that are known, or the mode; nothing where all is."""
        known = self._taken.get(self.mode)
        if known is None:
            return f"no call before had {type(self.model).__name__} {'training' if self.model.training else 'in eval'}"
        if way is None or way.taken <= known:
            return ""
        new = {taken >> _SHIFT for taken in way.taken - known}
        places = [place for place, number in self._places.items() if number in new]
        lines = sorted({line_of(_codes[place[1]][1], place[2]) for place in places if len(place) > 2})
        names = sorted({repr(place[0]) for place in places if len(place) == 2})
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


def line_of(code: CodeType, offset: int) -> str:
    """Return file and line of an instruction."""
    found = [line for start, end, line in code.co_lines() if start <= offset < end and line is not None]
    return f"{os.path.basename(code.co_filename)}:{found[0] if found else code.co_firstlineno}"


def _tensors(things: tuple[Any, ...] | list[Any]) -> list[Tensor]:
    """Return the tensors in a list, and in those in it."""
    found: list[Tensor] = []
    for each in things:
        if isinstance(each, Tensor):
            found.append(each)
        elif isinstance(each, _LISTED):
            found += _tensors(each)
    return found
