"""The reasons why a cell cannot run by a schedule, with the line of code that causes it."""

from __future__ import annotations

import re
import traceback
from pathlib import Path
from typing import Any

import torch

NOT_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
_FRAME = re.compile(r'File "(.+?)", line (\d+), in .*\n\s+(.*)')
# What torch's tracer says -> what it means for a step.
_MEANINGS = {
    r"data.dependent|Tensor\.item|aten\._local_scalar_dense|Tensor\.tolist|GuardOnDataDependent": (
        "its Python code asks for the value of a tensor, so another value might take another way"
    ),
    r"Random\.|numpy\.random|np\.random": "it draws random numbers from Python or numpy, which a trace would freeze",
    r"RNN, LSTM, and GRU|nn\.LSTM": "it calls one of torch's recurrent layers in a step",
    r"in-place operation": "it writes into a tensor that it was given",
}


def blame(error: BaseException) -> tuple[str, str]:
    """Return what an exception during tracing says, and the user's line that led to it."""
    inner = getattr(error, "inner_exception", None) or error
    text = f"{type(inner).__name__}: {inner}"
    stack = getattr(inner, "real_stack", None) or traceback.extract_tb(inner.__traceback__)
    for pattern, meaning in _MEANINGS.items():
        if re.search(pattern, text, re.IGNORECASE):
            return meaning, _line_of(stack)
    said = [line.strip() for line in str(inner).splitlines() if line.strip()] or [type(inner).__name__]
    return f"torch cannot trace it: {said[0].rstrip('.')[:200]}", _line_of(stack)


def line_in(node: Any) -> str:
    """Return the user's line that a node of a graph comes from."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    users = [frame for frame in frames if not frame[0].startswith(NOT_USERS)]
    return f"{Path(users[-1][0]).name}:{users[-1][1]}: {users[-1][2]}" if users else ""


def _line_of(frames: traceback.StackSummary) -> str:
    for frame in reversed(frames):
        if not frame.filename.startswith(NOT_USERS) and not frame.filename.startswith("<"):
            return f"{Path(frame.filename).name}:{frame.lineno}: {frame.line}"
    return ""
