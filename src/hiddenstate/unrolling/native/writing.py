"""A loop's body, written as C."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ..scan import Loop
from .grouping import Item, Order
from .operations import FILLED, POINTWISE, SPLITS, is_view, literal, view
from .prelude import PRELUDE
from .values import Place, Unsupported, ctype_of, dense, shape_of

aten = torch.ops.aten


class Writer:
    """Writes one function that runs all steps of a loop.

    Its pointers are, in order: what is carried in, what is carried on (two steps, or all of them), what is the same at
    all steps, what comes at each, what is kept of each, and memory to work in.
    """

    def __init__(self, loop: Loop) -> None:
        """Write the loop's body."""
        self.loop, self.graph = loop, loop.body.call.graph
        self.lines: list[str] = []
        self.places: dict[fx.Node, Place] = {}
        self.scalars: dict[fx.Node, str] = {}  # tensors of one number
        self.scratch = 0  # bytes
        self.order = Order(self.graph)
        self.inlined: set[fx.Node] = set()  # computed where they are read, and nowhere kept
        given = [node for node in self.graph.nodes if node.op == "placeholder"]
        self.carried, rest = given[: loop.carried], given[loop.carried :]
        self.fixed, self.along = rest[: len(loop.fixed)], rest[len(loop.fixed) :]
        self.results: list[fx.Node] = list(next(node for node in self.graph.nodes if node.op == "output").args[0])
        self.targets: dict[fx.Node, Place] = {}  # where a result has to lie in the end
        self.copies: list[tuple[Place, fx.Node]] = []

    def source(self) -> str:
        """Return the whole C file."""
        head = self._pointers()
        for node in self.graph.nodes:
            if node.target in FILLED:
                self.scalars[node] = literal(FILLED[node.target](node), ctype_of(node))
        self._choose_inlined()
        for item in self.order.items:
            self._item(item)
        for target, node in self.copies:
            self._copy(target, self._read(node))
        body = "\n".join("    " + line for line in [*head, *self.lines] if line)
        step = "steps - 1 - n" if self.loop.backward else "n"
        return (
            f"{PRELUDE}\nvoid run(long steps, char **p, sgemm_t sgemm, dgemm_t dgemm) {{\n"
            f"  for (long n = 0; n < steps; n++) {{\n    const long t = {step};\n{body}\n  }}\n}}\n"
        )

    def _pointers(self) -> list[str]:
        lines, number = [], 0
        n = len(self.carried)
        for place, node in enumerate(self.carried):
            ctype, size = ctype_of(node), math.prod(shape_of(node))
            now, after = ("n", "n + 1") if not self.loop.backward else ("steps - n", "t")
            if not self.loop.path[place]:
                now, after = "(n & 1)", "((n + 1) & 1)"
            for name, when in ((f"in{place}", now), (f"out{place}", after)):
                lines.append(f"{ctype} *{name} = ({ctype} *)p[{place}] + ({when}) * {size}L;")
            shape = shape_of(node)
            self.places[node] = Place(f"in{place}", shape, dense(shape), ctype)
            self._target(self.results[place], Place(f"out{place}", shape, dense(shape), ctype))
        number = n
        for place, node in enumerate(self.fixed):
            ctype = ctype_of(node)
            lines.append(f"{ctype} *fix{place} = ({ctype} *)p[{number}];")
            self.places[node] = Place(f"fix{place}", shape_of(node), tuple(node.meta["val"].stride()), ctype)
            number += 1
        for place, node in enumerate(self.along):
            lines.append(self._stream(f"now{place}", node, number))
            self.places[node] = Place(f"now{place}", shape_of(node), dense(shape_of(node)), ctype_of(node))
            number += 1
        for place, node in enumerate(self.results[n:]):
            lines.append(self._stream(f"keep{place}", node, number))
            self._target(node, Place(f"keep{place}", shape_of(node), dense(shape_of(node)), ctype_of(node)))
            number += 1
        return [*lines, f"char *work = p[{number}];"]

    def _stream(self, name: str, node: fx.Node, number: int) -> str:
        ctype, size = ctype_of(node), math.prod(shape_of(node))
        return f"{ctype} *{name} = ({ctype} *)p[{number}] + t * {size}L;"

    def _target(self, node: fx.Node, place: Place) -> None:
        # A node that is wanted in two places, or is no work of this body, is copied at the end.
        made = node.op == "call_function" and not is_view(node) and node.target not in FILLED
        if made and node not in self.targets:
            self.targets[node] = place
        else:
            self.copies.append((place, node))

    def _own(self, node: fx.Node) -> Place:
        """Return memory for a node's value: where it is wanted as a result, in a join, or anywhere."""
        if node in self.places:
            return self.places[node]
        if node in self.targets:
            place = self.targets[node]
        else:
            place = self._in_join(node) or self._room(shape_of(node), ctype_of(node))
        self.places[node] = place
        return place

    def _in_join(self, node: fx.Node) -> Place | None:
        for user in node.users:
            if user.target is aten.cat.default and list(user.args[0]).count(node) == 1:  # type: ignore[arg-type]
                whole, axis = self._own(user), _axis_of_join(user)
                parts: Any = user.args[0]
                first = sum(shape_of(part)[axis] for part in parts[: parts.index(node)])
                if ctype_of(node) == whole.ctype and len(shape_of(node)) == len(whole.shape):
                    return whole.moved(shape_of(node), whole.strides, first * whole.strides[axis])
        return None

    def _room(self, shape: tuple[int, ...], ctype: str) -> Place:
        start = self.scratch
        size = math.prod(shape) * {"float": 4, "double": 8, "uint8_t": 1, "int64_t": 8}[ctype]
        self.scratch += (size + 63) // 64 * 64
        name = f"w{start}"
        self.lines.append(f"{ctype} *{name} = ({ctype} *)(work + {start}L);")
        return Place(name, shape, dense(shape), ctype)

    def _read(self, node: fx.Node) -> Place | str:
        """Return where a value lies, or the number that it is all of."""
        if node in self.scalars:
            return self.scalars[node]
        if node in self.places:
            return self.places[node]
        source = node.all_input_nodes[0]
        if source.target in SPLITS:
            source = source.all_input_nodes[0]
        inner = self._read(source)
        if isinstance(inner, str):
            return inner
        shown = view(node, inner)
        if shown is None:  # no view of memory with gaps: put together first
            whole = self._room(inner.shape, inner.ctype)
            self._copy(whole, inner)
            shown = view(node, whole)
        if shown is None:
            raise Unsupported(f"{node.target} of this shape has no C here")
        self.places[node] = shown
        return shown

    def _choose_inlined(self) -> None:
        """Find cheap values that are read only through views, as the sum of gates before it is cut into pieces.

        Keeping them would cost a walk through memory; computing each element where it is read costs next to nothing.
        """
        for node in reversed(self.graph.nodes):  # readers before what they read
            if node.target in _CHEAP and node not in self.targets and self._only_cut(node):
                self.inlined.add(node)

    def _only_cut(self, node: fx.Node) -> bool:
        """Say whether a value is read by element-wise work alone, and no element of it more than about once."""
        readers = [reader for user in node.users for reader in (user.users if user.target in SPLITS else [user])]
        for reader in readers:
            if is_view(reader):
                fits = reader.target in _CUTS and reader not in self.results and len(reader.users) <= 2
                if not fits or not all(_elementwise(user) and user not in self.inlined for user in reader.users):
                    return False
            elif len(readers) > 1 or reader not in self.inlined or shape_of(reader) != shape_of(node):
                return False
        return bool(readers)

    def _item(self, item: Item) -> None:
        if item.shape is not None:
            self._elements(item)
            return
        (node,) = item.nodes
        special: dict[Any, Callable[[fx.Node], None]] = {
            aten.mm.default: self._product,
            aten.bmm.default: self._product,
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
        stores = [node for node in nodes if node in self.targets or any(self._outside(u, inside) for u in node.users)]
        reads: list[str] = []
        for node in nodes:
            ctype = ctype_of(node)
            arguments = self._arguments(node, lambda arg: names.get(arg) or self._element(arg, index))
            reads.append(f"const {ctype} {names[node]} = {POINTWISE[node.target](ctype, *arguments)};")
        writes = [f"{self._own(node).at(index)} = {names[node]};" for node in stores]
        self._nest(item.shape, [*reads, *writes])

    def _arguments(self, node: fx.Node, read: Callable[[fx.Node], str]) -> list[str]:
        values = [value for value in node.args]
        if node.target is aten._to_copy.default or node.target is aten.clone.default:
            values = values[:1]
        if "alpha" in node.kwargs:
            values.append(node.kwargs["alpha"])
        ctype = _working_type(node)
        return [
            read(value)
            if isinstance(value, fx.Node)
            else "None"
            if value is None
            else literal(value, ctype)
            if node.kwargs.get("alpha") is not value
            else str(value)
            for value in values
        ]

    def _outside(self, user: fx.Node, inside: set[fx.Node]) -> bool:
        return user not in inside or user in self.inlined

    def _element(self, node: fx.Node, index: list[str]) -> str:
        views, source = [], node
        while source not in self.places and is_view(source):
            views.append(source)
            source = source.all_input_nodes[0]
            if source.target in SPLITS:
                source = source.all_input_nodes[0]
        if source in self.inlined:
            return self._inline(source, views[::-1], index)
        place = self._read(node)
        return place if isinstance(place, str) else place.at(index)

    def _inline(self, node: fx.Node, views: list[fx.Node], index: list[str]) -> str:
        """Return the expression of an element of a value that is nowhere kept, seen through views."""
        shape = shape_of(node)

        def read(arg: fx.Node) -> str:
            if arg in self.inlined:
                if shape_of(arg) != shape:
                    raise Unsupported("a value of another shape cannot be computed where it is read")
                return self._inline(arg, views, index)
            place = self._read(arg)
            if isinstance(place, str):
                return place
            place = place.moved(*_broadcast(place, shape))
            for step in views:
                shown = view(step, place)
                if shown is None:
                    raise Unsupported("this view cannot be computed through")
                place = shown
            return place.at(index)

        return POINTWISE[node.target](ctype_of(node), *self._arguments(node, read))

    def _nest(self, shape: tuple[int, ...], lines: list[str]) -> None:
        """Write a loop over all elements, the last axis fastest."""
        for axis, size in enumerate(shape):
            if axis == len(shape) - 1:
                self.lines.append("SIMD")
            self.lines.append(f"for (long i{axis} = 0; i{axis} < {size}; i{axis}++) {{")
        self.lines += [*("  " + line for line in lines), "}" * len(shape)]  # a shape without axes is one element

    def _copy(self, target: Place, source: Place | str) -> None:
        if isinstance(source, Place) and source.contiguous and target.contiguous and source.ctype == target.ctype:
            size = math.prod(target.shape)
            self.lines.append(f"memcpy({target.pointer()}, {source.pointer()}, {size}L * sizeof({target.ctype}));")
            return
        index = [f"i{axis}" for axis in range(len(target.shape))]
        value = source if isinstance(source, str) else source.at(index)
        self._nest(target.shape, [f"{target.at(index)} = ({target.ctype}){value};"])

    def _join(self, node: fx.Node) -> None:
        whole, axis, first = self._own(node), _axis_of_join(node), 0
        for part in node.args[0]:  # type: ignore[union-attr]
            assert isinstance(part, fx.Node)
            shape = shape_of(part)
            if math.prod(shape):
                target = whole.moved(shape, whole.strides, first * whole.strides[axis])
                if self._read(part) != target:
                    self._copy(target, self._read(part))
                first += shape[axis]

    def _stack(self, node: fx.Node) -> None:
        whole = self._own(node)
        axis = (int(node.args[1]) if len(node.args) > 1 else 0) % len(whole.shape)  # type: ignore[arg-type]
        shape, strides = list(whole.shape), list(whole.strides)
        del shape[axis], strides[axis]
        for number, part in enumerate(node.args[0]):  # type: ignore[arg-type]
            self._copy(whole.moved(shape, strides, number * whole.strides[axis]), self._read(part))  # type: ignore[arg-type]

    def _reduce(self, node: fx.Node) -> None:
        inner = node.args[0]
        assert isinstance(inner, fx.Node)
        source, target = self._read(inner), self._own(node)
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
        index = [f"i{axis}" for axis in range(rank)]
        flat = [f"i{axis}" for axis in range(len(target.shape))]
        largest = node.target is aten.amax.default
        self._nest(target.shape, [f"{target.at(flat)} = {'-INFINITY' if largest else '0'};"])
        self._gather(source, into, index, last=rank - 1 in gone, largest=largest)
        if node.target is aten.mean.dim:
            count = math.prod(source.shape[axis] for axis in gone)
            self._nest(target.shape, [f"{target.at(flat)} /= {count};"])

    def _gather(self, source: Place, into: Place, index: list[str], *, last: bool, largest: bool) -> None:
        """Write the loop that adds up elements, or finds the largest."""
        for axis, size in enumerate(source.shape[:-1]):
            self.lines.append(f"for (long i{axis} = 0; i{axis} < {size}; i{axis}++) {{")
        end, size = index[-1], source.shape[-1]
        each = f"for (long {end} = 0; {end} < {size}; {end}++)"
        new, old = source.at(index), "s" if last else into.at(index)
        # A comparison that is also true of NaN, so that NaN is passed on.
        step = f"{old} = !({new} <= {old}) ? {new} : {old};" if largest else f"{old} += {new};"
        if last:
            simd = "" if largest else '_Pragma("omp simd reduction(+ : s)")'
            self.lines += [f"{into.ctype} s = {into.at(index)};", simd, f"{each} {step}", f"{into.at(index)} = s;"]
        else:
            self.lines += ["SIMD", f"{each} {step}"]
        self.lines.append("}" * (len(source.shape) - 1))

    def _product(self, node: fx.Node) -> None:
        left, right = (self._matrix(arg) for arg in node.args)
        out = self._own(node)
        if not out.contiguous:
            raise Unsupported("a product into memory with gaps has no C here")
        if len(out.shape) == 3:
            count = out.shape[0]
            self.lines.append(f"for (long b = 0; b < {count}; b++) {{")
            pieces = [place.moved(place.shape[1:], place.strides[1:]) for place in (left, right, out)]
            moved = [(piece, place.strides[0]) for piece, place in zip(pieces, (left, right, out), strict=True)]
            self._gemm(*((piece, f" + b * {step}L") for piece, step in moved))
            self.lines.append("}")
        else:
            self._gemm((left, ""), (right, ""), (out, ""))

    def _matrix(self, node: Any) -> Place:
        place = self._read(node)
        if isinstance(place, str):
            whole = self._room(shape_of(node), ctype_of(node))
            self._copy(whole, place)
            return whole
        rows, columns = place.strides[-2:]
        fits = (columns == 1 and rows >= place.shape[-1]) or (rows == 1 and columns >= place.shape[-2])
        if fits:
            return place
        whole = self._room(place.shape, place.ctype)
        self._copy(whole, place)
        return whole

    def _gemm(self, left: tuple[Place, str], right: tuple[Place, str], out: tuple[Place, str]) -> None:
        (a, move_a), (b, move_b), (c, move_c) = left, right, out
        (m, k), n = a.shape, b.shape[1]
        kind = c.ctype
        if kind not in ("float", "double"):
            raise Unsupported(f"a product of {kind} has no C here")
        pa, pb, pc = a.pointer() + move_a, b.pointer() + move_b, c.pointer() + move_c
        by_rows = b.strides[1] == 1 and b.strides[0] >= n
        if m == 1 and (a.strides[1] == 1 or k == 1):
            name, ld = ("rows", b.strides[0]) if by_rows else ("dots", b.strides[1])
            self.lines.append(f"hs_{name}_{kind}({n}, {k}, {pa}, {pb}, {ld}L, {pc});")
            return
        # Fortran reads by columns, so it is handed the transposed product: C' = B' A'.
        a_rows = a.strides[1] == 1 and a.strides[0] >= k
        flags = ("N" if by_rows else "T"), ("N" if a_rows else "T")
        lds = (b.strides[0] if by_rows else b.strides[1]), (a.strides[0] if a_rows else a.strides[1])
        call = f"&(int){{{n}}}, &(int){{{m}}}, &(int){{{k}}}, &({kind}){{1}}, {pb}, &(int){{{lds[0]}}}, {pa}, "
        call += f"&(int){{{lds[1]}}}, &({kind}){{0}}, {pc}, &(int){{{n}}}"
        self.lines.append(f'{"sgemm" if kind == "float" else "dgemm"}("{flags[0]}", "{flags[1]}", {call});')


_CHEAP = {aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.neg.default}
_CUTS = {operator.getitem, aten.slice.Tensor, aten.select.int}


def _elementwise(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target in POINTWISE


def _broadcast(place: Place, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    shift = len(shape) - len(place.shape)
    strides = [0 if size == 1 else stride for size, stride in zip(place.shape, place.strides, strict=True)]
    return shape, (*([0] * shift), *strides)


def _axis_of_join(node: fx.Node) -> int:
    dim = int(node.args[1]) if len(node.args) > 1 else 0  # type: ignore[arg-type]
    return dim % len(shape_of(node))


def _working_type(node: fx.Node) -> str:
    """Return the type in which numbers in the code are compared or computed with."""
    types = [ctype_of(arg) for arg in node.all_input_nodes]
    for ctype in ("double", "float", "int64_t"):
        if ctype in types:
            return ctype
    return ctype_of(node)
