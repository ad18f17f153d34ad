"""Writers of a Monitor's numbers and findings: CSV and JSON lines; others only need these three methods."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping
from os import PathLike
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from .episodes import Episode


class MonitorWriter(Protocol):
    """What a Monitor writes to."""

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Take the numbers of one look."""

    def finding(self, step: int, episode: Episode) -> None:
        """Take a finding that began, or ended, at this step."""

    def close(self) -> None:
        """Take no more, and close what was opened."""


class CsvWriter:
    """Numbers as a table, one line for each look; a second file `<name>.findings.csv` for findings."""

    def __init__(self, path: str | PathLike[str]) -> None:
        """Write to `path`, in place of what was there."""
        self._path = str(path)
        self._file = open(path, "w", newline="", encoding="utf-8")  # noqa: SIM115
        self._table: Any = None
        self._findings: Any = None

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write one line; the columns are those of the first look."""
        if self._table is None:
            self._table = csv.DictWriter(self._file, ["step", *numbers], restval="", extrasaction="ignore")
            self._table.writeheader()
        self._table.writerow({"step": step, **numbers})
        self._file.flush()

    def finding(self, step: int, episode: Episode) -> None:
        """Write one line to the file of findings."""
        if self._findings is None:
            self._findings = open(f"{self._path}.findings.csv", "w", newline="", encoding="utf-8")  # noqa: SIM115
            csv.writer(self._findings).writerow(["step", "event", "code", "severity", "where", "evidence"])
        f = episode.finding
        event = "began" if episode.ended is None else "ended"
        csv.writer(self._findings).writerow([step, event, f.code, f.severity, f.where, f.evidence])
        self._findings.flush()

    def close(self) -> None:
        """Close both files."""
        self._file.close()
        if self._findings is not None:
            self._findings.close()


class JsonlWriter:
    """One JSON object in each line: `{"step": 0, "numbers": {…}}`, or `{"step": 0, "began": {…}}`."""

    def __init__(self, path: str | PathLike[str]) -> None:
        """Write to `path`, in place of what was there."""
        self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write the numbers; what is not finite becomes null, as JSON knows no NaN."""
        plain = {name: number if math.isfinite(number) else None for name, number in numbers.items()}
        self._line({"step": step, "numbers": plain})

    def finding(self, step: int, episode: Episode) -> None:
        """Write a finding that began or ended."""
        self._line({"step": step, "began" if episode.ended is None else "ended": _plain(episode.finding.to_dict())})

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _line(self, content: dict[str, Any]) -> None:
        self._file.write(json.dumps(content) + "\n")
        self._file.flush()


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
