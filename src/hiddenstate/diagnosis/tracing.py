"""Which operations a forward makes, on what, and on which line of the user's code."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..state import tensors

_OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
_CALLER = str(Path(__file__).with_name("patient.py"))
_QUIET = {"size", "dim", "get:dtype", "get:device", "get:shape", "get:requires_grad", "get:is_cuda", "numel", "__len__"}


@dataclass(frozen=True, slots=True, eq=False)
class Event:
    """One operation: its name, its tensors, and where the user asked for it."""

    name: str
    inputs: tuple[Tensor, ...]
    output: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    line: str  # "model.py:31", "" where unknown


@dataclass(slots=True, eq=False)
class Trace:
    """All operations of one run, in order; their tensors stay alive, so that identity means something."""

    events: list[Event] = field(default_factory=list)

    def named(self, *names: str) -> list[Event]:
        """Return the operations with one of these names."""
        return [event for event in self.events if event.name in names]


# Operations after which each value is still one of the values before.
REARRANGING = frozenset(
    {
        *("view", "reshape", "chunk", "split", "unbind", "squeeze", "unsqueeze", "transpose", "permute", "flatten"),
        *("__getitem__", "contiguous", "expand", "expand_as", "to", "float", "clone", "movedim", "narrow", "select"),
        *("t", "dropout", "index_select", "gather", "stack", "cat", "repeat", "get:T", "get:mT"),
    }
)


class Tracer(TorchFunctionMode):
    """Writes down every operation while it is active."""

    def __init__(self) -> None:
        """Start with nothing written."""
        super().__init__()
        self.trace = Trace()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do what was asked, and write it down."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__"):
            name = f"{name[2:5]}:{getattr(func.__self__, '__name__', '')}"
        output = func(*args, **kwargs)
        if name not in _QUIET:
            inputs = tuple(tensors((args, kwargs)).values())
            self.trace.events.append(Event(name, inputs, output, args, kwargs, line()))
        return output


def line() -> str:
    """Return the line of the user's code that is being run: `model.py:31`."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if name == _CALLER:
            return ""  # nothing of the user's stands between the call of the model and this operation
        if not name.startswith(_OURS) and not name.startswith("<frozen"):
            return f"{Path(name).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
