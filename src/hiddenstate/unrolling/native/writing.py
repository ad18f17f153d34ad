"""Writing a loop's body as C."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ..scan import Loop
from .factors import Factors
from .grouping import Item, Order
from .inlining import inlined
from .operations import FILLED, SPLITS, expression, is_view, literal, view
from .page import Page
from .placement import Placement, axis_of_join
from .prelude import LOOP, PRELUDE, fill
from .rows import Rows
from .values import Place, Unsupported, c_type, ctype_of, dense, shape_of

aten = torch.ops.aten


class LoopWriter:
    """Writes one function that runs all steps of a loop.

    Its pointers are, in order: what is carried in, what is carried on (two steps, or all of them), what is the same at
    all steps, what comes at each, what is kept of each, memory to work in, and memory of which each thread has its own.
    """

    def __init__(self, loop: Loop) -> None:
        """Write the loop's body."""
        self.loop, self.graph = loop, loop.body.call.graph
        self.carried, self.fixed, self.along, self.results = loop.nodes()
        self.page, self.order = Page(), Order(self.graph)
        self.rows = Rows(loop, self.order.items)
        self.memory = Placement(self.page, self.rows)
        self.factors = Factors(self.memory)
        self.inlined: set[fx.Node] = set()  # computed where they are read, and nowhere kept
        self.copies: list[tuple[Place, fx.Node]] = []

    def source(self) -> str:
        """Return the whole C file."""
        streams, fixed = self._pointers(), self._fixed_pointers()
        for node in self.graph.nodes:
            if node.target in FILLED:
                self.memory.scalars[node] = literal(FILLED[node.target](node), ctype_of(node))
        self.inlined = inlined(self.graph, self.results, self.memory.targets)
        for item in self.order.items:
            self._item(item)
        for target, node in self.copies:
            self.page.copy(target, self.memory.read(node), by_rows=self.rows.has(node))
        step = "steps - 1 - n" if self.loop.backward else "n"
        return PRELUDE + fill(
            LOOP,
            rows=str(self.rows.count if self.rows.apart else 1),
            pointers=f"char *work = p[{self._count}];",
            last=str(self._count + 1),
            mine=str(self.memory.scratch["mine"]),
            step=step,
            fixed="\n".join(fixed),
            packs="\n  ".join(self.factors.packs),
            body="\n".join("    " + line for line in [*streams, *self.page.lines] if line),
        )

    @property
    def _count(self) -> int:
        return len(self.carried) + len(self.fixed) + len(self.along) + len(self.results) - self.loop.carried

    def _fixed_pointers(self) -> list[str]:
        lines = []
        for place, node in enumerate(self.fixed):
            ctype = ctype_of(node)
            lines.append(f"  {ctype} *fix{place} = ({ctype} *)p[{len(self.carried) + place}];")
            self.memory.places[node] = Place(f"fix{place}", shape_of(node), tuple(node.meta["val"].stride()), ctype)
        return lines

    def _pointers(self) -> list[str]:
        lines = []
        for place, node in enumerate(self.carried):
            ctype, shape = ctype_of(node), shape_of(node)
            now, after = ("n", "n + 1") if not self.loop.backward else ("steps - n", "t")
            if not self.loop.path[place]:
                now, after = "(n & 1)", "((n + 1) & 1)"
            if self.rows.sums[place]:
                now, after = f"2 * part + {now}", f"2 * part + {after}"
            for name, when in ((f"in{place}", now), (f"out{place}", after)):
                lines.append(f"{ctype} *{name} = ({ctype} *)p[{place}] + ({when}) * {math.prod(shape)}L;")
            self.memory.places[node] = Place(f"in{place}", shape, dense(shape), ctype)
            self._target(self.results[place], Place(f"out{place}", shape, dense(shape), ctype))
        number = len(self.carried) + len(self.fixed)
        for place, node in enumerate(self.along):
            lines.append(self._stream(f"now{place}", node, number + place))
            self.memory.places[node] = Place(f"now{place}", shape_of(node), dense(shape_of(node)), ctype_of(node))
        number += len(self.along)
        for place, node in enumerate(self.results[len(self.carried) :]):
            lines.append(self._stream(f"keep{place}", node, number + place))
            self._target(node, Place(f"keep{place}", shape_of(node), dense(shape_of(node)), ctype_of(node)))
        return lines

    def _stream(self, name: str, node: fx.Node, number: int) -> str:
        ctype, size = ctype_of(node), math.prod(shape_of(node))
        return f"{ctype} *{name} = ({ctype} *)p[{number}] + t * {size}L;"

    def _target(self, node: fx.Node, place: Place) -> None:
        # A node that is wanted in two places, or is no work of this body, is copied at the end.
        made = node.op == "call_function" and not is_view(node) and node.target not in FILLED
        if made and node not in self.memory.targets:
            self.memory.targets[node] = place
        else:
            self.copies.append((place, node))

    def _item(self, item: Item) -> None:
        if item.shape is not None:
            self._elements(item)
            return
        (node,) = item.nodes
        special: dict[Any, Callable[[fx.Node], None]] = {
            aten.mm.default: self.factors.write,
            aten.bmm.default: self.factors.write,
            aten.cat.default: self._join,
            aten.sum.dim_IntList: self._reduce,
            aten.mean.dim: self._reduce,
            aten.amax.default: self._reduce,
            aten.stack.default: self._stack,
        }
        if node.target not in special:
            raise Unsupported(f"{node.target} has no C here")
        special[node.target](node)

    def _elements(self, item: Item) -> None:
        assert item.shape is not None
        index = [f"i{axis}" for axis in range(len(item.shape))]
        nodes = [node for node in item.nodes if node not in self.inlined]
        if not nodes:
            return
        inside = set(item.nodes)
        names = {node: f"v{number}" for number, node in enumerate(nodes)}
        stores = [
            node for node in nodes if node in self.memory.targets or any(self._outside(u, inside) for u in node.users)
        ]
        reads: list[str] = []
        for node in nodes:
            value = expression(node, lambda arg: names.get(arg) or self._element(arg, index), c_type)
            reads.append(f"const {ctype_of(node)} {names[node]} = {value};")
        writes = [f"{self.memory.own(node).at(index)} = {names[node]};" for node in stores]
        self.page.nest(item.shape, [*reads, *writes], by_rows=self.rows.has(nodes[0]))

    def _outside(self, user: fx.Node, inside: set[fx.Node]) -> bool:
        return user not in inside or user in self.inlined

    def _element(self, node: fx.Node, index: list[str]) -> str:
        views, source = [], node
        while source not in self.memory.places and is_view(source):
            views.append(source)
            source = source.all_input_nodes[0]
            if source.target in SPLITS:
                source = source.all_input_nodes[0]
        if source in self.inlined:
            return self._inline(source, views[::-1], index)
        place = self.memory.read(node)
        return place if isinstance(place, str) else place.at(index)

    def _inline(self, node: fx.Node, views: list[fx.Node], index: list[str]) -> str:
        """Return the expression of an element of a value that is nowhere kept, seen through views."""
        shape = shape_of(node)

        def read(arg: fx.Node) -> str:
            if arg in self.inlined:
                if shape_of(arg) != shape:
                    raise Unsupported("a value of another shape cannot be computed where it is read")
                return self._inline(arg, views, index)
            place = self.memory.read(arg)
            if isinstance(place, str):
                return place
            place = place.moved(*_broadcast(place, shape))
            for step in views:
                shown = view(step, place)
                if shown is None:
                    raise Unsupported("this view cannot be computed through")
                place = shown
            return place.at(index)

        return expression(node, read, c_type)

    def _join(self, node: fx.Node) -> None:
        whole, axis, first = self.memory.own(node), axis_of_join(node), 0
        for part in node.args[0]:  # type: ignore[union-attr]
            assert isinstance(part, fx.Node)
            shape = shape_of(part)
            if math.prod(shape):
                target = whole.moved(shape, whole.strides, first * whole.strides[axis])
                if self.memory.read(part) != target:
                    self.page.copy(target, self.memory.read(part), by_rows=self.rows.has(node))
                first += shape[axis]

    def _stack(self, node: fx.Node) -> None:
        whole = self.memory.own(node)
        axis = (int(node.args[1]) if len(node.args) > 1 else 0) % len(whole.shape)  # type: ignore[arg-type]
        shape, strides = list(whole.shape), list(whole.strides)
        del shape[axis], strides[axis]
        for number, part in enumerate(node.args[0]):  # type: ignore[arg-type]
            target = whole.moved(shape, strides, number * whole.strides[axis])
            self.page.copy(target, self.memory.read(part), by_rows=self.rows.has(node))

    def _reduce(self, node: fx.Node) -> None:
        inner = node.args[0]
        assert isinstance(inner, fx.Node)
        source, target = self.memory.read(inner), self.memory.own(node)
        if isinstance(source, str) or not node.args[1] or node.kwargs.get("dtype") is not None:
            raise Unsupported(f"{node.target} of this kind has no C here")
        rank = len(source.shape)
        gone = {int(dim) % rank for dim in node.args[1]}  # type: ignore[union-attr, arg-type]
        kept_axes = len(target.shape) == rank
        strides, waiting = [], iter(target.strides)
        for axis in range(rank):
            stride = next(waiting) if kept_axes or axis not in gone else 0
            strides.append(0 if axis in gone else stride)
        into = target.moved(source.shape, strides)
        flat = [f"i{axis}" for axis in range(len(target.shape))]
        largest, by_rows = node.target is aten.amax.default, self.rows.has(node)
        least = {"int64_t": "INT64_MIN", "uint8_t": "0"}.get(target.ctype, "-INFINITY")
        self.page.nest(target.shape, [f"{target.at(flat)} = {least if largest else '0'};"], by_rows=by_rows)
        self.page.gather(source, into, last=rank - 1 in gone, largest=largest, by_rows=self.rows.has(inner))
        if node.target is aten.mean.dim:
            count = math.prod(source.shape[axis] for axis in gone)
            self.page.nest(target.shape, [f"{target.at(flat)} /= {count};"], by_rows=by_rows)


def _broadcast(place: Place, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    shift = len(shape) - len(place.shape)
    strides = [0 if size == 1 else stride for size, stride in zip(place.shape, place.strides, strict=True)]
    return shape, (*([0] * shift), *strides)
