"""A step's graph, rewritten so that less of it depends on the state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import fx

from .pieces import descendants

aten = torch.ops.aten


def rewrite(graph: fx.Graph, states: Iterable[fx.Node]) -> None:
    """Take products with joined values apart: what of them does not depend on the state need not be in the loop.

    `cat([x, h]) @ W` becomes `x @ W_x + h @ W_h`, and where only pieces of a product are used, each is a product of
    its own.
    """
    for node in list(graph.nodes):
        if node.target is aten.mm.default:
            _take_joined_apart(graph, node, descendants(graph, states))
    for node in list(graph.nodes):
        if node.target is aten.mm.default:
            _multiply_pieces(graph, node)
    graph.eliminate_dead_code()


def _take_joined_apart(graph: fx.Graph, node: fx.Node, depending: set[fx.Node]) -> None:
    left, right = node.args
    assert isinstance(left, fx.Node)
    assert isinstance(right, fx.Node)
    if left.target is not aten.cat.default or _joined_axis(left) != 1 or right in depending:
        return
    parts: Any = left.args[0]
    if len({part in depending for part in parts}) < 2:
        return
    terms, start = [], 0
    with graph.inserting_before(node):
        for _, group in groupby(parts, key=depending.__contains__):
            members = list(group)
            size = sum(int(part.meta["val"].shape[1]) for part in members)
            whole = members[0] if len(members) == 1 else _add(graph, aten.cat.default, members, 1)
            weight = _add(graph, aten.slice.Tensor, right, 0, start, start + size)
            terms.append(_add(graph, aten.mm.default, whole, weight))
            start += size
        total = reduce(lambda one, other: _add(graph, aten.add.Tensor, one, other), terms)
    node.replace_all_uses_with(total)


def _multiply_pieces(graph: fx.Graph, node: fx.Node) -> None:
    left, right = node.args
    pieces = [(user, _piece(user)) for user in node.users]
    if len(pieces) < 2 or any(bounds is None for _, bounds in pieces):
        return
    bounds = sorted(bounds for _, bounds in pieces if bounds is not None)
    if any(end > start for (_, end), (start, _) in pairwise(bounds)):
        return  # what two pieces share would be computed twice
    for user, _ in pieces:
        with graph.inserting_before(user):
            _, dim, start, end = user.args
            weight = _add(graph, aten.slice.Tensor, right, dim, start, end)
            product = _add(graph, aten.mm.default, left, weight)
        user.replace_all_uses_with(product)


def _piece(user: fx.Node) -> tuple[int, int] | None:
    """Return which columns a user takes of a matrix, or None where it does anything else."""
    if user.target is not aten.slice.Tensor or len(user.args) != 4 or user.kwargs:
        return None
    source, dim, start, end = user.args
    assert isinstance(source, fx.Node)
    if int(dim) % 2 != 1:  # type: ignore[arg-type]
        return None
    first, last, _ = slice(start, end).indices(int(source.meta["val"].shape[1]))
    return first, last


def _add(graph: fx.Graph, operation: Any, *args: Any) -> fx.Node:
    node = graph.call_function(operation, args)
    values = [_value(arg) for arg in args]
    node.meta["val"] = operation(*values)
    return node


def _value(arg: Any) -> Any:
    if isinstance(arg, fx.Node):
        return arg.meta["val"]
    return [_value(inner) for inner in arg] if isinstance(arg, Sequence) else arg


def _joined_axis(node: fx.Node) -> int:
    dim = int(node.args[1]) if len(node.args) > 1 else 0  # type: ignore[arg-type]
    return dim % int(node.meta["val"].dim())


def write_anew(graph: fx.Graph) -> None:
    """Have what is written into a value of the graph's own be a new value, where nothing else shows the old one.

    Derivatives of torch's own do so (that of `clamp` into a mask); nobody but them sees the difference.
    """
    nodes = list(graph.nodes)
    for place, node in enumerate(nodes):
        name, _, overload = str(getattr(node.target, "_schema", "")).partition("(")[0].partition(".")
        if not name.endswith("_") or name.endswith("__") or not isinstance(node.args[0], fx.Node):
            continue
        old, new = node.args[0], getattr(aten, name.removeprefix("aten::").removesuffix("_"), None)
        others = [arg.meta["val"] for arg in node.all_input_nodes]
        alike = all(isinstance(value, torch.Tensor) and value.dtype == others[0].dtype for value in others)
        if new is None or (overload or "default") not in new.overloads() or not alike or not _shown_once(old):
            continue
        node.target = getattr(new, overload or "default")
        for later in nodes[place + 1 :]:
            later.replace_input_with(old, node)


def _shown_once(node: fx.Node) -> bool:
    """Say whether a value is a graph's own, and is seen in no other way than by itself."""
    if node.op != "call_function" or _shows(node):
        return False
    return not any(_shows(user) and not str(user.target).split(".")[1].endswith("_") for user in node.users)


def _shows(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is None or any(result.alias_info is not None for result in schema.returns)
