"""Where a session is: in its slot, in the store, or with another worker."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..errors import ServeError
from .arena import Slab
from .facts import Entry, beside
from .inputs import Push
from .model import Served
from .policy import read_state
from .session_operations import Export, Fork, Info, Names, Op
from .stores import Busy, Claim, Store

_LOOK_ONLY = (Info, Export, Fork)  # of the session they are asked of, these change nothing
_RETRY = 0.01  # seconds until another worker's lease is looked at again


class Finding:
    """Looks sessions up, and brings their states to hand."""

    def __init__(self, served: Served, store: Store, slab: Slab, *, wait: Callable[[Op, float], None]) -> None:
        """Look in `slab` and `store`; `wait` lets an operation come again later."""
        self._served, self._store, self._slab, self._wait = served, store, slab, wait
        self.claimed: dict[str, int] = {}  # what a tick has claimed and not yet changed: session -> token

    def look_up(self, ops: list[Op]) -> dict[str, Entry]:
        """Return what is known of each session: from its slot, or else from the store."""
        entries: dict[str, Entry] = {}
        wanted: list[tuple[Op, Entry | None]] = []
        shared = self._store.shared
        for op in ops:
            if type(op) is Names:
                continue
            entry = self._slab.entry(op.session)
            if entry is not None:
                entry.fingerprint = self._served.fingerprint
            if entry is not None and not shared:
                entries[op.session] = entry
            elif shared and isinstance(op, _LOOK_ONLY):
                row = self._store.read(op.session)
                if row is not None:
                    entries[op.session] = _entry(op.session, Claim(-1, -1, row))
            else:
                wanted.append((op, entry))
        if wanted:
            claims = self._store.claim([(op.session, -1 if e is None else e.version) for op, e in wanted])
            for (op, entry), claim in zip(wanted, claims, strict=True):
                if isinstance(claim, Busy):
                    self._wait(op, min(claim.seconds, _RETRY))
                elif claim is None:
                    self._slab.drop(op.session)
                else:
                    entries[op.session] = self._claim(op.session, claim, entry)
        return entries

    def _claim(self, session: str, claim: Claim, entry: Entry | None) -> Entry:
        if self._store.shared:
            self.claimed[session] = claim.token
        if claim.row is None:
            assert entry is not None
            entry.token = self._slab.facts.token[entry.slot] = claim.token
            return entry
        self._slab.drop(session)
        return _entry(session, claim)

    def warm(self, inputs: list[tuple[Push, Entry]]) -> None:
        """Give each session a slot, and bring the states of those that had none into theirs."""
        cold = [one for one in inputs if one[1].slot < 0]
        if not cold:
            return
        self._slab.make_room(len(cold), {push.session for push, _ in inputs})
        slots, rows = [], []
        for one in cold:
            push, entry = one
            try:
                row = None if entry.anew else read_state(self._served, self._store, entry)
            except ServeError as error:
                push.result = error
                inputs.remove(one)
                continue
            self._slab.enter(entry)
            if row is not None:
                slots.append(entry.slot)
                rows.append(row)
            entry.state = None
        if slots:
            self._slab.scatter(beside(np.array(slots)), self._served.format.state(rows))


def _entry(session: str, claim: Claim) -> Entry:
    assert claim.row is not None
    entry = Entry(session, claim.token, claim.version)
    entry.seq, entry.steps, entry.opened, entry.touched, entry.fingerprint, entry.state = claim.row
    entry.anew = entry.state is None
    return entry
