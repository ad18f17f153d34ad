"""Random numbers of a step: drawn for all steps before the loop, in the order in which the loop would draw them.

So under one seed they are the same numbers, and no obstacle: to a schedule they come from outside, as the input does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ..errors import Untraceable
from .native.operations import FILLED
from .reasons import line_in

aten = torch.ops.aten

# Of the first argument only shape, dtype and device count.
_LIKE = {
    *(aten.rand_like.default, aten.randn_like.default, aten.randint_like.default, aten.randint_like.low_dtype),
    *(aten.bernoulli.p, aten.normal_functional.default, aten.exponential.default, aten.uniform.default),
    *(aten.geometric.default, aten.cauchy.default, aten.log_normal.default),
}
_SIZED = {aten.rand.default, aten.randn.default, aten.randint.default, aten.randint.low, aten.normal.float_float}
_BY_VALUE = {aten.bernoulli.default, aten.normal.Tensor_float, aten.normal.float_Tensor, aten.normal.Tensor_Tensor}


def is_random(operation: Any) -> bool:
    """Say whether an operation draws random numbers."""
    return isinstance(operation, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in operation.tags


@dataclass(frozen=True, slots=True, eq=False)
class Draw:
    """One draw of a step: by the very operation that the step draws with."""

    call: Callable[[int], Tensor]  # from the number of rows
    rowed: bool  # whether its first axis is the rows


def take_out(graph: fx.Graph, rows: int) -> tuple[list[fx.Node], list[Draw]]:
    """Have a graph take its random numbers from outside; returns where they come in, and how they are drawn."""
    places: list[fx.Node] = []
    draws: list[Draw] = []
    for node in list(graph.nodes):
        if node.op == "call_function" and is_random(node.target):
            dropped = node.target is aten.native_dropout.default
            draws.append(_mask(node, rows) if dropped else _draw(node, rows))
            with graph.inserting_before(next(iter(graph.nodes))):
                place = graph.placeholder(f"drawn_{len(places)}")
            if dropped:
                place.meta = {**node.meta, "val": node.meta["val"][1]}
                _drop_by(place, node)
            else:
                place.meta = dict(node.meta)
                node.replace_all_uses_with(place)
                graph.erase_node(node)
            places.append(place)
    return places, draws


def _mask(node: fx.Node, rows: int) -> Draw:
    """Return how a dropout on a GPU draws which numbers stay: by the same kernel, whose input does not count."""
    like, p = node.meta["val"][0], node.args[1]
    assert isinstance(p, float | int)
    shape, kind = [int(size) for size in like.shape], {"dtype": like.dtype, "device": like.device}
    rowed = shape[:1] == [rows]

    def call(alive: int) -> Tensor:
        ones = torch.ones([alive, *shape[1:]] if rowed else shape, **kind)
        mask: Tensor = torch.native_dropout(ones, p, True)[1]
        return mask

    return Draw(call, rowed)


def _drop_by(mask: fx.Node, node: fx.Node) -> None:
    """Write a dropout as products with a mask and a number; what takes its results goes on to stand for them."""
    graph, (x, p) = node.graph, node.args[:2]
    assert isinstance(p, float | int)
    like = node.meta["val"][0]
    with graph.inserting_before(node):
        kept = graph.call_function(aten._to_copy.default, (mask,), {"dtype": like.dtype})
        product = graph.call_function(aten.mul.Tensor, (x, kept))
    for made in (kept, product):
        made.meta = {**node.meta, "val": like}
    for user in list(node.users):
        if user.args[1]:
            user.target, user.args, user.kwargs = aten._to_copy.default, (mask,), {"dtype": torch.bool}
        else:
            user.target, user.args = aten.mul.Tensor, (product, 1 / (1 - p) if p < 1 else 0.0)
    graph.erase_node(node)


def draw_all(draws: Sequence[Draw], x: Tensor, lengths: Tensor | None) -> list[Tensor]:
    """Draw for all steps, (time, ...), as a loop would in which only rows take part that have not ended."""
    if not draws:
        return []
    batch, steps = x.shape[:2]
    order = None if lengths is None else lengths.argsort(descending=True, stable=True)
    places = None if order is None else order.argsort()
    found: list[list[Tensor]] = [[] for _ in draws]
    with torch.no_grad():
        for t in range(steps):
            alive = batch if lengths is None else int((lengths > t).sum())
            for draw, drawn in zip(draws, found, strict=True):
                if alive == 0:  # the loop has ended
                    drawn.append(torch.zeros_like(drawn[0]))
                    continue
                numbers = draw.call(alive)
                if draw.rowed and places is not None:  # rows that have ended are given what a row that runs is given
                    numbers = numbers.index_select(0, places.clamp(max=alive - 1).to(numbers.device))
                drawn.append(numbers)
        return [torch.stack(drawn) for drawn in found]


def _draw(node: fx.Node, rows: int) -> Draw:
    target: Any = node.target
    name, line = str(target).removeprefix("aten.").split(".")[0], line_in(node)
    if target not in _LIKE | _SIZED | _BY_VALUE or not isinstance(node.meta["val"], Tensor):
        raise Untraceable(f"it draws random numbers in a step ({name}) in a way that has to be seen at each", line)
    arguments: list[Any] = list(node.args)
    if any(isinstance(value, torch.Generator) for value in (*arguments, *node.kwargs.values())):
        raise Untraceable(f"it draws random numbers in a step ({name}) by a generator of its own", line)
    shape = [int(size) for size in node.meta["val"].shape]
    rowed = shape[:1] == [rows]
    makers = [_maker(value, target, rows, (name, line)) for value in arguments]
    options = dict(node.kwargs)
    options.pop("memory_format", None)  # of an empty tensor, which has none

    def call(alive: int) -> Tensor:
        drawn: Tensor = target(*(make(alive) for make in makers), **options)
        return drawn

    return Draw(call, rowed)


def _maker(value: Any, target: Any, rows: int, said: tuple[str, str]) -> Callable[[int], Any]:
    """Return how an argument of a draw is made for a number of rows."""
    if target in _SIZED and isinstance(value, list | tuple):
        size = [int(each) for each in value]
        return lambda alive: [alive, *size[1:]] if size[:1] == [rows] else size
    if not isinstance(value, fx.Node):
        return lambda _: value
    like = value.meta["val"]
    if target in _LIKE:
        shape, kind = tuple(like.shape), {"dtype": like.dtype, "device": like.device}
        return lambda alive: torch.empty((alive, *shape[1:]) if shape[:1] == (rows,) else shape, **kind)
    constant = _constant(value, said)
    if constant.shape[:1] == (rows,):
        return lambda alive: constant[:alive]
    return lambda _: constant


def _constant(node: fx.Node, said: tuple[str, str]) -> Tensor:
    """Return the value of a node that depends on nothing that a step is given."""
    like = node.meta.get("val")
    if node.target in FILLED and isinstance(like, Tensor):
        return torch.full(tuple(like.shape), FILLED[node.target](node), dtype=like.dtype, device=like.device)
    if node.op != "call_function" or is_random(node.target):
        name, line = said
        raise Untraceable(f"it draws random numbers in a step ({name}) that depend on what it is given", line)
    arguments = [_constant(value, said) if isinstance(value, fx.Node) else value for value in node.args]
    found: Tensor = node.target(*arguments, **node.kwargs)  # type: ignore[operator]
    return found
