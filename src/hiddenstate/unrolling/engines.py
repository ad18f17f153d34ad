"""Which engine runs a cell along time."""

from __future__ import annotations

from typing import Literal, TypeAlias

from torch import Tensor

from ..cells import Layer
from ..errors import BadInput
from ..state import State
from .checks import Task
from .loop import run_loop

Engine: TypeAlias = Literal["auto", "fast", "loop"]
_ENGINES = ("auto", "fast", "loop")


def check_engine(engine: str) -> None:
    """Refuse a name that is no engine's."""
    if engine not in _ENGINES:
        raise BadInput(f"engine is {engine!r}, but 'auto', 'fast' or 'loop' is needed.")


def run_cell(layer: Layer, task: Task, engine: Engine = "auto") -> tuple[Tensor, State]:
    """Run a cell along a checked task."""
    return run_loop(layer, task)
