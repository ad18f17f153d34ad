"""Indices of a value's elements: a row, a unit, or a fixed place along each axis."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import fx

from ..native.operations import SPLITS
from ..native.values import Unsupported, dense, shape_of

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Along:
    """A place along one axis: `row * b + unit * u + shift`, for row b and unit u of whoever reads."""

    row: int = 0
    unit: int = 0
    shift: int = 0


Index: TypeAlias = tuple[Along, ...]


def at(place: int) -> Along:
    """Return a fixed place."""
    return Along(shift=place)


@dataclass(frozen=True, slots=True)
class Extent:
    """How many rows and units there are."""

    rows: int
    units: int

    @property
    def row(self) -> Along:
        """The reader's own row; of a single row there is no other."""
        return Along(row=1) if self.rows > 1 else at(0)

    def windows(self, shape: Sequence[int]) -> list[Index]:
        """Return the indices by which rows and units reach every element of a value, each once."""
        if not shape or shape[0] != self.rows:
            raise Unsupported("a value without an axis of rows is kept at each step")
        rest = list(shape[1:])
        wide = next((axis for axis in reversed(range(len(rest))) if rest[axis] % self.units == 0), None)
        counts = [size // self.units if axis == wide else size for axis, size in enumerate(rest)]
        if math.prod(counts) > 32:
            raise Unsupported("a value of another width than the state is kept at each step")
        found: list[Index] = [(self.row,)]
        for axis, count in enumerate(counts):
            if axis == wide:
                places = [Along(unit=1, shift=number * self.units) for number in range(count)]
            else:
                places = [at(number) for number in range(count)]
            found = [(*index, place) for index in found for place in places]
        return found

    def fits(self, place: Along, size: int) -> bool:
        """Say whether a place lies within an axis, for all rows and units."""
        last = place.shift + place.row * (self.rows - 1) + place.unit * (self.units - 1)
        return place.shift >= 0 and last < size


def broadcast(index: Index, shape: Sequence[int]) -> Index:
    """Return the index into a value that is broadcast to what is indexed; axes are lined up from the right."""
    kept = index[len(index) - len(shape) :]
    return tuple(at(0) if size == 1 else place for place, size in zip(kept, shape, strict=True))


def through(node: fx.Node, index: Index, extent: Extent) -> tuple[fx.Node, Index] | None:
    """Return what a view shows at an index: its source, and where in it; None for an operation that computes."""
    mapping = _VIEWS.get(node.target)
    if mapping is None:
        return None
    source = node.all_input_nodes[0]
    if node.target is operator.getitem:
        if source.target not in SPLITS:
            raise Unsupported(f"{source.target} has no kernel here")
        return source.all_input_nodes[0], _piece(node, index)
    return source, mapping(node, index, extent)


def part_of_join(node: fx.Node, index: Index, extent: Extent) -> tuple[fx.Node, Index]:
    """Return which of the joined or stacked values an index falls into, and where in it."""
    axis = (int(node.args[1]) if len(node.args) > 1 else 0) % len(index)  # type: ignore[arg-type]
    place, first = index[axis], 0
    if node.target is aten.stack.default:
        if place.row or place.unit:
            raise Unsupported("units are stacked in a step")
        return node.args[0][place.shift], (*index[:axis], *index[axis + 1 :])  # type: ignore[index, return-value]
    for part in node.args[0]:  # type: ignore[union-attr]
        assert isinstance(part, fx.Node)
        size = shape_of(part)[axis]
        inner = Along(place.row, place.unit, place.shift - first)
        if extent.fits(inner, size):
            return part, _with(index, axis, inner)
        first += size
    raise Unsupported("values are joined at a place that is no multiple of the state's width")


def _with(index: Index, axis: int, place: Along) -> Index:
    return (*index[:axis], place, *index[axis + 1 :])


def _shifted(index: Index, axis: int, by: int) -> Index:
    place = index[axis]
    return _with(index, axis, Along(place.row, place.unit, place.shift + by))


def _transpose(node: fx.Node, index: Index, extent: Extent) -> Index:
    order = list(range(len(index)))
    if node.target is aten.t.default:
        return index[::-1]
    one, other = (int(axis) % len(order) for axis in node.args[1:3])  # type: ignore[arg-type]
    order[one], order[other] = order[other], order[one]
    return tuple(index[axis] for axis in order)


def _permute(node: fx.Node, index: Index, extent: Extent) -> Index:
    order: Any = node.args[1]
    places: dict[int, Along] = {int(axis) % len(index): place for axis, place in zip(order, index, strict=True)}
    return tuple(places[axis] for axis in range(len(index)))


def _unsqueeze(node: fx.Node, index: Index, extent: Extent) -> Index:
    axis = int(node.args[1]) % len(index)  # type: ignore[arg-type]
    return (*index[:axis], *index[axis + 1 :])


def _expand(node: fx.Node, index: Index, extent: Extent) -> Index:
    return broadcast(index, shape_of(node.all_input_nodes[0]))


def _slice(node: fx.Node, index: Index, extent: Extent) -> Index:
    rest: list[Any] = [*node.args[1:], *(0, None, None, 1)[len(node.args) - 1 :]]
    dim, start, end, step = rest
    first, _, jump = slice(start, end, step).indices(shape_of(node.all_input_nodes[0])[int(dim)])
    if jump != 1:
        raise Unsupported("every other element is taken")
    return _shifted(index, int(dim) % len(index), first)


def _select(node: fx.Node, index: Index, extent: Extent) -> Index:
    shape = shape_of(node.all_input_nodes[0])
    axis = int(node.args[1]) % len(shape)  # type: ignore[arg-type]
    return (*index[:axis], at(int(node.args[2]) % shape[axis]), *index[axis:])  # type: ignore[arg-type]


def _piece(node: fx.Node, index: Index) -> Index:
    source, number = node.args
    assert isinstance(source, fx.Node)
    dim = int(source.args[2]) if len(source.args) > 2 else int(source.kwargs.get("dim", 0))  # type: ignore[arg-type]
    axis = dim % len(index)
    before = source.meta["val"][: int(number)]  # type: ignore[arg-type]
    return _shifted(index, axis, sum(int(value.shape[axis]) for value in before))


def _reshape(node: fx.Node, index: Index, extent: Extent) -> Index:
    """Return the index into the source of a view of another shape, by way of the place in memory without gaps."""
    strides = dense(shape_of(node))
    row, unit, shift = (
        sum(getattr(place, part) * stride for place, stride in zip(index, strides, strict=True))
        for part in ("row", "unit", "shift")
    )
    shape = shape_of(node.all_input_nodes[0])
    found: list[Along] = []
    for size, stride in zip(shape, dense(shape), strict=True):
        digit, shift = divmod(shift, stride)
        place = Along(int(size > 1 and row == stride), int(size > 1 and unit == stride), digit)
        row, unit = (0 if place.row else row), (0 if place.unit else unit)
        if not extent.fits(place, size):
            raise Unsupported("a view cuts through the state's width")
        found.append(place)
    if (row and extent.rows > 1) or (unit and extent.units > 1):
        raise Unsupported("a view cuts through the state's width")
    return tuple(found)


_VIEWS: dict[Any, Callable[[fx.Node, Index, Extent], Index]] = {
    aten.t.default: _transpose,
    aten.transpose.int: _transpose,
    aten.permute.default: _permute,
    aten.view.default: _reshape,
    aten._unsafe_view.default: _reshape,
    aten.reshape.default: _reshape,
    aten.squeeze.dim: _reshape,
    aten.squeeze.dims: _reshape,
    aten.squeeze.default: _reshape,
    aten.unsqueeze.default: _unsqueeze,
    aten.expand.default: _expand,
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    operator.getitem: lambda node, index, extent: _piece(node, index),
}
