"""The hot states: one tensor for each part, one row for each slot, and who is in which."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence

import torch

from ..state import State


class Entry:
    """What is known of a session that is at hand."""

    __slots__ = (
        *("anew", "fingerprint", "opened", "seq", "session"),
        *("slot", "state", "steps", "token", "touched", "version"),
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
        self._free = list(range(slots))
        self.slots = slots
        self._entries: OrderedDict[str, Entry] = OrderedDict()  # the one longest unused first

    def __len__(self) -> int:
        """Return how many sessions are at hand."""
        return len(self._entries)

    def has(self, session: str) -> bool:
        """Say whether a session is at hand."""
        return session in self._entries

    def get(self, session: str) -> Entry | None:
        """Return a session that is at hand, and note that it is used."""
        entry = self._entries.get(session)
        if entry is not None:
            self._entries.move_to_end(session)
        return entry

    def enter(self, entry: Entry, needed: Collection[str]) -> None:
        """Give an entry a slot: if need be that of the session longest unused, but of none among the `needed`."""
        if not self._free:
            self.drop(next(name for name in self._entries if name not in needed))
        entry.slot = self._free.pop()
        self._entries[entry.session] = entry

    def drop(self, session: str) -> None:
        """Let a session go; the store has its state."""
        entry = self._entries.pop(session, None)
        if entry is not None:
            self._free.append(entry.slot)
            entry.slot = -1

    def clear(self) -> None:
        """Let all sessions go."""
        for session in list(self._entries):
            self.drop(session)

    def gather(self, slots: Sequence[int]) -> State:
        """Return the states in these slots, as rows in that order."""
        parts = {}
        for name, part in self._parts.items():
            index = torch.tensor(slots, dtype=torch.int64, device=part.device)
            parts[name] = part.index_select(self._axes[name], index)
        return State(parts, self._axes)

    def scatter(self, slots: Sequence[int], state: State) -> None:
        """Write the rows of `state` to these slots."""
        for name, part in self._parts.items():
            index = torch.tensor(slots, dtype=torch.int64, device=part.device)
            part.index_copy_(self._axes[name], index, state[name].to(part))
