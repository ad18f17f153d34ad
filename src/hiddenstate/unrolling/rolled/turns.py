"""The values that the turns of one run of a loop take from outside, stacked over all turns."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from .index import LeftAlone, MovingPiece
from .loop_code import LoopCode
from .names import loads

Places: TypeAlias = range | list[int]


@dataclass(frozen=True, slots=True, eq=False)
class Written:
    """The pieces of a tensor that turns write, in place."""

    pieces: Tensor  # (turn, ...), a view
    backwards: bool  # whether the last turn writes the first piece

    def in_order(self) -> Tensor:
        """Return the pieces as the turns come."""
        return self.pieces.flip(0) if self.backwards else self.pieces

    def write(self, first: list[Tensor], rest: Tensor) -> None:
        """Write what the turns gave: the first by itself, where there is one, and the others (turn, ...)."""
        whole = torch.cat([torch.stack(first), rest]) if first else rest
        missing = self.pieces.dim() - whole.dim()  # axes that each piece would have been spread over
        whole = whole.view(whole.shape[0], *[1] * missing, *whole.shape[1:]) if missing > 0 else whole
        self.pieces.copy_(whole.flip(0) if self.backwards else whole)


@dataclass(frozen=True, slots=True, eq=False)
class Turns:
    """How many turns a run has, and what each takes."""

    count: int
    counts: dict[str, Any]  # index name -> a range
    pieces: dict[str, Tensor]  # name -> (turn, ...)
    written: dict[str, Written]  # collecting list -> the pieces of a tensor that it is written into
    places: dict[str, Places] = field(default_factory=dict)  # collecting list -> where in a list or dict it goes


def first_turns(turns: Turns, count: int) -> Turns:
    """Return the first turns of a run, as their pieces lie in memory; what they write is written elsewhere."""
    written = {
        name: Written(whole.in_order()[:count].detach().clone(), backwards=False)
        for name, whole in turns.written.items()
    }
    counts = {name: numbers[:count] for name, numbers in turns.counts.items()}
    pieces = {name: piece[:count] for name, piece in turns.pieces.items()}
    return Turns(count, counts, pieces, written, {name: places[:count] for name, places in turns.places.items()})


class TurnReader:
    """Reads what the turns of a loop take, with the names as they are when it begins."""

    def __init__(self, code: LoopCode, function: FunctionType) -> None:
        """Compile the loop's expressions once."""
        self.code, self.scope = code, function.__globals__
        self._compiled: dict[int, CodeType] = {}

    def read(self, names: dict[str, Any], over: Sequence[Any]) -> Turns:
        """Return the turns of a run, or raise why they cannot be taken together."""
        code, waiting = self.code, iter(over)
        things = {leaf.value: next(waiting) for leaf in code.leaves if leaf.value}
        sizes = [self._size(thing, leaf.counts) for leaf in code.leaves if leaf.value for thing in [things[leaf.value]]]
        count = min(sizes)
        if len(set(sizes)) > 1:
            raise LeftAlone("it goes over several things of different lengths", code.line)
        counts: dict[str, Any] = {}
        pieces: dict[str, Tensor] = {}
        for leaf in code.leaves:
            thing = things.get(leaf.value)
            if leaf.counts:
                if thing is None:
                    start = 0 if leaf.start is None else self._value(leaf.start, names)
                    thing = range(start, start + count)
                counts[leaf.target] = (thing[::-1] if leaf.backwards else thing)[:count]
            elif leaf.target:
                along = thing if isinstance(thing, Tensor) else _stacked(thing or (), code.line)
                pieces[leaf.target] = (along.flip(0) if leaf.backwards else along)[:count]
        for taken in code.taken:
            pieces[taken.name] = self._pieces(taken.piece, names, counts, count)
        written, places = {}, {}
        for collected in code.collected:
            thing = names.get(collected.into)
            if collected.piece is not None and isinstance(thing, Tensor):
                written[collected.name] = self._written(collected.piece, names, counts, count)
            elif collected.piece is not None:
                places[collected.name] = self._places_in(thing, collected.piece, names, counts, count)
        return Turns(count, counts, pieces, written, places)

    def _size(self, thing: Any, counts: bool) -> int:
        line = self.code.line
        if counts:
            if type(thing) is not range and not (type(thing) is list and all(type(n) is int for n in thing)):
                raise LeftAlone(f"its turns are counted by a {type(thing).__name__}", line)
            return len(thing)
        if isinstance(thing, Tensor):
            if thing.dim() == 0:
                raise LeftAlone("it goes over a single number", line)
            return thing.shape[0]
        if isinstance(thing, nn.Module) or (
            isinstance(thing, list | tuple) and any(isinstance(t, nn.Module) for t in thing)
        ):
            raise LeftAlone("it goes over modules, not over time", line)
        if not isinstance(thing, list | tuple):
            raise LeftAlone(f"it goes over a {type(thing).__name__}", line)
        return len(thing)

    def places(self, piece: MovingPiece, names: dict[str, Any], counts: dict[str, Any], count: int) -> Places:
        """Return which place of a tensor or list each turn's piece is at."""
        return self._numbers(piece.index, names, counts, count)

    def _numbers(self, index: ast.expr, names: dict[str, Any], counts: dict[str, Any], count: int) -> Places:
        if isinstance(index, ast.Name) and index.id in counts:
            found: Any = counts[index.id]
            return found  # type: ignore[no-any-return]
        moving = loads([index]) & set(counts)
        turns = range(count) if not _is_even(index, moving) else range(min(2, count))
        values = [self._value(index, {**names, **{name: counts[name][t] for name in moving}}) for t in turns]
        if any(type(value) is not int for value in values):
            raise LeftAlone(f"a piece is taken at {ast.unparse(index)}, which is no whole number", index.lineno)
        if len(values) == count:
            return values
        start, step = values[0], values[1] - values[0]
        return range(start, start + count * step, step) if step else [start] * count

    def _written(self, piece: MovingPiece, names: dict[str, Any], counts: dict[str, Any], count: int) -> Written:
        places, line = self._numbers(piece.index, names, counts, count), piece.index.lineno
        if piece.rest or piece.end is not None:
            raise LeftAlone("a turn writes into some of a piece", line)
        if not isinstance(places, range) or (places.start < 0) != (places[-1] < 0):
            raise LeftAlone("turns write to places that do not follow each other", line)
        thing, backwards = self._value(piece.thing, names), places.step < 0
        axis = piece.before % thing.dim() if -thing.dim() <= piece.before < thing.dim() else 0
        return Written(_along(thing, axis, places[::-1] if backwards else places, line), backwards)

    def _places_in(
        self, thing: Any, piece: MovingPiece, names: dict[str, Any], counts: dict[str, Any], count: int
    ) -> Places:
        """Return which places of a list or dict turns put something into."""
        places, line = self._numbers(piece.index, names, counts, count), piece.index.lineno
        if type(thing) not in (list, dict) or piece.before or piece.rest or piece.end is not None:
            raise LeftAlone(f"a turn writes into pieces of a {type(thing).__name__}", line)
        if type(thing) is list and not all(-len(thing) <= place < len(thing) for place in places):
            raise LeftAlone("a turn writes beyond the end", line)
        return places

    def _pieces(self, piece: MovingPiece, names: dict[str, Any], counts: dict[str, Any], count: int) -> Tensor:
        thing = self._value(piece.thing, names)
        places = self._numbers(piece.index, names, counts, count)
        line = piece.index.lineno
        if isinstance(thing, list | tuple) and piece.end is None and not piece.before and not piece.rest:
            if any(not -len(thing) <= place < len(thing) for place in places):
                raise LeftAlone("a piece is taken beyond the end", line)
            return _stacked([thing[place] for place in places], line)
        if not isinstance(thing, Tensor):
            raise LeftAlone(f"a turn takes its piece of a {type(thing).__name__}", line)
        if not -thing.dim() <= piece.before < thing.dim():
            raise LeftAlone("a piece is taken of an axis that is not there", line)
        axis = piece.before % thing.dim()
        if piece.end is None:
            return _along(thing, axis, places, line)
        ends = self._numbers(piece.end, names, counts, count)
        width = ends[0] - places[0]
        if width < 1 or any(end - start != width for start, end in zip(places, ends, strict=True)):
            raise LeftAlone("pieces are of different sizes", line)
        if min(places) < 0 or max(ends) > thing.shape[axis]:
            raise LeftAlone("a piece is taken beyond the end", line)
        if width == 1:
            return _along(thing, axis, places, line).unsqueeze(axis + 1)
        return torch.stack([thing.narrow(axis, start, width) for start in places])

    def _value(self, expression: ast.expr, names: dict[str, Any]) -> Any:
        compiled = self._compiled.get(id(expression))
        if compiled is None:
            whole = ast.fix_missing_locations(ast.Expression(expression))
            compiled = self._compiled[id(expression)] = compile(whole, "<loop>", "eval")
        return eval(compiled, self.scope, names)


