"""Ratios that hold on a noisy machine: rivals take turns, and each round compares only with itself.

    from timing import compare

    print(compare({"by hand": by_hand, "carried": carried}))

The first rival is the yardstick: its ratio is 1. A ratio of 1.02 reads "2 % slower than the yardstick".
"""

import datetime
import gc
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch

import hiddenstate


@dataclass(frozen=True)
class Comparison:
    """What each rival took, in seconds and against the yardstick."""

    seconds: dict[str, float]  # median over the rounds
    ratios: dict[str, float]  # median over the rounds of (this rival / the yardstick, in the same round)
    spread: dict[str, tuple[float, float]]  # the middle half of those ratios
    rounds: int

    def __str__(self) -> str:
        width = max(map(len, self.seconds))
        lines = [
            f"{name:<{width}}  {1e3 * self.seconds[name]:10.3f} ms  x {self.ratios[name]:7.3f}"
            f"  (half of {self.rounds} rounds in {self.spread[name][0]:.3f} to {self.spread[name][1]:.3f})"
            for name in self.seconds
        ]
        return "\n".join([machine(), *lines])


def compare(
    rivals: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 21,
    warmup: int = 2,
    at_least: float = 0.01,
    clock: Callable[[], float] = time.perf_counter,
) -> Comparison:
    """Time the rivals in turn, `rounds` times over, and give medians and ratios to the first of them.

    Each round starts with another rival, so that no one always finds the caches warm. A rival that takes less than
    `at_least` seconds is repeated within its turn, every rival equally often. The garbage collector rests meanwhile.
    """
    if rounds < 2 or not rivals:
        raise ValueError(f"{len(rivals)} rivals in {rounds} rounds: at least one rival and two rounds make a median")
    for _ in range(warmup):
        for call in rivals.values():
            call()
    quickest = min(_turn(call, 1, clock) for call in rivals.values())
    repeats = max(1, round(at_least / max(quickest, 1e-9)))
    names = list(rivals)
    times: dict[str, list[float]] = {name: [] for name in names}
    collecting = gc.isenabled()
    gc.disable()
    try:
        for turn in range(rounds):
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                times[name].append(_turn(rivals[name], repeats, clock))
            gc.collect()
    finally:
        if collecting:
            gc.enable()
    return _summary(times)


def machine() -> str:
    """The kind of machine, the versions and the date, in one line."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return (
        f"{_processor()}, {torch.get_num_threads()} threads, {device} · Python {platform.python_version()}, "
        f"torch {torch.__version__}, numpy {numpy.__version__}, hiddenstate {hiddenstate.__version__} · "
        f"{datetime.date.today().isoformat()}"
    )


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _turn(call: Callable[[], object], repeats: int, clock: Callable[[], float]) -> float:
    """Seconds for one call. CUDA is waited for on both sides: a launch is not yet a result."""
    _wait()
    start = clock()
    for _ in range(repeats):
        call()
    _wait()
    return (clock() - start) / repeats


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _summary(times: dict[str, list[float]]) -> Comparison:
    yardstick = next(iter(times.values()))
    ratios = {name: [a / b for a, b in zip(taken, yardstick, strict=True)] for name, taken in times.items()}
    quarters = {name: statistics.quantiles(values, n=4, method="inclusive") for name, values in ratios.items()}
    return Comparison(
        seconds={name: statistics.median(taken) for name, taken in times.items()},
        ratios={name: statistics.median(values) for name, values in ratios.items()},
        spread={name: (low, high) for name, (low, _, high) in quarters.items()},
        rounds=len(yardstick),
    )
