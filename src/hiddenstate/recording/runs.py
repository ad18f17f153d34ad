"""Runs: a recorded one with the source of its values, and those that are under way."""

from __future__ import annotations

import contextlib
import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from ..cells import Call, OpenRun, Succession, memory_of
from ..errors import RecordingWarning
from ..state import State, tensors
from ..unrolling import RowPlaces
from .recording import Options
from .trajectory import Trajectory

_R = TypeVar("_R")
RunKey: TypeAlias = "tuple[threading.Thread, str, OpenRun]"  # thread, track, and which of the track's runs


class RunValues(Protocol):
    """A source of a run's values, all `(time, batch, unit)` and in memory of their own."""

    def states(self) -> dict[str, Tensor]:
        """Return each part of the state."""

    @property
    def gates(self) -> dict[str, Tensor]:
        """Each gate by name."""

    def grads(self) -> dict[str, Tensor]:
        """Return the gradient of each part, as far as backward passes have brought any."""

    def expects_grads(self) -> bool:
        """Say whether a backward pass may still bring the first gradients."""


@dataclass(slots=True, eq=False)
class RecordedRun:
    """One run of one track."""

    track: str
    kind: str
    options: Options
    lengths: Tensor  # (batch,) int64: steps that were run, before `every` left any out
    initial: Mapping[str, Tensor]  # part -> (batch, unit); empty if unknown
    source: RunValues | None  # dropped as soon as all values are computed
    thinned: bool = False  # whether the source has left out steps already
    piece: int = 0  # for a run written in pieces: the number of pieces before this one
    number: int | None = None  # for a run on disk: its number among the track's runs, set with its first piece
    _values: dict[str, Tensor] = field(default_factory=dict)

    def settle(self) -> RecordedRun:
        """Compute all values now, and drop their source; gradients may still arrive."""
        self.values()
        return self

    def values(self) -> dict[str, Tensor]:
        """Return everything recorded by flat names, `(time, batch, unit)`: `states.h`, `gates.input`, `grads.h`."""
        stored = self.options.cast if self.thinned else self.options.thin
        if not self._values and self.source is not None:
            found = {f"states.{name}": stored(part) for name, part in self.source.states().items()}
            if self.options.gates:
                found |= {f"gates.{name}": stored(gate) for name, gate in self.source.gates.items()}
            if self.options.every > 1 and not self.thinned:  # copy: a slice would keep the skipped steps in memory
                found = {name: value.clone() for name, value in found.items()}
            self._values = found
        if not self.options.grads:
            self.source = None
        if self.source is None:
            return self._values
        return self._values | {f"grads.{n}": stored(g) for n, g in self.source.grads().items()}

    def waits(self) -> bool:
        """Say whether gradients that were asked for may still come."""
        return self.options.grads and self.source is not None and self.source.expects_grads()

    @property
    def nbytes(self) -> int:
        """The size of all values, in bytes."""
        return sum(value.nbytes for value in self.values().values())

    def entries(self) -> dict[str, Tensor]:
        """Return everything that a file needs to contain, by flat names."""
        initial = {f"initial.{name}": self.options.cast(part) for name, part in self.initial.items()}
        return {**self.values(), **initial, "lengths": self.lengths}

    def trajectory(self) -> Trajectory:
        """Return the run as a Trajectory."""
        initial = {name: self.options.cast(part) for name, part in self.initial.items()}
        every, track, kind = self.options.every, self.track, self.kind
        return assemble(self.values(), initial, lengths=self.lengths, every=every, track=track, kind=kind)


