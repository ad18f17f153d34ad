"""Pieces of tensors that move with the turns of a loop, as they are written: `x[:, t]`, `x[..., t:t + 1]`."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from .names import loads


class LeftAlone(Exception):
    """A loop that is not rolled up, with the reason and its line."""

    def __init__(self, reason: str, line: int) -> None:
        """Say why, and where."""
        super().__init__(reason)
        self.reason, self.line = reason, line


@dataclass(frozen=True, slots=True, eq=False)
class MovingPiece:
    """Where in a tensor, or a list, the piece of one turn is: one place of its index moves with the turns."""

    thing: ast.expr  # the tensor or list
    before: int  # axes in front of the place that moves, or those behind it less one, as a negative number
    index: ast.expr  # of the place that moves, or where it begins
    end: ast.expr | None  # of a slice
    rest: tuple[ast.expr, ...]  # the other places; empty where they take everything


def read_piece(node: ast.Subscript, index_names: set[str]) -> MovingPiece | None:
    """Return where a subscript takes a piece that moves with the turns; None where it does not, or in other ways."""
    places = list(node.slice.elts) if isinstance(node.slice, ast.Tuple) else [node.slice]
    moving = [number for number, place in enumerate(places) if loads([place]) & index_names]
    if len(moving) != 1:
        return None
    number = moving[0]
    place, others = places[number], [*places[:number], *places[number + 1 :]]
    if not is_arithmetic(place):
        return None
    # Behind a whole number at the first place others may be tensors: `a[t, rows]` is `a[t][rows]`.
    led = number == 0 and not isinstance(place, ast.Slice) and not any(_is_plain(o) and not is_int(o) for o in others)
    if not led and not all(_is_plain(other) for other in others):
        return None
    dots = [number for number, other in enumerate(places) if _is_constant(other, ...)]
    if dots and dots[0] < number:
        before = -1 - sum(not _is_constant(other, None) for other in places[number + 1 :])
    else:
        before = sum(not _is_constant(other, None) for other in places[:number])
    index, end = place, None
    if isinstance(place, ast.Slice):
        if place.lower is None or place.upper is None or place.step is not None:
            return None
        index, end = place.lower, place.upper
        others.insert(number, ast.Slice())
    if all((isinstance(other, ast.Slice) and _is_all(other)) or _is_constant(other, ...) for other in others):
        others = []
    return MovingPiece(node.value, before, index, end, tuple(others))


def _is_constant(place: ast.expr, value: object) -> bool:
    return isinstance(place, ast.Constant) and place.value is value


def _is_all(place: ast.Slice) -> bool:
    return place.lower is None and place.upper is None and place.step is None


def is_int(place: ast.expr) -> bool:
    """Say whether a place is a whole number as such."""
    if isinstance(place, ast.UnaryOp):
        place = place.operand
    return isinstance(place, ast.Constant) and type(place.value) is int


def is_arithmetic(place: ast.expr) -> bool:
    """Say whether a place is put together from names and numbers alone."""
    kinds = (ast.Name, ast.Constant, ast.BinOp, ast.UnaryOp, ast.Slice, ast.operator, ast.unaryop, ast.expr_context)
    return all(isinstance(node, kinds) for node in ast.walk(place))


def _is_plain(place: ast.expr) -> bool:
    """Say whether an index is a slice, a whole number, None or dots: nothing that may be a tensor."""
    if isinstance(place, ast.Slice):
        return all(part is None or _is_plain(part) for part in (place.lower, place.upper, place.step))
    if isinstance(place, ast.UnaryOp) and isinstance(place.op, ast.USub):
        place = place.operand
    return isinstance(place, ast.Constant) and (place.value is None or place.value is ... or type(place.value) is int)
