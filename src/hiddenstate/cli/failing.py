"""Errors as a person at a terminal wants them: one line of ours, or the traceback of their own code."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from types import TracebackType

from ..errors import HiddenStateError

_OURS = str(Path(__file__).resolve().parents[1])


class TheirCodeFailed(HiddenStateError, RuntimeError):
    """The user's own module or factory raised; what it raised is the cause."""


def show(error: BaseException, *, debug: bool) -> None:
    """Print an error on stderr: in one line, after the user's own traceback where their code is at fault."""
    if debug:
        traceback.print_exception(error)
    elif isinstance(error, TheirCodeFailed) and error.__cause__ is not None:
        cause = error.__cause__
        traceback.print_exception(type(cause), cause, _their_part(cause.__traceback__))
    print(f"error: {one_line(error)}", file=sys.stderr)


def one_line(error: BaseException) -> str:
    """Return the message of an error without line breaks, or its type where it has none."""
    said = getattr(error, "format_message", error.__str__)()  # of a usage error, this names the option too
    return " ".join(str(said).split()) or type(error).__name__


def _their_part(trace: TracebackType | None) -> TracebackType | None:
    """Leave out the frames in front that are ours or the import system's."""
    here = trace
    while here is not None:
        name = here.tb_frame.f_code.co_filename
        if not name.startswith((_OURS, "<frozen")) and "importlib" not in name:
            return here
        here = here.tb_next
    return trace if trace is None or trace.tb_next is None else None
