"""The same call again: after itself, with another seed, in training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...state import Path, mapped, tensors
from ..equal import same
from ..hiding import hidden_things
from ..patient import Patient, Run, probe


@dataclass(frozen=True, slots=True, eq=False)
class Twice:
    """Two calls with the same input and seed, one after the other."""

    first: Run
    second: Run
    changed: dict[str, Tensor]  # attributes that hold another tensor after the calls than before

    @property
    def gap(self) -> float:
        """The largest difference between their outputs, relative to their size."""
        return gap(self.first, self.second)


def gap(a: Run, b: Run) -> float:
    """Return the largest difference between two runs' outputs, relative to their size; inf for other shapes."""
    worst = 0.0
    ours, theirs = _all(a), _all(b)
    if ours.keys() != theirs.keys():
        return float("inf")
    for path, old in ours.items():
        new = theirs[path]
        if old.shape != new.shape:
            return float("inf")
        if same(old, new):
            continue
        size = float(old.detach().abs().double().nan_to_num(posinf=0.0, neginf=0.0).max()) or 1.0
        gaps = (old.detach().double() - new.detach().double()).abs().nan_to_num(nan=float("inf"))
        worst = max(worst, float(gaps.max()) / size)
    return worst


def _all(run: Run) -> dict[Path, Tensor]:
    return {path: t for path, t in tensors(run.result).items() if t.numel()}


@probe
def twice(patient: Patient) -> Twice:
    """Call the model twice in eval mode, without putting anything back in between."""
    before = _attributes(patient)
    with patient.afresh():
        first = patient.call()
        # The first result may be a tensor that the second call writes into.
        first = Run(_copied(first), first.inputs, first.calls, first.trace)
        second = patient.call()
        after = _attributes(patient)
    changed = {name: t for name, t in after.items() if name not in before or before[name] is not t}
    return Twice(first, second, changed)


def _copied(run: Run) -> Any:
    return mapped(run.result, lambda _, end: end.detach().clone() if isinstance(end, Tensor) else end)


@probe
def traced(patient: Patient) -> Run:
    """Return the plain call with every operation written down."""
    return patient.run(trace=True, collect=True)


@probe
def other_seed(patient: Patient) -> tuple[Run, Run]:
    """Call the model in eval mode with two seeds."""
    # Neither is traced: torch takes other kernels then, and these differ in their last bits.
    return patient.run(number=0, collect=True), patient.run(number=1, collect=True)


@probe
def stochastic(patient: Patient) -> bool:
    """Say whether the output depends on the seed, in eval mode."""
    return gap(*other_seed(patient)) > 0


@dataclass(frozen=True, slots=True, eq=False)
class Growth:
    """Calls in training mode, one after the other: what the later graphs still hold of the earlier ones."""

    nodes: tuple[int, ...]  # in the graph of each call's output
    shared: int  # nodes of the first call's graph that the second one's reaches
    holders: tuple[str, ...]  # attributes that hold a tensor with a graph after a call


@probe
def growth(patient: Patient) -> Growth:
    """Call the model three times in training mode, and look at what is reachable from each output."""
    with patient.afresh():
        runs = [patient.call(train=True, grad=True) for _ in range(3)]
        holders = tuple(name for name, t in _attributes(patient).items() if t.grad_fn is not None)
    graphs = [_graph(run) for run in runs]
    shared = len(graphs[0].keys() & graphs[1].keys())
    return Growth(tuple(len(graph) for graph in graphs), shared, holders)


def _graph(run: Run) -> dict[Any, Any]:
    """Return every node reachable from a run's outputs, except those that belong to parameters."""
    waiting = [t.grad_fn for t in tensors(run.result).values() if t.grad_fn is not None]
    found: dict[Any, Any] = {}
    while waiting:
        node = waiting.pop()
        if node in found or type(node).__name__ == "AccumulateGrad":
            continue
        found[node] = node
        waiting.extend(inner for inner, _ in node.next_functions if inner is not None)
        if len(found) > 200_000:
            break
    return found


def _attributes(patient: Patient) -> dict[str, Tensor]:
    """Return all tensors that are neither parameters nor fixed buffers, by the name one would write."""
    held = {thing.name: thing.value for thing in hidden_things(patient.model) if isinstance(thing.value, Tensor)}
    return {**held, **{name: b for name, b in patient.model.named_buffers() if isinstance(b, torch.Tensor)}}
