"""The doctor's report: findings, gravest first, for people and for programs."""

from __future__ import annotations

import html
import io
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

from ..measure import Survey
from .rule import Severity
from .rules import TITLES

RANK: dict[str, int] = {"error": 0, "warning": 1, "note": 2}
_SARIF = {"error": "error", "warning": "warning", "note": "note"}


@dataclass(frozen=True, slots=True)
class Finding:
    """What is wrong with a model's state, the number that shows it, and a line of code that mends it."""

    code: str
    severity: Severity
    where: str  # a layer, a parameter, or a line of the user's forward
    evidence: str  # the measured number and the threshold it crossed
    cause: str
    advice: str
    numbers: Mapping[str, float] = field(default_factory=dict)  # the evidence for programs: the measure and its limit
    title: str = ""

    def __post_init__(self) -> None:
        """Take the title of its code where none was given."""
        if not self.title:
            object.__setattr__(self, "title", TITLES[self.code])

    @property
    def page(self) -> str:
        """The page that explains it."""
        return f"docs/findings/{self.code}.md"

    def __str__(self) -> str:
        """Return a short paragraph."""
        return (
            f"{self.code} {self.severity}: {self.title} ({self.where})\n"
            f"  evidence  {self.evidence}\n  cause     {self.cause}\n  advice    {self.advice}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {
            "code": self.code,
            "title": self.title,
            "where": self.where,
            "severity": self.severity,
            "evidence": self.evidence,
            # JSON knows neither NaN nor infinity.
            "numbers": {name: n if math.isfinite(n) else None for name, n in self.numbers.items()},
            "cause": self.cause,
            "advice": self.advice,
            "page": self.page,
        }


