"""Changing functions through their source: the new function has the same globals, closures and line numbers."""

from __future__ import annotations

import ast
import builtins
import inspect
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from ..twins import members
from .index import LeftAlone
from .joined import asks_for_gradients, escaping, is_join, join, only_joined
from .loop_code import LoopCode, read_loop
from .names import loads, stores

ENTER, LEAVE, VIA, JOIN = "__hs_enter__", "__hs_leave__", "__hs_via__", "__hs_join__"


@dataclass(frozen=True, slots=True, eq=False)
class Rewritten:
    """A function whose loops ask first whether they are to run, and what is known of these loops."""

    function: FunctionType
    loops: list[LoopCode]
    left_alone: list[LeftAlone]
    calls: list[FunctionType]  # functions with loops that it calls


def rewrite(
    function: FunctionType, owner: Any, enter: Callable[..., Any], leave: Callable[..., Any], via: Callable[..., Any]
) -> Rewritten:
    """Return a function that calls `enter` ahead of each loop that may be rolled up.

    `enter(number, names, over)` returns a dict of new values in place of the loop. Otherwise the loop runs as it is
    written, and `leave(number, token, names)` is called behind it, where `enter` returned a token rather than None.
    Functions that it calls are asked for by `via(function)`, where they have loops of their own: `owner` is the type
    whose methods are called by `self.name`.
    """
    tree = _definition(function)
    writer = _LoopsAsk(tree, function, owner)
    tree.body = [inner for statement in tree.body for inner in _many(writer.visit(statement))]
    if not writer.loops and not writer.calls:
        return Rewritten(function, [], writer.left_alone, [])
    made = made_again(function, tree, {ENTER: enter, LEAVE: leave, VIA: via, JOIN: join})
    return Rewritten(made, writer.loops, writer.left_alone, writer.calls)


def has_loops(function: Any, owner: Any, seen: set[Any] | None = None) -> bool:
    """Say whether there is a loop in a function of the user's own, or in one that it calls."""
    seen = set() if seen is None else seen
    if not isinstance(function, FunctionType) or function in seen or _is_librarys(function):
        return False
    seen.add(function)
    try:
        tree, _ = _parsed(function)
    except LeftAlone:
        return False
    if any(isinstance(node, ast.For | ast.While) or _carries_on(node) for node in ast.walk(tree)):
        return True
    called = [called_function(node, function, owner) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return any(has_loops(other, owner, seen) for other in called)


def called_function(call: ast.Call, function: FunctionType, owner: Any) -> Any:
    """Return the function that a call by a plain name, or by `self.name`, leads to, as far as that is known now."""
    if isinstance(call.func, ast.Name):
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        if call.func.id in cells:
            return getattr(cells[call.func.id], "cell_contents", None) if _is_filled(cells[call.func.id]) else None
        return function.__globals__.get(call.func.id)
    if not isinstance(call.func, ast.Attribute) or not isinstance(call.func.value, ast.Name) or owner is None:
        return None
    own = function.__code__.co_varnames[: min(1, function.__code__.co_argcount)]
    return getattr(owner, call.func.attr, None) if call.func.value.id in own else None


def _is_filled(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _is_librarys(function: FunctionType) -> bool:
    part = (function.__module__ or "sys").split(".")[0]
    return part in ("torch", "hiddenstate", "numpy") or (part in sys.stdlib_module_names and part != "__main__")


_UNREADABLE = "its source cannot be read"


def _definition(function: FunctionType) -> ast.FunctionDef:
    """Return a function's definition, with the lines of its file."""
    tree, first = _parsed(function)
    if not isinstance(tree, ast.FunctionDef) or tree.name != function.__code__.co_name:
        raise LeftAlone("it is no plain function", first)
    if tree.decorator_list:
        raise LeftAlone(f"it is decorated with {ast.unparse(tree.decorator_list[0])}", first)
    ast.increment_lineno(tree, first - 1)
    return tree


def _parsed(function: FunctionType) -> tuple[ast.stmt, int]:
    try:
        lines, first = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(lines))).body[0]
    except (OSError, TypeError, SyntaxError, IndentationError, IndexError):
        raise LeftAlone(_UNREADABLE, function.__code__.co_firstlineno) from None
    return tree, first


