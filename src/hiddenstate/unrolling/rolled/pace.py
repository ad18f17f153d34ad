"""The times that a loop takes as written and by the engine, overhead included, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...cells import random_streams_kept, untouched
from ...state import ends, mapped
from ..deciding import Pace, seconds_of
from ..holding import held_tensors, put_in
from .plan import RollPlan, SeenRun
from .turns import Turns, first_turns

_MOST = 64  # turns of a trial
_ROUNDS = 5  # of which the quickest counts; on a GPU the third records a graph


def paces_of(plan: RollPlan, seen: SeenRun, by_engine: Callable[[Turns, dict[str, Any]], Any]) -> tuple[Pace, Pace]:
    """Measure both ways on what a run began with; `by_engine(turns, names)` returns what the loop would have left."""
    several = min(seen.turns.count, _MOST)
    counts = (several // 2, several)
    found: list[list[float]] = [[], []]
    with random_streams_kept(), untouched(plan.layer.module):
        for count in counts:
            runs = [partial(_there_and_back, plan, seen, count, way) for way in (plan.as_written, by_engine)]
            rounds = [[seconds_of(run) for run in runs] for _ in range(_ROUNDS)]  # in turn: work comes and goes
            for times, taken in zip(found, zip(*rounds, strict=True), strict=True):
                times.append(min(taken))
    written, ours = (_pace(counts, *times) for times in found)
    return written, ours


def _pace(counts: tuple[int, int], few: float, several: float) -> Pace:
    each = max(0.0, several - few) / (counts[1] - counts[0])
    return Pace(counts[1], max(0.0, few - (counts[0] - 1) * each), several)


def _there_and_back(plan: RollPlan, seen: SeenRun, count: int, way: Callable[[Turns, dict[str, Any]], Any]) -> None:
    """Run the first turns one way, and the gradients back to all that asks for some."""
    leaves: list[Tensor] = []

    def own(_: Any, end: Any) -> Any:
        """Return a value that lies in memory as it did, and leads nowhere outside."""
        if not isinstance(end, Tensor) or isinstance(end, nn.Parameter):
            return end
        leaf = end.detach()
        if end.requires_grad and torch.is_grad_enabled():
            leaves.append(leaf.requires_grad_())
        return leaf

    names, code, turns = seen.names, plan.code, first_turns(seen.turns, count)
    read = {name: names[name] for name in (*plan.reads, *code.carried) if name in names}
    read = {name: value if isinstance(value, nn.Module) else mapped(value, own) for name, value in read.items()}
    read |= {name: read[name].clone() for name in code.added if isinstance(read.get(name), Tensor)}  # written in place
    into = {each.into: names.get(each.into) for each in code.collected}
    read |= {name: own((), value) if isinstance(value, Tensor) else _emptied(value) for name, value in into.items()}
    pieces = {name: own((), piece) for name, piece in turns.pieces.items()}
    module = plan.layer.module
    held = [each.tensor for each in held_tensors(module)]
    # A weight that was computed, as WeightDrop does, leads to a graph that the user goes back through later.
    lent = [tensor if tensor.grad_fn is None else own((), tensor) for tensor in held]
    with put_in(module, lent):
        left = way(replace(turns, pieces=pieces), {**names, **read})
    values = [left, *(whole.pieces for whole in turns.written.values())]
    roots = [end for _, end in ends(values) if isinstance(end, Tensor) and end.requires_grad]
    weights = [*module.parameters(), *(value for value in read.values() if isinstance(value, nn.Parameter))]
    wanted = [*leaves, *(w for w in weights if w.requires_grad and not w._backward_hooks)]
    if roots and wanted:
        seeds = [torch.ones_like(root) for root in roots]
        torch.autograd.grad(roots, wanted, seeds, retain_graph=True, allow_unused=True)  # also graphs in containers


def _emptied(into: Any) -> Any:
    """Return a list or dict for what turns leave; one that they put things into by place has to be as long."""
    if isinstance(into, list):
        return [None] * len(into)
    return {} if isinstance(into, dict) else into
