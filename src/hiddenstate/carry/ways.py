"""Which way a call takes through a model: what is proven of one way need not hold on another.

A way is a set of places in the code, each with where its operands were made, so that neither the number of steps nor
the numbers in tensors matter. A branch that was not taken before shows, also one that only picks another tensor.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from threading import get_ident
from types import CodeType, FrameType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..cells import Call, watching

Place: TypeAlias = "tuple[Any, ...]"  # a function and the user's instruction that leads to it, or a layer
Taken: TypeAlias = "set[tuple[Place, Any]]"

_NOT_THEIRS = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.dirname(__file__)) + os.sep)
_theirs: dict[CodeType, bool] = {}


class CallWay(TorchFunctionMode):
    """Notes the way that a call takes, while it is on; what layers do inside is their own business."""

    def __init__(self) -> None:
        """Begin with nothing."""
        super().__init__()
        self.ours = True  # until the model itself runs
        self.taken: Taken = set()
        self._made: dict[int, Place] = {}  # by tensor: where it was made; the latest counts
        self._begun = False  # whether a layer was called: what is done before is done to starts
        self._inside = 0
        self._thread = get_ident()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one operation, and note where it is done, and on what."""
        result = func(*args, **kwargs) if kwargs else func(*args)
        kind = type(result)
        if self.ours or self._inside or kind is int or kind is bool or kind is torch.Size or kind is float:
            return result
        if get_ident() == self._thread:
            frame = users_frame(sys._getframe(1))
            self._note((func, frame.f_code, frame.f_lasti, self._begun), (args, kwargs), result)
        return result

    def _note(self, place: Place, given: Any, result: Any) -> None:
        made, taken = self._made, self.taken
        taken.add((place, None))
        for tensor in _tensors(given):
            taken.add((place, made.get(id(tensor))))
        for tensor in _tensors(result):
            made[id(tensor)] = place

    def along(self, run: Callable[[], Any]) -> Any:
        """Return what `run()` does, noted from beginning to end."""
        with watching(self), self:
            return run()

    def through(self, call: Call, run: Callable[[], Call]) -> Call:
        """Run a call of a layer."""
        self._inside += 1
        try:
            done = run()
        finally:
            self._inside -= 1
        self._note((call.layer.name, self._begun), (call.args, call.kwargs), done.result)
        self._begun = True
        return done


@dataclass(slots=True, eq=False)
class KnownWays:
    """The ways through a model on which pieces give what the whole gives, by which of its modules are training."""

    model: nn.Module
    _taken: dict[bytes, Taken] = field(default_factory=dict)
    _modules: list[nn.Module] = field(default_factory=list)

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
        places = [place for place, _ in way.taken - known]
        lines = sorted({line_of(place[1], place[2]) for place in places if len(place) > 2})
        names = sorted({repr(place[0]) for place in places if len(place) == 2})
        return f"it goes another way at {', '.join(lines[:3] or names[:3])}"


def users_frame(frame: FrameType) -> FrameType:
    """Return the innermost frame that is neither torch's nor ours."""
    while True:
        code = frame.f_code
        theirs = _theirs.get(code)
        if theirs is None:
            theirs = _theirs[code] = not code.co_filename.startswith(_NOT_THEIRS)
        if theirs or frame.f_back is None:
            return frame
        frame = frame.f_back


def line_of(code: CodeType, offset: int) -> str:
    """Return file and line of an instruction."""
    found = [line for start, end, line in code.co_lines() if start <= offset < end and line is not None]
    return f"{os.path.basename(code.co_filename)}:{found[0] if found else code.co_firstlineno}"


def _tensors(thing: Any) -> Iterator[Tensor]:
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, tuple | list):
        for inner in thing:
            yield from _tensors(inner)
    elif isinstance(thing, dict):
        for inner in thing.values():
            yield from _tensors(inner)
