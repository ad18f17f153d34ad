"""Figures in plotly's format: plain data and layout. Colors are names, which the page's theme defines."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from ..measure import Jacobians, Memory, Saturation, Statistics
from ..plot import averaged, jumps, one_row, ordered, picked, project
from ..recording import Trajectory

Figure = dict[str, Any]

_HOVER = "<extra></extra>"  # hides plotly's box that repeats the name of a trace
_PATHS = 12  # more paths would be a tangle
_POINTS = 4000
_COLORED = 6  # tokens that get their own color
_ORDERS: dict[str, Literal["similar", "peak", "size"]] = {
    "alike together": "similar",
    "by peak": "peak",
    "by size": "size",
}


def numbers(values: Tensor, digits: int = 4) -> list[Any]:
    """Return nested lists, rounded to `digits` significant digits; NaN and Inf, which JSON lacks, as None.

    >>> numbers(torch.tensor([0.123456, float("nan"), 2.0]))
    [0.1235, None, 2.0]
    """

    def plain(value: Any) -> Any:
        if isinstance(value, list):
            return [plain(one) for one in value]
        return float(f"{value:.{digits}g}") if math.isfinite(value) else None

    return list(plain(values.detach().double().cpu().tolist()))


def heatmap(values: Tensor, *, part: str, tokens: list[str] | None, every: int, cells: int) -> tuple[Figure, str]:
    """Return a heatmap of `values (time, unit)` in about `cells` cells, and a note about what is left out."""
    steps = len(values)
    # Thin units first, since they cannot be averaged. A screen has no room for more than 512 lines.
    tall = picked(values, min(512, max(24, cells // max(1, min(steps, 1000)))), axis=1)
    wide = averaged(tall.values, max(48, cells // max(1, tall.values.shape[1])))
    shown = wide.values.T  # (unit, time)
    finite = shown[shown.isfinite()]
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)
    one_sided = low >= 0 and high <= 1
    bound = max(abs(low), abs(high)) or 1.0
    trace = {
        "type": "heatmap",
        "z": numbers(shown, 3),
        "x": _steps(wide.index, tokens, every),
        "y": tall.index.tolist(),
        "zmin": 0 if one_sided else -bound,
        "zmax": 1 if one_sided else bound,
        "colorscale": "@@sequential" if one_sided else "@@diverging",
        "colorbar": {"thickness": 10, "outlinewidth": 0, "title": {"text": part}},
        "hovertemplate": f"unit %{{y}}<br>step %{{x}}<br>{part} %{{z}}{_HOVER}",
    }
    layout = {
        "xaxis": {"title": {"text": "step"}, **_ticks(wide.index, tokens), "showgrid": False},
        "yaxis": {"title": {"text": "unit"}, "type": "category", "autorange": "reversed", "showgrid": False}
        | {"nticks": 12},
        "plot_bgcolor": "@@gap",
        "height": int(min(500, max(240, 150 + 9 * len(shown)))),
    }
    # The orders of the picture's lines; the page sorts them as the reader chooses.
    orders = {what: ordered(wide.values, how).tolist() for what, how in _ORDERS.items()} if len(shown) > 2 else {}
    note = "; ".join(note for note in (tall.note, wide.note) if note)
    return {"data": [trace], "layout": layout, "orders": orders}, note


def gates(traj: Trajectory, row: int, tokens: list[str] | None) -> Figure:
    """Return the median opening of each gate along time, with the middle half of the units around it."""
    data: list[Figure] = []
    index = torch.arange(0)
    for number, name in enumerate(name for name in traj.gates if name != "candidate"):
        kept = averaged(one_row(traj, part=name, row=row), 600)
        index, color = kept.index, f"@@color{number % 6}"
        low, middle, high = kept.values.quantile(torch.tensor([0.25, 0.5, 0.75]), dim=1)
        x = _steps(index, tokens, traj.every)
        band = {"type": "scatter", "x": x, "mode": "lines", "line": {"width": 0}, "showlegend": False}
        data += [
            {**band, "y": numbers(low), "hoverinfo": "skip", "legendgroup": name},
            {**band, "y": numbers(high), "hoverinfo": "skip", "legendgroup": name, "fill": "tonexty"}
            | {"fillcolor": f"@@band{number % 6}"},
            {"type": "scatter", "x": x, "y": numbers(middle), "mode": "lines", "name": name, "legendgroup": name}
            | {"line": {"color": color, "width": 2, "dash": ("solid", "dash", "dot", "dashdot")[number % 4]}}
            | {"hovertemplate": f"{name}<br>step %{{x}}<br>median %{{y}}{_HOVER}"},
        ]
    layout = {
        "xaxis": {"title": {"text": "step"}, **_ticks(index, tokens)},
        "yaxis": {"title": {"text": "opening"}, "range": [-0.02, 1.02]},
        "height": 320,
    }
    return {"data": data, "layout": layout}


def histogram(found: Mapping[str, Statistics]) -> Figure:
    """Return the share of values in each of about 64 bins, with one line for each track."""
    data = []
    for number, (track, one) in enumerate(found.items()):
        filled = one.histogram.nonzero().flatten()
        total = max(1, int(one.histogram.sum()))
        low, high = (int(filled[0]), int(filled[-1]) + 1) if len(filled) else (0, 1)
        wide = max(1, -(-(high - low) // 64))
        counts = [int(one.histogram[begin : begin + wide].sum()) for begin in range(low, high, wide)]
        middles = [float(one.edges[begin : begin + wide + 1].mean()) for begin in range(low, high, wide)]
        shares = torch.tensor([count / total for count in counts], dtype=torch.float64)
        data.append(
            {
                "type": "scatter",
                "x": numbers(torch.tensor(middles)),
                "y": numbers(shares),
                "mode": "lines",
                "name": track,
            }
            | {"line": {"color": f"@@color{number % 6}", "width": 2, "shape": "hvh"}}
            | {"hovertemplate": f"{escape(track)}<br>about %{{x}}<br>%{{y:.1%}} of the values{_HOVER}"}
        )
    layout = {
        "xaxis": {"title": {"text": "value"}, "zeroline": True},
        "yaxis": {"title": {"text": "share of values"}, "tickformat": ".0%", "rangemode": "tozero"},
        "height": 320,
    }
    return {"data": data, "layout": layout}


def memory(result: Memory) -> Figure:
    """Return the influence of an input over its distance, on a log scale, with threshold and effective length."""
    kept = picked(torch.arange(len(result.curve)), 1000, what="lags")
    lags, curve = kept.values, result.curve.double().cpu()
    peak = float(curve.max())
    floor = peak * 1e-9  # anything fainter is invisible: the picture ends a little above
    last = int((curve > floor * 10).nonzero()[-1])
    x = lags.tolist()
    low, high = (values.double().cpu()[lags].clamp(min=floor) for values in result.spread())
    band = {"type": "scatter", "x": x, "mode": "lines", "line": {"width": 0}, "showlegend": False, "hoverinfo": "skip"}
    level = result.threshold * peak
    heights = [math.log10(max(float(curve[: last + 1].min()), floor * 10) / 2), math.log10(peak * 2)]
    line = {"type": "line", "line": {"color": "@@color1", "width": 1.5, "dash": "dash"}}
    return {
        "data": [
            {**band, "y": numbers(low)},
            {**band, "y": numbers(high), "fill": "tonexty", "fillcolor": "@@band0"},
            {
                "type": "scatter",
                "x": x,
                "y": numbers(curve[lags].clamp(min=floor)),
                "mode": "lines",
                "showlegend": False,
            }
            | {"line": {"color": "@@color0", "width": 2}, "name": "influence"}
            | {"hovertemplate": f"lag %{{x}}<br>influence %{{y}}{_HOVER}"},
        ],
        "layout": {
            "xaxis": {
                "title": {"text": "lag: steps before the output"},
                "range": [-0.02 * last - 0.2, 1.02 * last + 0.2],
            },
            "yaxis": {"title": {"text": "influence"}, "type": "log", "exponentformat": "power", "range": heights}
            | ({"dtick": math.ceil((heights[1] - heights[0]) / 10)} if heights[1] - heights[0] > 2 else {}),
            "shapes": [
                {**line, "x0": 0, "x1": 1, "xref": "paper", "y0": level, "y1": level},
                {**line, "x0": result.length - 1, "x1": result.length - 1, "y0": 0, "y1": 1, "yref": "paper"},
            ],
            "height": 360,
        },
    }


def saturation(result: Saturation) -> Figure:
    """Return the saturated share of each unit, as bars at the units' own places."""
    shares = result.units.double().cpu()
    order = shares.argsort(descending=True, stable=True) if len(shares) > 512 else torch.arange(len(shares))
    kept = picked(order, 1000)
    return {
        "data": [
            {"type": "bar", "x": list(range(len(kept.values))), "y": numbers(shares[kept.values])}
            | {"customdata": kept.values.tolist(), "marker": {"color": "@@color0", "line": {"width": 0}}}
            | {"hovertemplate": f"unit %{{customdata}}<br>saturated at %{{y:.1%}} of steps{_HOVER}"}
        ],
        "layout": {
            "xaxis": {"title": {"text": "unit" if len(shares) <= 512 else "units, most saturated first"}},
            "yaxis": {"title": {"text": "saturated steps"}, "range": [0, 1.02], "tickformat": ".0%"},
            "bargap": 0.15 if len(shares) <= 100 else 0,
            "height": 280,
        },
    }


