"""Graphs from call to call: whether one reaches into the graph of a call whose backward pass has run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..cells import Call, EndState
from ..state import tensors
from .outcome import Outcome

_MARK = "hiddenstate.graph"  # in the metadata of graph nodes, which die with the graph and keep nothing alive
_MOST = 100_000


class _GraphMark:
    """What is left on the nodes of some calls: whether a backward pass has gone through them since."""

    def __init__(self) -> None:
        self.run = False

    def arrived(self, gradient: Tensor) -> None:
        if not torch.is_grad_enabled():  # a gradient of a gradient is yet to come otherwise, and the graph is needed
            self.run = True


class GraphWatch:
    """Follows the graphs of calls, of which no node may be met again after its backward pass."""

    def __init__(self) -> None:
        """Begin with no call."""
        self._open = _GraphMark()

    @property
    def spent(self) -> bool:
        """Whether a backward pass has gone through the calls so far: the next ones show whether anything is kept."""
        return self._open.run

    def call(self, given: Any, result: Any) -> int:
        """Follow the graph of a call; return how many of its nodes were made by calls whose backward pass has run.

        What leads to its arguments and was not made by such calls is the user's own, and may be used again.
        """
        now = _GraphMark() if self._open.run else self._open
        outside: set[Any] = set()
        spent = _walk(given, outside, mark=None) | _walk(result, outside, mark=now)
        for tensor in tensors(result).values():
            if tensor.grad_fn is not None:
                tensor.register_hook(now.arrived)  # type: ignore[no-untyped-call]
        self._open = now
        return len(spent)


def _walk(ends: Any, seen: set[Any], *, mark: _GraphMark | None) -> set[Any]:
    """Visit what is new behind some tensors, mark it, and return the nodes whose backward pass has run."""
    waiting = [tensor.grad_fn for tensor in tensors(ends).values() if tensor.grad_fn is not None]
    spent: set[Any] = set()
    while waiting and len(seen) < _MOST:
        node: Any = waiting.pop()
        if node in seen or type(node).__name__ == "AccumulateGrad":  # of parameters, which all calls share
            continue
        seen.add(node)
        left = node.metadata.get(_MARK)
        if left is not None and left.run:
            spent.add(node)
        elif left is not None:
            continue  # made by calls that were followed already
        elif mark is not None:
            node.metadata[_MARK] = mark
        waiting.extend(inner for inner, _ in node.next_functions if inner is not None)
    return spent


def cut_spans(calls: Iterable[Call]) -> list[int]:
    """Return the steps of a layer's calls from one to the next that was handed the last state without its graph.

    Steps before the first one that has a graph, as under torch.no_grad(), are spans of one.
    """
    spans, last, begun = [0], None, False
    for call in calls:
        given = tensors(call.given_native).values()
        lost = last is not None and bool(given) and all(p.grad_fn is None for p in given)
        has_graph = any(part.grad_fn is not None for part in tensors(call.state_native).values())
        if lost and last is not None and (last.mark is not None or has_graph) and last.handed_on(call.given_native):
            spans = [*(spans if begun else [1] * sum(spans)), 0]
        spans[-1] += call.steps
        begun |= has_graph
        last = EndState.of(call.state_native)
    return spans


def count_nodes(result: Any) -> int:
    """Return how many nodes are behind a result."""
    waiting = [tensor.grad_fn for tensor in tensors(result).values() if tensor.grad_fn is not None]
    seen: set[Any] = set()
    while waiting and len(seen) < _MOST:
        node: Any = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting.extend(inner for inner, _ in node.next_functions if inner is not None)
    return len(seen)


_CUTS = {
    "detach": "detach()",
    "detach_": "detach_()",
    "get:data": ".data",
    "tensor": "torch.tensor(...)",
    "numpy": "numpy()",
    "item": "item()",
    "tolist": "tolist()",
}


def place_of_cut(run: Outcome, *behind: Tensor) -> tuple[str, str]:
    """Return the line on which a graph is cut and what cuts it there, "" where nothing is seen to.

    What is applied to a state comes first: something else may well be detached on purpose. Where it is known what lies
    behind the cut, another cut is none.
    """
    made, lost = run.trace.makers(), {id(tensor) for tensor in behind}
    states = {id(part) for call in run.calls for part in tensors((call.state_native, call.output_native)).values()}
    cuts = [operation for operation in run.trace.named(*_CUTS) if operation.line]
    if lost:
        cuts = [cut for cut in cuts if any(id(t) in lost for t in made.behind(*cut.inputs))]
    cuts.sort(key=lambda operation: not any(id(made.source(t)) in states for t in operation.inputs))
    return (cuts[0].line, _CUTS[cuts[0].name]) if cuts else ("", "")
