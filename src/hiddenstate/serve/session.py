"""What an engine tells about a session."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Session:
    """A session as it is after the last input applied. Times are in seconds since the epoch."""

    id: str
    seq: int  # of the last input applied, 0 before the first
    steps: int  # applied in all
    opened: float
    touched: float  # when the last input was applied
    expires: float | None  # when it is lost unless an input comes; None: never
    fingerprint: str  # of the model its state belongs to
    hot: bool  # its state is at hand, rather than in the store alone
