"""Why a cell cannot run by a schedule, and which line of it is to blame."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from .step import Arguments, Step

_NOT_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


def blame(error: Exception) -> tuple[str, str]:
    """Return what an exception during tracing says, and the user's line that led to it."""
    said = str(error).strip().splitlines() or [type(error).__name__]
    what = said[0]
    if "DataDependent" in type(error).__name__ or "data-dependent" in str(error):
        what = "its Python code asks for the value of a tensor, so another value might take another way"
    if "in-place operation" in what:
        what = "it writes into a tensor that it was given"
    return what, _line_of(traceback.extract_tb(error.__traceback__))


def blame_operation(step: Step, arguments: Arguments, guilty: Callable[[Any], bool], reason: str) -> tuple[str, str]:
    """Return the reason with the first guilty operation's name, and the line that calls it."""
    from torch._subclasses import FakeTensorMode

    finder = _Finder(guilty)
    fields = (arguments.weights, arguments.firsts, arguments.inputs, arguments.states)
    try:
        # With fake tensors: this call must neither draw numbers nor write anywhere.
        with FakeTensorMode(allow_non_fake_inputs=True) as fake, torch.enable_grad(), finder:
            step(*([fake.from_tensor(tensor.detach()) for tensor in tensors] for tensors in fields))
    except Exception:  # the line is a service: without it the reason stands alone
        pass
    return (f"{reason} ({finder.name})" if finder.name else reason), finder.line


class _Finder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Remembers the line in user code from which a guilty operation is first called."""

    def __init__(self, guilty: Callable[[Any], bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.guilty, self.name, self.line = guilty, "", ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not self.name and self.guilty(func):
            self.name = str(func).removeprefix("aten.").split(".")[0]
            self.line = _line_of(traceback.extract_stack())
        return func(*args, **(kwargs or {}))


def _line_of(frames: traceback.StackSummary) -> str:
    for frame in reversed(frames):
        if not frame.filename.startswith(_NOT_USERS) and not frame.filename.startswith("<"):
            return f"{Path(frame.filename).name}:{frame.lineno}: {frame.line}"
    return ""
