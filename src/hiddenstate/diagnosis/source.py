"""What the user wrote where a call was made."""

from __future__ import annotations

import ast
import linecache
from itertools import islice
from types import CodeType, TracebackType


def says(code: CodeType | None, instruction: int, keyword: str) -> bool:
    """Whether the call at an instruction gives a keyword the value True in so many words."""
    if code is None or instruction < 0:
        return False
    first, last, start, end = next(islice(code.co_positions(), instruction // 2, None), (None,) * 4)
    if first is None or last is None or start is None or end is None:
        return False
    lines = [line.encode() for line in linecache.getlines(code.co_filename)[first - 1 : last]]  # columns are of bytes
    if not lines:
        return False
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][start:]
    try:
        call = ast.parse(f"({b''.join(lines).decode()})", mode="eval").body
    except (SyntaxError, UnicodeDecodeError):
        return False
    given = call.keywords if isinstance(call, ast.Call) else []
    return any(
        each.arg == keyword and isinstance(each.value, ast.Constant) and each.value.value is True for each in given
    )


def raised_at(error: BaseException, function: str) -> tuple[CodeType | None, int]:
    """Return the code and instruction from which a function was called in which an error was raised."""
    trace: TracebackType | None = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        if trace.tb_next.tb_frame.f_code.co_name == function:
            return trace.tb_frame.f_code, trace.tb_lasti
        trace = trace.tb_next
    return None, -1
