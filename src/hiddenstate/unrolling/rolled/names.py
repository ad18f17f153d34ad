"""Names in Python code: which are read, which are bound, and which are read before they are bound."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence


def loads(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the names that are read, but for those that comprehensions and lambdas bind for themselves."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Load):
                found.add(node.id)
        elif isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp):
            own = {name for part in node.generators for name in stores([part.target])}
            first = loads([node.generators[0].iter])  # which is read outside of it
            found |= first | (loads(ast.iter_child_nodes(node)) - own)
        elif isinstance(node, ast.Lambda):
            arguments = [
                *node.args.posonlyargs,
                *node.args.args,
                *node.args.kwonlyargs,
                node.args.vararg,
                node.args.kwarg,
            ]
            own = {argument.arg for argument in arguments if argument is not None}
            found |= loads([node.args]) | (loads([node.body]) - own)
        else:
            found |= loads(ast.iter_child_nodes(node))
    return found


def stores(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the names that are bound, but for those that comprehensions bind for themselves."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Name):
            if not isinstance(node.ctx, ast.Load):
                found.add(node.id)
        elif isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp):
            named = [inner for inner in ast.walk(node) if isinstance(inner, ast.NamedExpr)]
            found |= {inner.target.id for inner in named}
        elif not isinstance(node, ast.Lambda):
            found |= stores(ast.iter_child_nodes(node))
    return found


def exposed(body: Sequence[ast.stmt]) -> set[str]:
    """Return the names that may be read before the statements themselves have bound them."""
    return _exposed(body, frozenset())[0]


def _exposed(body: Sequence[ast.stmt], bound: frozenset[str]) -> tuple[set[str], frozenset[str]]:
    found: set[str] = set()
    for statement in body:
        more, bound = _of_statement(statement, bound)
        found |= more
    return found, bound


def _of_statement(statement: ast.stmt, bound: frozenset[str]) -> tuple[set[str], frozenset[str]]:
    """Return which names a statement may read that are not bound yet, and which are bound after it for sure."""
    if isinstance(statement, ast.If):
        found = loads([statement.test]) - bound
        yes, after_yes = _exposed(statement.body, bound)
        no, after_no = _exposed(statement.orelse, bound)
        return found | yes | no, after_yes & after_no
    if isinstance(statement, ast.For):
        found = loads([statement.iter]) - bound
        inside, _ = _exposed(statement.body, bound | stores([statement.target]))
        behind, _ = _exposed(statement.orelse, bound)
        return found | inside | behind, bound
    if isinstance(statement, ast.While):
        inside, _ = _exposed([*statement.body, *statement.orelse], bound)
        return (loads([statement.test]) - bound) | inside, bound
    if isinstance(statement, ast.With):
        found = loads([item.context_expr for item in statement.items]) - bound
        bound |= stores([item.optional_vars for item in statement.items if item.optional_vars is not None])
        inside, bound = _exposed(statement.body, bound)
        return found | inside, bound
    if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
        found = (loads([statement.value]) | {statement.target.id}) - bound
        return found, bound | {statement.target.id}
    named = {inner.target.id for inner in ast.walk(statement) if isinstance(inner, ast.NamedExpr)}
    return loads([statement]) - bound, bound | (stores([statement]) - named)
