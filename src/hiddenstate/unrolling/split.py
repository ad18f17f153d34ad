"""Splitting a step's graph by dependence into what runs before the loop, in it, and after it."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import fx

from .pieces import descendants
from .tracing import StepTrace

aten = torch.ops.aten

# What is worth doing for all steps at once even where memory is slow: products with weights, and look-ups.
HEAVY = {
    *(aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default, aten.mv.default),
    *(aten.convolution.default, aten.convolution_backward.default),
    *(aten.embedding.default, aten.embedding_dense_backward.default),
}


_VIEWS = {
    *(aten.t.default, aten.transpose.int, aten.permute.default, aten.unsqueeze.default, aten.expand.default),
    *(aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.squeeze.dim, aten.squeeze.dims),
}


class Stage(Enum):
    """When a node runs; `once` is before everything, since it does not depend on time at all."""

    ONCE = "once"
    BEFORE = "before the loop"
    LOOP = "in the loop"
    AFTER = "after the loop"
    BACK_BEFORE = "before the backward loop"
    BACK_LOOP = "in the backward loop"
    BACK_AFTER = "after the backward loop"


@dataclass(frozen=True, slots=True, eq=False)
class StagedTrace:
    """The stage of every node of a trace."""

    trace: StepTrace
    stages: dict[fx.Node, Stage]

    def nodes(self, stage: Stage) -> list[fx.Node]:
        """Return the nodes of one stage, in order."""
        return [node for node in self.trace.graph.nodes if self.stages.get(node) is stage]


def split(trace: StepTrace, *, wide: bool) -> StagedTrace:
    """Assign every node its stage.

    `wide` moves everything out of the loop that can be moved, which is right where each operation has a cost of its
    own, but for what is made in the loop from what it reads anyway. Otherwise only heavy work is moved: light work is
    cheaper in the loop, where its data is still at hand.
    """
    forward = _ancestors([trace.out, *trace.news])
    loop = _ancestors(trace.news)
    back = _ancestors(_some([*trace.to_weights, *trace.to_firsts, trace.to_x, *trace.to_states]))
    back_loop = _ancestors(_some(trace.to_states))
    on_input = descendants(trace.graph, [*trace.inputs, *_some([trace.grad_out])])
    on_state = descendants(trace.graph, trace.states)
    on_grad = descendants(trace.graph, _some(trace.grad_news))
    stages: dict[fx.Node, Stage] = {}
    for node in trace.graph.nodes:
        if node.op != "call_function" or node not in forward | back:
            continue
        if node not in on_input | on_state | on_grad:
            stages[node] = Stage.ONCE
        elif node in forward:
            early, late = node not in on_state, node not in loop
            stages[node] = Stage.BEFORE if early else Stage.AFTER if late else Stage.LOOP
        else:
            early, late = node not in on_grad, node not in back_loop
            stages[node] = Stage.BACK_BEFORE if early else Stage.BACK_AFTER if late else Stage.BACK_LOOP
    if wide:
        _bring_in(trace, stages, Stage.BEFORE, Stage.LOOP)
        _bring_in(trace, stages, Stage.BACK_BEFORE, Stage.BACK_LOOP)
    else:
        _narrow(trace, stages, (Stage.BEFORE, Stage.LOOP, Stage.AFTER))
        _narrow(trace, stages, (Stage.BACK_BEFORE, Stage.BACK_LOOP, Stage.BACK_AFTER))
    _keep_tuples_together(trace, stages)
    return StagedTrace(trace, stages)


def _bring_in(trace: StepTrace, stages: dict[fx.Node, Stage], before: Stage, loop: Stage) -> None:
    """Bring element-wise work into a loop where the loop then reads no more than it would read of its results."""
    ends = {trace.out, *trace.news, *_some([*trace.to_weights, *trace.to_firsts, trace.to_x, *trace.to_states])}
    for node in reversed(list(trace.graph.nodes)):
        if stages.get(node) is not before:
            continue
        used = [stages.get(user) is loop for user in node.users if user in stages]
        if not all(used) or not used or node in ends or not is_light(node):
            continue
        read = {arg for inner in trace.graph.nodes if stages.get(inner) is loop for arg in inner.all_input_nodes}
        new = [arg for arg in node.all_input_nodes if _varies(trace, stages, arg) and arg not in read]
        if sum(arg.meta["val"].numel() for arg in new) <= node.meta["val"].numel():
            stages[node] = loop


def is_light(node: fx.Node) -> bool:
    """Say whether a node's elements are each made from the same elements of others."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags and isinstance(node.meta.get("val"), torch.Tensor)


def _varies(trace: StepTrace, stages: dict[fx.Node, Stage], node: fx.Node) -> bool:
    return node not in trace.weights and node not in trace.firsts and stages.get(node) is not Stage.ONCE


def _narrow(trace: StepTrace, stages: dict[fx.Node, Stage], around: tuple[Stage, Stage, Stage]) -> None:
    """Bring light nodes into the loop, where no heavy node before it needs them or after it makes them."""
    before, loop, after = around
    nodes = list(trace.graph.nodes)
    heavy_later: set[fx.Node] = set()  # nodes before the loop that a heavy one there needs
    for node in reversed(nodes):
        if stages.get(node) is before and (node in heavy_later or _heavy(node)):
            heavy_later.update([node, *node.all_input_nodes])
    heavy_sooner: set[fx.Node] = set()  # nodes after the loop that need a heavy one there
    for node in nodes:
        if stages.get(node) is after and (_heavy(node) or any(arg in heavy_sooner for arg in node.all_input_nodes)):
            heavy_sooner.add(node)
    for node in reversed(nodes):
        # A view computes nothing: it is taken where it is needed, so that nothing is kept twice.
        if stages.get(node) is after and node.target in _VIEWS and all(user in heavy_sooner for user in node.users):
            heavy_sooner.add(node)
    for node in nodes:
        light_before = stages.get(node) is before and node not in heavy_later
        light_after = stages.get(node) is after and node not in heavy_sooner
        if light_before or light_after:
            stages[node] = loop


def _heavy(node: fx.Node) -> bool:
    return node.target in HEAVY


def _keep_tuples_together(trace: StepTrace, stages: dict[fx.Node, Stage]) -> None:
    # What passes from stage to stage is a tensor; an operation with several results hands them out in its own stage.
    for node in trace.graph.nodes:
        if node.target is operator.getitem and node in stages:
            stages[node] = stages[node.args[0]]


def _ancestors(roots: Iterable[fx.Node]) -> set[fx.Node]:
    seen: set[fx.Node] = set()
    waiting = list(roots)
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting += node.all_input_nodes
    return seen


def _some(nodes: Iterable[Any]) -> list[fx.Node]:
    return [node for node in nodes if node is not None]
