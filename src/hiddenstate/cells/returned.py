"""What a step returns: its next state alone, after its output, or before it, as tutorials on RNNs write it."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

from torch import Tensor, nn

from .native import Form, Native, matches
from .signature import arguments, named_like_state

_OUTPUTS = {"y", "yt", "out", "outs", "output", "outputs", "logit", "logits", "pred", "preds", "prediction", "yhat"}
_OUTPUTS |= {"score", "scores", "prob", "probs"}
_HEADS = _OUTPUTS | {"o", "fc", "fc2", "head", "linear", "readout", "h2o", "decoder", "why", "wy", "hy", "v"}
_STATES = {"h", "hy", "hn", "ht", "hx", "hidden", "state", "c", "cy", "cn", "ct", "cx", "cell", "carry", "memory"}
_WHICH = {"prev", "previous", "next", "new", "old", "last", "t", "0", "1", "x", ""}


def parted(module: nn.Module, form: Form, result: Any) -> tuple[Any, Native] | None:
    """Split a result into output and next state by the form of the state; return None if no place in it has that form.

    If a step returns its state alone, its output is None. If two places fit, the later one is the state, unless the
    names in the return statement show that the state comes first: `return h, y`.
    """
    if matches(form, result):
        return None, result
    if not isinstance(result, tuple | list) or len(result) != 2:
        return None
    first, behind = matches(form, result[0]), matches(form, result[1])
    nested = not isinstance(form, str)  # an output is unlikely to have the nesting of the state by chance
    if first and ((nested and not behind) or state_before_output(module)):
        return result[1], result[0]
    return (result[0], result[1]) if behind else None


def parted_of_several(module: nn.Module, result: Any, count: int) -> tuple[Any, tuple[Tensor, ...]] | None:
    """Do the same for a cell with several state arguments: `(h, c)`, `(output, h, c)`, `(output, (h, c))`, ..."""
    if not isinstance(result, tuple | list):
        return None
    if len(result) == count and all(isinstance(part, Tensor) for part in result):
        return result[0], tuple(result)
    before = state_before_output(module)
    if len(result) == count + 1 and all(isinstance(part, Tensor) for part in (result[:-1] if before else result[1:])):
        return (result[-1], tuple(result[:-1])) if before else (result[0], tuple(result[1:]))
    for output, state in ((0, 1), (1, 0)):
        if len(result) == 2 and isinstance(result[state], tuple | list) and len(result[state]) == count:
            return result[output], tuple(result[state])
    return None


def state_before_output(module: nn.Module) -> bool:
    """Say whether, by its names, every return statement of a forward has the state first and the output last."""
    kind = type(module)
    forward = getattr(kind, "forward", None)
    return forward is not None and _state_first(forward, arguments(kind)[1:])


@lru_cache(maxsize=1024)
def _state_first(forward: Callable[..., Any], taken: tuple[str, ...]) -> bool:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, TypeError, SyntaxError):  # no source code
        return False
    several = [each.value.elts for each in _returns(tree.body[0]) if isinstance(each.value, ast.Tuple)]
    known = {word for name in taken for word in _words(name)} - _WHICH
    own = next((each.arg for each in ast.walk(tree) if isinstance(each, ast.arg)), "self")
    return bool(several) and all(_stands_first(parts[:-1], parts[-1], known, own) for parts in several)


def _stands_first(before: list[ast.expr], last: ast.expr, known: set[str], own: str) -> bool:
    names = [part.id for part in before if isinstance(part, ast.Name)]
    if not names or len(names) < len(before):
        return False
    if isinstance(last, ast.Name):
        return _is_output(last.id, known) and all(_is_state(name, known) for name in names)
    return _is_head(last, set(names), own) and not any(_is_output(name, known) for name in names)


def _returns(node: ast.AST) -> Iterator[ast.Return]:
    """Yield the return statements of a function, without those of functions inside it."""
    for inner in ast.iter_child_nodes(node):
        if isinstance(inner, ast.Return):
            yield inner
        elif not isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            yield from _returns(inner)


def _words(name: str) -> set[str]:
    return set(name.lower().split("_"))


def _is_state(name: str, known: set[str]) -> bool:
    return named_like_state(name) or bool(_words(name) & (_STATES | known))


def _is_output(name: str, known: set[str]) -> bool:
    words = _words(name)
    return bool(words & _OUTPUTS) and not words & (_STATES | known)


def _is_head(part: ast.expr, states: set[str], own: str) -> bool:
    """Say whether an expression applies a head to the new state alone, as in `self.fc(h)`."""
    inside = list(ast.walk(part))
    called = [each.func for each in inside if isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute)]
    heads = [each.attr for each in called if isinstance(each.value, ast.Name) and each.value.id == own]
    names = {each.id for each in inside if isinstance(each, ast.Name)} - {own, "torch", "F", "nn"}
    return bool(names) and names <= states and any(head.lower() in _HEADS for head in heads)