class Report(Sequence[Finding]):
    """The findings of one examination, gravest first; `ok` where none is an error or a warning."""

    def __init__(
        self,
        findings: Sequence[Finding],
        *,
        model: str = "",
        assumed: Sequence[str] = (),
        failed: Mapping[str, str] | None = None,
        broken: str = "",
        survey: Survey | None = None,
        source: tuple[str, int] | None = None,
        unheard: str = "",
    ) -> None:
        """Take what was found, what was assumed, and which checks could not run and why."""
        self.source = source  # file and line of the model's class, where it is the user's own
        self.findings = tuple(sorted(findings, key=lambda finding: RANK[finding.severity]))
        self.model = model
        self.assumed = tuple(assumed)
        self.failed = dict(failed or {})
        self.survey = survey  # the states of all batches, where a data set was examined
        self.unheard = unheard  # which layers nothing can be told of, and why
        self.broken = broken  # why the plain call itself failed, "" where it did not

    @property
    def ok(self) -> bool:
        """Whether there is no error and no warning; notes are allowed."""
        return not self.broken and not any(finding.severity != "note" for finding in self.findings)

    @property
    def codes(self) -> tuple[str, ...]:
        """The codes of all findings, each once."""
        return tuple(dict.fromkeys(finding.code for finding in self.findings))

    def worst(self) -> str:
        """Return the gravest severity, "" where there is no finding."""
        if self.broken:
            return "error"
        return self.findings[0].severity if self.findings else ""

    def __bool__(self) -> bool:
        """Be true even when nothing was found: a report is not a list that may be empty."""
        return True

    def __len__(self) -> int:
        """Count the findings."""
        return len(self.findings)

    @overload
    def __getitem__(self, place: int) -> Finding: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Finding]: ...
    def __getitem__(self, place: int | slice) -> Finding | Sequence[Finding]:
        """Return a finding by its place."""
        return self.findings[place]

    def __iter__(self) -> Iterator[Finding]:
        """Go through the findings, gravest first."""
        return iter(self.findings)

    def __str__(self) -> str:
        """Return the report as text: a table with frames where a person is watching a terminal."""
        return self._table() if sys.stdout.isatty() else self.text()

    __repr__ = __str__

    def text(self) -> str:
        """Return the report as plain text."""
        lines = [self._headline()]
        lines += [f"\n{finding}" for finding in self.findings]
        lines += self._footnotes()
        return "\n".join(lines)

    def _headline(self) -> str:
        name = self.model or "the model"
        if self.broken:
            return f"{name} could not be examined: {self.broken}"
        if not self.findings:
            return f"{name}: nothing found{' in what was heard' if self.unheard else ''}"
        counts = [(kind, sum(f.severity == kind for f in self.findings)) for kind in RANK]
        return f"{name}: " + ", ".join(f"{n} {kind}{'s' if n > 1 else ''}" for kind, n in counts if n)

    def _footnotes(self) -> list[str]:
        lines = [f"\nassumed: {line}" for line in self.assumed]
        return lines + [f"\n{code} could not run: {reason}" for code, reason in self.failed.items()]

    def _table(self) -> str:
        from rich.console import Console
        from rich.table import Table

        stream = io.StringIO()
        console = Console(file=stream, force_terminal=True, width=max(80, min(140, Console().width)))
        console.print(self._headline(), style="bold", highlight=False)
        if self.findings:
            table = Table(show_lines=True)
            for column in ("code", "finding", "evidence", "what to do"):
                table.add_column(column, overflow="fold")
            colors = {"error": "red", "warning": "yellow", "note": "cyan"}
            for f in self.findings:
                mark = f"[{colors[f.severity]}]{f.code}\n{f.severity}[/]"
                # Brackets in a user's names are not markup.
                texts = [f"{f.title}\n{f.where}", f.evidence, f"{f.cause}.\n{f.advice}"]
                table.add_row(mark, *(text.replace("[", r"\[") for text in texts))
            console.print(table)
        for line in self._footnotes():
            console.print(line.strip(), style="dim", markup=False, highlight=False)
        return stream.getvalue().rstrip()

    def _repr_html_(self) -> str:
        """Return a table for notebooks."""
        rows = "".join(
            "<tr>"
            + "".join(
                f"<td style='text-align:left;vertical-align:top'>{html.escape(text)}</td>"
                for text in (f.code, f.severity, f.title, f.where, f.evidence, f.cause, f.advice)
            )
            + "</tr>"
            for f in self.findings
        )
        head = "".join(f"<th>{c}</th>" for c in ("code", "severity", "finding", "where", "evidence", "cause", "advice"))
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>" if rows else ""
        notes = "".join(f"<p>{html.escape(line.strip())}</p>" for line in self._footnotes())
        return f"<p><b>{html.escape(self._headline())}</b></p>{table}{notes}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {
            "model": self.model,
            "ok": self.ok,
            "findings": [finding.to_dict() for finding in self.findings],
            "assumed": list(self.assumed),
            "failed": dict(self.failed),
            "broken": self.broken,
        }

    def to_sarif(self) -> dict[str, Any]:
        """Return the findings as SARIF 2.1.0, which code hosts and editors read."""
        rules = [
            {
                "id": code,
                "name": TITLES[code].title().replace(" ", "").replace(",", ""),
                "shortDescription": {"text": TITLES[code]},
                "help": {"text": f"docs/findings/{code}.md"},
            }
            for code in self.codes
        ]
        results = [_sarif_result(finding, list(self.codes), self.source) for finding in self.findings]
        driver = {"name": "hiddenstate", "rules": rules}
        return {
            "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
            "version": "2.1.0",
            "runs": [{"tool": {"driver": driver}, "results": results}],
        }


def _sarif_result(finding: Finding, codes: list[str], source: tuple[str, int] | None) -> dict[str, Any]:
    location: dict[str, Any] = {"logicalLocations": [{"fullyQualifiedName": finding.where}]}
    file, _, number = finding.where.strip("()").rpartition(" (")[-1].partition(":")
    # Code hosts refuse a result without a file: where a finding names no line, it stands at the model's class.
    place = (file, int(number)) if file.endswith(".py") and number.isdigit() else source
    if place is not None:
        location["physicalLocation"] = {"artifactLocation": {"uri": place[0]}, "region": {"startLine": place[1]}}
    return {
        "ruleId": finding.code,
        "ruleIndex": codes.index(finding.code),
        "level": _SARIF[finding.severity],
        "message": {"text": f"{finding.title}: {finding.evidence} {finding.cause}. {finding.advice}"},
        "locations": [location],
        "properties": {"numbers": finding.to_dict()["numbers"]},
    }
