"""The hot states: one tensor for each part, one row for each slot, and who is in which."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..state import State
from .facts import At, Entry, Facts
from .stores import Ints, Lookup

_WHOLE_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Slab:
    """States by slot. A slot belongs to one session from `enter` to `drop`, given away by the engine's thread alone."""

    def __init__(self, like: State, slots: int) -> None:
        """Make room for the states of `slots` sessions, of the kind of `like`."""
        self._axes = dict(like.batch_axis)
        self._parts: dict[str, Tensor] = {}
        for name, part in like.items():
            shape = list(part.shape)
            shape[self._axes[name]] = slots
            self._parts[name] = part.new_zeros(shape)
        self._arrays = {name: array_of(part) for name, part in self._parts.items()}
        self._fresh: tuple[slice, State] | None = None  # the last states written, as long as nobody needs them in place
        self._free = list(range(slots - 1, -1, -1))  # the lowest is given first, so that those in use lie together
        self._names: list[str | None] = [None] * slots
        self.count = slots
        self._where = Lookup()
        self.facts = Facts(slots)

    def __len__(self) -> int:
        """Return how many sessions are at hand."""
        return len(self._where.names)

    def has(self, session: str) -> bool:
        """Say whether a session is at hand."""
        return session in self._where.names

    def entry(self, session: str) -> Entry | None:
        """Return what is known of a session, None where it is not at hand."""
        slot = self._where.names.get(session)
        return None if slot is None else self.facts.entry(session, slot)

    def find(self, sessions: list[str]) -> Ints:
        """Return the slot of each session, -1 where it is not at hand; not to be changed."""
        return self._where.all(sessions)

    def make_room(self, count: int, needed: Collection[str]) -> None:
        """Have `count` slots free: if need be those of the sessions longest unused, but of none among the `needed`."""
        missing = count - len(self._free)
        if missing > 0:
            idle = self.find([session for session in self._where.names if session not in needed])
            for slot in idle[np.argsort(self.facts.used[idle], kind="stable")[:missing]].tolist():
                name = self._names[slot]
                assert name is not None
                self.drop(name)

    def enter(self, entry: Entry) -> None:
        """Give an entry a free slot."""
        entry.slot = self._free.pop()
        self._names[entry.slot] = entry.session
        self._where.add(entry.session, entry.slot)
        self.facts.enter(entry)

    def drop(self, session: str) -> None:
        """Let a session go; the store has its state."""
        slot = self._where.remove(session)
        if slot is not None:
            self._names[slot] = None
            self._free.append(slot)

    def clear(self) -> None:
        """Let all sessions go."""
        for session in list(self._where.names):
            self.drop(session)

    def view(self, at: At) -> State:
        """Return the same as `gather`, not to be changed: where it can be, it is what lies in the slots itself."""
        if not isinstance(at, slice):
            return self.gather(at)
        if self._fresh is not None and self._fresh[0] == at:
            return self._fresh[1]
        self._put_down()
        return State({name: part[_along(self._axes[name], at)] for name, part in self._parts.items()}, self._axes)

    def gather(self, at: At) -> State:
        """Return the states in these slots, as rows in that order, which may be changed: what is in a slot is not."""
        self._put_down()
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

    def scatter(self, at: At, state: State) -> None:
        """Write the rows of `state` to these slots; it is the slab's from now on.

        Often the same sessions come tick after tick: then what one tick leaves, the next one takes, and no slot is
        written at all.
        """
        again = self._fresh is not None and isinstance(at, slice) and self._fresh[0] == at
        if not again:
            self._put_down()
        self._fresh = None
        alike = all((state[n].dtype, state[n].device) == (p.dtype, p.device) for n, p in self._parts.items())
        if isinstance(at, slice) and alike:
            self._fresh = at, state
        else:
            self._write(at, state)

    def _put_down(self) -> None:
        if self._fresh is not None:
            fresh, self._fresh = self._fresh, None
            self._write(*fresh)

    def _write(self, at: At, state: State) -> None:
        for name, part in self._parts.items():
            axis, new = self._axes[name], state[name].to(part)
            held = self._arrays[name]
            if held is not None:
                held[_along(axis, at)] = array_of(new)
            elif isinstance(at, slice):
                part[_along(axis, at)].copy_(new)
            else:
                part.index_copy_(axis, torch.from_numpy(at).to(part.device), new)


# In the processor's memory, states are moved by numpy: torch would put several threads to each of these short copies,
# which costs more than it brings, and far more on a machine that has other things to do.


def array_of(tensor: Tensor) -> Any:
    """Return a view of a tensor in memory, None where it lies elsewhere: other numbers perhaps, but the same bytes."""
    if tensor.device.type != "cpu":
        return None
    plain = tensor.detach().resolve_conj().resolve_neg()
    return (plain if plain.is_complex() else plain.view(_WHOLE_NUMBERS[plain.element_size()])).numpy()


def _take(held: Any, at: At, axis: int, *, into: Any) -> None:
    if isinstance(at, slice):
        into[...] = held[_along(axis, at)]
    else:
        np.take(held, at, axis, out=into, mode="clip")  # which copies straight into `out`


def _along(axis: int, at: At) -> tuple[At, ...]:
    return (*(slice(None),) * axis, at)
