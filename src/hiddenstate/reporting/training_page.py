"""The page of a training run: when findings came and went, with memory, saturation and gradients over time."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any, NamedTuple

import numpy as np
import torch

from ..diagnosis import Episode, Monitor
from . import figures
from .markup import contents, document, figure, section, table, tiles

_MANY = 12  # lines in one picture, chosen by name; more would be a tangle
_RANK = {"error": 0, "warning": 1, "note": 2}


class _Drawn(NamedTuple):
    """A section of the page."""

    name: str
    title: str
    lead: str
    kinds: tuple[tuple[str, str, str], ...]  # for each kind of number: its words, the end of its name, its axis


_SECTIONS = (
    _Drawn(
        "memory",
        "Memory",
        "Steps back within which an input still moves a layer's output, down to 0.01 of the peak: measured on a few "
        "rows, at the first look and then while that takes a hundredth of the time, or less.",
        (("Memory length", "memory", "steps"),),
    ),
    _Drawn(
        "saturation",
        "Saturation",
        "The share of a layer's states that are pressed against the ends of their range, and of its gates that are "
        "nearly open or nearly shut.",
        (("States", "saturated", "share"), ("Gates", "gates", "share")),
    ),
    _Drawn(
        "states",
        "States",
        "The size of the states, and the share of units that hardly move over a batch.",
        (("Mean norm of a state", "norm", "norm"), ("Still units", "dead", "share")),
    ),
    _Drawn(
        "gradients",
        "Gradients",
        "The norm over all parameters right before an update, and what comes back to the first and to the last step "
        "of each layer.",
        (
            ("All parameters", "gradient", "norm"),
            ("Back to the first step", "gradient_first", "norm"),
            ("Back to the last step", "gradient_last", "norm"),
        ),
    ),
)


def training_page(monitor: Monitor) -> str:
    """Return the whole page as one string of HTML."""
    monitor.flush()
    history, episodes = monitor.history, monitor.findings
    name = type(monitor.model).__name__
    drawn = {each: body for each in _SECTIONS if (body := _section(history, each, monitor.step))}
    titles = {"findings": "Findings", **{each.name: each.title for each in drawn}}
    looks = len(history["step"])
    together = _together(episodes)
    header = (
        f"<header><h1>{escape(name)} in training</h1><p>{monitor.step:,} training calls · {looks:,} "
        f"look{'s' if looks != 1 else ''}</p>{tiles([_finding_tile(together), *_drift_tiles(history)])}</header>"
    )
    body = header + _findings(monitor, together) + "".join(drawn.values())
    return document(f"{name}: hidden state in training", contents(titles), body, "monitor.report(path)")


def _together(episodes: list[Episode]) -> list[list[Episode]]:
    """Group the episodes by finding and place, in the order in which they first began."""
    found: dict[tuple[str, str], list[Episode]] = {}
    for episode in episodes:
        found.setdefault((episode.finding.code, episode.finding.where), []).append(episode)
    return list(found.values())


def _finding_tile(together: list[list[Episode]]) -> tuple[str, str, str, str]:
    lasting = [each[-1].finding.severity for each in together if each[-1].ended is None]
    worst = min(lasting, key=_RANK.__getitem__, default="good")
    more = f"{len(lasting)} last{'s' if len(lasting) == 1 else ''}, {len(together) - len(lasting)} over"
    return (worst, str(len(together)), "findings", more if together else "nothing found")


def _drift_tiles(history: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """Return how memory and saturation have drifted, each in the layer that drifts most."""
    shown = []
    for ending, what, form in (
        ("memory", "memory, in steps", ".0f"),
        ("saturated", "saturated states", ".0%"),
        ("gates", "saturated gates", ".0%"),
    ):
        series = {name: values[1] for name, values in _series(history, ending).items()}
        if series:
            most = max(series, key=lambda name: abs(series[name][-1] - series[name][0]))
            first, last = series[most][0], series[most][-1]
            said = " → ".join(dict.fromkeys(f"{number:{form}}" for number in (first, last)))
            among = f", of {len(series)} layers the one that drifts most" if len(series) > 1 else ""
            shown.append(("", said, what, f"{most}{among}"))
    return shown


def _series(history: Mapping[str, Any], ending: str) -> dict[str, tuple[Any, Any]]:
    """Return the steps and values of all numbers whose names end so, by layer."""
    found = {}
    for name, values in history.items():
        layer, _, last = name.rpartition(".")
        known = np.isfinite(values)
        if last == ending and name != "step" and known.any():
            found[layer or "the model"] = (history["step"][known], values[known])
    return found


def _section(history: Mapping[str, Any], one: _Drawn, end: int) -> str:
    body = ""
    for words, ending, axis in one.kinds:
        series = _series(history, ending)
        if series:
            left = f" Drawn: {_MANY} of {len(series)} layers." if len(series) > _MANY else ""
            caption = f"<strong>{words}</strong>: {_range(series, axis)}{left}"
            body += figure(f"{one.name}-{ending}", _lines(series, axis, end), caption, table=_table(series, axis))
    return section(one.name, one.title, one.lead, body) if body else ""


def _range(series: Mapping[str, tuple[Any, Any]], axis: str) -> str:
    low, high = (float(get(get(values) for _, values in series.values())) for get in (min, max))
    return f"between {_number(low, axis)} and {_number(high, axis)}."


def _table(series: Mapping[str, tuple[Any, Any]], axis: str) -> str:
    rows = [
        (name, *(_number(float(each), axis) for each in (values[0], values[-1], values.min(), values.max())))
        for name, (_, values) in series.items()
    ]
    return table(("layer", "first", "last", "least", "most"), rows)


def _number(value: float, axis: str) -> str:
    return f"{value:.1%}" if axis == "share" else f"{value:.3g}"


def _lines(series: Mapping[str, tuple[Any, Any]], axis: str, end: int) -> figures.Figure:
    data = []
    for number, (name, (steps, values)) in enumerate(list(series.items())[:_MANY]):
        data.append(
            {
                "type": "scatter",
                "x": [int(step) for step in steps],
                "y": figures.numbers(torch.from_numpy(values)),
                "mode": "lines+markers" if len(steps) < 60 else "lines",
                "name": figures.escape(name),
                "showlegend": len(series) > 1,
                "line": {"color": f"@@color{number % 6}", "width": 2, "dash": ("solid", "dash")[number // 6]},
                "hovertemplate": f"{figures.escape(name)}<br>call %{{x}}<br>%{{y}}<extra></extra>",
            }
        )
    vertical: dict[str, Any] = {"title": {"text": axis}, "rangemode": "tozero"}
    if axis == "share":
        vertical |= {"tickformat": ".0%", "range": [-0.02, 1.02]}
    elif axis == "norm" and all(bool((values > 0).all()) for _, values in series.values()):
        vertical = {"title": {"text": axis}, "type": "log", "exponentformat": "power"}
    return {"data": data, "layout": {"xaxis": _calls(end), "yaxis": vertical, "height": 300}}


def _calls(end: int) -> dict[str, Any]:
    """Return the axis that all pictures share, so that they can be compared."""
    return {"title": {"text": "training call"}, "range": [-0.01 * max(1, end), 1.01 * max(1, end)]}


def _findings(monitor: Monitor, together: list[list[Episode]]) -> str:
    lead = "When each began, and when it was gone. Open one for its evidence, its usual cause and what to do."
    if not together:
        body = '<p class="healthy"><strong>Nothing found</strong> at any look.</p>'
    else:
        words = "<strong>Along the run</strong>: a bar from the look at which a finding began to the one at which it "
        words += "was gone; at the right edge it still lasts."
        body = figure("findings-along", _timeline(together, max(1, monitor.step)), words)
        gravest_first = sorted(
            together, key=lambda each: (each[-1].ended is not None, _RANK[each[-1].finding.severity])
        )
        body += "".join(map(_details, gravest_first))
    for each in monitor.unseen:
        body += f'<p class="unmeasured">Not looked at: {escape(each)}. That nothing is found there means nothing.</p>'
    return section("findings", "Findings", lead, body)


def _details(episodes: list[Episode]) -> str:
    """Return one finding with all its episodes, and the evidence of the last."""
    one, last = episodes[-1].finding, episodes[-1]
    times = f", {len(episodes)} times" if len(episodes) > 1 else ""
    short = f"from call {episodes[0].began:,}{times}, {'still so' if last.ended is None else f'until {last.ended:,}'}"
    spans = [f"{each.began:,} to {'now' if each.ended is None else f'{each.ended:,}'}" for each in episodes]
    rows = (("calls", "; ".join(spans)), ("evidence", one.evidence), ("cause", one.cause), ("advice", one.advice))
    inside = "".join(f"<dt>{name}</dt><dd>{escape(text)}</dd>" for name, text in rows)
    return (
        f'<details class="finding {escape(one.severity)}"><summary><span class="severity">{escape(one.severity)}'
        f'</span> <span class="title">{escape(one.title[:1].upper() + one.title[1:])}</span> '
        f'<span class="where">{escape(one.where)} · {short}</span> '
        f'<span class="code">{escape(one.code)}</span></summary><dl>{inside}</dl></details>'
    )


def _timeline(together: list[list[Episode]], end: int) -> figures.Figure:
    """Return a line for each code and place, with a bar for each episode."""
    episodes = [episode for each in together for episode in each]
    colors = {"error": "@@color1", "warning": "@@color5", "note": "@@color4"}
    names = list(dict.fromkeys(_line(episode) for episode in episodes))
    data = []
    for severity, color in colors.items():
        some = [episode for episode in episodes if episode.finding.severity == severity]
        until = [end if episode.ended is None else episode.ended for episode in some]
        if some:
            data.append(
                {"type": "bar", "orientation": "h", "name": severity, "y": [_line(each) for each in some]}
                | {"base": [each.began for each in some], "marker": {"color": color, "line": {"width": 0}}}
                | {"x": [max(last - each.began, end / 200) for each, last in zip(some, until, strict=True)]}
                | {"customdata": ["still so" if each.ended is None else f"until {each.ended}" for each in some]}
                | {"hovertemplate": "%{y}<br>from call %{base}, %{customdata}<extra></extra>"}
            )
    layout = {
        "xaxis": _calls(end),
        "yaxis": {"type": "category", "categoryorder": "array", "categoryarray": names[::-1], "showgrid": False},
        "barmode": "overlay",
        "bargap": 0.35,
        "height": 130 + 34 * len(names),
    }
    return {"data": data, "layout": layout}


def _line(episode: Episode) -> str:
    where = episode.finding.where
    short = where if len(where) <= 40 else f"{where[:39]}…"
    return figures.escape(f"{episode.finding.code} {episode.finding.title} · {short}")
