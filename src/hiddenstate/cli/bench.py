"""What watching and carrying cost on this machine, for this model: ratios within one run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..carry import Carry
from ..cells import unheard
from ..recording import record
from ..state import tensors
from ..unrolling import accelerate


@dataclass(frozen=True, slots=True)
class Cost:
    """One way of calling the model, compared with the plain call."""

    name: str
    ratio: float  # the median over the rounds, relative to the plain call
    low: float  # the lower end of the middle half of the rounds
    high: float
    milliseconds: float


def bench(model: nn.Module, inputs: tuple[Any, ...], rounds: int) -> list[Cost]:
    """Time the plain call against recording and carrying; rivals take turns, each round compares with itself only."""
    model.eval()

    def plain() -> None:
        model(*inputs)

    def recorded() -> None:
        with record(model) as kept:
            model(*inputs)
        _ = {name: kept.runs(name) for name in kept}

    def with_gates() -> None:
        with record(model, gates=True) as kept:
            model(*inputs)
        _ = {name: kept.runs(name) for name in kept}

    def carried() -> None:
        with Carry(model):
            model(*inputs)

    rivals = {"plain forward": plain, "record states": recorded, "record gates": with_gates, "carry": carried}
    with torch.no_grad():
        times = _in_turn(rivals, rounds)
    yardstick = times["plain forward"]
    return [_cost(name, own, yardstick) for name, own in times.items()]


def bench_accelerated(model: nn.Module, inputs: tuple[Any, ...], rounds: int) -> tuple[list[Cost], str]:
    """Time a model with torch's kernels and with `accelerate`, forward and in training; say what was decided."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]

    def forward() -> None:
        with torch.no_grad():
            model(*inputs)

    def training() -> None:
        made = [value for value in tensors(model(*inputs)).values() if value.requires_grad]
        torch.autograd.grad(made, weights, [torch.ones_like(value) for value in made], allow_unused=True)

    def plain(call: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            with unheard():
                call()

        return run

    costs = []
    with accelerate(model) as faster:
        for name, call in {"forward": forward, "forward and backward": training}.items():
            call()  # decides
            times = _in_turn({f"{name}, torch's kernels": plain(call), f"{name}, accelerated": call}, rounds)
            yardstick = times[f"{name}, torch's kernels"]
            costs += [_cost(rival, own, yardstick) for rival, own in times.items()]
        return costs, faster.explain()


def _in_turn(rivals: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in rivals}
    for turn in range(rounds + 1):
        for name, call in rivals.items():
            began = time.perf_counter()
            call()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if turn:  # the first round only warms up
                times[name].append(time.perf_counter() - began)
    return times


def _cost(name: str, own: list[float], yardstick: list[float]) -> Cost:
    ratios = sorted(mine / plain for mine, plain in zip(own, yardstick, strict=True))
    quarter = len(ratios) // 4
    return Cost(
        name=name,
        ratio=statistics.median(ratios),
        low=ratios[quarter],
        high=ratios[len(ratios) - 1 - quarter],
        milliseconds=1000 * statistics.median(own),
    )
