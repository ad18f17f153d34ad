"""The sections of the page: findings in pictures that can be explored, and in words."""

from __future__ import annotations

import math
from html import escape

import torch

from ..diagnosis import Report
from ..measure import Comparison, Lyapunov
from ..plot import one_row
from . import figures
from .evidence import Evidence, MeasuredTrack, Unmeasured
from .markup import anchor, figure, section, table, tabs, unmeasured

TRACKS = 8  # tracks to draw; the others are only in the table of layers
_CELLS = 500_000  # of all heatmaps together: about 3 MB
GROWTH = {
    "chaotic": "disturbances grow",
    "contracting": "disturbances fade",
    "at the edge": "too close to 0 to say whether disturbances grow or fade",
}


def findings(evidence: Evidence) -> str:
    """Return the doctor's findings, gravest first, each with its evidence and advice inside."""
    report = evidence.findings
    if isinstance(report, Unmeasured):
        return section("findings", "Findings", "What the doctor says about this model.", unmeasured(report.reason))
    lead = "Tested on the input you gave. Open a finding for its evidence, its usual cause and what to do."
    if report.broken:
        return section("findings", "Findings", lead, unmeasured(report.broken))
    if not len(report):
        body = '<p class="healthy"><strong>Nothing found.</strong> Every probe that could run came back clean.</p>'
        return section("findings", "Findings", lead, body + _footnotes(report))
    body = ""
    for number, one in enumerate(report):
        title = escape(one.title[:1].upper() + one.title[1:])
        rows = (("evidence", one.evidence), ("cause", one.cause), ("advice", one.advice))
        inside = "".join(f"<dt>{name}</dt><dd>{escape(str(text))}</dd>" for name, text in rows)
        body += (
            f'<details class="finding {escape(one.severity)}"{" open" if number == 0 else ""}><summary>'
            f'<span class="severity">{escape(one.severity)}</span> <span class="title">{title}</span> '
            f'<span class="where">{escape(one.where)}</span> <span class="code">{escape(one.code)}</span>'
            f"</summary><dl>{inside}</dl></details>"
        )
    return section("findings", "Findings", lead, body + _footnotes(report))


def _footnotes(report: Report) -> str:
    lines = [*report.assumed, *(f"{code} could not run: {reason}" for code, reason in report.failed.items())]
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<details class="more"><summary>What was assumed</summary><ul>{items}</ul></details>' if items else ""


def layers(evidence: Evidence) -> str:
    """Return the table of recurrent layers."""
    rows = []
    for layer in evidence.run.layers:
        spec = layer.spec
        weights = sum(weight.numel() for weight in layer.module.parameters())
        state = ", ".join(f"{part} {spec.sizes[part]}" for part in spec.parts)
        way = "both ways" if spec.bidirectional else "forward"
        rows.append(
            (layer.name or "(the model)", layer.kind, state, spec.layers, way, spec.input_size or "?", f"{weights:,}")
        )
    head = ("layer", "kind", "state", "depth", "direction", "input", "parameters")
    lead = "Every recurrent layer that was found, by its place in the model: <code>hs.layers(model)</code>."
    return section("layers", "Layers", lead, table(head, rows))


def data_set(evidence: Evidence) -> str:
    """Return statistics of the states of all batches; nothing if there was a single input."""
    found = evidence.survey
    if found is None:
        return ""
    rows = []
    for track, numbers in found.statistics.items():
        pressed = found.saturation.get(track)
        low, high = float(numbers.min.nan_to_num().min()), float(numbers.max.nan_to_num().max())
        rows.append(
            (
                track,
                f"{numbers.count:,}",
                f"{float(numbers.mean.nanmean()):.3g} ± {float(numbers.std.nanmean()):.3g}",
                f"{low:.3g} to {high:.3g}",
                f"{numbers.near_zero:.1%}",
                "–" if pressed is None else f"{pressed.share:.1%}",
                f"{len(found.still(track))} of {len(numbers.mean)}",
                f"{numbers.nan + numbers.inf:,}",
            )
        )
    head = ("track", "steps", "mean ± std", "range", "near zero", "saturated", "still units", "NaN, Inf")
    words = "<strong>Activations</strong> of all batches: the share of values at each size, a line for each track."
    lead = (
        f"All states of {found.batches:,} batches, {found.rows:,} rows: <code>hs.measure.survey(model, loader)</code>."
    )
    body = table(head, rows) + figure("data-histogram", figures.histogram(found.statistics), words)
    return section("data", "The whole data set", lead, body)