def assemble(
    values: Mapping[str, Tensor], initial: Mapping[str, Tensor], *, lengths: Tensor, every: int, track: str, kind: str
) -> Trajectory:
    """Return a Trajectory made of values by flat names; `lengths` count all steps, also those that were left out."""
    groups: dict[str, dict[str, Tensor]] = {"states": {}, "gates": {}, "grads": {}}
    for name, value in values.items():
        group, _, short = name.partition(".")
        groups[group][short] = value.transpose(0, 1)
    states = groups["states"]
    first = "h" if "h" in states else next(iter(states))
    h = states[first]
    return Trajectory(
        h=h,
        lengths=((lengths + every - 1) // every).to(h.device),
        c=states.get("c") if first == "h" else None,
        gates=groups["gates"],
        grads=groups["grads"],
        others={n: v for n, v in states.items() if n != first and not (n == "c" and first == "h")},
        initial=State(initial) if initial else None,
        track=track,
        kind=kind,
        every=every,
        name=first,
    )


@dataclass(frozen=True, slots=True, eq=False)
class Arranged:
    """Puts the values of a run back into the user's rows and order of steps, if other rows or steps were run.

    Rows may have been sorted, cut into segments that run side by side, or reversed.
    """

    source: RunValues
    places: RowPlaces
    run_lengths: Tensor  # (places,) lengths of the rows that were run
    reverse: bool = False  # whether each row was run from its end
    every: int = 1  # the source holds steps 0, every, 2 * every, …

    @property
    def lengths(self) -> Tensor:
        """The number of steps of each of the user's rows, `(batch,)`."""
        found = torch.zeros(self.places.batch, dtype=torch.int64)
        return found.scatter_reduce(0, self.places.rows, self.places.starts + self.run_lengths, "amax")

    def rows(self, first: Tensor) -> Tensor:
        """Return the state before each row's first step as `(batch, unit)`; zero for rows that have not started."""
        begins = (self.places.starts == 0).nonzero().squeeze(1)
        found = first.new_zeros(self.places.batch, *first.shape[1:])
        return found.index_copy(0, self.places.rows[begins].to(first.device), first[begins.to(first.device)])

    def states(self) -> dict[str, Tensor]:
        """Return each part of the state, `(time, batch, unit)`."""
        return {name: self._placed(part) for name, part in self.source.states().items()}

    @property
    def gates(self) -> dict[str, Tensor]:
        """Each gate by name."""
        return {name: self._placed(gate) for name, gate in self.source.gates.items()}

    def grads(self) -> dict[str, Tensor]:
        """Return the gradient of each part at every step."""
        return {name: self._placed(grad) for name, grad in self.source.grads().items()}

    def expects_grads(self) -> bool:
        """Say whether a backward pass may still bring the first gradients."""
        return self.source.expects_grads()

    def _placed(self, values: Tensor) -> Tensor:
        step = torch.arange(len(values)).unsqueeze(1)  # (time, 1)
        lengths = (self.run_lengths + self.every - 1) // self.every
        at = self.places.starts + (lengths - 1 - step if self.reverse else step)  # (time, places)
        there = (step < lengths).flatten().nonzero().squeeze(1)
        target = (at * self.places.batch + self.places.rows).flatten()[there].to(values.device)
        time = -(-int(self.lengths.max()) // self.every)
        flat = values.new_zeros(time * self.places.batch, values.shape[-1])
        flat.index_copy_(0, target, values.flatten(0, 1)[there.to(values.device)])
        return flat.view(time, self.places.batch, -1)


@dataclass(slots=True, eq=False)
class Joined:
    """Several calls of a layer as one run, each continuing the one before."""

    pieces: list[RunValues]

    def states(self) -> dict[str, Tensor]:
        """Return each part of the state, `(time, batch, unit)`."""
        return _joined([piece.states() for piece in self.pieces])

    @property
    def gates(self) -> dict[str, Tensor]:
        """Each gate by name."""
        return _joined([piece.gates for piece in self.pieces])

    def grads(self) -> dict[str, Tensor]:
        """Return the gradient of each part; zero in pieces that no gradient has reached."""
        found = [piece.grads() for piece in self.pieces]
        names = {name for grads in found for name in grads}
        if not names:
            return {}
        states = [piece.states() for piece in self.pieces]
        filled = [{n: g.get(n, torch.zeros_like(s[n])) for n in names} for g, s in zip(found, states, strict=True)]
        return _joined(filled)

    def expects_grads(self) -> bool:
        """Say whether a backward pass may still bring the first gradients."""
        return all(piece.expects_grads() for piece in self.pieces)


def _joined(pieces: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}


class Keep(Protocol):
    """Where a run goes when it has ended."""

    def __call__(self, run: RecordedRun, *, last: bool = True) -> None:
        """Keep a run, or with `last=False` a piece of a run that continues."""


class ModelCalls(threading.local):
    """The model call of this thread that is under way, or was last: its number, and the arguments it was given."""

    def __init__(self) -> None:
        """Start without a call."""
        self.number = 0
        self._handed: set[int | None] = set()

    def begin(self, *handed: Any) -> None:
        """Begin the next call."""
        self.number += 1
        self._handed = {memory_of(tensor) for tensor in tensors(handed).values()} - {None}

    def gave(self, native: Any) -> bool:
        """Say whether a layer's state is among the arguments of the model call."""
        return any(memory_of(tensor) in self._handed for tensor in tensors(native).values())


class OpenRuns(ABC, Generic[_R]):
    """The runs of one kind of layer that are under way; a track has several if they are fed in turns.

    Each run goes to `keep` when it ends.
    """

    piece_bytes: ClassVar[int] = 32 * 2**20  # a streamed run is written in pieces of about this size

    def __init__(self, options: Options, keep: Keep, calls: ModelCalls | None = None) -> None:
        """Start without any runs."""
        self.options = options
        self.keep = keep
        self.calls = ModelCalls() if calls is None else calls
        self.successions: dict[tuple[threading.Thread, nn.Module], Succession] = {}
        self.open: dict[RunKey, _R] = {}

    @abstractmethod
    def recorded(self, track: str, run: _R) -> RecordedRun:
        """Return a run as far as it has come."""

    def run_of(self, call: Call) -> tuple[OpenRun, bool]:
        """Return the run that a layer's call belongs to, and whether the call continues its recorded values.

        It does if the call is given the state in which the run ended. But if a model itself passes states from one of
        its calls to the next, each call of several steps is recorded as a run of its own.
        """
        run = self._succession(call).run_of(call, self.calls.number)
        if run.last is None:
            return run, False
        within = run.number == self.calls.number
        return run, within or (run.steps == 1 and call.steps == 1) or self.calls.gave(call.given_native)

    def ended(self, call: Call, run: OpenRun) -> None:
        """Remember the state a call ended in, for calls that continue it; end the runs that no call can continue."""
        over = self._succession(call).ended(call, self.calls.number, run)
        for key in [key for key in self.open if key[2] in over] if over else ():
            self.close_one(key)

    def _succession(self, call: Call) -> Succession:
        return self.successions.setdefault((threading.current_thread(), call.layer.module), Succession())

    def close(self, track: str, run: OpenRun) -> None:
        """End one of a track's runs in this thread, if it is under way."""
        self.close_one((threading.current_thread(), track, run))

    def close_all(self, thread: threading.Thread | None = None) -> None:
        """End all runs, or those of one thread."""
        for key in list(self.open):
            if thread in (None, key[0]):
                self.close_one(key)

    def forget(self, track: str) -> None:
        """Discard the runs of a track that are under way."""
        self.open = {key: run for key, run in self.open.items() if key[1] != track}

    def under_way(self) -> list[str]:
        """Return the tracks whose runs are under way."""
        return [track for _, track, _ in list(self.open)]

    def so_far(self, track: str) -> list[RecordedRun]:
        """Return the runs of a track that are under way, as far as they have come."""
        return [self.recorded(track, run) for (_, other, _), run in list(self.open.items()) if other == track]

    def close_one(self, key: RunKey) -> None:
        """End a run."""
        run = self.open.pop(key, None)
        if run is not None:
            self.keep(self.recorded(key[1], run))


def warn_and_go_on(text: str) -> None:
    """Warn, but do not stop the user's run if a filter turns warnings into errors."""
    with contextlib.suppress(RecordingWarning):
        warnings.warn(text, RecordingWarning, stacklevel=2)
