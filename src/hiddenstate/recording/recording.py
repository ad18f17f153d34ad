"""A recording: every run of every track, as a mapping that reads well in a notebook."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

from ..errors import SeveralRuns, UnknownTrack
from .trajectory import Trajectory


class Recording(Mapping[str, Trajectory]):
    """A mapping from track name to Trajectory, with all runs behind it; printing it is a table."""

    every: int = 1
    stopped: str | None = None  # why and where the recording ended early

    @abstractmethod
    def _tracks(self) -> dict[str, int]:
        """Return each track that has runs, and how many."""

    @abstractmethod
    def _known(self) -> tuple[str, ...]:
        """Return every track that was to be recorded."""

    @abstractmethod
    def _load(self, track: str, first: int | None = None) -> list[Trajectory]:
        """Return all runs of one track, or the first few."""

    def __getitem__(self, track: str) -> Trajectory:
        """Return the one run of a track; a layer with one track answers to its own name."""
        runs = self.runs(track)
        if len(runs) > 1:
            raise SeveralRuns(
                f"track {track!r} has {len(runs)} runs, one for each call: take one with rec.runs({track!r})[-1], "
                f"or open a recording around each call."
            )
        return runs[0]

    def runs(self, track: str) -> list[Trajectory]:
        """Return all runs of one track, in the order in which they ended."""
        return self._load(self._resolve(track))

    def __iter__(self) -> Iterator[str]:
        """Iterate over the tracks that have been run."""
        return iter(self._tracks())

    def __len__(self) -> int:
        """Return the number of tracks that have been run."""
        return len(self._tracks())

    def __contains__(self, track: object) -> bool:
        """Say whether a track, or a layer of one track, has been run."""
        return isinstance(track, str) and self._find(track) in self._tracks()

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    @property
    def nbytes(self) -> int:
        """The bytes of everything recorded."""
        return sum(run.nbytes for track in self for run in self.runs(track))

    def numpy(self) -> dict[str, Any]:
        """Return for each track a dict of arrays as `Trajectory.numpy` gives it, or a list of them for several runs."""
        return {track: _one([run.numpy() for run in self.runs(track)]) for track in self}

    def to_xarray(self) -> dict[str, Any]:
        """Return an `xarray.Dataset` for each track, or a list of them for several runs."""
        return {track: _one([run.to_xarray() for run in self.runs(track)]) for track in self}

    def __str__(self) -> str:
        """Return a table with one line for each run."""
        rows: list[tuple[str, ...]] = [("track", "kind", "run", "batch", "time", "unit", "kept", "bytes")]
        for track, count in self._tracks().items():
            rows += [_row(track, run, f"{n + 1} of {count}") for n, run in enumerate(self._load(track, _SHOWN))]
            if count > _SHOWN:
                rows.append((track, "", f"… {count} runs", "", "", "", "", ""))
        if len(rows) == 1:
            return "nothing recorded yet: call the model inside the block" + (
                f"\n{self.stopped}" if self.stopped else ""
            )
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        table = "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)
        return f"{table}\n{self.stopped}" if self.stopped else table

    __repr__ = __str__

    def _find(self, name: str) -> str | None:
        known = self._known()
        if name in known:
            return name
        prefix = f"{name}." if name else ""
        inside = [track for track in known if track.startswith(prefix) and "." not in track[len(prefix) :]]
        return inside[0] if len(inside) == 1 else None

    def _resolve(self, name: str) -> str:
        track = self._find(name)
        if track is not None and track in self._tracks():
            return track
        there = ", ".join(self._tracks()) or "none yet: call the model inside the block"
        if track is not None:
            raise UnknownTrack(f"track {track!r} has not been run; those that have: {there}.")
        inside = [track for track in self._known() if track.startswith(f"{name}.")]
        more = f" {name!r} is a layer of {len(inside)} tracks: name one of them." if inside else ""
        raise UnknownTrack(f"no track is named {name!r}.{more} The tracks are: {', '.join(self._known())}.")


_SHOWN = 4  # runs of one track that a table shows


def _one(runs: list[Any]) -> Any:
    return runs[0] if len(runs) == 1 else runs


def _row(track: str, run: Trajectory, number: str) -> tuple[str, ...]:
    batch, time, unit = run.h.shape
    kept = [*run.states, *run.gates, *(f"d{part}" for part in run.grads)]
    return track, run.kind, number, str(batch), str(time), str(unit), ", ".join(kept), _bytes(run.nbytes)


def _bytes(count: int) -> str:
    size, units = float(count), ["B", "KB", "MB", "GB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.3g} {units[0]}"
