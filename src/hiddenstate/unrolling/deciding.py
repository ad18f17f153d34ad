"""When a schedule is worth its making, and from how many steps on it is the faster way: both by the clock.

Where decisions have to be the same in every process and at every run, they are made by counting steps instead.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

clock = time.perf_counter

_BUILDING = {"cpu": 0.4, "cuda": 4.0}  # seconds that the making of a schedule takes, until one was made
_LOADING = 1.6  # seconds that torch's tracer takes to load
_BACKWARD = 2  # times that a backward pass takes longer than its forward pass, about
_STEPS = 1_000  # after which a schedule is made where decisions are counted
_LONG = 64  # steps of a trial, at most


@dataclass(slots=True, eq=False)
class LoopTime:
    """What calls of one kind have cost so far that a schedule would have saved."""

    seconds: float = 0.0
    steps: int = 0
    calls: int = 0
    paid: bool = False  # whether it was due once: a schedule that is there costs nothing more
    fewest: int = 1  # steps of a call from which on a schedule was found to be faster
    patience: float = 1.0  # times what the making costs until it is tried: more after a refusal

    def add(self, seconds: float, steps: int, *, grad: bool) -> None:
        """Note a call; where a backward pass follows, it costs too."""
        self.seconds += seconds * (1 + _BACKWARD if grad else 1)
        self.steps += steps
        self.calls += 1

    def wait(self, times: float) -> None:
        """Reset the clock, and wait `times` as long as before until a schedule is due again."""
        self.seconds, self.steps, self.patience = 0.0, 0, times * max(self.patience, 1.0)
        self.paid = False

    def is_due(self, device: str) -> bool:
        """Say whether the calls so far have cost as much as the making of a schedule will."""
        if not self.paid:
            spent, cost = (self.steps, _STEPS) if counted() else (self.seconds, _expected(device))
            self.paid = spent >= self.patience * cost
        return self.paid


@dataclass(frozen=True, slots=True)
class Pace:
    """How long a cell takes for one step and for several, forward and backward, in seconds."""

    steps: int
    one: float
    several: float


@dataclass(frozen=True, slots=True)
class EngineDecision:
    """From how many steps on a schedule runs a cell, and how that was found out."""

    fewest: int | None  # None: never
    because: str

    def takes(self, steps: int) -> bool:
        """Say whether a call of so many steps runs by the schedule."""
        return self.fewest is not None and steps >= self.fewest


def counted() -> bool:
    """Say whether decisions must not depend on the clock: on request, and where several processes run alike."""
    if torch.are_deterministic_algorithms_enabled():
        return True
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def built(device: str, seconds: float) -> None:
    """Note how long the making of a schedule took; the next one will take as long."""
    _BUILDING[device] = seconds


def _expected(device: str) -> float:
    loading = 0.0 if "torch._dynamo" in sys.modules else _LOADING
    return loading + _BUILDING.get(device, max(_BUILDING.values()))


def trial_steps(steps: int) -> int:
    """Return the steps of the longer one of two trials."""
    return max(16, min(steps, _LONG))


def decide(loop: Pace, schedule: Pace, share: float = 1.0) -> EngineDecision:
    """Compare two ways by their pace, which is taken to grow evenly with the steps.

    `share`: of the loop's time that a schedule has to stay below, where the loop that was timed is itself slower than
    what it stands for.
    """
    once, often = share * loop.one - schedule.one, share * loop.several - schedule.several
    said = (
        f"{loop.steps} steps take {1e3 * schedule.several:.2f} ms by it and {1e3 * loop.several:.2f} ms step by step, "
        f"one step {1e3 * schedule.one:.2f} and {1e3 * loop.one:.2f} ms"
    )
    if often <= 0:
        return EngineDecision(None, said)
    if once > 0:
        return EngineDecision(1, said)
    return EngineDecision(1 + math.ceil(-once * (loop.steps - 1) / (often - once)), said)


def best_of(count: int, run: Callable[[], object]) -> float:
    """Return the shortest time that a call took."""
    return min(seconds_of(run) for _ in range(count))


def seconds_of(run: Callable[[], object]) -> float:
    """Return how long a call took; where one thread does all of it, without what else the processor was given to."""
    cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    tell = clock if cuda or torch.get_num_threads() > 1 else time.thread_time
    start = tell()
    run()
    if cuda:
        torch.cuda.synchronize()
    return tell() - start
