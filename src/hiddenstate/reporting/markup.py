"""Pieces of HTML: text that cannot break out, figures with their words, tables."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from html import escape
from typing import Any

from .evidence import Unmeasured


def figure(name: str, picture: dict[str, Any], words: str, *, table: str = "", square: bool = False) -> str:
    """Return an interactive picture; `words`, HTML of a sentence or two, also stand for it where it cannot be seen."""
    spoken = escape(re.sub(r"<[^>]+>", "", words), quote=True).replace("&amp;", "&")
    # Its height from the start: pictures are drawn when they are first seen, and nothing below may move then.
    height = f' style="height:{picture["layout"]["height"]}px"'
    more = f'<details class="more"><summary>As a table</summary>{table}</details>' if table else ""
    return (
        f'<figure><figcaption id="{name}-words">{words}</figcaption>{_orders(name, picture)}'
        f'<div class="plot{" square" if square else ""}" id="{name}" data-figure="{name}-data" role="img" '
        f'aria-label="{spoken}"{height}></div>'
        f'<script type="application/json" id="{name}-data">{as_json(picture)}</script>{more}</figure>'
    )


def _orders(name: str, picture: dict[str, Any]) -> str:
    """Return a choice of the order in which lines are drawn, where a picture knows several."""
    if not picture.get("orders"):
        return ""
    options = "".join(f"<option>{escape(order)}</option>" for order in (*picture["orders"], "by number"))
    return f'<label class="order">Order of units <select data-orders="{name}">{options}</select></label>'


def as_json(value: Any) -> str:
    """Return JSON that can stand inside a script element, whatever strings it holds."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def table(head: Sequence[str], rows: Sequence[Sequence[object]], caption: str = "") -> str:
    """Return a table with a header row; the first cell of each row names it."""
    columns = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    body = "".join(
        f'<tr><th scope="row">{escape(str(first))}</th>'
        + "".join(f"<td>{escape(str(cell))}</td>" for cell in rest)
        + "</tr>"
        for first, *rest in rows
    )
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    # A box that scrolls must be reachable by keyboard.
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption or head[0], quote=True)}">'
        f"<table>{title}<thead><tr>{columns}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def section(name: str, title: str, lead: str, body: str) -> str:
    """Return one section of the page."""
    return (
        f'<section id="{name}" aria-labelledby="{name}-title"><h2 id="{name}-title">{escape(title)}</h2>'
        f'<p class="lead">{lead}</p>{body}</section>'
    )


def unmeasured(why: Unmeasured) -> str:
    """Return a box that says why there is no number."""
    return f'<p class="unmeasured">Not measured: {escape(why.reason)}</p>'


def tabs(name: str, legend: str, panels: dict[str, str]) -> str:
    """Return panels of which one is seen, chosen by radio buttons: the keyboard and screen readers know those."""
    if len(panels) == 1:
        return next(iter(panels.values()))
    buttons = "".join(
        f'<input type="radio" name="{name}" id="{name}-{number}"{" checked" if number == 0 else ""}>'
        f'<label for="{name}-{number}">{escape(label)}</label>'
        for number, label in enumerate(panels)
    )
    bodies = "".join(f'<div class="panel">{body}</div>' for body in panels.values())
    return f'<fieldset class="tabs"><legend>{escape(legend)}</legend>{buttons}{bodies}</fieldset>'


def anchor(text: str) -> str:
    """Return an id made of `text`: letters, digits and dashes."""
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-") or "model"