class _LoopsAsk(ast.NodeTransformer):
    """Has each loop ask first whether it is to run."""

    def __init__(self, tree: ast.FunctionDef, function: FunctionType, owner: Any) -> None:
        self.tree, self.function, self.owner = tree, function, owner
        self.calls: list[FunctionType] = []
        self.candidates = 0  # loops around the one that is visited which may be rolled up
        self.used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        self.loops: list[LoopCode] = []
        self.left_alone: list[LeftAlone] = []
        self.outer: list[ast.For | ast.While] = []
        self.locals = stores(tree.body) | {
            argument.arg for argument in ast.walk(tree.args) if isinstance(argument, ast.arg)
        }
        self.escaping = escaping(tree)
        self.joined = set() if "torch" in self.locals else only_joined(tree)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return node  # what is defined inside has names of its own

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if is_join(node, self.joined):
            joins = ast.Call(ast.Name(JOIN, ast.Load()), [node.func, *node.args], node.keywords)
            return ast.fix_missing_locations(ast.copy_location(joins, node))
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        called = None if name in self.locals else called_function(node, self.function, self.owner)
        if called is not None and called is not self.function and has_loops(called, self.owner):
            self.calls.append(called)
            asked = ast.Call(ast.Name(VIA, ast.Load()), [node.func], [])
            node.func = ast.fix_missing_locations(ast.copy_location(asked, node.func))
        return node

    def visit_ListComp(self, node: ast.ListComp) -> ast.AST:
        return self._comprehended(node)

    def visit_GeneratorExp(self, node: ast.GeneratorExp) -> ast.AST:
        return self._comprehended(node)

    def _comprehended(self, node: ast.ListComp | ast.GeneratorExp) -> ast.AST:
        if _carries_on(node) and not self.candidates:
            self.left_alone.append(LeftAlone("it is a comprehension, and no for statement", node.lineno))
        return self.generic_visit(node)

    def visit_While(self, node: ast.While) -> ast.AST:
        if not self.candidates:
            self.left_alone.append(LeftAlone("it is a while loop", node.lineno))
        self.outer.append(node)
        self.generic_visit(node)
        self.outer.pop()
        return node

    def visit_For(self, node: ast.For) -> Any:
        code: LoopCode | None = None
        try:
            if {"range", "zip", "enumerate", "reversed"} & self.locals:
                raise LeftAlone("one of Python's own names is bound anew", node.lineno)
            asking = next(filter(asks_for_gradients, self._behind(node)), None)
            if asking is not None:
                raise LeftAlone(f"gradients at single turns may be asked for (line {asking.lineno})", node.lineno)
            code, evaluated, node.iter = read_loop(node, self._read_later(node), self._fresh)
        except LeftAlone as reason:
            if not self.candidates:  # else what is around it may be rolled up as a whole
                self.left_alone.append(reason)
        self.candidates += code is not None
        self.outer.append(node)
        self.generic_visit(node)
        self.outer.pop()
        self.candidates -= code is not None
        if code is None:
            return node
        code.joined, code.escaping, number = self.joined, self.escaping, len(self.loops)
        self.loops.append(code)
        return [*evaluated, *self._asking(node, code, number)]

    def _asking(self, node: ast.For, code: LoopCode, number: int) -> list[ast.stmt]:
        """Return: new values are asked for; where there are none, the loop runs."""
        result = self._fresh("result")
        over = ", ".join(leaf.value for leaf in code.leaves if leaf.value)
        grown = (collected.into for collected in code.collected if collected.axis is not None)
        names = sorted({*code.carried, *code.finals, *grown, *(leaf.target for leaf in code.leaves if leaf.target)})
        taken = "\n".join(f"    {name} = {result}[{name!r}]" for name in names)
        text = (
            f"{result} = {ENTER}({number}, locals(), ({over},))\n"
            f"if type({result}) is dict:\n{taken or '    pass'}\n"
            f"else:\n    pass\n    if {result} is not None:\n        {LEAVE}({number}, {result}, locals())"
        )
        first, choice = ast.parse(text).body
        assert isinstance(choice, ast.If)
        for inner in ast.walk(ast.Module([first, choice], [])):
            if isinstance(inner, ast.stmt | ast.expr):
                ast.copy_location(inner, node)
        choice.orelse[0] = node
        return [first, choice]

    def _read_later(self, loop: ast.For) -> set[str]:
        """Return the names that are read after a loop, or before it in a loop around it."""
        if self.outer:
            around = [self.outer[0]]
            inside = {id(node) for node in ast.walk(loop)}
            found = {n.id for n in ast.walk(around[0]) if isinstance(n, ast.Name) and id(n) not in inside}
        else:
            found = set()
        last = loop.end_lineno or loop.lineno
        behind = [s for s in ast.walk(self.tree) if isinstance(s, ast.stmt) and s.lineno > last]
        same_line = [s for s in ast.walk(self.tree) if isinstance(s, ast.stmt) and s.lineno == last and s is not loop]
        return found | loads(behind) | (loads(same_line) if same_line and last == loop.lineno else set())

    def _behind(self, loop: ast.For) -> list[Any]:
        """Return the code behind a loop."""
        last = loop.end_lineno or loop.lineno
        return [node for node in ast.walk(self.tree) if getattr(node, "lineno", 0) > last]

    def _fresh(self, stem: str) -> str:
        number = 0
        while (name := f"hs_{stem}_{number}") in self.used:
            number += 1
        self.used.add(name)
        return name


def _carries_on(node: ast.AST) -> bool:
    """Say whether a comprehension hands something on from turn to turn: `[h := cell(x, h) for x in xs]`."""
    if not isinstance(node, ast.ListComp | ast.GeneratorExp):
        return False
    named = {inner.target.id for inner in ast.walk(node) if isinstance(inner, ast.NamedExpr)}
    return bool(named & loads([node]))


