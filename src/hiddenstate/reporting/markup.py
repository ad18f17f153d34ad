"""HTML pieces of a page: the document with its style and scripts, and elements with escaped text."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Mapping, Sequence
from html import escape
from importlib import metadata
from importlib.resources import files
from types import MappingProxyType
from typing import Any

import torch

# Okabe and Ito's palette, and a lighter one for the dark theme; no scale has red next to green.
_LIGHT = ("#0072B2", "#D55E00", "#00805E", "#B0588C", "#2F8FCB", "#A66F00")
_DARK = ("#63B8F0", "#F58B4C", "#45C99F", "#E39BC4", "#9CC7FF", "#F0BE55")
_CIVIDIS = [[0, "#00224e"], [0.25, "#434e6c"], [0.5, "#7d7c78"], [0.75, "#bcaf6f"], [1, "#fee838"]]
_VIRIDIS = [[0, "#440154"], [0.25, "#3b528b"], [0.5, "#21918c"], [0.75, "#5ec962"], [1, "#fde725"]]
_PLASMA = [[0, "#5c53c7"], [0.25, "#9c4fbf"], [0.5, "#d8576b"], [0.75, "#f9973f"], [1, "#f0f921"]]
_ON_WHITE = [[0, "#053061"], [0.25, "#4393c3"], [0.5, "#f7f7f7"], [0.75, "#d6604d"], [1, "#67001f"]]
_ON_BLACK = [[0, "#a6d3f5"], [0.25, "#3d86bd"], [0.5, "#171c24"], [0.75, "#c8553d"], [1, "#ffc9b0"]]


def document(title: str, contents: str, body: str, made_by: str) -> str:
    """Return a page with its style, its table of contents, and the scripts that draw its pictures."""
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="generator" content="hiddenstate"><link rel="icon" href="data:,">'
        f"<style>{_asset('page.css')}</style></head><body>"
        f'<a class="skip" href="#findings">Skip to the findings</a><div class="page">{contents}'
        f"<main>{body}{_footer(made_by)}</main></div>"
        f'<script type="application/json" id="themes">{as_json(_themes())}</script>'
        f"<script>{_asset('plotly.min.js')}</script><script>{_asset('page.js')}</script></body></html>\n"
    )


def tiles(shown: Sequence[tuple[str, str, str, str]]) -> str:
    """Return large numbers side by side; each has a kind, a number, a name, and more text about it."""
    boxes = "".join(
        f'<div class="tile {kind}"><dt>{escape(name)}</dt><dd>{escape(value)}</dd>'
        f'<dd class="small">{escape(more)}</dd></div>'
        for kind, value, name, more in shown
    )
    return f'<dl class="tiles">{boxes}</dl>'


def contents(names: Mapping[str, str], inside: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return the table of contents by name and title; `inside` is put below the entries it names."""
    items = "".join(f'<li><a href="#{name}">{title}</a>{inside.get(name, "")}</li>' for name, title in names.items())
    return f'<nav class="contents" aria-label="Contents"><p>Contents</p><ul>{items}</ul></nav>'


def _asset(name: str) -> str:
    return files(__package__).joinpath("assets", name).read_text(encoding="utf-8")


def _footer(made_by: str) -> str:
    return (
        f"<footer>Made by <code>{made_by}</code>, hiddenstate {metadata.version('hiddenstate')}, "
        f"torch {escape(torch.__version__)}, Python {platform.python_version()}. "
        f"Pictures by plotly.js (MIT license). Nothing on this page is loaded from a network.</footer>"
    )


def _themes() -> dict[str, dict[str, Any]]:
    def theme(colors: tuple[str, ...], **named: Any) -> dict[str, Any]:
        palette = {f"@@color{number}": color for number, color in enumerate(colors)}
        bands = {f"@@band{number}": color + "2e" for number, color in enumerate(colors)}
        return {**palette, **bands, **{f"@@{name}": value for name, value in named.items()}}

    light = {
        "ink": "#1c2430",
        "muted": "#8a94a3",
        "faint": "#c3cad4",
        "grid": "#e4e8ed",
        "gap": "#000000",
        "veil": "#ffffffcc",
    }
    dark = {
        "ink": "#e6eaf0",
        "muted": "#7d8997",
        "faint": "#46505e",
        "grid": "#2d3642",
        "gap": "#ffffff",
        "veil": "#12161ccc",
    }
    return {
        "light": theme(_LIGHT, diverging=_ON_WHITE, sequential=_CIVIDIS, time=_VIRIDIS, **light),
        "dark": theme(_DARK, diverging=_ON_BLACK, sequential=_CIVIDIS, time=_PLASMA, **dark),
    }


def figure(name: str, picture: dict[str, Any], words: str, *, table: str = "", square: bool = False) -> str:
    """Return an interactive picture. `words`, a sentence or two in HTML, describe it to screen readers too."""
    spoken = escape(re.sub(r"<[^>]+>", "", words), quote=True).replace("&amp;", "&")
    # The height is set from the start: pictures are drawn when first seen, and nothing below them may move then.
    height = f' style="height:{picture["layout"]["height"]}px"'
    more = f'<details class="more"><summary>As a table</summary>{table}</details>' if table else ""
    return (
        f'<figure><figcaption id="{name}-words">{words}</figcaption>{_orders(name, picture)}'
        f'<div class="plot{" square" if square else ""}" id="{name}" data-figure="{name}-data" role="img" '
        f'aria-label="{spoken}"{height}></div>'
        f'<script type="application/json" id="{name}-data">{as_json(picture)}</script>{more}</figure>'
    )


def _orders(name: str, picture: dict[str, Any]) -> str:
    """Return a menu of orders for the lines of a picture, if it has several."""
    if not picture.get("orders"):
        return ""
    options = "".join(f"<option>{escape(order)}</option>" for order in (*picture["orders"], "by number"))
    return f'<label class="order">Order of units <select data-orders="{name}">{options}</select></label>'


def as_json(value: Any) -> str:
    """Return JSON that is safe inside a script element, whatever strings it contains."""
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


def unmeasured(why: str) -> str:
    """Return a box that says why there is no number."""
    return f'<p class="unmeasured">Not measured: {escape(why)}</p>'


def tabs(name: str, legend: str, panels: dict[str, str]) -> str:
    """Return panels with radio buttons to choose the visible one: keyboards and screen readers support those."""
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
