"""The page of a model: its header, its sections and its table of contents."""

from __future__ import annotations

from html import escape

from . import sections
from .evidence import Evidence, Unmeasured
from .markup import anchor, contents, document, tiles


def page(evidence: Evidence) -> str:
    """Return the whole page as one string of HTML."""
    body = [
        sections.findings(evidence),
        sections.layers(evidence),
        sections.data_set(evidence),
        sections.states(evidence),
        sections.memory(evidence),
        sections.distances(evidence),
        sections.trajectories(evidence),
        sections.spectrum(evidence),
    ]
    title = f"{evidence.model}: hidden state report"
    return document(title, _contents(evidence), f"{_header(evidence)}{''.join(body)}", "hs.report(model, x)")


def _header(evidence: Evidence) -> str:
    count = len(evidence.run.layers)
    given = ", ".join(evidence.inputs)
    return (
        f"<header><h1>{escape(evidence.model)}</h1><p>{count} recurrent layer{'s' if count != 1 else ''} · "
        f"{evidence.parameters:,} parameters · input {escape(given)}</p>{_tiles(evidence)}</header>"
    )


def _tiles(evidence: Evidence) -> str:
    shown = [_finding_tile(evidence)]
    remembered = evidence.memory
    if not isinstance(remembered, Unmeasured):
        length = f"{'≥ ' if remembered.cut_off else ''}{remembered.length} step{'s' if remembered.length != 1 else ''}"
        half = f"half-life {sections.number(remembered.half_life)}"
        shown.append(("", length if remembered.input_reaches else "none", "memory", half))
    shares = {one.name: one.saturation.share for one in evidence.tracks if not isinstance(one.saturation, Unmeasured)}
    if shares:
        worst = max(shares, key=lambda name: shares[name])
        most = ", which has most" if len(shares) > 1 else ""
        shown.append(("", f"{shares[worst]:.1%}", "saturated", f"of the values of h in {worst}{most}"))
    grown = {name: one for name, one in evidence.exponents.items() if not isinstance(one, Unmeasured)}
    if grown:
        most = max(grown, key=lambda name: float(grown[name].exponents[0]))
        said = f"± {float(grown[most].error[0]):.1g} a step, {most or 'the model'}: {sections.GROWTH[grown[most].kind]}"
        shown.append(("", f"{float(grown[most].exponents[0]):.2g}", "Lyapunov exponent", said))
    return tiles(shown)


def _finding_tile(evidence: Evidence) -> tuple[str, str, str, str]:
    report = evidence.findings
    if isinstance(report, Unmeasured):
        return ("warning", "–", "findings", "the doctor could not look")
    counts = {kind: sum(one.severity == kind for one in report) for kind in ("error", "warning", "note")}
    said = ", ".join(f"{count} {kind}{'s' if count > 1 else ''}" for kind, count in counts.items() if count)
    worst = next((kind for kind, count in counts.items() if count), "good")
    return (worst, str(sum(counts.values())), "findings", said or "nothing found")


def _contents(evidence: Evidence) -> str:
    tracks = "".join(
        f'<li><a href="#track-{anchor(track.name)}">{escape(track.name)}</a></li>'
        for track in evidence.tracks[: sections.TRACKS]
    )
    names = {
        "findings": "Findings",
        "layers": "Layers",
        **({"data": "The whole data set"} if evidence.survey is not None else {}),
        "states": "States and gates",
        "memory": "Memory",
        "distances": "Distances",
        "trajectories": "Trajectories",
        "spectrum": "Jacobian spectrum",
    }
    return contents(names, {"states": f"<ul>{tracks}</ul>"})