def _many(result: Any) -> list[ast.stmt]:
    return result if isinstance(result, list) else [result]


def made_again(function: FunctionType, tree: ast.FunctionDef, more: dict[str, Any]) -> FunctionType:
    """Return a function from a changed definition, with the globals and closures of another, and `more` names."""
    free = [*function.__code__.co_freevars, *more]
    _mangle(tree, function.__qualname__)
    outer = ast.FunctionDef(
        name="outer",
        args=ast.arguments([], [ast.arg(name) for name in free], None, [], [], None, []),
        body=[_without_defaults(tree), ast.Return(ast.Name(tree.name, ast.Load()))],
        decorator_list=[],
    )
    outer.__dict__.setdefault("type_params", [])  # which Python 3.12 asks for
    module = ast.fix_missing_locations(ast.Module([outer], []))
    code = compile(module, function.__code__.co_filename, "exec", dont_inherit=True, flags=_flags(function))
    inner = _inner(code, tree.name)
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    closure = tuple(cells[name] if name in cells else CellType(more[name]) for name in inner.co_freevars)
    made = FunctionType(inner, function.__globals__, function.__name__, function.__defaults__, closure)
    made.__kwdefaults__ = function.__kwdefaults__
    made.__qualname__, made.__module__ = function.__qualname__, function.__module__
    return made


def _flags(function: FunctionType) -> int:
    import __future__

    return function.__code__.co_flags & __future__.annotations.compiler_flag


def _without_defaults(tree: ast.FunctionDef) -> ast.FunctionDef:
    """Return a definition that evaluates no defaults and annotations: they are taken from the function as it is."""
    arguments = tree.args
    arguments.defaults = [ast.Constant(None) for _ in arguments.defaults]
    arguments.kw_defaults = [None if default is None else ast.Constant(None) for default in arguments.kw_defaults]
    for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]:
        if argument is not None:
            argument.annotation = None
    tree.returns = None
    return tree


def _inner(code: CodeType, name: str) -> CodeType:
    for outer in code.co_consts:
        if isinstance(outer, CodeType):
            for inner in outer.co_consts:
                if isinstance(inner, CodeType) and inner.co_name == name:
                    return inner
    raise AssertionError(name)


def _mangle(tree: ast.FunctionDef, qualname: str) -> None:
    """Spell private names as within their class, `self.__x` as `self._Class__x`."""
    parts = qualname.split(".")
    if len(parts) < 2 or parts[-2] == "<locals>":
        return
    owner = parts[-2].lstrip("_")
    for node in ast.walk(tree):
        for slot in ("attr", "id", "arg"):
            name = getattr(node, slot, None)
            if isinstance(name, str) and name.startswith("__") and not name.endswith("__") and owner:
                setattr(node, slot, f"_{owner}{name}")


def resolves_to_builtins(function: FunctionType) -> bool:
    """Say whether the names that loops are made with are Python's own."""
    names = ("range", "zip", "enumerate", "reversed", "locals", "type", "dict")
    if function.__globals__.get("torch", torch) is not torch:
        return False
    return all(function.__globals__.get(name, getattr(builtins, name)) is getattr(builtins, name) for name in names)


def called_modules(body: Sequence[ast.AST], names: dict[str, Any], seen: set[Any] | None = None) -> list[nn.Module]:
    """Return the modules that statements may call, by the attributes that they and the methods they call read."""
    seen = set() if seen is None else seen
    found: dict[nn.Module, None] = {}
    parents = {id(child): node for each in body for node in ast.walk(each) for child in ast.iter_child_nodes(node)}
    for node in (inner for each in body for inner in ast.walk(each)):
        value = names.get(node.id) if isinstance(node, ast.Name) else None
        if not isinstance(value, nn.Module):
            continue
        whole, above = value, parents.get(id(node))
        while isinstance(above, ast.Attribute) and isinstance(getattr(value, above.attr, None), nn.Module):
            value, above = getattr(value, above.attr), parents.get(id(above))
        if not isinstance(above, ast.Attribute):
            found.update(dict.fromkeys(members(value)))
            continue
        method = getattr(value, above.attr, None)
        if callable(method):
            inside = _called_by(method, seen) if value is whole else None
            found.update(dict.fromkeys(members(value)[1 if value is whole else 0 :] if inside is None else inside))
    return list(found)


def _called_by(method: Any, seen: set[Any]) -> list[nn.Module] | None:
    """Return the modules that a method calls; None where its source does not tell."""
    if not isinstance(method, MethodType) or not isinstance(method.__func__, FunctionType):
        return None
    if method in seen:
        return []
    seen.add(method)
    try:
        tree, _ = _parsed(method.__func__)
    except LeftAlone:
        return None
    code = method.__func__.__code__
    return called_modules([tree], {code.co_varnames[0]: method.__self__} if code.co_argcount else {}, seen)
