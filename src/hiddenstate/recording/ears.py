"""A recording's interest in one module of the model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..cells import Layer
from .outputs import Outputs
from .padded import Padded
from .takes import Options, Take

if TYPE_CHECKING:
    from .recorder import Recorder


@dataclass(slots=True, eq=False)
class Ear:
    """Who listens, to what, and what for."""

    recording: Recorder
    layer: Layer
    options: Options

    def hears(self) -> bool:
        """Say whether calls in this thread concern the recording."""
        return self.recording.hears()


@dataclass(slots=True, eq=False)
class FusedEar(Ear):
    """Listens to a layer that runs whole sequences."""

    tracks: dict[int, str]  # place in the layer's state -> track

    def keep(self, track: str, source: Padded | Outputs) -> None:
        """Hand one run to the recording."""
        self.recording.keep(Take(track, self.layer.kind, self.options, source.layout.lengths, source.initial, source))


@dataclass(slots=True, eq=False)
class CellEar(Ear):
    """Listens to a cell, alone or in a stack."""

    track: str
    stacked: bool = False  # whether it is one of an `hs.Recurrent`'s
    reverse: bool = False
    heard: bool = False  # a step of it has been taken in
    deaf: bool = False  # it turned out to be no cell


@dataclass(slots=True, eq=False)
class StackEar(Ear):
    """Listens to an `hs.Recurrent`, to know where the runs of its cells begin and end."""

    cells: list[CellEar] = field(default_factory=list)
