"""A `for` loop as it is written: what a turn takes from outside, what crosses to the next, what it leaves behind.

Read off the source. Whatever a turn does with the tensors is not looked at here: that is traced later, with guards.
What is read here has to hold for every value, so a loop that is written in any other way is left alone, with a reason.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from .names import exposed, loads, stores

_ITERABLES = ("range", "enumerate", "zip", "reversed")
_LEAVES = {
    **dict.fromkeys((ast.Return, ast.Break, ast.Continue), "a turn may end the loop, or itself, early"),
    **dict.fromkeys((ast.Yield, ast.YieldFrom, ast.Await), "a turn hands control to somebody else"),
    **dict.fromkeys((ast.Global, ast.Nonlocal, ast.Delete), "a turn changes names that are not its own"),
    **dict.fromkeys((ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef), "it defines"),
    **dict.fromkeys((ast.Try, ast.Match, ast.AsyncFor, ast.AsyncWith), "a turn may go on after an error"),
}


class LeftAlone(Exception):
    """A loop that is not rolled up, with the reason and its line."""

    def __init__(self, reason: str, line: int) -> None:
        """Say why, and where."""
        super().__init__(reason)
        self.reason, self.line = reason, line


@dataclass(frozen=True, slots=True, eq=False)
class Leaf:
    """Something that the loop goes over: numbers of turns, or things."""

    target: str  # the name that it gives a turn; "" where none is looked at
    value: str  # the name under which the evaluated thing is handed over; "" for the count of `enumerate`
    counts: bool  # whether its things are whole numbers, by which others are indexed
    backwards: bool = False
    start: ast.expr | None = None  # of `enumerate`


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Where in a tensor, or a list, the piece of one turn is: one place of its index moves with the turns."""

    thing: ast.expr  # the tensor or list
    before: int  # axes in front of the place that moves, or those behind it less one, as a negative number
    index: ast.expr  # of the place that moves, or where it begins
    end: ast.expr | None  # of a slice
    rest: tuple[ast.expr, ...]  # the other places; empty where they take everything


@dataclass(frozen=True, slots=True, eq=False)
class Taken:
    """A piece that a turn reads."""

    name: str
    piece: Piece


@dataclass(frozen=True, slots=True, eq=False)
class Collected:
    """What turns leave behind: appended to a list, or written into a piece of a tensor or list."""

    name: str  # of the list that stands for it within a turn
    into: str  # the user's own list or tensor
    piece: Piece | None = None  # where in it; None: appended
    axis: int | None = None  # of a tensor that grows by `torch.cat`


@dataclass(slots=True, eq=False)
class LoopCode:
    """What is known of a loop by its source."""

    line: int
    leaves: list[Leaf]
    body: list[ast.stmt]  # with pieces and collections under their names
    index_names: set[str]
    taken: list[Taken] = field(default_factory=list)
    collected: list[Collected] = field(default_factory=list)
    carried: list[str] = field(default_factory=list)  # names that a turn reads before it binds them anew
    mutated: set[str] = field(default_factory=set)  # those among them that a turn writes into
    added: set[str] = field(default_factory=set)  # those that are only ever added to, in place
    finals: list[str] = field(default_factory=list)  # other names that a turn binds, and that are read after the loop
    read: set[str] = field(default_factory=set)  # names that are the same at all turns


def read_loop(
    loop: ast.For, later: set[str], fresh: Callable[[str], str]
) -> tuple[LoopCode, list[ast.stmt], ast.expr]:
    """Return what a loop is, statements that evaluate what it goes over, once, and that by the names they give it.

    `later` are the names that are read after the loop; `fresh` makes names that nobody uses.
    """
    _refuse(loop)
    leaves: list[Leaf] = []
    evaluated: list[ast.stmt] = []
    over = _over(loop.iter, loop.target, leaves, evaluated, fresh, loop.body)
    index_names = {leaf.target for leaf in leaves if leaf.counts and leaf.target}
    copied = _one_target_each(copy.deepcopy(loop.body), fresh)
    code = LoopCode(loop.lineno, leaves, copied, index_names)
    targets = {leaf.target for leaf in leaves} - {""}
    bound = stores(copied)
    _collect(code, bound, fresh)
    code.body = [_Takes(code, bound | targets | _mutated(code.body), fresh).visit(statement) for statement in code.body]
    left = next((node for node in _walk(code.body) if isinstance(node, ast.Name) and node.id in index_names), None)
    if left is not None:
        raise LeftAlone(f"it computes with the number of the turn, {left.id!r}", left.lineno)
    _sort_names(code, targets, later)
    return code, evaluated, over


