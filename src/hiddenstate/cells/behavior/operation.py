"""An operation and a module call, as the trace writes them down."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .memory import Value
from .places import Scope, line_at

# What gives Python or numpy a number that depends on a tensor's content.
ESCAPES = {"item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__", "__complex__", "__array__"}
ESCAPES |= {"equal", "allclose", "is_nonzero", "__contains__"}


class Op:
    """One operation."""

    __slots__ = ("args", "call", "cast", "func", "ins", "kwargs", "name", "offset", "outs", "reads", "scope")

    def __init__(self, func: Any, name: str, called: tuple[Any, Any], place: tuple[Scope, int, int]) -> None:
        """Note an operation with its arguments; `place` is scope, instruction, and the module call it happens in."""
        self.func: Callable[..., Any] = func
        self.name = name
        self.args: tuple[Any, ...] = called[0]
        self.kwargs: Mapping[str, Any] = called[1]
        self.scope, self.offset, self.call = place
        self.ins: list[Value] = []
        self.reads: list[tuple[Tensor, Value]] = []  # what each operand held
        self.outs: list[Value] = []
        self.cast = _autocast() if torch._C._is_any_autocast_enabled() else ()

    @property
    def escapes(self) -> bool:
        """Whether a number left for Python."""
        return self.name in ESCAPES

    @property
    def where(self) -> str:
        """File and line, in the user's code."""
        return line_at(self.scope, self.offset)


@dataclass(slots=True, eq=False, repr=False)
class Call:
    """One call of a module."""

    number: int
    module: nn.Module
    path: str
    parent: int
    start: int
    end: int = -1
    known: bool = False
    site: tuple[str, int] = ("", 0)  # file and line of the caller
    args: list[tuple[tuple[Any, ...], Value]] = field(default_factory=list)
    results: list[tuple[tuple[Any, ...], Value]] = field(default_factory=list)
    given: Any = None  # arguments and result as they were, with what the tensors are nested in
    returned: Any = None


def _autocast() -> tuple[tuple[str, torch.dtype], ...]:
    """Return the kinds of device for which autocast is on, with the dtype."""
    kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind))
