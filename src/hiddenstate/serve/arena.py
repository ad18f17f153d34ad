"""The arena: the states of the sessions in memory, one row per slot, and what is known of each of these sessions.

It belongs to the tick: nothing else reads or writes a slot. The store has every state that is here, so a session may be
dropped at any time.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ..state import State
from .stores import Floats, Ints, Lookup

Slots: TypeAlias = "slice | Ints"  # a range of slots, or any slots in any order

_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(slots=True, eq=False)
class SessionEntry:
    """What is known of one session."""

    session: str
    token: int  # the store's, to be shown with a change
    version: int  # the store's
    slot: int = -1  # none
    seq: int = 0  # of the last input applied
    steps: int = 0  # applied in all
    opened: float = 0.0
    touched: float = 0.0
    fingerprint: str = ""  # of the model that the state belongs to
    state: bytes | None = None  # as read from the store, until it is in a slot
    initial: bool = True  # it starts from the initial state, and its slot holds nothing
    used: int = 0  # the last tick that used it
    damage: Exception | None = None  # why its row cannot be read, and nothing of the above is known


_COLUMNS = ("token", "version", "seq", "steps", "opened", "touched", "initial", "used")


class SessionTable:
    """The entries of all sessions that have a slot, as columns by slot: a tick reads and writes hundreds at once.

    There is no column for the fingerprint: all of these sessions belong to the model that is served.
    """

    def __init__(self, slots: int) -> None:
        """Make columns of this length."""
        self.token: Ints = np.zeros(slots, np.int64)
        self.version: Ints = np.zeros(slots, np.int64)
        self.seq: Ints = np.zeros(slots, np.int64)
        self.steps: Ints = np.zeros(slots, np.int64)
        self.opened: Floats = np.zeros(slots)
        self.touched: Floats = np.zeros(slots)
        self.initial = np.ones(slots, bool)
        self.used: Ints = np.zeros(slots, np.int64)

    def write(self, entry: SessionEntry) -> None:
        """Copy the entry of a session into its slot."""
        for name in _COLUMNS:
            getattr(self, name)[entry.slot] = getattr(entry, name)

    def read(self, session: str, slot: int) -> SessionEntry:
        """Return the entry of the session in a slot, without its fingerprint."""
        return SessionEntry(session, slot=slot, **{name: getattr(self, name)[slot].item() for name in _COLUMNS})

    def advance(self, slots: Slots, versions: Ints, *, inputs: int, steps: int, now: float) -> None:
        """Note that `inputs` inputs with `steps` steps in all were applied to each of these sessions."""
        self.token[slots] = self.version[slots] = versions
        self.seq[slots] += inputs
        self.steps[slots] += steps
        self.touched[slots] = now
        self.initial[slots] = False


class Arena:
    """States by slot. A slot belongs to one session from `enter` to `drop`."""

    def __init__(self, like: State, slots: int) -> None:
        """Allocate `slots` rows for states like this one."""
        self._axes = dict(like.batch_axis)
        self._parts: dict[str, Tensor] = {}
        for name, part in like.items():
            shape = list(part.shape)
            shape[self._axes[name]] = slots
            self._parts[name] = part.new_zeros(shape)
        self._arrays = {name: array_of(part) for name, part in self._parts.items()}
        self._unwritten: tuple[slice, State] | None = None  # the last states, as long as nobody needs them in place
        self._free = list(range(slots - 1, -1, -1))  # the lowest is given first, so that slots in use are neighbors
        self._names: list[str | None] = [None] * slots
        self._slots = Lookup()
        self.size = slots
        self.table = SessionTable(slots)

    def __len__(self) -> int:
        """Return how many sessions have a slot."""
        return len(self._slots.names)

    def has(self, session: str) -> bool:
        """Return whether a session has a slot."""
        return session in self._slots.names

    def entry(self, session: str) -> SessionEntry | None:
        """Return what is known of a session, None where it has no slot."""
        slot = self._slots.names.get(session)
        return None if slot is None else self.table.read(session, slot)

    @property
    def sessions(self) -> list[str]:
        """The sessions that have a slot."""
        return list(self._slots.names)

    def find(self, sessions: list[str]) -> Ints:
        """Return the slot of each session, -1 where it has none; not to be changed."""
        return self._slots.all(sessions)

    def make_room(self, count: int, needed: Collection[str]) -> None:
        """Free at least `count` slots by dropping the sessions unused for longest, but none of the `needed` ones."""
        missing = count - len(self._free)
        if missing > 0:
            idle = self.find([session for session in self._slots.names if session not in needed])
            for slot in idle[np.argsort(self.table.used[idle], kind="stable")[:missing]].tolist():
                name = self._names[slot]
                assert name is not None
                self.drop(name)

    def enter(self, entry: SessionEntry) -> None:
        """Give a session a free slot."""
        entry.slot = self._free.pop()
        self._names[entry.slot] = entry.session
        self._slots.add(entry.session, entry.slot)
        self.table.write(entry)

    def drop(self, session: str) -> None:
        """Free the slot of a session, if it has one."""
        slot = self._slots.remove(session)
        if slot is not None:
            self._names[slot] = None
            self._free.append(slot)

    def clear(self) -> None:
        """Drop all sessions."""
        for session in list(self._slots.names):
            self.drop(session)

    def view(self, at: Slots) -> State:
        """Return the same as `gather`, not to be changed: where possible a view of the slots themselves."""
        if not isinstance(at, slice):
            return self.gather(at)
        if self._unwritten is not None and self._unwritten[0] == at:
            return self._unwritten[1]
        self._flush()
        return State({name: part[_along(self._axes[name], at)] for name, part in self._parts.items()}, self._axes)

    def gather(self, at: Slots) -> State:
        """Return a copy of the states in these slots, as rows in that order."""
        self._flush()
        count = at.stop - at.start if isinstance(at, slice) else len(at)
        parts = {}
        for name, part in self._parts.items():
            axis, held = self._axes[name], self._arrays[name]
            if held is not None:
                parts[name] = part.new_empty((*part.shape[:axis], count, *part.shape[axis + 1 :]))
                _take(held, at, axis, into=array_of(parts[name]))
            elif isinstance(at, slice):
                parts[name] = part[_along(axis, at)].clone(memory_format=torch.contiguous_format)
            else:
                parts[name] = part.index_select(axis, torch.from_numpy(at).to(part.device))
        return State(parts, self._axes)

    def scatter(self, at: Slots, state: State) -> None:
        """Write the rows of `state` to these slots; nobody else may change it from now on.

        Often the same sessions come tick after tick: then one tick's states are handed to the next one as they are, and
        no slot is written at all.
        """
        again = self._unwritten is not None and isinstance(at, slice) and self._unwritten[0] == at
        if not again:
            self._flush()
        self._unwritten = None
        alike = all((state[n].dtype, state[n].device) == (p.dtype, p.device) for n, p in self._parts.items())
        if isinstance(at, slice) and alike:
            self._unwritten = at, state
        else:
            self._write(at, state)

    def _flush(self) -> None:
        if self._unwritten is not None:
            unwritten, self._unwritten = self._unwritten, None
            self._write(*unwritten)

    def _write(self, at: Slots, state: State) -> None:
        for name, part in self._parts.items():
            axis, new = self._axes[name], state[name].to(part)
            held = self._arrays[name]
            if held is not None:
                held[_along(axis, at)] = array_of(new)
            elif isinstance(at, slice):
                part[_along(axis, at)].copy_(new)
            else:
                part.index_copy_(axis, torch.from_numpy(at).to(part.device), new)


# On the CPU, states are copied by numpy: torch would use several threads for each of these short copies, which costs
# more than it gains, and far more on a busy machine.


def array_of(tensor: Tensor) -> Any:
    """Return a numpy view of a CPU tensor, perhaps of another dtype of the same size; None on any other device."""
    if tensor.device.type != "cpu":
        return None
    plain = tensor.detach().resolve_conj().resolve_neg()
    return (plain if plain.is_complex() else plain.view(_SAME_SIZE[plain.element_size()])).numpy()


def _take(held: Any, at: Slots, axis: int, *, into: Any) -> None:
    if isinstance(at, slice):
        into[...] = held[_along(axis, at)]
    else:
        np.take(held, at, axis, out=into, mode="clip")  # which copies straight into `out`


def _along(axis: int, at: Slots) -> tuple[Slots, ...]:
    return (*(slice(None),) * axis, at)


def as_slots(slots: Ints) -> Slots:
    """Return consecutive slots as a slice, since most of a large tick's are, and all others as they are."""
    if len(slots) and slots[-1] - slots[0] == len(slots) - 1 and bool((slots[1:] > slots[:-1]).all()):
        return slice(int(slots[0]), int(slots[-1]) + 1)
    return slots