def _sort_names(code: LoopCode, targets: set[str], later: set[str]) -> None:
    bound = stores(code.body)
    own = {collected.name for collected in code.collected} | {taken.name for taken in code.taken}
    if bound & code.index_names:
        raise LeftAlone(f"a turn binds {min(bound & code.index_names)!r} anew, by which it is counted", code.line)
    code.mutated = _mutated(code.body) - bound
    missing = exposed(code.body) - targets - own
    code.carried = sorted(missing & (bound | code.mutated))
    code.read = missing - set(code.carried)
    code.finals = sorted((bound - set(code.carried)) & later)
    code.added = {name for name in code.carried if _only_added(code.body, name)}


def _walk(statements: Iterable[ast.AST]) -> Iterable[ast.AST]:
    for statement in statements:
        yield from ast.walk(statement)


def _refuse(loop: ast.For) -> None:
    """Refuse what cannot be put into a function of one turn."""
    if loop.orelse:
        raise LeftAlone("it has an else", loop.lineno)
    waiting: list[tuple[ast.AST, bool]] = [(statement, False) for statement in loop.body]
    while waiting:
        node, inner = waiting.pop()
        if inner and isinstance(node, ast.Break | ast.Continue):
            continue
        for kind, reason in _LEAVES.items():
            if isinstance(node, kind):
                raise LeftAlone(reason, getattr(node, "lineno", loop.lineno))
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            raise LeftAlone(f"a turn writes the attribute {node.attr!r}", node.lineno)
        deeper = inner or isinstance(node, ast.For | ast.While)
        waiting += [(child, deeper) for child in ast.iter_child_nodes(node)]


def _over(
    iterable: ast.expr,
    target: ast.expr,
    leaves: list[Leaf],
    evaluated: list[ast.stmt],
    fresh: Callable[[str], str],
    body: list[ast.stmt],
    *,
    backwards: bool = False,
) -> ast.expr:
    """Take what a loop goes over apart, down to ranges and things; returns it with names in their place."""
    kind = iterable.func.id if isinstance(iterable, ast.Call) and isinstance(iterable.func, ast.Name) else ""
    if kind in _ITERABLES and isinstance(iterable, ast.Call):
        starred = any(isinstance(argument, ast.Starred) for argument in iterable.args)
        parts = target.elts if isinstance(target, ast.Tuple | ast.List) else []
        if kind == "reversed" and len(iterable.args) == 1 and not backwards:
            inner = _over(iterable.args[0], target, leaves, evaluated, fresh, body, backwards=True)
            return ast.copy_location(ast.Call(iterable.func, [inner], []), iterable)
        if kind == "zip" and not starred and len(parts) == len(iterable.args) and parts and not backwards:
            pairs = zip(iterable.args, parts, strict=True)
            inners = [_over(arg, part, leaves, evaluated, fresh, body) for arg, part in pairs]
            return ast.copy_location(ast.Call(iterable.func, inners, iterable.keywords), iterable)
        if kind == "enumerate" and len(parts) == 2 and not starred and not backwards:
            given = [*iterable.args[1:], *(keyword.value for keyword in iterable.keywords)]
            leaves.append(Leaf(_name(parts[0]), "", True, start=given[0] if given else None))
            inner = _over(iterable.args[0], parts[1], leaves, evaluated, fresh, body)
            return ast.copy_location(ast.Call(iterable.func, [inner, *given], []), iterable)
        if kind != "range" or starred or iterable.keywords:
            raise LeftAlone(f"it goes over {ast.unparse(iterable)}", iterable.lineno)
    value = fresh("over")
    evaluated.append(ast.copy_location(ast.Assign([ast.Name(value, ast.Store())], iterable), iterable))
    leaves.append(Leaf(_name(target), value, kind == "range" or _indexes(_name(target), body), backwards))
    return ast.copy_location(ast.Name(value, ast.Load()), iterable)


def _indexes(name: str, body: list[ast.stmt]) -> bool:
    """Say whether a name stands in an index: then what it goes over is taken for numbers, and refused if it is none."""
    return any(name in loads([node.slice]) for node in _walk(body) if isinstance(node, ast.Subscript))


