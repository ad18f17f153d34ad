"""What watching and carrying cost on this machine, for this model: ratios within one run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ..carry import Carry
from ..cells import unheard
from ..recording import Recording, record
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
    first: float | None = None  # milliseconds of opening the block and the first call in it; None where there is none


def bench(model: nn.Module, inputs: tuple[Any, ...], rounds: int) -> list[Cost]:
    """Time the plain call against recording and carrying; rivals take turns, each round compares with itself only.

    Timed is the second call within a block. In the first one the model is looked through, once for all that follow.
    """
    model.eval()
    ways: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "plain forward": nullcontext,
        "record states": lambda: record(model),
        "record gates": lambda: record(model, gates=True),
        "carry": lambda: Carry(model),
    }
    opened: dict[str, list[float]] = {name: [] for name in ways}

    def second_call(name: str) -> float:
        began = time.perf_counter()
        with ways[name]() as heard:
            for turn in range(2):
                if turn:
                    opened[name].append(time.perf_counter() - began)
                    began = time.perf_counter()
                model(*inputs)
                if isinstance(heard, Recording):
                    _ = {track: heard.runs(track) for track in heard}
                _finish()
            return time.perf_counter() - began

    with torch.no_grad():
        times = _in_turn({name: partial(second_call, name) for name in ways}, rounds)
    costs = [_cost(name, own, times["plain forward"]) for name, own in times.items()]
    firsts = {name: 1000 * statistics.median(taken[1:]) for name, taken in opened.items() if name != "plain forward"}
    return [replace(cost, first=firsts.get(cost.name)) for cost in costs]


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
            rivals = {f"{name}, torch's kernels": plain(call), f"{name}, accelerated": call}
            times = _in_turn({rival: _timed(way) for rival, way in rivals.items()}, rounds)
            yardstick = times[f"{name}, torch's kernels"]
            costs += [_cost(rival, own, yardstick) for rival, own in times.items()]
        return costs, faster.explain()


def _in_turn(rivals: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds that each rival says it took, round by round; a round before these only warms up."""
    turns = [{name: call() for name, call in rivals.items()} for _ in range(rounds + 1)][1:]
    return {name: [turn[name] for turn in turns] for name in rivals}


def _finish() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _timed(call: Callable[[], None]) -> Callable[[], float]:
    def run() -> float:
        began = time.perf_counter()
        call()
        _finish()
        return time.perf_counter() - began

    return run


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
