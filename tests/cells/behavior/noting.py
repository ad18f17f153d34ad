"""Models say themselves what their state is after each repetition; no operation of torch is needed for that."""

from __future__ import annotations

import sys
from collections import defaultdict
from typing import Any

from torch import Tensor, nn

from hiddenstate.cells.behavior.model_call import traced
from hiddenstate.cells.behavior.trace import Trace

NOTED: dict[str, list[Tensor]] = defaultdict(list)


def note(**parts: Tensor) -> None:
    """Remember what these parts are now; a tensor that is written later has to be copied by the model."""
    for name, part in parts.items():
        NOTED[name].append(part)


def noted() -> dict[str, list[Tensor]]:
    """Return all that was noted since the last time."""
    found = {name: [part.detach().clone() for part in parts] for name, parts in NOTED.items()}
    NOTED.clear()
    return found


def run(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Trace, Any]:
    """Call a model under a trace; return both the trace and what the call gives."""
    trace = Trace(sys._getframe())
    return trace, traced(model, (args, kwargs), trace)
