"""What is known of the sessions at hand, column by column: a tick reads and writes it for hundreds at once."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from .stores import Floats, Ints

At: TypeAlias = "slice | Ints"  # slots: those from one to another, or any


class Entry:
    """What is known of one session."""

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


class Facts:
    """The same of all sessions that have a slot, by slot. All of them belong to the model that is served."""

    def __init__(self, slots: int) -> None:
        """Make room for as many."""
        self.token: Ints = np.zeros(slots, np.int64)
        self.version: Ints = np.zeros(slots, np.int64)
        self.seq: Ints = np.zeros(slots, np.int64)
        self.steps: Ints = np.zeros(slots, np.int64)
        self.used: Ints = np.zeros(slots, np.int64)
        self.opened: Floats = np.zeros(slots)
        self.touched: Floats = np.zeros(slots)
        self.anew = np.ones(slots, bool)

    def enter(self, entry: Entry) -> None:
        """Take over what is known of a session that has got a slot."""
        slot = entry.slot
        self.token[slot], self.version[slot] = entry.token, entry.version
        self.seq[slot], self.steps[slot], self.used[slot] = entry.seq, entry.steps, entry.used
        self.opened[slot], self.touched[slot], self.anew[slot] = entry.opened, entry.touched, entry.anew

    def entry(self, session: str, slot: int) -> Entry:
        """Return what is known of the session in a slot, but for its fingerprint."""
        entry = Entry(session, int(self.token[slot]), int(self.version[slot]))
        entry.slot, entry.anew, entry.used = slot, bool(self.anew[slot]), int(self.used[slot])
        entry.seq, entry.steps = int(self.seq[slot]), int(self.steps[slot])
        entry.opened, entry.touched = float(self.opened[slot]), float(self.touched[slot])
        return entry

    def advance(self, slots: At, versions: Ints, *, inputs: int, steps: int, now: float) -> None:
        """Note that each of these has come so many inputs and steps further."""
        self.token[slots] = self.version[slots] = versions
        self.seq[slots] += inputs
        self.steps[slots] += steps
        self.touched[slots] = now
        self.anew[slots] = False


def beside(slots: Ints) -> At:
    """Return slots that lie side by side, in order, as a slice: most of a large tick's do."""
    if len(slots) and slots[-1] - slots[0] == len(slots) - 1 and bool((slots[1:] > slots[:-1]).all()):
        return slice(int(slots[0]), int(slots[-1]) + 1)
    return slots
