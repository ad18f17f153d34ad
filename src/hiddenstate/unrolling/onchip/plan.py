"""The plan of a loop's kernel: what it does in a step, in which order, and where its blocks exchange values."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from ..native.operations import FILLED, POINTWISE, SPLITS
from ..native.values import Unsupported, shape_of
from ..scan import Loop
from .indexing import Extent, Index, at, through

aten = torch.ops.aten

# dtype -> how a number is stored, and how it is computed with
STORED = {
    torch.float32: "float",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.bool: "uint8_t",
    torch.int64: "int64_t",
}
WORKED = {"bf16": "float", "f16": "float"}
JOINED = {aten.cat.default, aten.stack.default}
REDUCED: dict[Any, str] = {aten.sum.dim_IntList: "+", aten.mean.dim: "+", aten.amax.default: "max"}
_NARROWEST = 8  # units below which a state is not worth spreading over blocks


class Plan:
    """The nodes of a loop's body by level: a value of one level needs what all blocks made on the level before."""

    def __init__(self, loop: Loop) -> None:
        """Look through the body, or raise `Unsupported`."""
        self.loop, self.graph = loop, loop.body.call.graph
        self.carried, self.fixed, self.along, self.results = loop.nodes()
        self.extent = _extent(self.carried)
        self.levels: dict[fx.Node, int] = {}
        self.enters = False  # whether a step begins with what all blocks made in the step before
        self.products: list[fx.Node] = []
        for node in self.graph.nodes:
            if node.op == "placeholder":
                self.levels[node] = 0
                stored(node)
            elif node.op == "call_function":
                self.levels[node] = self._level(node)
            elif node.op != "output":
                raise Unsupported(f"{node.op} has no kernel here")
        self.last = max(self.levels.values())

    @property
    def exchanges(self) -> int:
        """How often in a step blocks wait for each other."""
        return self.last + int(self.enters)

    @property
    def multiplied(self) -> set[fx.Node]:
        """What is multiplied with weights, which every block needs whole."""
        found = {node.args[0] for node in self.products}
        return {node for node in found if isinstance(node, fx.Node)}

    def axes(self, node: fx.Node) -> tuple[int, ...]:
        """Return the axes that a reduction takes together."""
        inner = node.all_input_nodes[0]
        shape, dims = shape_of(inner), node.args[1]
        if not dims or node.kwargs.get("dtype") is not None:
            raise Unsupported(f"{node.target} of this kind has no kernel here")
        gone = sorted({int(dim) % len(shape) for dim in dims})  # type: ignore[union-attr, arg-type]
        if 0 in gone or shape[0] != self.extent.rows:
            raise Unsupported("rows are added up in a step")
        return tuple(gone)

    def crosses(self, node: fx.Node) -> bool:
        """Say whether a reduction takes units of several blocks together."""
        shape = shape_of(node.all_input_nodes[0])
        return any(shape[axis] % self.extent.units == 0 for axis in self.axes(node))

    def weight(self, node: fx.Node) -> tuple[fx.Node, bool]:
        """Return the weight that a product is with, and whether it is turned."""
        right, turned = node.args[1], False
        assert isinstance(right, fx.Node)
        while right.target is aten.t.default:
            right, turned = right.all_input_nodes[0], not turned
        if right not in self.fixed:
            raise Unsupported("two values of the step are multiplied as matrices")
        return right, turned

    def _level(self, node: fx.Node) -> int:
        inner = [self.levels[arg] for arg in node.all_input_nodes]
        level = max(inner, default=0)
        if node.target is aten.mm.default:
            return self._product(node)
        if node.target in REDUCED:
            return level + int(self.crosses(node))
        known = node.target in POINTWISE or node.target in FILLED or node.target in SPLITS
        if not known and node.target not in JOINED and not _is_view(node):
            raise Unsupported(f"{node.target} has no kernel here")
        if node.target not in SPLITS:
            stored(node)
        return level

    def _product(self, node: fx.Node) -> int:
        left = node.args[0]
        assert isinstance(left, fx.Node)
        self.weight(node)
        if shape_of(left)[0] != self.extent.rows or stored(node) not in ("float", "bf16", "f16"):
            raise Unsupported("a product of this kind has no kernel here")
        if left in self.along or left in self.fixed:
            raise Unsupported("a product in the loop does not depend on the state")
        self.products.append(node)
        if left in self.carried:
            self.enters = True
            return 0
        return self.levels[left] + 1


def stored(node: fx.Node) -> str:
    """Return how the numbers of a node are stored."""
    return _stored_type(node.meta["val"].dtype)


def worked(node: fx.Node) -> str:
    """Return how the numbers of a node are computed with."""
    return worked_type(node.meta["val"].dtype)


def worked_type(dtype: torch.dtype) -> str:
    """Return how the numbers of a dtype are computed with."""
    kind = _stored_type(dtype)
    return WORKED.get(kind, kind)


def _stored_type(dtype: torch.dtype) -> str:
    if dtype not in STORED:
        raise Unsupported(f"{dtype} has no kernel here")
    return STORED[dtype]


def _extent(carried: list[fx.Node]) -> Extent:
    shapes = [shape_of(node) for node in carried]
    if not shapes or any(not shape or shape[0] != shapes[0][0] for shape in shapes):
        raise Unsupported("its state has no axis of rows")
    units = math.gcd(*(shape[-1] for shape in shapes if len(shape) > 1 and shape[-1] > 1))
    if units < _NARROWEST:
        raise Unsupported(f"the parts of its state are {units} units wide, in common")
    return Extent(shapes[0][0], units)


def _is_view(node: fx.Node) -> bool:
    value: Any = node.meta.get("val")
    if isinstance(value, tuple | list):
        return False
    try:
        index: Index = tuple(at(0) for _ in value.shape)
        return through(node, index, Extent(1, 1)) is not None
    except Unsupported:
        return False
