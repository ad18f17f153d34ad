"""Sessions as a tick needs them: known from the arena, or claimed from the store until changed or returned."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ..errors import ServeError, SessionLost
from .arena import Arena, SessionEntry
from .model import ServedModel
from .session_operations import Close, Export, Import, Info, ListNames, Open, SessionOperation
from .setback import SetBackWatch
from .stores import Busy, Claim, Store

_READ_ONLY = (Info, Export)  # these need one look at their session; a fork needs it to stay as it is meanwhile
_REPLACING = (Open, Import, Close)  # these do not need what is in the store
_RETRY = 0.01  # seconds until another worker's lease is looked at again


class SessionClaims:
    """Looks sessions up, and remembers in a tick which of them are claimed and not changed yet."""

    def __init__(
        self, model: ServedModel, store: Store, arena: Arena, *, delay: Callable[[SessionOperation, float], None]
    ) -> None:
        """Call `delay` with an operation whose session another worker holds, and the seconds to wait."""
        self._model, self._store, self._arena, self._delay = model, store, arena, delay
        self._claimed: dict[str, int] = {}  # session -> token
        self.set_back = SetBackWatch()

    def begin_tick(self) -> None:
        """Begin another tick; forget all sessions where somebody else has written."""
        self._claimed.clear()
        if self._store.others_wrote():
            self.set_back.remember(self._arena, replaced=self._store.replaced)
            self._arena.clear()

    def look_up(self, ops: Sequence[SessionOperation]) -> dict[str, SessionEntry]:
        """Return what is known of each session, from the arena or else from the store; delay those that are busy."""
        entries: dict[str, SessionEntry] = {}
        wanted: list[tuple[SessionOperation, SessionEntry | None]] = []
        shared = self._store.shared
        for op in ops:
            if type(op) is ListNames:
                continue
            entry = self._arena.entry(op.session)
            if entry is not None:
                entry.fingerprint = self._model.fingerprint
            if entry is not None and not shared:
                entries[op.session] = entry
            elif shared and isinstance(op, _READ_ONLY):
                try:
                    row = self._store.read(op.session)
                except SessionLost as error:  # it is damaged
                    op.result, row = error, None
                if row is not None:
                    entries[op.session] = _entry(op.session, Claim(-1, -1, row))
            else:
                wanted.append((op, entry))
        if wanted:
            known = [self.set_back.known(op.session, entry) for op, entry in wanted]
            asked = [(op.session, -1 if k is None else k.version) for (op, _), k in zip(wanted, known, strict=True)]
            for (op, entry), k, claim in zip(wanted, known, self._store.claim(asked), strict=True):
                if isinstance(claim, Busy):
                    self._delay(op, min(claim.seconds, _RETRY))
                elif isinstance(claim, ServeError):
                    op.result = claim
                elif claim is not None and claim.damage is not None:
                    self._note(op.session, claim)
                    self._arena.drop(op.session)
                    if isinstance(op, _REPLACING):
                        damaged = SessionEntry(op.session, claim.token, claim.version, damage=claim.damage)
                        entries[op.session] = damaged
                    else:
                        op.result = claim.damage
                elif claim is None:
                    self._arena.drop(op.session)
                else:
                    if claim.row is None and entry is None:  # it is as it was, but only remembered, not at hand
                        claim = claim._replace(row=self._store.read(op.session))
                    self.set_back.compare(op.session, claim, k)
                    entries[op.session] = self._claim(op.session, claim, entry)
        return entries

    def changed(self, sessions: Iterable[str]) -> None:
        """Note that these sessions were changed, which ended their claims."""
        if self._claimed:
            for session in sessions:
                self._claimed.pop(session, None)

    def end_tick(self) -> None:
        """Give back what was claimed and not changed."""
        if self._claimed:
            self._store.release(list(self._claimed.items()))

    def _note(self, session: str, claim: Claim) -> None:
        if self._store.shared:
            self._claimed[session] = claim.token

    def _claim(self, session: str, claim: Claim, entry: SessionEntry | None) -> SessionEntry:
        self._note(session, claim)
        if claim.row is None:
            assert entry is not None
            entry.token = self._arena.table.token[entry.slot] = claim.token
            return entry
        self._arena.drop(session)
        return _entry(session, claim)


def _entry(session: str, claim: Claim) -> SessionEntry:
    row = claim.row
    assert row is not None
    return SessionEntry(session, claim.token, claim.version, initial=row.state is None, **row._asdict())
