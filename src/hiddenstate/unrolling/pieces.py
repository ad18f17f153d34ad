"""Pieces of a step's graph that run separately: once, for all steps at once, or as the body of a loop."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """A function from the values of some nodes to the values of others."""

    call: fx.GraphModule
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]

    def __call__(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs' values, given the inputs'."""
        result: tuple[Tensor, ...] = self.call(*values)
        return result


def make_piece(
    nodes: Iterable[fx.Node], outputs: Sequence[fx.Node], *, first: Sequence[fx.Node] = (), sums: Sequence[Any] = ()
) -> Piece:
    """Cut out the nodes that `outputs` need among `nodes`; what lies outside is an input.

    Inputs named in `first` come first, needed or not. For each pair `(so_far, node)` in `sums` one output more is
    `so_far + node`, which a loop can use to add up what only its sum is wanted of.
    """
    inside = set(nodes)
    needed = _needed(inside, [*outputs, *(node for _, node in sums)])
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    inputs = list(dict.fromkeys([*first, *(pair[0] for pair in sums), *_outside(needed, inside, outputs, sums)]))
    for node in inputs:
        env[node] = _placeholder(graph, node)
    for node in needed:
        env[node] = graph.node_copy(node, lambda inner: env[inner])
    totals = []
    for so_far, node in sums:
        total = graph.call_function(torch.ops.aten.add.Tensor, (env[so_far], env[node]))
        total.meta = dict(node.meta)
        totals.append(total)
    graph.output((*(env[node] for node in outputs), *totals))
    return Piece(fx.GraphModule({}, graph), tuple(inputs), (*outputs, *(node for _, node in sums)))


def descendants(graph: fx.Graph, roots: Iterable[fx.Node]) -> set[fx.Node]:
    """Return these nodes and all that depend on them."""
    seen = set(roots)
    for node in graph.nodes:
        if any(arg in seen for arg in node.all_input_nodes):
            seen.add(node)
    return seen


def _placeholder(graph: fx.Graph, node: fx.Node) -> fx.Node:
    made = graph.placeholder(node.name)
    made.meta = dict(node.meta)
    return made


def _needed(inside: set[fx.Node], outputs: Sequence[fx.Node]) -> list[fx.Node]:
    seen: set[fx.Node] = set()
    waiting = [node for node in outputs if node in inside]
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting += [arg for arg in node.all_input_nodes if arg in inside]
    order = {node: place for place, node in enumerate(next(iter(seen)).graph.nodes)} if seen else {}
    return sorted(seen, key=order.__getitem__)


def _outside(
    needed: list[fx.Node], inside: set[fx.Node], outputs: Sequence[fx.Node], sums: Sequence[Any]
) -> list[fx.Node]:
    used = [arg for node in needed for arg in node.all_input_nodes if arg not in inside]
    return [*used, *(node for node in (*outputs, *(pair[1] for pair in sums)) if node not in inside)]