def distances(square: Tensor, names: Sequence[str], what: str) -> tuple[Figure, str]:
    """Return the distances of all pairs, and a note if some are left out."""
    kept = picked(square.detach().float().cpu(), 200, what=f"{what}s")
    shown = kept.values[:, kept.index]
    ticks = [names[place] for place in kept.index.tolist()]
    trace = {
        "type": "heatmap",
        "z": numbers(shown, 3),
        "x": ticks,
        "y": ticks,
        "zmin": 0,
        "colorscale": "@@sequential",
        "colorbar": {"thickness": 10, "outlinewidth": 0, "title": {"text": "distance"}},
        "hovertemplate": f"%{{y}}<br>%{{x}}<br>distance %{{z}}{_HOVER}",
    }
    axis = {"type": "category", "title": {"text": what}, "showgrid": False, "nticks": 12}
    layout = {"xaxis": axis, "yaxis": {**axis, "autorange": "reversed"}, "height": 460, "plot_bgcolor": "@@gap"}
    return {"data": [trace], "layout": layout}, kept.note


def paths(traj: Trajectory, labels: list[str], tokens: list[list[str]]) -> tuple[Figure, Tensor, str]:
    """Return the rows' paths in the plane of the main differences, the variance shares of its axes, and a note."""
    rows = [one_row(traj, row=row) for row in range(len(traj.h))]
    plane = project(torch.cat(rows))
    shown = picked(torch.tensor([row for row, path in enumerate(rows) if len(path)]), _PATHS, what="rows")
    most = max(2, _POINTS // max(1, len(shown.values)))
    longest = max(len(path) for path in rows)
    data: list[Figure] = []
    ends: list[Figure] = []
    tangled = jumps([rows[row] for row in shown.values.tolist()])
    notes = [shown.note, plane.note, "points without lines, since states jump from step to step" if tangled else ""]
    for number, row in enumerate(shown.values.tolist()):
        kept = picked(rows[row], most, what="steps")
        notes.append(kept.note)
        points = plane(kept.values)
        color = {"colorscale": "@@time", "cmin": 0, "cmax": max(1, longest - 1), "showscale": number == 0}
        path = _path(points, kept.index * traj.every, labels[row], color)
        path["text"] = _steps(kept.index, tokens[row] if row < len(tokens) else None, traj.every)
        path["mode"] = "markers" if tangled else "lines+markers"
        data.append(path)
        at = {"x": path["x"][-1], "y": path["y"][-1], "text": escape(labels[row])}
        ends.append({**at, "showarrow": False, "xanchor": "left", "xshift": 8, "bgcolor": "@@veil", "borderpad": 1})
    if tangled and len(tokens) >= len(shown.values):
        data, ends = _by_token(data), []
        notes.append("colored by the token that was read")
    layout = {
        "xaxis": {"title": {"text": plane.label(0)}, "zeroline": False},
        "yaxis": {"title": {"text": plane.label(1)}, "zeroline": False},
        "annotations": ends,
        "height": 480,
        "hovermode": "closest",
    }
    return {"data": data, "layout": layout}, plane.explained, "; ".join(dict.fromkeys(note for note in notes if note))


def _path(points: Tensor, steps: Tensor, label: str, color: Figure) -> Figure:
    last = len(steps) - 1
    marker = {
        "color": steps.tolist(),
        "size": [9 if step in (0, last) else 5 for step in range(last + 1)],
        "symbol": ["circle-open" if step == 0 else "square" if step == last else "circle" for step in range(last + 1)],
        "colorbar": {"thickness": 10, "outlinewidth": 0, "title": {"text": "step"}},
        **color,
    }
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": label,
        "showlegend": False,
        "x": numbers(points[:, 0]),
        "y": numbers(points[:, 1]),
        "line": {"color": "@@faint", "width": 1},
        "marker": marker,
        "hovertemplate": f"{escape(label)}<br>step %{{text}}<br>%{{x}}, %{{y}}{_HOVER}",
    }


