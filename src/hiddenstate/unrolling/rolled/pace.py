"""How long a loop takes as it is written, and by the engine with all that this costs besides: forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...cells import random_streams_kept, untouched
from ...state import ends, mapped
from ..deciding import Pace, best_of, trial_steps
from .plan import RollPlan, SeenRun
from .turns import Turns, Written, of_count

_FEW = 4  # turns of the shorter one of two trials
_ROUNDS = 5  # of which the quickest counts; on a GPU the third records a graph


def paces_of(plan: RollPlan, seen: SeenRun, by_engine: Callable[[Turns, dict[str, Any]], Any]) -> tuple[Pace, Pace]:
    """Measure both ways on what a run began with; `by_engine(turns, names)` returns what the loop would have left."""
    several = trial_steps(seen.turns.count)
    found: list[list[float]] = [[], []]
    with random_streams_kept(), untouched(plan.layer.module):
        for count in (_FEW, several):
            turns = of_count(seen.turns, count)
            for way, times in zip((plan.as_written, by_engine), found, strict=True):
                times.append(best_of(_ROUNDS, partial(_there_and_back, plan, turns, seen.names, way)))
    written, ours = (_pace(several, *times) for times in found)
    return written, ours


def _pace(steps: int, few: float, several: float) -> Pace:
    each = max(0.0, several - few) / (steps - _FEW)
    return Pace(steps, max(0.0, few - (_FEW - 1) * each), several)


def _there_and_back(
    plan: RollPlan, turns: Turns, names: dict[str, Any], way: Callable[[Turns, dict[str, Any]], Any]
) -> None:
    """Run the turns one way, and the gradients back to all that asks for some."""
    leaves: list[Tensor] = []

    def own(_: Any, end: Any) -> Any:
        """Return a value of which nothing that happens here is seen outside."""
        if not isinstance(end, Tensor) or isinstance(end, nn.Parameter):
            return end
        leaf = end.detach()
        if end.requires_grad and torch.is_grad_enabled():
            leaves.append(leaf.requires_grad_())
        return leaf.clone() if end.dim() == 0 or leaf.requires_grad else leaf

    read = {name: names[name] for name in (*plan.reads, *plan.code.carried) if name in names}
    read = {name: value if isinstance(value, nn.Module) else mapped(value, own) for name, value in read.items()}
    into = {each.into: names.get(each.into) for each in plan.code.collected}
    read |= {name: [] if isinstance(value, list) else own((), value) for name, value in into.items()}
    pieces = {name: own((), piece) for name, piece in turns.pieces.items()}
    written = {name: Written(whole.pieces.clone(), whole.backwards) for name, whole in turns.written.items()}
    left = way(Turns(turns.count, turns.counts, pieces, written), {**names, **read})
    values = [left, *(whole.pieces for whole in written.values())]
    roots = [end for _, end in ends(values) if isinstance(end, Tensor) and end.requires_grad]
    weights = [*plan.layer.module.parameters(), *(value for value in read.values() if isinstance(value, nn.Parameter))]
    wanted = [*leaves, *(w for w in weights if w.requires_grad and not w._backward_hooks)]
    if roots and wanted:
        torch.autograd.grad(roots, wanted, [torch.ones_like(root) for root in roots], allow_unused=True)