def states(evidence: Evidence) -> str:
    """Return heatmaps, gates and saturation of each track."""
    shown = evidence.tracks[:TRACKS]
    panels = sum(len(track.traj.states) + len(track.traj.gates) for track in shown)
    budget = max(2_000, min(100_000, _CELLS // max(1, panels)))
    body = "".join(_track(evidence, track, budget) for track in shown)
    if len(evidence.tracks) > len(shown):
        rest = ", ".join(track.name for track in evidence.tracks[TRACKS:])
        body += f'<p class="unmeasured">Of {len(evidence.tracks)} tracks {TRACKS} are drawn, not: {escape(rest)}</p>'
    lead = (
        f"The states of {escape(evidence.rows_of(shown[0].traj)[0])}: a line for each unit, a column for each step. "
        f"Drag to zoom, double-click to zoom out, hover for the value."
    )
    return section("states", "States and gates", lead, body)


def _track(evidence: Evidence, track: MeasuredTrack, cells: int) -> str:
    name, traj = f"track-{anchor(track.name)}", track.traj
    tokens = next(iter(evidence.tokens_of(traj)), None)
    panels = {}
    for part in (*traj.states, *traj.gates):
        values = one_row(traj, part=part)
        picture, note = figures.heatmap(values, part=part, tokens=tokens, every=traj.every, cells=cells)
        words = f"<strong>{escape(part)}</strong> of {escape(track.name)}: {_range(values)}."
        words += f" Drawn: {escape(note)}." if note else ""
        panels[part] = figure(f"{name}-{anchor(part)}", picture, words, table=_units(values, part))
    body = f'<h3 id="{name}">{escape(track.name)}</h3>'
    if track.runs > 1:
        body += f'<p class="lead">It was called {track.runs} times; this is the first call.</p>'
    body += tabs(f"{name}-parts", "Show", panels)
    if any(gate != "candidate" for gate in traj.gates):
        words = "<strong>Gates</strong>: the median over units, with the middle half of the units around it. "
        words += "1 is open, 0 is shut."
        body += figure(f"{name}-gates", figures.gates(traj, 0, tokens), words, table=_gates(track))
    return body + _saturation(name, track)


def _saturation(name: str, track: MeasuredTrack) -> str:
    if isinstance(track.saturation, Unmeasured):
        return unmeasured(track.saturation.reason)
    words = f"<strong>Saturation</strong>: {escape(str(track.saturation).splitlines()[0])}."
    if not track.saturation.share:
        return f'<p class="healthy">{words}</p>'
    shares = track.saturation.units.double().cpu()
    top = shares.argsort(descending=True)[:10]
    rows = [(int(unit), f"{float(shares[unit]):.1%}") for unit in top]
    facts = table(("unit", "saturated steps"), rows, "The most saturated units")
    return figure(f"{name}-saturation", figures.saturation(track.saturation), words, table=facts)


def memory(evidence: Evidence) -> str:
    """Return the memory curve."""
    lead = "How strongly the last output depends on the input so many steps earlier: "
    lead += "<code>hs.measure.memory(model, x)</code>."
    result = evidence.memory
    if isinstance(result, Unmeasured) or not result.input_reaches:
        why = result.reason if isinstance(result, Unmeasured) else str(result)
        return section("memory", "Memory", lead, unmeasured(why))
    words = f"<strong>{escape(str(result)).capitalize()}.</strong> Dashed: the threshold, and the last lag above it."
    lags = [lag for lag in (0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if lag < len(result.curve)]
    facts = table(("lag", "influence"), [(lag, f"{float(result.curve[lag]):.3g}") for lag in lags], "Influence by lag")
    return section("memory", "Memory", lead, figure("memory-curve", figures.memory(result), words, table=facts))


def distances(evidence: Evidence) -> str:
    """Return the distances between steps of the first row, and between the last states of all rows."""
    track = evidence.tracks[-1]
    values = one_row(track.traj)
    tokens = next(iter(evidence.tokens_of(track.traj)), None)
    body = ""
    if len(values) > 1:
        every = -(-len(values) // 200)  # the pairs of thousands of steps would not fit in memory
        kept = values[::every]
        names = [f"{step * track.traj.every}" for step in range(0, len(values), every)]
        if tokens:
            names = [f"{name} · {figures.escape(token)}" for name, token in zip(names, tokens[::every], strict=True)]
        picture, _ = figures.distances(torch.cdist(kept, kept), names, "step")
        words = f"<strong>Between steps</strong> of {escape(evidence.labels[0])}, in {escape(track.name)}: dark where "
        words += "the state comes back to where it has been."
        words += f" Drawn: 1 of every {every} steps." if every > 1 else ""
        body += figure("distances-steps", picture, words, square=True)
    result = evidence.comparison
    if not isinstance(result, Unmeasured):
        picture, note = figures.distances(result.distances, _unique(evidence.labels), "row")
        words = f"<strong>Between rows</strong>: {escape(_closest(result, evidence.labels))}"
        words += f" Drawn: {note}." if note else ""
        facts = table(("row", "nearest", "distance"), _nearest(result, evidence.labels), "Nearest rows")
        body += figure("distances-rows", picture, words, table=facts, square=True)
    lead = "How far apart states are, as points in the space of all units."
    return section("distances", "Distances", lead, body or unmeasured("there is one state only."))


def trajectories(evidence: Evidence) -> str:
    """Return the rows' paths through the plane of the main differences."""
    track = evidence.tracks[-1]
    lead = (
        "The path of the state through the two directions in which it varies most; where there are lines, a circle is "
    )
    lead += "its start and a square its end."
    try:
        picture, explained, note = figures.paths(
            track.traj, evidence.rows_of(track.traj), evidence.tokens_of(track.traj)
        )
    except ValueError as error:
        return section("trajectories", "Trajectories", lead, unmeasured(str(error)))
    words = f"<strong>{escape(track.name)}</strong>: these two hold {float(explained.sum()):.0%} of the variance."
    words += f" Drawn: {escape(note)}." if note else ""
    return section("trajectories", "Trajectories", lead, figure("paths", picture, words))


def spectrum(evidence: Evidence) -> str:
    """Return the eigenvalues of the state's Jacobian, layer by layer."""
    body = ""
    for name, result in evidence.jacobians.items():
        title = escape(name or "the model")
        if isinstance(result, Unmeasured):
            body += f"<h3>{title}</h3>{unmeasured(result.reason)}"
            continue
        radius = result.spectral_radius[result.valid]
        words = f"<strong>{title}</strong>: {escape(str(result))}. {_growth(evidence.exponents.get(name))}"
        facts = table(
            ("spectral radius", "over the measured steps"),
            [(name, f"{float(value):.3g}") for name, value in _extremes(radius).items()],
        )
        body += figure(f"spectrum-{anchor(name)}", figures.spectrum(result), words, table=facts, square=True)
    lead = (
        "Eigenvalues of d next state / d state, at steps spread over the first row: "
        "<code>hs.measure.jacobians(layer, x)</code>. What lies outside the circle grows in that one step; whether "
        "disturbances grow in the long run is told by the Lyapunov exponent, since each step turns them anew."
    )
    return section("spectrum", "Jacobian spectrum", lead, body)


def _growth(result: Lyapunov | Unmeasured | None) -> str:
    if result is None or isinstance(result, Unmeasured):
        return f"No Lyapunov exponent: {escape(result.reason)}" if result is not None else ""
    first, error = float(result.exponents[0]), float(result.error[0])
    said = f"Largest Lyapunov exponent {first:.3g} ± {error:.1g} a step: {GROWTH[result.kind]}."
    return escape(said)


def _closest(result: Comparison, labels: list[str]) -> str:
    """Say which two rows end closest to each other, by their names in the picture."""
    names, neighbors = _unique(labels), result.neighbors[:, 0]
    away = result.distances.gather(1, neighbors.unsqueeze(1)).squeeze(1)
    row = int(away.argmin())
    said = f"the states in which {len(names)} rows end; closest are {names[row]} and {names[int(neighbors[row])]}, "
    said += f"{float(away[row]):.3g} apart."
    return said + (f" {result.agreement:.0%} lie next to their own label." if result.agreement is not None else "")


def _nearest(result: Comparison, labels: list[str]) -> list[tuple[str, str, str]]:
    rows = []
    for row in range(min(10, len(labels))):
        other = int(result.neighbors[row, 0])
        rows.append((labels[row], labels[other], f"{float(result.distances[row, other]):.3g}"))
    return rows


def _extremes(values: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"smallest": values.min(), "mean": values.mean(), "largest": values.max()}


def _range(values: torch.Tensor) -> str:
    bad = int((~values.isfinite()).sum())
    finite = values[values.isfinite()]
    if not len(finite):
        return "no finite value" if values.numel() else "no steps"
    said = (
        f"{values.shape[1]} units over {len(values)} steps, from {float(finite.min()):.3g} to {float(finite.max()):.3g}"
    )
    return said + (f"; {bad:,} values are NaN or Inf (gaps)" if bad else "")


def _units(values: torch.Tensor, part: str) -> str:
    size = values.nan_to_num().abs().mean(0) if len(values) else values.new_zeros(values.shape[1])
    rows = []
    for unit in size.argsort(descending=True)[:10].tolist():
        one = values[:, unit]
        facts = (one.mean(), one.std(correction=0), one.min(), one.max()) if len(one) else ()
        rows.append((unit, *(f"{float(fact):.3g}" for fact in facts)))
    return table(("unit", "mean", "std", "min", "max"), rows, f"The ten largest units of {part}, by mean size")


def _gates(track: MeasuredTrack) -> str:
    rows = []
    for name in track.traj.gates:
        values = one_row(track.traj, part=name)
        if name == "candidate" or not values.numel():
            continue
        open_, shut = float((values > 0.9).float().mean()), float((values < 0.1).float().mean())
        rows.append((name, f"{float(values.median()):.3g}", f"{open_:.1%}", f"{shut:.1%}"))
    return table(("gate", "median", "above 0.9", "below 0.1"), rows, "How open the gates are")


def _unique(names: list[str]) -> list[str]:
    """Make equal labels unique: an axis draws equal names on top of each other."""
    return [name if names.count(name) == 1 else f"{row}: {name}" for row, name in enumerate(names)]


def number(value: float) -> str:
    """Return a number formatted for a tile."""
    return f"{value:.3g}" if math.isfinite(value) else "∞" if value > 0 else "–"