def _name(target: ast.expr) -> str:
    if not isinstance(target, ast.Name):
        raise LeftAlone(f"each turn is given several things, {ast.unparse(target)}", target.lineno)
    return target.id


class _Takes(ast.NodeTransformer):
    """Puts a name in the place of each piece of something that is the same at all turns."""

    def __init__(self, code: LoopCode, changing: set[str], fresh: Callable[[str], str]) -> None:
        self.code, self.changing, self.fresh = code, changing, fresh
        self.known: dict[str, str] = {}

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)  # `a[b[t]]` takes its piece of b
        piece = read_piece(node, self.code.index_names) if isinstance(node.ctx, ast.Load) else None
        if piece is None or loads([piece.thing]) & self.changing or not _is_place(piece.thing):
            return node
        said = ast.unparse(node)
        if said not in self.known:
            self.known[said] = self.fresh("piece")
            self.code.taken.append(Taken(self.known[said], piece))
        taken: ast.expr = ast.copy_location(ast.Name(self.known[said], ast.Load()), node)
        if not piece.rest:
            return taken
        rest = piece.rest[0] if len(piece.rest) == 1 else ast.Tuple(list(piece.rest), ast.Load())
        return ast.fix_missing_locations(ast.copy_location(ast.Subscript(taken, rest, ast.Load()), node))


def _is_place(thing: ast.expr) -> bool:
    while isinstance(thing, ast.Attribute):
        thing = thing.value
    return isinstance(thing, ast.Name)


def read_piece(node: ast.Subscript, index_names: set[str]) -> Piece | None:
    """Return where a subscript takes a piece that moves with the turns; None where it does not, or in other ways."""
    places = list(node.slice.elts) if isinstance(node.slice, ast.Tuple) else [node.slice]
    moving = [number for number, place in enumerate(places) if loads([place]) & index_names]
    if len(moving) != 1:
        return None
    number = moving[0]
    place, others = places[number], [*places[:number], *places[number + 1 :]]
    if not _is_arithmetic(place):
        return None
    # Behind a whole number at the first place others may be tensors: `a[t, rows]` is `a[t][rows]`.
    led = number == 0 and not isinstance(place, ast.Slice) and not any(_is_plain(o) and not _is_int(o) for o in others)
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
    if all(isinstance(other, ast.Slice) and _is_all(other) or _is_constant(other, ...) for other in others):
        others = []
    return Piece(node.value, before, index, end, tuple(others))


def _is_constant(place: ast.expr, value: object) -> bool:
    return isinstance(place, ast.Constant) and place.value is value


def _is_all(place: ast.Slice) -> bool:
    return place.lower is None and place.upper is None and place.step is None


def _is_int(place: ast.expr) -> bool:
    if isinstance(place, ast.UnaryOp):
        place = place.operand
    return isinstance(place, ast.Constant) and type(place.value) is int


def _is_arithmetic(place: ast.expr) -> bool:
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


def _one_target_each(body: list[ast.stmt], fresh: Callable[[str], str]) -> list[ast.stmt]:
    """Write `a[t] = b = value` as three statements."""

    class Apart(ast.NodeTransformer):
        def visit_Assign(self, node: ast.Assign) -> Any:
            if len(node.targets) == 1:
                return node
            name = fresh("value")
            first: list[ast.stmt] = [ast.Assign([ast.Name(name, ast.Store())], node.value)]
            rest = [ast.Assign([target], ast.Name(name, ast.Load())) for target in node.targets]
            return [ast.fix_missing_locations(ast.copy_location(each, node)) for each in (*first, *rest)]

    return [inner for statement in body for inner in _listed(Apart().visit(statement))]


def _listed(made: Any) -> list[ast.stmt]:
    return made if isinstance(made, list) else [made]


