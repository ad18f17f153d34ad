"""One run of one track: where its values come from, and the Trajectory they make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from ..state import State
from .trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class Options:
    """What a recording keeps of each run."""

    gates: bool = False
    grads: bool = False
    every: int = 1
    dtype: torch.dtype | None = None
    device: torch.device | None = None

    def keep(self, values: Tensor) -> Tensor:
        """Return `(time, batch, unit)` as the recording stores it."""
        return self.cast(values[:: self.every] if self.every > 1 else values)

    def cast(self, values: Tensor) -> Tensor:
        """Return values where and as the recording stores them; integers stay integers."""
        if self.dtype is None and self.device is None:
            return values
        dtype = self.dtype if values.is_floating_point() else None
        return values.to(device=self.device, dtype=dtype)


class Source(Protocol):
    """Something that knows the values of a run, all `(time, batch, unit)` and in memory of their own."""

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
class Take:
    """One run of one track."""

    track: str
    kind: str
    options: Options
    lengths: Tensor  # (batch,) int64: steps that were run, before `every`
    initial: Mapping[str, Tensor]  # part -> (batch, unit); empty where nobody knows
    source: Source | None  # let go as soon as all has been worked out
    thinned: bool = False  # the source has left out steps already
    run: int = 0  # its number among those of its track, and of the piece among those of the run, where it is on disk
    piece: int = 0
    _values: dict[str, Tensor] = field(default_factory=dict)

    def settle(self) -> Take:
        """Work out all values now, and let go of what they came from; gradients may still arrive."""
        self.values()
        return self

    def values(self) -> dict[str, Tensor]:
        """Return all that was recorded by flat names, `(time, batch, unit)`: `h`, `c`, `gates.input`, `grads.h`."""
        keep = self.options.cast if self.thinned else self.options.keep
        if not self._values and self.source is not None:
            found = {f"states.{name}": keep(part) for name, part in self.source.states().items()}
            if self.options.gates:
                found |= {f"gates.{name}": keep(gate) for name, gate in self.source.gates.items()}
            if (
                self.options.every > 1 and not self.thinned
            ):  # a slice would hold on to all the steps that nobody asked for
                found = {name: value.clone() for name, value in found.items()}
            self._values = found
        if not self.options.grads:
            self.source = None
        if self.source is None:
            return self._values
        return self._values | {f"grads.{n}": keep(g) for n, g in self.source.grads().items()}

    def waits(self) -> bool:
        """Say whether gradients that were asked for may still come."""
        return self.options.grads and self.source is not None and self.source.expects_grads()

    @property
    def nbytes(self) -> int:
        """The bytes of all values."""
        return sum(value.nbytes for value in self.values().values())

    def entries(self) -> dict[str, Tensor]:
        """Return all that a file needs to hold, by flat names."""
        initial = {f"initial.{name}": self.options.cast(part) for name, part in self.initial.items()}
        return {**self.values(), **initial, "lengths": self.lengths}

    def trajectory(self) -> Trajectory:
        """Return the run as a Trajectory."""
        every = self.options.every
        initial = {name: self.options.cast(part) for name, part in self.initial.items()}
        return assemble(
            self.values(),
            initial,
            lengths=(self.lengths + every - 1) // every,
            track=self.track,
            kind=self.kind,
            every=every,
        )


def assemble(
    values: Mapping[str, Tensor], initial: Mapping[str, Tensor], *, lengths: Tensor, track: str, kind: str, every: int
) -> Trajectory:
    """Return the Trajectory that flat values make."""
    groups: dict[str, dict[str, Tensor]] = {"states": {}, "gates": {}, "grads": {}}
    for name, value in values.items():
        group, _, short = name.partition(".")
        groups[group][short] = value.transpose(0, 1)
    states = groups["states"]
    first = "h" if "h" in states else next(iter(states))
    h = states[first]
    return Trajectory(
        h=h,
        lengths=lengths.to(h.device),
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
