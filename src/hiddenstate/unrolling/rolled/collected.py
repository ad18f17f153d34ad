"""The values that the turns of a loop leave behind: appended, written into a piece, or concatenated."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from .index import MovingPiece, read_piece


@dataclass(frozen=True, slots=True, eq=False)
class Collected:
    """What turns leave behind: appended to a list, or written into a piece of a tensor or list."""

    name: str  # of the list that stands for it within a turn
    into: str  # the user's own list or tensor
    piece: MovingPiece | None = None  # where in it; None: appended
    axis: int | None = None  # of a tensor that grows by `torch.cat`
    in_front: bool = False  # whether each is put in front of those before it: `insert(0, ...)`


def collecting(statement: ast.stmt, index_names: set[str]) -> tuple[str, ast.expr, MovingPiece | None] | None:
    """Return what a statement leaves behind: in which list or tensor, what, and where."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        call = statement.value
        appends = isinstance(call.func, ast.Attribute) and call.func.attr == "append" and len(call.args) == 1
        if appends and isinstance(call.func.value, ast.Name) and not call.keywords:  # type: ignore[attr-defined]
            return call.func.value.id, call.args[0], None  # type: ignore[attr-defined]
    if isinstance(statement, ast.AugAssign) and isinstance(statement.op, ast.Add):
        name, value = statement.target, statement.value
        if isinstance(name, ast.Name) and isinstance(value, ast.List) and len(value.elts) == 1:
            return name.id, value.elts[0], None
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target = statement.targets[0]
        if isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
            piece = read_piece(target, index_names)
            if piece is not None:
                return target.value.id, statement.value, piece
    return None


def inserting(statement: ast.stmt) -> tuple[str, ast.expr] | None:
    """Return in front of what a statement puts something: `a.insert(0, b)`."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        call = statement.value
        named = isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name)
        if named and call.func.attr == "insert" and len(call.args) == 2 and not call.keywords:  # type: ignore[attr-defined]
            first = call.args[0]
            if isinstance(first, ast.Constant) and type(first.value) is int and first.value == 0:
                return call.func.value.id, call.args[1]  # type: ignore[attr-defined]
    return None


def growing(statement: ast.stmt) -> tuple[str, ast.expr, int] | None:
    """Return which tensor a statement makes longer, by what, along which axis: `a = torch.cat([a, b], 1)`.

    Also where `a` is None at first: `if a is None: a = b` and else that.
    """
    if isinstance(statement, ast.If) and len(statement.body) == len(statement.orelse) == 1:
        first, found = statement.body[0], growing(statement.orelse[0])
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


def count_of(body: list[ast.stmt], name: str) -> int:
    """Return how often a name stands in statements."""
    every = (node for statement in body for node in ast.walk(statement))
    return sum(isinstance(node, ast.Name) and node.id == name for node in every)


def append_instead(statement: ast.stmt, name: str, value: ast.expr) -> None:
    """Turn a statement, in place, into one that appends to a list of the turn's own."""
    call = ast.Call(ast.Attribute(ast.Name(name, ast.Load()), "append", ast.Load()), [value], [])
    line = ast.copy_location(ast.Expr(call), statement)
    ast.fix_missing_locations(line)
    statement.__class__ = ast.Expr
    statement.__dict__.clear()
    statement.__dict__.update(line.__dict__)