def _collect(code: LoopCode, bound: set[str], fresh: Callable[[str], str]) -> None:
    """Find what turns append to lists, or write into pieces, of which they read nothing."""
    for statement in [node for node in _walk(code.body) if isinstance(node, ast.stmt)]:
        grown = _growing(statement)
        if grown is not None and _count(code.body, grown[0]) == _count([statement], grown[0]):
            name = fresh("left")
            code.collected.append(Collected(name, grown[0], axis=grown[2]))
            _append_instead(statement, name, grown[1])
            continue
        found = _collecting(statement, code.index_names)
        if found is None:
            continue
        into, value, piece = found
        uses = [node for node in _walk(code.body) if isinstance(node, ast.Name) and node.id == into]
        same = [other for node in _walk(code.body) if isinstance(node, ast.stmt)
                if (other := _collecting(node, code.index_names)) is not None and other[0] == into]
        if len(uses) != len(same) or (into in bound and not isinstance(statement, ast.AugAssign)):
            continue
        if piece is not None and len(same) > 1:
            continue
        known = next((each.name for each in code.collected if each.into == into), None)
        name = known or fresh("left")
        if known is None:
            code.collected.append(Collected(name, into, piece))
        _append_instead(statement, name, value)


def _collecting(statement: ast.stmt, index_names: set[str]) -> tuple[str, ast.expr, Piece | None] | None:
    """Return what a statement leaves behind: in which list or tensor, what, and where."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        call = statement.value
        if isinstance(call.func, ast.Attribute) and call.func.attr == "append" and len(call.args) == 1:
            if isinstance(call.func.value, ast.Name) and not call.keywords:
                return call.func.value.id, call.args[0], None
    if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
        if isinstance(statement.op, ast.Add) and isinstance(statement.value, ast.List) and len(statement.value.elts) == 1:
            return statement.target.id, statement.value.elts[0], None
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target = statement.targets[0]
        if isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
            piece = read_piece(target, index_names)
            if piece is not None:
                return target.value.id, statement.value, piece
    return None


def _growing(statement: ast.stmt) -> tuple[str, ast.expr, int] | None:
    """Return which tensor a statement makes longer, by what, along which axis: `a = torch.cat([a, b], 1)`.

    Also where `a` is None at first: `if a is None: a = b` and else that.
    """
    if isinstance(statement, ast.If) and len(statement.body) == len(statement.orelse) == 1:
        first, found = statement.body[0], _growing(statement.orelse[0])
        if found is None or not isinstance(first, ast.Assign) or ast.unparse(statement.test) != f"{found[0]} is None":
            return None
        alike = ast.unparse(first) == f"{found[0]} = {ast.unparse(found[1])}"
        return found if alike else None
    if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Call):
        return None
    call, (target, *more) = statement.value, statement.targets
    if more or not isinstance(target, ast.Name) or ast.unparse(call.func) != "torch.cat" or not call.args:
        return None
    joined, axes = call.args[0], [*call.args[1:], *(word.value for word in call.keywords if word.arg == "dim")]
    if len(call.args) + len(call.keywords) > 2 or len(axes) > 1 or not isinstance(joined, ast.Tuple | ast.List):
        return None
    axis = ast.unparse(axes[0]) if axes else "0"
    if len(joined.elts) != 2 or ast.unparse(joined.elts[0]) != target.id or not axis.lstrip("-").isdigit():
        return None
    return target.id, joined.elts[1], int(axis)


def _count(body: list[ast.stmt], name: str) -> int:
    return sum(isinstance(node, ast.Name) and node.id == name for node in _walk(body))


def _append_instead(statement: ast.stmt, name: str, value: ast.expr) -> None:
    """Turn a statement, in place, into one that appends to a list of the turn's own."""
    call = ast.Call(ast.Attribute(ast.Name(name, ast.Load()), "append", ast.Load()), [value], [])
    line = ast.copy_location(ast.Expr(call), statement)
    ast.fix_missing_locations(line)
    statement.__class__ = ast.Expr  # type: ignore[assignment]
    statement.__dict__.clear()
    statement.__dict__.update(line.__dict__)


def _mutated(body: list[ast.stmt]) -> set[str]:
    """Return the names of things that a turn writes into, by an index."""
    found = set()
    for node in _walk(body):
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            thing: ast.expr = node.value
            while isinstance(thing, ast.Subscript | ast.Attribute):
                thing = thing.value
            if isinstance(thing, ast.Name):
                found.add(thing.id)
    return found


def _only_added(body: list[ast.stmt], name: str) -> bool:
    """Say whether a name is only ever added to by `name += ...`: nobody else sees what it was before."""
    uses = [node for node in _walk(body) if isinstance(node, ast.Name) and node.id == name]
    added = [node.target for node in _walk(body) if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add)]
    return bool(uses) and all(any(use is target for target in added) for use in uses)
