"""A clock that stands still until a test moves it."""

from __future__ import annotations


class FakeClock:
    """Seconds since the epoch for `serve.Engine(..., clock=)`, moved by hand, so that no test has to wait.

    >>> clock = FakeClock()
    >>> with hs.serve.Engine(nn.GRU(3, 4, batch_first=True), ttl=10, clock=clock) as engine:
    ...     name = engine.open()
    ...     clock.advance(11)
    ...     engine.push(name, torch.randn(1, 3))
    Traceback (most recent call last):
    hiddenstate.errors.SessionLost: ...
    """

    def __init__(self, now: float = 1000.0) -> None:
        """Start at `now`."""
        self.now = now

    def __call__(self) -> float:
        """Return the time."""
        return self.now

    def advance(self, seconds: float) -> None:
        """Move the clock forward."""
        self.now += seconds