def _by_token(paths: list[Figure]) -> list[Figure]:
    """Return the points of paths that jump, colored by the token read at each: the most frequent ones, and the rest."""
    read = Counter(_token(text) for path in paths for text in path["text"])
    common = [token for token, _ in read.most_common(_COLORED)]
    data: list[Figure] = []
    for number, token in enumerate([*common, None]):
        points = [
            (x, y, f"{escape(path['name'])}<br>step {text}")
            for path in paths
            for x, y, text in zip(path["x"], path["y"], path["text"], strict=True)
            if (_token(text) == token if token is not None else _token(text) not in common)
        ]
        x, y, text = ([*column] for column in zip(*points, strict=True)) if points else ([], [], [])
        color = {"color": "@@faint" if token is None else f"@@color{number}", "size": 6, "opacity": 0.75}
        data.append(
            {"type": "scatter", "mode": "markers", "name": token or "others", "legendrank": number, "x": x, "y": y}
            | {"text": text, "marker": color, "hovertemplate": f"%{{text}}<br>%{{x}}, %{{y}}{_HOVER}"}
        )
    return data[::-1]


def _token(step: str) -> str:
    return step.partition(" · ")[2]


def spectrum(result: Jacobians) -> Figure:
    """Return the eigenvalues at all measured steps around the unit circle."""
    values = result.eigenvalues[result.valid].flatten().cpu()
    values = picked(values[values.isfinite()], 6000, what="eigenvalues").values
    reach = max(1.1, 1.05 * float(values.abs().max()) if len(values) else 1.1)
    data = []
    for outside, color, symbol in ((False, "@@color0", "circle"), (True, "@@color1", "triangle-up")):
        some = values[(values.abs() > 1) == outside]
        data.append(
            {"type": "scatter", "mode": "markers", "name": "outside the circle" if outside else "inside"}
            | {"x": numbers(some.real), "y": numbers(some.imag), "customdata": numbers(some.abs())}
            | {"marker": {"color": color, "symbol": symbol, "size": 6, "opacity": 0.65}}
            | {"hovertemplate": f"%{{x}} + %{{y}}i<br>modulus %{{customdata}}{_HOVER}"}
        )
    circle = {"type": "circle", "x0": -1, "x1": 1, "y0": -1, "y1": 1, "line": {"color": "@@muted", "width": 1}}
    layout = {
        "xaxis": {"title": {"text": "real part"}, "range": [-reach, reach], "constrain": "domain"},
        "yaxis": {"title": {"text": "imaginary part"}, "range": [-reach, reach], "scaleanchor": "x"},
        "shapes": [circle],
        "height": 480,
        "hovermode": "closest",
    }
    return {"data": data, "layout": layout}


def escape(text: str) -> str:
    """Return `text` escaped for plotly, which would interpret some HTML and `%{}` in labels."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace("%{", "%\u200b{")


def _steps(index: Tensor, tokens: list[str] | None, every: int) -> list[Any]:
    places = (index * every).tolist()
    if tokens is None:
        return list(places)
    # Make step names unique: a category axis draws equal names on top of each other.
    return [f"{place} · {escape(tokens[step])}" for place, step in zip(places, index.tolist(), strict=True)]


def _ticks(index: Tensor, tokens: list[str] | None) -> Figure:
    """Show every token if all fit; otherwise let plotly choose steps, more of them the closer one zooms in."""
    if tokens is None:
        return {"dtick": 1} if 1 < len(index) <= 12 else {}
    texts = [escape(tokens[step]) for step in index.tolist()]
    if len(texts) > 40:
        return {"type": "category", "nticks": 12}
    turned = max(map(len, texts), default=0) > 2
    places = list(range(len(texts)))
    return {"type": "category", "tickvals": places, "ticktext": texts, "tickangle": -90 if turned else 0}
