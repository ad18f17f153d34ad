"""Episodes: when each finding of a training run began and ended, and who is told."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from .report import Finding
from .writers import MonitorWriter

_log = logging.getLogger("hiddenstate")


@dataclass(slots=True)
class Episode:
    """A finding with the training step at which it began, and at which it was gone; None while it lasts."""

    finding: Finding
    began: int
    ended: int | None = None

    def __str__(self) -> str:
        """Return one line."""
        until = "still so" if self.ended is None else f"until step {self.ended}"
        return f"step {self.began}, {until}: {self.finding.code} {self.finding.title} ({self.finding.where})"


class Episodes:
    """All findings of a run, by code and place."""

    def __init__(self, writers: Sequence[MonitorWriter], on_finding: Callable[[Episode], None] | None) -> None:
        """Begin with none; writers and `on_finding` are told of each as it begins and as it ends."""
        self._writers, self._on_finding = writers, on_finding
        self._open: dict[tuple[str, str], Episode] = {}
        self._past: list[Episode] = []

    def __iter__(self) -> Iterator[Episode]:
        """Yield all of them, in the order in which they began."""
        return iter(sorted([*self._past, *self._open.values()], key=lambda episode: episode.began))

    def lasts(self, code: str) -> bool:
        """Say whether a finding of this code lasts, wherever."""
        return any(key[0] == code for key in self._open)

    def begin(self, finding: Finding, step: int, *, anew: bool = False) -> None:
        """Begin a finding, where it is new; `anew`: one that lasts takes the new numbers."""
        key = finding.code, finding.where
        if key in self._open:
            if anew:
                self._open[key].finding = finding
            return
        episode = self._open[key] = Episode(finding, step)
        _log.log(logging.INFO if finding.severity == "note" else logging.WARNING, "%s", episode)
        self._tell(episode)

    def end(self, code: str, step: int, where: str | None = None) -> None:
        """End the findings of a code, at one place or at all."""
        for key in [key for key in self._open if key[0] == code and where in (None, key[1])]:
            self._stop(key, step)

    def settle(self, step: int, found: Sequence[Finding], judged: Callable[[Finding], bool]) -> None:
        """Begin what is new in a look, and end what is gone, of those that it has judged."""
        now = {(finding.code, finding.where) for finding in found}
        for finding in found:
            self.begin(finding, step)
        for key in [key for key, episode in self._open.items() if key not in now and judged(episode.finding)]:
            self._stop(key, step)

    def _stop(self, key: tuple[str, str], step: int) -> None:
        episode = self._open.pop(key)
        episode.ended = step
        self._past.append(episode)
        self._tell(episode)

    def _tell(self, episode: Episode) -> None:
        for writer in self._writers:
            writer.finding(episode.began if episode.ended is None else episode.ended, episode)
        if self._on_finding is not None:
            self._on_finding(episode)
