"""One verdict: what is wrong, how we know, and what to change."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .rule import Severity
from .rules import RULES

TITLES = {rule.code: rule.title for rule in RULES}
RANK: dict[str, int] = {"error": 0, "warning": 1, "note": 2}


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
