"""`assert_healthy`: a diagnosis as one line of a test."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from ..diagnosis import Report, diagnose
from ..errors import DiagnosisFailed


def assert_healthy(
    model: nn.Module,
    *inputs: Any,
    ignore: Iterable[str] = (),
    call: Callable[..., Any] | None = None,
    **options: Any,
) -> Report:
    """Raise `DiagnosisFailed`, an `AssertionError`, if the doctor finds an error or a warning, or cannot look.

    >>> assert_healthy(nn.GRU(3, 8, batch_first=True), torch.randn(4, 10, 3)).ok
    True

    Args:
        model: As for `hs.diagnose`.
        inputs: What the model is called with.
        ignore: Codes that are known and accepted.
        call: How to call the model, if not through its forward.
        options: Options of `hs.diagnose`, and keyword arguments of the model.
    """
    __tracebackhide__ = True
    report = diagnose(model, *inputs, ignore=ignore, call=call, **options)
    if report.ok and not report.failed:
        return report
    found = [f"{each.code} {each.title} ({each.where})" for each in report if each.severity != "note"]
    could_not = [f"{code} could not be looked for" for code in report.failed]
    broken = ["the model could not be called"] if report.broken else []
    raise DiagnosisFailed(
        f"{type(model).__name__} is not healthy: {'; '.join([*broken, *found, *could_not])}.\n\n{report.text()}\n\n"
        f"What is so on purpose: assert_healthy(..., ignore=[code])."
    )
