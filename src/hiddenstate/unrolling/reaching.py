"""Which tensors a gradient reaches: the others get no gradient, not a gradient of zeros."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import fx

from .tracing import StepTrace

aten = torch.ops.aten


class Reaching:
    """For every tensor that goes in, the outputs of one step from which a gradient comes to it."""

    def __init__(self, trace: StepTrace, *, ends: bool) -> None:
        """Follow each incoming gradient through the step's graph; 0 is the output, then come the states."""
        # A row that has ended hands its state on, but took no step: what comes of that is not followed.
        alive = _shown(trace.inputs[1]) if ends else set()
        idle = {node for node in trace.graph.nodes if node.args and node.args[0] in alive and _hands_on(node)}

        def reached_from(seed: fx.Node | None) -> set[fx.Node]:
            found = set() if seed is None else {seed}
            for node in trace.graph.nodes:
                if node not in idle and any(arg in found for arg in node.all_input_nodes):
                    found.add(node)
            return found

        reached = [reached_from(seed) for seed in (trace.grad_out, *trace.grad_news)]
        self._given, self._states = (
            [frozenset(n for n, found in enumerate(reached) if node is not None and node in found) for node in nodes]
            for nodes in ((*trace.to_weights, *trace.to_firsts, trace.to_x), trace.to_states)
        )
        self._known: dict[tuple[frozenset[int], tuple[bool, ...]], list[bool]] = {}

    def __call__(self, lengths: Iterable[int], outputs: Sequence[bool]) -> list[bool]:
        """Say for each tensor that went in whether gradients of these outputs reach it in rows of these lengths."""
        # What is reached settles long before there are more steps than states could hand it on.
        most = 2 * len(self._states) + 2
        key = (frozenset(min(length, most) for length in lengths), tuple(outputs))
        if key not in self._known:
            found = [self._follow(length, key[1]) for length in key[0]]
            self._known[key] = [any(each) for each in zip(*found, strict=True)]
        return self._known[key]

    def _follow(self, steps: int, outputs: tuple[bool, ...]) -> list[bool]:
        own = {0} if outputs[0] else set()
        live = {place for place, wanted in enumerate(outputs) if wanted}
        given = [False] * len(self._given)
        for _ in range(steps):
            given = [before or bool(sources & live) for before, sources in zip(given, self._given, strict=True)]
            live = own | {place for place, sources in enumerate(self._states, 1) if sources & live}
        return [*given, *(place in live for place in range(1, len(self._states) + 1))]


def _shown(mask: fx.Node) -> set[fx.Node]:
    """Return a mask and all views of it."""
    return {mask}.union(*(_shown(user) for user in mask.users if len(user.all_input_nodes) == 1))


def _hands_on(node: fx.Node) -> bool:
    """Say whether a node gives zero to rows that are there, and a gradient to those that are not."""
    first = node.args[1] if node.target is aten.where.self else None
    return isinstance(first, fx.Node) and not first.all_input_nodes and first.op == "call_function"
