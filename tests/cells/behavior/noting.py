"""Models say themselves what their state is after each repetition; no operation of torch is needed for that."""

from __future__ import annotations

from collections import defaultdict

from torch import Tensor

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
