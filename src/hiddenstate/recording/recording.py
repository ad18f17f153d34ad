"""A recording: its options, and a mapping from each track to its runs that prints as a table."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..cells import Layer
from ..errors import BadInput, SeveralRuns, UnknownTrack
from ..state import as_preformatted
from .joining import joined, stacked
from .trajectory import Trajectory

Tracks: TypeAlias = "str | Iterable[str] | Callable[[str], bool]"


@dataclass(frozen=True, slots=True, eq=False)
class Options:
    """What to record: the keywords of `hs.record` as one value."""

    gates: bool = False  # also record gates, and the values that cells name with `hs.tap`
    grads: bool = False  # also record the gradient of the loss with respect to every state
    tracks: Tracks | None = None  # names of tracks or layers, or a function of a track's name; None: all
    every: int = 1  # only steps 0, every, 2 * every, …
    to: str | PathLike[str] | None = None  # the folder to stream to; None: values stay in memory
    dtype: torch.dtype | None = None  # of the stored values; None: unchanged
    device: torch.device | None = None  # of the stored values; None: unchanged
    graph: bool = False  # states keep the graph that made them, for penalties and heads

    def __post_init__(self) -> None:
        """Refuse an `every` that is not a positive whole number, and a graph on disk."""
        if self.graph and self.to is not None:
            raise BadInput(
                "graph=True keeps the states with the graph that made them, which cannot be written to a folder. "
                "Leave out to=, or graph=True."
            )
        if not isinstance(self.every, int) or isinstance(self.every, bool) or self.every < 1:
            raise BadInput(
                f"every is {self.every!r}, but a whole number from 1 is needed: every=2 keeps steps 0, 2, 4, …"
            )

    def thin(self, values: Tensor) -> Tensor:
        """Return the steps of `(time, batch, unit)` to record, in the dtype and on the device of the recording."""
        return self.cast(values[:: self.every] if self.every > 1 else values)

    def taken(self, values: Tensor) -> Tensor:
        """Return states with their graph if the options ask for it, else detached."""
        return values if self.graph else values.detach()

    def cast(self, values: Tensor) -> Tensor:
        """Return values in the dtype and on the device of the recording; integers stay integers."""
        if self.dtype is None and self.device is None:
            return values
        dtype = self.dtype if values.is_floating_point() else None
        return values.to(device=self.device, dtype=dtype)

    def choose(self, layers: list[Layer], *, final: bool = True) -> tuple[str, ...]:
        """Return the tracks of these layers that are to be recorded, in the model's order.

        If the layers are `final`, a name that no track has is an error; if not, it may still turn up.
        """
        everything = {track: layer for layer in layers for track in layer.tracks}
        if self.tracks is None:
            return tuple(everything)
        if callable(self.tracks):
            chosen = {track for track in everything if self.tracks(track)}
        else:
            chosen = set()
            for name in [self.tracks] if isinstance(self.tracks, str) else self.tracks:
                named = {track for track, layer in everything.items() if name in (track, layer.name)}
                if not named and final:
                    raise UnknownTrack(f"no track or layer is named {name!r}. The tracks are: {', '.join(everything)}.")
                chosen |= named
        if not chosen and final:
            raise BadInput(f"tracks={self.tracks!r} chooses nothing. The tracks are: {', '.join(everything)}.")
        return tuple(track for track in everything if track in chosen)


def the_track(source: Any) -> Any:
    """Return the single trajectory of a recording with one track; anything but a recording is returned unchanged."""
    if not isinstance(source, Mapping):
        return source
    if not source:
        raise BadInput("there is no track in it: a recording has tracks once a recurrent layer has run.")
    if len(source) != 1:
        names = list(source)
        raise BadInput(
            f"these are trajectories by track ({', '.join(map(str, names))}), but this is about one: rec[{names[0]!r}]."
        )
    return next(iter(source.values()))


class Recording(Mapping[str, Trajectory]):
    """A mapping from track name to Trajectory, with all runs of each track; printing it shows a table."""

    every: int = 1
    stopped: str | None = None  # why and where the recording ended early

    @abstractmethod
    def _tracks(self) -> dict[str, int]:
        """Return each track that has runs, with their number."""

    @abstractmethod
    def _known(self) -> tuple[str, ...]:
        """Return every track that was to be recorded."""

    @abstractmethod
    def _load(self, track: str, first: int | None = None) -> list[Trajectory]:
        """Return all runs of one track, or the first few."""

    def __getitem__(self, track: str) -> Trajectory:
        """Return the single run of a track; the name of a layer with one track works as well."""
        runs = self.runs(track)
        if len(runs) > 1:
            raise SeveralRuns(
                f"track {track!r} has {len(runs)} runs: take one with rec.runs({track!r})[-1], all of them as one "
                f"with rec.joined({track!r}), one after another, or rec.stacked({track!r}), as rows, or open a "
                f"recording around each call. Calls are one run where each is handed the state in which the one before "
                f"ended."
            )
        return runs[0]

    def runs(self, track: str) -> list[Trajectory]:
        """Return all runs of one track, in the order in which they ended."""
        return self._load(self._resolve(track))

    def joined(self, track: str) -> Trajectory:
        """Return all runs of one track joined along time, such as the chunks of a stream, without padding between them.

        >>> gru, x = torch.nn.GRU(3, 4, batch_first=True), torch.randn(2, 9, 3)
        >>> with hs.record(gru) as rec:
        ...     for chunk in x.split(3, dim=1):
        ...         _ = gru(chunk)
        >>> len(rec.runs("l0")), rec.joined("l0").h.shape
        (3, torch.Size([2, 9, 4]))
        """
        return joined(self.runs(track))

    def stacked(self, track: str) -> Trajectory:
        """Return all runs of one track as rows of one padded trajectory, such as the batches of a data set.

        >>> gru = torch.nn.GRU(3, 4, batch_first=True)
        >>> with hs.record(gru) as rec:
        ...     for rows, steps in ((2, 9), (1, 5)):
        ...         _ = gru(torch.randn(rows, steps, 3))
        >>> rec.stacked("l0").h.shape, rec.stacked("l0").lengths.tolist()
        (torch.Size([3, 9, 4]), [9, 9, 5])
        """
        return stacked(self.runs(track))

    def __iter__(self) -> Iterator[str]:
        """Iterate over the tracks that have run."""
        return iter(self._tracks())

    def __len__(self) -> int:
        """Return the number of tracks that have run."""
        return len(self._tracks())

    def __contains__(self, track: object) -> bool:
        """Say whether a track has run; the name of a layer with one track works as well."""
        return isinstance(track, str) and self._find(track) in self._tracks()

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    @property
    def nbytes(self) -> int:
        """The size of everything recorded, in bytes."""
        return sum(run.nbytes for track in self for run in self.runs(track))

    def numpy(self) -> dict[str, Any]:
        """Return a dict of arrays for each track, as `Trajectory.numpy` does; a list of them if it has several runs."""
        return {track: _one([run.numpy() for run in self.runs(track)]) for track in self}

    def to_xarray(self) -> dict[str, Any]:
        """Return an `xarray.Dataset` for each track; a list of them if it has several runs."""
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
    _repr_html_ = as_preformatted

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
