"""Whether the rows of a batch are independent, so that threads can take some each and never wait."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch
from torch import fx

from ..scan import Loop
from .grouping import Item
from .operations import FILLED, POINTWISE, SPLITS, is_view
from .values import shape_of

aten = torch.ops.aten

_REDUCTIONS = (aten.sum.dim_IntList, aten.mean.dim, aten.amax.default)


class Kind(Enum):
    """How a value lies to the rows."""

    SAME = "read by all rows, made by none"
    ROWS = "its first axis is the rows, and each is made from the same row of other values"
    SUM = "added up over rows: each thread has its own, and they are added up in the end"


class Rows:
    """The kind of every value of a body, where its rows can run apart."""

    def __init__(self, loop: Loop, items: Sequence[Item]) -> None:
        """Look at a body and the order of its work; the first of what it carries tells the number of rows."""
        graph = loop.body.call.graph
        carried, fixed, along, results = loop.nodes()
        self.count = (*shape_of(carried[0]), 0)[0] if carried else 0
        self.sums = [
            not path and _adds_to(node, result) for node, result, path in zip(carried, results, loop.path, strict=False)
        ]
        self.kinds: dict[fx.Node, Kind] = dict.fromkeys((*carried, *fixed, *along), Kind.SAME)
        for node in (*carried, *along):
            if shape_of(node)[:1] == (self.count,):
                self.kinds[node] = Kind.ROWS
        self.kinds.update((node, Kind.SUM) for node, summed in zip(carried, self.sums, strict=True) if summed)
        self.apart = self.count > 1 and self._follow(graph) and self._ends_well(results) and self._in_items(items)
        if not self.apart:
            self.kinds, self.sums = {}, [False] * len(carried)

    def has(self, node: fx.Node) -> bool:
        """Say whether a value's first axis is the rows, of which a thread takes some."""
        return self.kinds.get(node) is Kind.ROWS

    def private(self, node: fx.Node) -> bool:
        """Say whether each thread needs a place of its own for a value."""
        return self.apart and not self.has(node)

    def _follow(self, graph: fx.Graph) -> bool:
        for node in graph.nodes:
            if node.op != "call_function":
                continue
            kind = self._kind(node)
            if kind is None:
                return False
            self.kinds[node] = kind
        return True

    def _ends_well(self, results: list[fx.Node]) -> bool:
        wanted = [Kind.SUM if summed else Kind.ROWS for summed in self.sums]
        wanted += [Kind.ROWS] * (len(results) - len(wanted))
        return all(self.kinds[node] is kind for node, kind in zip(results, wanted, strict=True))

    def _in_items(self, items: Sequence[Item]) -> bool:
        # What shares a loop over elements has to be cut alike.
        return all(len({self.kinds[node] for node in item.nodes}) == 1 for item in items)

    def _kind(self, node: fx.Node) -> Kind | None:
        if node.target in FILLED:
            return Kind.SAME
        kinds = {self.kinds[arg] for arg in node.all_input_nodes}
        if is_view(node) or node.target in SPLITS:
            (kind,) = kinds
            return kind if kind is not Kind.ROWS or self._keeps_rows(node) else None
        if Kind.SUM in kinds:
            return Kind.SUM if node.target is aten.add.Tensor and kinds == {Kind.SUM} else None
        if node.target in (aten.mm.default, aten.bmm.default):
            sides = [self.kinds[arg] for arg in node.args]  # type: ignore[index]
            other = Kind.SAME if node.target is aten.mm.default else Kind.ROWS
            return Kind.ROWS if sides == [Kind.ROWS, other] else None
        if Kind.ROWS not in kinds:
            return None  # made anew at each step, and by all threads at once
        if node.target in _REDUCTIONS:
            return self._reduced(node)
        if node.target in (aten.cat.default, aten.stack.default):
            axis = (int(node.args[1]) if len(node.args) > 1 else 0) % len(shape_of(node))  # type: ignore[arg-type]
            return Kind.ROWS if axis else None
        return Kind.ROWS if node.target in POINTWISE and self._lined_up(node) else None

    def _reduced(self, node: fx.Node) -> Kind | None:
        inner, dims = node.args[:2]
        assert isinstance(inner, fx.Node)
        axes = {int(dim) % len(shape_of(inner)) for dim in dims or [0]}  # type: ignore[union-attr, arg-type]
        if 0 not in axes:
            return Kind.ROWS
        return Kind.SUM if node.target is aten.sum.dim_IntList else None

    def _lined_up(self, node: fx.Node) -> bool:
        rank = len(shape_of(node))
        parts = [arg for arg in node.all_input_nodes if self.has(arg)]
        return shape_of(node)[:1] == (self.count,) and all(len(shape_of(part)) == rank for part in parts)

    def _keeps_rows(self, node: fx.Node) -> bool:
        """Say whether a view leaves the first axis as it is."""
        source, args, target = node.all_input_nodes[0], list(node.args[1:]), node.target
        if target in SPLITS:
            dim: Any = args[1] if len(args) > 1 else node.kwargs.get("dim", 0)
            return int(dim) % len(shape_of(source)) != 0
        if source.target in SPLITS:
            return True  # a piece of what was cut along another axis
        if shape_of(node)[:1] != (self.count,) or target is aten.t.default:
            return False
        rank = len(shape_of(source))
        if target is aten.permute.default:
            return int(args[0][0]) % rank == 0  # type: ignore[index, arg-type]
        if target is aten.expand.default:
            return len(shape_of(node)) == rank
        axes = args[:2] if target is aten.transpose.int else args[:1]
        if target in (aten.transpose.int, aten.select.int, aten.slice.Tensor):
            return all(int(axis) % rank for axis in axes or [0])  # type: ignore[arg-type]
        if target is aten.unsqueeze.default:
            return int(args[0]) % (rank + 1) != 0  # type: ignore[arg-type]
        return True  # another shape of the same rows


def _adds_to(node: fx.Node, result: fx.Node) -> bool:
    """Say whether a carried value is a sum to which each step adds, and that nothing else reads."""
    only = list(node.users) == [result] and result.target is aten.add.Tensor and not result.kwargs
    return only and result.args[0] is node and result.args[1] is not node and len(result.users) == 1
