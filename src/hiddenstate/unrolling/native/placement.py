"""Placing the values of a body in memory: in the result if they belong there, else in working memory."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from .operations import SPLITS, view
from .page import Page
from .rows import Rows
from .values import Place, Unsupported, ctype_of, dense, shape_of

aten = torch.ops.aten


class Placement:
    """The place of every value that has one."""

    def __init__(self, page: Page, rows: Rows) -> None:
        """Begin with no value known; code that places need is written on `page`."""
        self.page, self.rows = page, rows
        self.places: dict[fx.Node, Place] = {}
        self.scalars: dict[fx.Node, str] = {}  # tensors of one number
        self.targets: dict[fx.Node, Place] = {}  # where a result has to lie in the end
        self.scratch = {"work": 0, "mine": 0}  # bytes to work in: of all threads, and of each

    def own(self, node: fx.Node) -> Place:
        """Return memory for a node's value: where it is wanted as a result, in a join, or anywhere."""
        if node in self.places:
            return self.places[node]
        if node in self.targets:
            place = self.targets[node]
        else:
            private = self.rows.private(node)
            place = self._in_join(node) or self.room(shape_of(node), ctype_of(node), private=private)
        self.places[node] = place
        return place

    def _in_join(self, node: fx.Node) -> Place | None:
        for user in node.users:
            if user.target is aten.cat.default and list(user.args[0]).count(node) == 1:  # type: ignore[arg-type]
                whole, axis = self.own(user), axis_of_join(user)
                parts: Any = user.args[0]
                first = sum(shape_of(part)[axis] for part in parts[: parts.index(node)])
                if ctype_of(node) == whole.ctype and len(shape_of(node)) == len(whole.shape):
                    return whole.moved(shape_of(node), whole.strides, first * whole.strides[axis])
        return None

    def room(self, shape: tuple[int, ...], ctype: str, *, private: bool = False) -> Place:
        """Return memory to work in; private memory is another for each thread."""
        whose = "mine" if private else "work"
        start = self.scratch[whose]
        size = math.prod(shape) * {"float": 4, "double": 8, "uint8_t": 1, "int64_t": 8}[ctype]
        self.scratch[whose] += (size + 63) // 64 * 64
        name = f"{whose}{start}"
        self.page.lines.append(f"{ctype} *{name} = ({ctype} *)({whose} + {start}L);")
        return Place(name, shape, dense(shape), ctype)

    def read(self, node: fx.Node) -> Place | str:
        """Return where a value lies, or the number that it is all of."""
        if node in self.scalars:
            return self.scalars[node]
        if node in self.places:
            return self.places[node]
        source = node.all_input_nodes[0]
        if source.target in SPLITS:
            source = source.all_input_nodes[0]
        inner = self.read(source)
        if isinstance(inner, str):
            return inner
        shown = view(node, inner)
        if shown is None:  # no view of memory with gaps: put together first
            whole = self.room(inner.shape, inner.ctype, private=self.rows.private(source))
            self.page.copy(whole, inner, by_rows=self.rows.has(source))
            shown = view(node, whole)
        if shown is None:
            raise Unsupported(f"{node.target} of this shape has no C here")
        self.places[node] = shown
        return shown


def axis_of_join(node: fx.Node) -> int:
    """Return the axis along which tensors are joined."""
    dim = int(node.args[1]) if len(node.args) > 1 else 0  # type: ignore[arg-type]
    return dim % len(shape_of(node))
