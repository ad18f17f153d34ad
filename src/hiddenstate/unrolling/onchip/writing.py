"""A loop's body, written as one CUDA kernel."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from ..native.operations import FILLED, expression, literal
from ..native.values import Unsupported, dense, shape_of
from .indexing import Along, Index, at, broadcast, part_of_join, through
from .plan import JOINED, REDUCED, STORED, Plan, stored, worked, worked_type

aten = torch.ops.aten


@dataclass(slots=True, eq=False)
class Level:
    """What is done between two exchanges, for each element."""

    body: list[str] = field(default_factory=list)
    shared: list[str] = field(default_factory=list)  # stores that other blocks wait for
    stores: list[str] = field(default_factory=list)
    sums: list[tuple[str, str]] = field(default_factory=list)  # over all units: (variable, operation), taken before it


class StepWriter:
    """Writes the element-wise work of a step: what each thread loads, computes and stores, level by level.

    Names in the text: `row`, `unit` of the thread's element `e`, and `lrow`, `lunit` within its block.
    """

    def __init__(self, plan: Plan) -> None:
        """Write what the loop's results need."""
        self.plan, self.extent = plan, plan.extent
        self.first: list[str] = []  # before the first step
        self.top: list[str] = []  # at the beginning of a step, before any exchange
        self.levels = [Level() for _ in range(plan.last + 1)]
        self.last: list[str] = []  # at the end of a step
        self.outer: list[str] = []  # declarations that outlive a step
        self.inner: list[str] = []
        self.parts: dict[fx.Node, list[int]] = {node: [] for node in plan.products}  # columns needed of a product
        self.left: dict[fx.Node, str] = {}  # what is multiplied -> where it lies
        self.scratch = 0  # bytes of memory to work in, for one of two steps
        self._names: dict[tuple[fx.Node, Index], str] = {}
        self._held: list[str] = []
        self._write()

    def _write(self) -> None:
        plan = self.plan
        multiplied = plan.multiplied
        for place, node in enumerate(plan.carried):
            for number, index in enumerate(self.extent.windows(shape_of(node))):
                name = self._declare(self.outer, f"c{place}_{number}", worked(node))
                self._names[node, index] = name
                self.first.append(f"{name} = get(room{place} + start{place} + {self._address(node, index)});")
            if node in multiplied:
                self.left[node] = f"room{place} + now{place}"
        for place, result in enumerate(plan.results):
            carried = place < plan.loop.carried
            target = f"room{place} + next{place}" if carried else f"keep{place - plan.loop.carried}_now"
            if carried and slots(plan, place) == 1:
                continue
            waits = (carried and plan.carried[place] in multiplied) or result in multiplied
            if result in multiplied and result not in plan.carried:
                self.left.setdefault(result, target)
            self._store(result, target, waits=waits)
        for node in plan.products:
            source = node.args[0]
            assert isinstance(source, fx.Node)
            if source not in self.left:
                self.left[source] = self._room(source)
                self._store(source, self.left[source], waits=True)
        for place, node in enumerate(plan.carried):
            self._carry_on(place, node)

    def _carry_on(self, place: int, node: fx.Node) -> None:
        result = self.plan.results[place]
        if shape_of(result) != shape_of(node):
            raise Unsupported("a state changes its shape")
        for number, index in enumerate(self.extent.windows(shape_of(node))):
            value = self.value(result, index)
            self._held.append(f"const {worked(node)} n{place}_{number} = kept<{stored(node)}>({value});")
            self.last.append(f"c{place}_{number}[e] = n{place}_{number};")

    def ending(self) -> list[str]:
        """Return the lines that carry values on: first all are read, then all are replaced."""
        return [*self._held, *self.last]

    def finals(self, place: int) -> list[str]:
        """Return the lines that store what is carried out of the last step, where no step stores it."""
        node = self.plan.carried[place]
        return [
            self._guarded(index, f"put(room{place} + {self._address(node, index)}, c{place}_{number}[e]);")
            for number, index in enumerate(self.extent.windows(shape_of(node)))
        ]

    def _room(self, node: fx.Node) -> str:
        start, size = self.scratch, math.prod(shape_of(node)) * node.meta["val"].dtype.itemsize
        self.scratch += (size + 127) // 128 * 128
        return f"({stored(node)} *)(work_now + {start}L)"

    def _store(self, node: fx.Node, target: str, *, waits: bool) -> None:
        level = self.levels[self.plan.levels[node]]
        lines = level.shared if waits else level.stores
        kind = stored(node)
        for index in self.extent.windows(shape_of(node)):
            value = self.value(node, index)
            lines.append(self._guarded(index, f"put(({kind} *)({target}) + {self._address(node, index)}, {value});"))

    def _guarded(self, index: Index, line: str) -> str:
        everywhere = any(place.unit for place in index)
        return f"if (ok[e]) {line}" if everywhere else f"if (ok[e] && unit[e] == 0) {line}"

    def _address(self, node: fx.Node, index: Index, strides: Sequence[int] | None = None) -> str:
        strides = dense(shape_of(node)) if strides is None else strides
        shift = sum(place.shift * stride for place, stride in zip(index, strides, strict=True))
        terms = [str(shift)] if shift else []
        for name in ("row", "unit"):
            step = sum(getattr(place, name) * stride for place, stride in zip(index, strides, strict=True))
            if step:
                terms.append(f"{name}[e]" if step == 1 else f"{name}[e] * {step}L")
        return " + ".join(terms) or "0"

    def _declare(self, where: list[str], name: str, kind: str) -> str:
        where.append(f"{kind} {name}[E];")
        return f"{name}[e]"

    def value(self, node: fx.Node, index: Index) -> str:
        """Return the expression of one element, whose computation is written where it belongs."""
        if node.target in FILLED:
            return literal(FILLED[node.target](node), worked(node))
        if (node, index) not in self._names:
            found = self._compute(node, index)
            if isinstance(found, tuple):
                return self.value(*found)
            self._names[node, index] = found
        return self._names[node, index]

    def _compute(self, node: fx.Node, index: Index) -> str | tuple[fx.Node, Index]:
        if node.op == "placeholder":
            return self._given(node, index)
        seen = through(node, index, self.extent)
        if seen is not None:
            return seen
        if node.target in JOINED:
            return part_of_join(node, index, self.extent)
        if node.target is aten.mm.default:
            return self._product(node, index)
        if node.target in REDUCED:
            return self._reduction(node, index)
        text = expression(
            node,
            lambda arg: self.value(arg, broadcast(index, shape_of(arg))),
            worked_type,
            lambda text, dtype: f"kept<{STORED[dtype]}>((float){text})",
        )
        if node.target is aten._to_copy.default:
            text = f"kept<{stored(node)}>({text})"
        return self._assign(self.plan.levels[node], worked(node), text)

    def _assign(self, level: int, kind: str, expression: str) -> str:
        name = self._declare(self.inner, f"v{len(self._names)}_{len(self.inner)}", kind)
        self.levels[level].body.append(f"{name} = {expression};")
        return name

    def _given(self, node: fx.Node, index: Index) -> str:
        if node in self.plan.carried:
            raise Unsupported("a unit reads another unit's state")
        if node in self.plan.along:
            name = self._declare(self.inner, f"a{len(self._names)}", worked(node))
            self.top.append(f"{name} = get(along{self.plan.along.index(node)}_now + {self._address(node, index)});")
            return name
        name = self._declare(self.outer, f"same{len(self._names)}", worked(node))
        address = self._address(node, index, node.meta["val"].stride())
        self.first.append(f"{name} = get(fix{self.plan.fixed.index(node)} + {address});")
        return name

    def _product(self, node: fx.Node, index: Index) -> str:
        row, column = index
        if row != self.extent.row or column.unit != 1 or column.row:
            raise Unsupported("a product is read at another place than its unit's")
        parts = self.parts[node]
        if column.shift not in parts:
            parts.append(column.shift)
        number, part = self.plan.products.index(node), parts.index(column.shift)
        return self._assign(self.plan.levels[node], "float", f"GATHER{number}(lrow[e], {part} * UNITS + lunit[e])")

    def _reduction(self, node: fx.Node, index: Index) -> str:
        plan, inner = self.plan, node.all_input_nodes[0]
        shape, gone = shape_of(inner), plan.axes(node)
        kept = iter(index) if len(index) < len(shape) else None
        places: list[Along | None] = []
        for axis in range(len(shape)):
            own = index[axis] if kept is None else next(kept) if axis not in gone else None
            places.append(None if axis in gone else own)
        terms = [self.value(inner, found) for found in self._all_along(places, shape)]
        operation = REDUCED[node.target]
        if operation == "max" and worked(node) != "float":
            raise Unsupported("the largest of whole numbers has no kernel here")
        total = " + ".join(terms) if operation == "+" else _largest(terms)
        count = math.prod(shape[axis] for axis in gone)
        scale = f" / {count}.0f" if node.target is aten.mean.dim else ""
        if not plan.crosses(node):
            return self._assign(plan.levels[node], worked(node), f"({total}){scale}")
        if any(place is not None and place.unit for place in places) or worked(node) != "float":
            raise Unsupported(f"{node.target} of this kind has no kernel here")
        level = plan.levels[node]
        mine = self._assign(level - 1, "float", total)
        sums = self.levels[level].sums
        sums.append((mine, operation))
        return self._assign(level, "float", f"total[{len(sums) - 1} * ROWS + lrow[e]]{scale}")

    def _all_along(self, places: Sequence[Along | None], shape: Sequence[int]) -> list[Index]:
        """Return the indices of all elements of a unit that a reduction takes together."""
        found: list[Index] = [()]
        units, spread = self.extent.units, False
        for place, size in reversed(list(zip(places, shape, strict=True))):
            if place is not None:
                options = [place]
            elif size % units == 0 and not spread:
                options, spread = [Along(unit=1, shift=start) for start in range(0, size, units)], True
            else:
                options = [at(number) for number in range(size)]
            found = [(option, *rest) for option in options for rest in found]
        if len(found) > 32:
            raise Unsupported("too many numbers are taken together")
        return found


def slots(plan: Plan, place: int) -> int:
    """Return how many steps of a carried value are in memory: two, one, or all of them and one more (0)."""
    if plan.loop.path[place]:
        return 0
    return 2 if {plan.carried[place], plan.results[place]} & plan.multiplied else 1


def _largest(terms: Sequence[str]) -> str:
    found = terms[0]
    for term in terms[1:]:
        found = f"hs_max({found}, {term})"
    return found
