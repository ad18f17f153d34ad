"""The hot states: one tensor for each part, one row for each slot, and who is in which."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from heapq import nsmallest
from typing import NamedTuple

import torch

from ..state import State


class Entry:
    """What is known of a session that is at hand."""

    __slots__ = (
        *("anew", "fingerprint", "opened", "seq", "session"),
        *("slot", "state", "steps", "token", "touched", "used", "version"),
    )

    def __init__(self, session: str, token: int, version: int) -> None:
        """Know nothing yet but how the store knows it."""
        self.session = session
        self.token, self.version = token, version
        self.slot = -1  # none
        self.state: bytes | None = None  # as it came from the store, until it is in its slot
        self.seq = self.steps = 0
        self.opened = self.touched = 0.0
        self.fingerprint = ""
        self.used = 0  # the tick that last had to do with it
        self.anew = True  # it starts from the initial state, and its slot holds nothing


class Slab:
    """States by slot. A slot belongs to one session from `enter` to `drop`, given away by the engine's thread alone."""

    def __init__(self, like: State, slots: int) -> None:
        """Make room for the states of `slots` sessions, of the kind of `like`."""
        self._axes = dict(like.batch_axis)
        self._parts = {}
        for name, part in like.items():
            shape = list(part.shape)
            shape[self._axes[name]] = slots
            self._parts[name] = part.new_zeros(shape)
        self._free = list(range(slots - 1, -1, -1))  # the lowest is given first, so that those in use lie together
        self.slots = slots
        self.entries: dict[str, Entry] = {}

    def __len__(self) -> int:
        """Return how many sessions are at hand."""
        return len(self.entries)

    def has(self, session: str) -> bool:
        """Say whether a session is at hand."""
        return session in self.entries

    def make_room(self, count: int, needed: Collection[str]) -> None:
        """Have `count` slots free: if need be those of the sessions longest unused, but of none among the `needed`."""
        missing = count - len(self._free)
        if missing > 0:
            idle = (entry for entry in self.entries.values() if entry.session not in needed)
            for entry in nsmallest(missing, idle, key=lambda entry: entry.used):
                self.drop(entry.session)

    def enter(self, entry: Entry) -> None:
        """Give an entry a free slot."""
        entry.slot = self._free.pop()
        self.entries[entry.session] = entry

    def drop(self, session: str) -> None:
        """Let a session go; the store has its state."""
        entry = self.entries.pop(session, None)
        if entry is not None:
            self._free.append(entry.slot)
            entry.slot = -1

    def clear(self) -> None:
        """Let all sessions go."""
        for session in list(self.entries):
            self.drop(session)

    def gather(self, slots: Sequence[int]) -> State:
        """Return the states in these slots, as rows in that order."""
        index = self._index(slots)
        parts = {}
        for name, part in self._parts.items():
            axis = self._axes[name]
            if index.rows is None:
                # A copy all the same: a cell may change the state it is given, and what is in a slot must not change.
                parts[name] = part[index.beside(axis)].clone(memory_format=torch.contiguous_format)
            else:
                parts[name] = part.index_select(axis, index.rows)
        return State(parts, self._axes)

    def scatter(self, slots: Sequence[int], state: State) -> None:
        """Write the rows of `state` to these slots."""
        index = self._index(slots)
        for name, part in self._parts.items():
            axis = self._axes[name]
            if index.rows is None:
                part[index.beside(axis)].copy_(state[name])
            else:
                part.index_copy_(axis, index.rows, state[name].to(part))

    def _index(self, slots: Sequence[int]) -> _Slots:
        count = len(slots)
        if count and slots[-1] - slots[0] == count - 1 and list(slots) == list(range(slots[0], slots[0] + count)):
            return _Slots(slots[0], slots[0] + count, None)
        device = next(iter(self._parts.values())).device
        return _Slots(0, 0, torch.tensor(slots, dtype=torch.int64, device=device))


class _Slots(NamedTuple):
    """Slots that lie side by side, in order; or else their numbers."""

    first: int
    end: int
    rows: torch.Tensor | None

    def beside(self, axis: int) -> tuple[slice, ...]:
        return (*(slice(None),) * axis, slice(self.first, self.end))