def _is_even(index: ast.expr, moving: set[str]) -> bool:
    """Say whether an index moves by the same number at each turn, by the way it is written."""
    if isinstance(index, ast.Name | ast.Constant) or not loads([index]) & moving:
        return True
    if isinstance(index, ast.UnaryOp) and isinstance(index.op, ast.USub | ast.UAdd):
        return _is_even(index.operand, moving)
    if isinstance(index, ast.BinOp) and isinstance(index.op, ast.Add | ast.Sub):
        return _is_even(index.left, moving) and _is_even(index.right, moving)
    if isinstance(index, ast.BinOp) and isinstance(index.op, ast.Mult):
        sides = [side for side in (index.left, index.right) if loads([side]) & moving]
        return len(sides) == 1 and _is_even(sides[0], moving)
    return False


def _stacked(things: Sequence[Any], line: int) -> Tensor:
    if not things or not all(isinstance(thing, Tensor) for thing in things):
        kind = type(things[0]).__name__ if things else "nothing"
        raise LeftAlone(f"each turn is given a {kind}, which is no tensor", line)
    if len({(thing.shape, thing.dtype, thing.device) for thing in things}) > 1:
        raise LeftAlone("turns are given tensors of different shapes", line)
    return torch.stack(list(things))


def _along(thing: Tensor, axis: int, places: Places, line: int) -> Tensor:
    """Return the pieces of a tensor at places of an axis, with a first axis of the turns."""
    size, moved = thing.shape[axis], thing.movedim(axis, 0)
    low, high = min(places), max(places)
    if low < -size or high >= size:
        raise LeftAlone("a piece is taken beyond the end", line)
    if isinstance(places, range) and (low >= 0 or high < 0):
        if high < 0:
            places = range(places.start + size, places.stop + size, places.step)
        if places.step > 0:
            return moved[places.start : places[-1] + 1 : places.step]
        return moved[places[-1] : places.start + 1 : -places.step].flip(0)
    return moved.index_select(0, torch.tensor([place % size for place in places], device=thing.device))
