"""What an engine has done, in numbers."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from .session_operations import Push, PushChain, PushMany, ResultFuture, SessionOperation

_KEPT = 1024  # ticks and answers that means and quantiles are taken over


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Totals since the start, and the last thousand or so ticks."""

    seconds: float  # since the start
    ticks: int
    inputs: int  # applied or answered again
    steps: int
    failures: int  # operations that were answered by an error
    batch: float  # mean number of operations in a tick, lately
    tick_seconds: float  # mean, lately
    latency_p50: float  # seconds from call to answer, lately
    latency_p99: float


class TickCounter:
    """Counts ticks and what was in them; read from any thread."""

    def __init__(self) -> None:
        """Start at zero."""
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self._ticks = self._inputs = self._steps = self._failures = 0
        self._lately: deque[tuple[int, float]] = deque(maxlen=_KEPT)  # operations, seconds
        self._latencies: deque[float] = deque(maxlen=_KEPT)

    def count(self, ops: Sequence[SessionOperation], complete: Sequence[ResultFuture], began: float) -> None:
        """Count one tick: its operations, and the futures that it completed."""
        now = time.perf_counter()
        single = [op for op in ops if not isinstance(op, PushChain | PushMany)]
        chained = [push for op in ops if isinstance(op, PushChain) for push in op.pushes]
        many = [op for op in ops if isinstance(op, PushMany)]
        lengths = [op.steps for op in [*single, *chained] if type(op) is Push]
        together = sum([len(op) for op in many])
        failed = len([op for op in [*single, *chained] if isinstance(op.result, Exception)])
        with self._lock:
            self._ticks += 1
            self._inputs += len(lengths) + together
            self._steps += sum(lengths) + sum([op.steps * len(op) for op in many])
            self._failures += failed
            self._lately.append((len(single) + len(chained) + together, now - began))
            self._latencies.extend([now - future.began for future in complete])

    def snapshot(self) -> EngineStats:
        """Return the current numbers."""
        with self._lock:
            lately, latencies = list(self._lately), sorted(self._latencies)
            totals = (self._ticks, self._inputs, self._steps, self._failures)
        batch, seconds = (
            sum(column) / max(1, len(lately)) for column in (zip(*lately, strict=True) if lately else ((), ()))
        )
        p50, p99 = (latencies[int(share * (len(latencies) - 1))] if latencies else 0.0 for share in (0.5, 0.99))
        return EngineStats(time.monotonic() - self._began, *totals, batch, seconds, p50, p99)
