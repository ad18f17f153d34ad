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

from .collected import Collected, append_instead, collecting, count_of, growing, inserting
from .index import LeftAlone, MovingPiece, is_arithmetic, is_int, read_piece
from .names import exposed, loads, stores

_ITERABLES = ("range", "enumerate", "zip", "reversed")
_LEAVES: dict[type[ast.AST], str] = {
    **dict.fromkeys((ast.Return, ast.Break, ast.Continue), "a turn may end the loop, or itself, early"),
    **dict.fromkeys((ast.Yield, ast.YieldFrom, ast.Await), "a turn hands control to somebody else"),
    **dict.fromkeys((ast.Global, ast.Nonlocal, ast.Delete), "a turn changes names that are not its own"),
    **dict.fromkeys((ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef), "it defines"),
    **dict.fromkeys((ast.Try, ast.Match, ast.AsyncFor, ast.AsyncWith), "a turn may go on after an error"),
}


@dataclass(frozen=True, slots=True, eq=False)
class LoopSource:
    """Something that the loop goes over: numbers of turns, or things."""

    target: str  # the name that it gives a turn; "" where none is looked at
    value: str  # the name under which the evaluated thing is handed over; "" for the count of `enumerate`
    counts: bool  # whether its things are whole numbers, by which others are indexed
    backwards: bool = False
    start: ast.expr | None = None  # of `enumerate`


@dataclass(frozen=True, slots=True, eq=False)
class Taken:
    """A piece that a turn reads."""

    name: str
    piece: MovingPiece


@dataclass(slots=True, eq=False)
class LoopCode:
    """What is known of a loop by its source."""

    line: int
    leaves: list[LoopSource]
    body: list[ast.stmt]  # with pieces and collections under their names
    index_names: set[str]
    taken: list[Taken] = field(default_factory=list)
    collected: list[Collected] = field(default_factory=list)
    carried: list[str] = field(default_factory=list)  # names that a turn reads before it binds them anew
    mutated: set[str] = field(default_factory=set)  # those among them that a turn writes into
    added: set[str] = field(default_factory=set)  # those that are only ever added to, in place
    finals: list[str] = field(default_factory=list)  # other names that a turn binds, and that are read after the loop
    read: set[str] = field(default_factory=set)  # names that are the same at all turns
    joined: set[str] = field(default_factory=set)  # lists whose things nobody looks at one by one
    escaping: set[str] = field(default_factory=set)  # names that the function hands out
    lasts: dict[str, str] = field(default_factory=dict)  # name -> the list whose last thing it stands for


def read_loop(loop: ast.For, later: set[str], fresh: Callable[[str], str]) -> tuple[LoopCode, list[ast.stmt], ast.expr]:
    """Return what a loop is, statements that evaluate what it goes over, once, and that by the names they give it.

    `later` are the names that are read after the loop; `fresh` makes names that nobody uses.
    """
    _refuse(loop)
    leaves: list[LoopSource] = []
    evaluated: list[ast.stmt] = []
    over = _over(loop.iter, loop.target, leaves, evaluated, fresh, loop.body)
    index_names = {leaf.target for leaf in leaves if leaf.counts and leaf.target}
    copied = _one_target_each(copy.deepcopy(loop.body), fresh)
    code = LoopCode(loop.lineno, leaves, copied, index_names)
    targets = {leaf.target for leaf in leaves} - {""}
    _follow_lists(code, fresh)
    bound = stores(code.body)
    _collect(code, bound, fresh)
    changing = bound | targets | _mutated(code.body) | _bound_inside(code.body)
    code.body = [_Takes(code, changing, fresh).visit(statement) for statement in code.body]
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
    leaves: list[LoopSource],
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
            leaves.append(LoopSource(_name(parts[0]), "", True, start=given[0] if given else None))
            inner = _over(iterable.args[0], parts[1], leaves, evaluated, fresh, body)
            return ast.copy_location(ast.Call(iterable.func, [inner, *given], []), iterable)
        if kind != "range" or starred or iterable.keywords:
            raise LeftAlone(f"it goes over {ast.unparse(iterable)}", iterable.lineno)
    value = fresh("over")
    evaluated.append(ast.copy_location(ast.Assign([ast.Name(value, ast.Store())], iterable), iterable))
    leaves.append(LoopSource(_name(target), value, kind == "range" or _indexes(_name(target), body), backwards))
    return ast.copy_location(ast.Name(value, ast.Load()), iterable)


def _indexes(name: str, body: list[ast.stmt]) -> bool:
    """Say whether a name stands in an index: then what it goes over is taken for numbers, and refused if it is none."""
    return any(name in loads([node.slice]) for node in _walk(body) if isinstance(node, ast.Subscript))


