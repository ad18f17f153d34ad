"""Short displays of values that hold many numbers: a sentence, then the names and shapes of what they hold."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from html import escape
from typing import Any, TypeVar

from torch import Tensor

_WIDTH = 110
_LINES = 4  # of fields, after the line with the value's own sentence
_LISTED = 4  # entries of a list or tuple that are written out

T = TypeVar("T", bound=type)


def shown_in_short(kind: T) -> T:
    """Give a dataclass a `repr` of a few lines, and an HTML table for notebooks. The numbers themselves are not shown.

    >>> from dataclasses import dataclass
    >>> @shown_in_short
    ... @dataclass
    ... class Curve:
    ...     values: torch.Tensor
    ...     length: int
    ...     def __str__(self):
    ...         return f"a curve of {self.length} steps"
    >>> Curve(torch.zeros(2, 300), 300)
    Curve: a curve of 300 steps
      values (2, 300) · length 300
    """
    says = "__str__" in vars(kind)  # object.__str__ would return the repr
    shown: dict[str, Callable[[Any, str], str]] = {"__repr__": _in_lines, "_repr_html_": _as_table}
    for name, show in shown.items():
        setattr(kind, name, lambda value, show=show: show(value, str(value) if says else ""))
    return kind


def as_table(name: str, said: str, rows: Iterable[tuple[str, ...]]) -> str:
    """Return a name, what is said of it and rows of cells as HTML for notebooks; each row begins with its heading."""
    lines = (
        "".join((f"<th>{escape(head)}</th>", *(f"<td>{escape(cell)}</td>" for cell in rest))) for head, *rest in rows
    )
    table = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<p><b>{escape(name)}</b> {escape(said)}</p><table>{table}</table>"


def as_preformatted(value: object) -> str:
    """Return the text that a value prints, as preformatted HTML: a table of text needs a fixed-width font."""
    return f"<pre>{escape(str(value))}</pre>"


def _in_lines(value: Any, said: str) -> str:
    first = f"{type(value).__name__}: {said.splitlines()[0]}" if said else type(value).__name__
    facts = " · ".join(f"{name} {fact}" for name, fact in _facts(value))
    lines = textwrap.wrap(facts, _WIDTH, initial_indent="  ", subsequent_indent="  ", max_lines=_LINES)
    return "\n".join([first, *lines])


def _as_table(value: Any, said: str) -> str:
    return as_table(type(value).__name__, said, _facts(value))


def _facts(value: Any) -> Iterator[tuple[str, str]]:
    """Yield the name of each field that is set, and a few words about its content."""
    for field in fields(value):
        held = getattr(value, field.name)
        if held is not None and not (isinstance(held, Mapping | str) and not held):
            yield field.name, _words(held)


def _words(held: Any) -> str:
    if isinstance(held, Tensor):
        return f"{held.item():.4g}" if held.dim() == 0 else str(tuple(held.shape))
    if isinstance(held, Mapping):
        return "{" + ", ".join(f"{name} {_words(one)}" for name, one in held.items()) + "}"
    if isinstance(held, float):
        return f"{held:.4g}"
    if isinstance(held, list | tuple):
        some = ", ".join(map(_words, held[:_LISTED]))
        return f"[{some}, … {len(held)} in all]" if len(held) > _LISTED else f"[{some}]"
    if is_dataclass(held) and not isinstance(held, type):
        return type(held).__name__
    return textwrap.shorten(str(held), 60, placeholder=" …")
