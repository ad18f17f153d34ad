"""Lists that turns append to and that are only ever put together: then all turns are handed on as the one tensor."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from ...errors import Untraceable

_JOINS = ("torch.stack", "torch.cat")
_SHOWS = {"locals", "vars", "eval", "exec", "dir"}  # by which a list would be seen without its name


@dataclass(frozen=True, slots=True, eq=False)
class AllTurns:
    """Stands in a list for what all turns appended to it."""

    along: Tensor  # (turn, ...)


def only_joined(tree: ast.FunctionDef) -> set[str]:
    """Return the names of a function's own lists of which nothing is done but to append and to join them."""
    inner = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
    apart_from_it = [node for node in ast.walk(tree) if node is not tree and isinstance(node, inner)]
    hidden = {id(node) for each in apart_from_it for node in ast.walk(each)}
    harmless = {id(name) for node in ast.walk(tree) if id(node) not in hidden for name in _harmless(node)}
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    if any(name.id in _SHOWS for name in names):
        return set()
    others = {name.id for name in names if id(name) not in harmless}
    others |= {argument.arg for argument in ast.walk(tree.args) if isinstance(argument, ast.arg)}
    others |= {name for node in ast.walk(tree) if isinstance(node, ast.Global | ast.Nonlocal) for name in node.names}
    made = {name.id for name in names if id(name) in harmless and isinstance(name.ctx, ast.Store)}
    return made - others


def is_join(call: ast.Call, lists: set[str]) -> bool:
    """Say whether a call joins one of these lists."""
    first = call.args[0] if call.args else None
    return isinstance(first, ast.Name) and first.id in lists and ast.unparse(call.func) in _JOINS


def join(function: Callable[..., Tensor], things: list[Any], *args: Any, **kwargs: Any) -> Tensor:
    """Return what `torch.stack` or `torch.cat` returns for the things that a list stands for."""
    if type(things) is not list or not any(type(thing) is AllTurns for thing in things):
        return function(things, *args, **kwargs)
    axis = kwargs.get("dim", args[0] if args else 0)
    if len(args) + len(kwargs) < 2 and kwargs.keys() <= {"dim"} and type(axis) is int:
        parts = [thing.along if type(thing) is AllTurns else torch.unsqueeze(thing, 0) for thing in things]
        rank = parts[0].dim() - (function is torch.cat)
        alike = len({(part.shape[1:], part.dtype, part.device) for part in parts}) == 1
        if alike and -rank <= axis < rank:
            axis %= rank
            whole = parts[0] if len(parts) == 1 else torch.cat(parts)
            moved = whole.movedim(0, axis).clone(memory_format=torch.contiguous_format)
            return moved if function is torch.stack else moved.flatten(axis, axis + 1)
    every = [inner for thing in things for inner in (apart(thing.along) if type(thing) is AllTurns else [thing])]
    return function(every, *args, **kwargs)


def apart(along: Tensor, *, states: bool = False) -> list[Tensor]:
    """Return the tensors of all turns, each its own: views of one tensor could not be written to before a backward.

    A gradient that is kept, or hooked, at one of several `states` would lack the way through later turns: it is
    refused in the backward pass.
    """
    if not along.requires_grad:
        return list(along.unbind(0))
    items: tuple[Tensor, ...] = _TurnsApart.apply(along)  # type: ignore[no-untyped-call]
    if states:
        node: Any = items[0].grad_fn
        node.states = list(map(ref, items[:-1]))
    return list(items)


class _TurnsApart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, along: Tensor) -> tuple[Tensor, ...]:
        ctx.states = []
        return tuple(torch.ops.aten.unbind_copy.int(along, 0))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        if any(item.retains_grad or item._backward_hooks for each in ctx.states if (item := each()) is not None):
            raise Untraceable(
                "a gradient is asked for at one turn of a loop that hs.accelerate runs as a whole, by retain_grad or a "
                "hook: it would lack the way through later turns. Close what hs.accelerate returned ahead of such a "
                "call, or ask for the gradient of another tensor."
            )
        return torch.stack(grads)


def escaping(tree: ast.FunctionDef) -> set[str]:
    """Return the names that a function returns, or puts into attributes, as they are."""
    found: set[str] = set()
    for node in ast.walk(tree):
        kept = isinstance(node, ast.Assign) and any(isinstance(target, ast.Attribute) for target in node.targets)
        waiting = [node.value] if isinstance(node, ast.Return | ast.Yield) or kept else []  # type: ignore[attr-defined]
        while waiting:
            value = waiting.pop()
            if isinstance(value, ast.Name):
                found.add(value.id)
            elif isinstance(value, ast.Tuple | ast.List):
                waiting += value.elts
            elif isinstance(value, ast.Dict):
                waiting += value.values
    return found


def asks_for_gradients(node: ast.AST) -> bool:
    """Say whether a piece of code may look at the gradient of something between an input and an output."""
    if not isinstance(node, ast.Attribute):
        return False
    return node.attr in ("retain_grad", "register_hook") or ast.unparse(node).endswith("autograd.grad")


def _harmless(node: ast.AST) -> list[ast.expr]:
    """Return the names in a piece of code that may be those of a list which holds something else than it seems."""
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        pairs = [(node.targets[0], node.value)]
        if isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
            pairs = list(zip(node.targets[0].elts, node.value.elts, strict=False))
        return [target for target, value in pairs if isinstance(value, ast.List) and not value.elts]
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        called = node.value.func
        return [called.value] if isinstance(called, ast.Attribute) and called.attr == "append" else []
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
        return [node.target] if isinstance(node.value, ast.List) else []
    if isinstance(node, ast.Call) and node.args and ast.unparse(node.func) in _JOINS:
        return [node.args[0]]
    return []