def _name(target: ast.expr) -> str:
    if not isinstance(target, ast.Name):
        raise LeftAlone(f"each turn is given several things, {ast.unparse(target)}", target.lineno)
    return target.id


def _bound_inside(body: list[ast.stmt]) -> set[str]:
    """Return the names that comprehensions and lambdas bind for themselves."""
    comprehended = [node.target for node in _walk(body) if isinstance(node, ast.comprehension)]
    return stores(comprehended) | {node.arg for node in _walk(body) if isinstance(node, ast.arg)}


def _follow_lists(code: LoopCode, fresh: Callable[[str], str]) -> None:
    """Give the last thing of a list a name, where turns append to the list and read it by `[-1]` alone."""
    for statement in list(code.body):
        found = collecting(statement, set())
        if found is None or found[2] is not None:
            continue
        into, value, _ = found
        reads = [n for n in _walk(code.body) if isinstance(n, ast.Subscript) and ast.unparse(n) == f"{into}[-1]"]
        if not reads or count_of(code.body, into) != 1 + len(reads):
            continue
        name = fresh("last")
        code.lasts[name] = into
        for read in reads:
            read.__class__ = ast.Name  # type: ignore[assignment]
            read.__dict__ = ast.copy_location(ast.Name(name, ast.Load()), read).__dict__
        bind = ast.copy_location(ast.Assign([ast.Name(name, ast.Store())], value), statement)
        code.body.insert(code.body.index(statement), ast.fix_missing_locations(bind))
        append = ast.parse(f"{into}.append({name})").body[0]
        for node in ast.walk(append):
            if isinstance(node, ast.stmt | ast.expr):
                ast.copy_location(node, statement)
        code.body[code.body.index(statement)] = append


class _Takes(ast.NodeTransformer):
    """Puts a name in the place of each piece of something that is the same at all turns."""

    def __init__(self, code: LoopCode, changing: set[str], fresh: Callable[[str], str]) -> None:
        self.code, self.changing, self.fresh = code, changing, fresh
        self.known: dict[str, str] = {}

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Take `x.select(1, t)` and `torch.narrow(x, 1, t, 1)` for what they are: `x[:, t]`, `x[:, t:t + 1]`."""
        self.generic_visit(node)
        if not isinstance(node.func, ast.Attribute) or node.keywords or node.func.attr not in ("select", "narrow"):
            return node
        given = node.args if ast.unparse(node.func.value) == "torch" else [node.func.value, *node.args]
        if len(given) != (3 if node.func.attr == "select" else 4) or (len(given) == 4 and ast.unparse(given[3]) != "1"):
            return node
        thing, axis, index = given[:3]
        if not is_int(axis) or not loads([index]) & self.code.index_names or not is_arithmetic(index):
            return node
        end = None if len(given) == 3 else ast.copy_location(ast.BinOp(index, ast.Add(), ast.Constant(1)), index)
        return self._taken(node, MovingPiece(thing, int(ast.unparse(axis)), index, end, ()))

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)  # `a[b[t]]` takes its piece of b
        piece = read_piece(node, self.code.index_names) if isinstance(node.ctx, ast.Load) else None
        return node if piece is None else self._taken(node, piece)

    def _taken(self, node: ast.expr, piece: MovingPiece) -> ast.AST:
        if loads([piece.thing]) & self.changing or not _is_place(piece.thing):
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
        grown = growing(statement)
        if grown is not None and count_of(code.body, grown[0]) == count_of([statement], grown[0]):
            name = fresh("left")
            code.collected.append(Collected(name, grown[0], axis=grown[2]))
            append_instead(statement, name, grown[1])
            continue
        inserted = inserting(statement)
        if inserted is not None and count_of(code.body, inserted[0]) == 1 and inserted[0] not in bound:
            name = fresh("left")
            code.collected.append(Collected(name, inserted[0], in_front=True))
            append_instead(statement, name, inserted[1])
            continue
        found = collecting(statement, code.index_names)
        if found is None:
            continue
        into, value, piece = found
        uses = [node for node in _walk(code.body) if isinstance(node, ast.Name) and node.id == into]
        same = [
            other
            for node in _walk(code.body)
            if isinstance(node, ast.stmt)
            if (other := collecting(node, code.index_names)) is not None and other[0] == into
        ]
        if len(uses) != len(same) or (into in bound and not isinstance(statement, ast.AugAssign)):
            continue
        if piece is not None and len(same) > 1:
            continue
        known = next((each.name for each in code.collected if each.into == into), None)
        name = known or fresh("left")
        if known is None:
            code.collected.append(Collected(name, into, piece))
        append_instead(statement, name, value)


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
