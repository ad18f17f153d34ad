"""What can be asked of an engine about sessions, by callers that wait and by coroutines."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, cast

from ..errors import BadInput, SessionLost, StateMismatch
from ..state import State, from_bytes
from .exporting import facts_of
from .model import Served
from .session import Session
from .session_operations import Close, Export, Fork, Import, Info, Names, Op, Open, Reset, Ticket

_LONGEST_NAME = 512
ENGINE: Any = object()  # stands for the engine itself, where a session could be named


class Verbs(ABC):
    """Everything but inputs: begin, end, copy, save and look at sessions."""

    _served: Served

    @abstractmethod
    def _now(self, ask: Callable[[Ticket], Op]) -> Any:
        """Do what `ask` makes, and wait for its result."""

    @abstractmethod
    async def _later(self, ask: Callable[[Ticket], Op]) -> Any:
        """Do what `ask` makes, and await its result."""

    @abstractmethod
    def shutdown(self) -> None:
        """Stop."""

    def open(self, session: str | None = None, *, exist_ok: bool = False) -> str:
        """Begin a session and return its name, made up where none is given."""
        return cast(str, self._now(lambda ticket: Open(named(session), ticket, exist_ok=exist_ok)))

    async def aopen(self, session: str | None = None, *, exist_ok: bool = False) -> str:
        """Do as `open`."""
        return cast(str, await self._later(lambda ticket: Open(named(session), ticket, exist_ok=exist_ok)))

    def close(self, session: str = ENGINE) -> None:
        """End a session: its state is gone. Without a session, stop the engine itself, as `shutdown` does."""
        if session is ENGINE:
            self.shutdown()
        else:
            self._now(lambda ticket: Close(checked(session), ticket))

    async def aclose(self, session: str) -> None:
        """End a session."""
        await self._later(lambda ticket: Close(checked(session), ticket))

    def reset(self, session: str) -> None:
        """Let a session start anew from the initial state; the numbering of its inputs goes on."""
        self._now(lambda ticket: Reset(checked(session), ticket))

    async def areset(self, session: str) -> None:
        """Do as `reset`."""
        await self._later(lambda ticket: Reset(checked(session), ticket))

    def fork(self, session: str, target: str | None = None) -> str:
        """Begin another session in the state of this one, and return its name."""
        return cast(str, self._now(lambda ticket: Fork(checked(session), ticket, target=named(target))))

    async def afork(self, session: str, target: str | None = None) -> str:
        """Do as `fork`."""
        return cast(str, await self._later(lambda ticket: Fork(checked(session), ticket, target=named(target))))

    def export(self, session: str) -> bytes:
        """Return a session's state as a safetensors file, with its model and the number of its last input."""
        return cast(bytes, self._now(lambda ticket: Export(checked(session), ticket)))

    async def aexport(self, session: str) -> bytes:
        """Do as `export`."""
        return cast(bytes, await self._later(lambda ticket: Export(checked(session), ticket)))

    def import_(self, session: str, state: bytes | State, *, any_model: bool = False) -> str:
        """Put a session, begun if need be, where an exported one was.

        Args:
            session: Its name.
            state: What `export` gave, or a State of one row, which then is as after no input.
            any_model: Whether to take a file that does not say which model it belongs to, or names another one.
        """
        return cast(str, self._now(lambda ticket: self._read_import(ticket, session, state, any_model=any_model)))

    async def aimport_(self, session: str, state: bytes | State, *, any_model: bool = False) -> str:
        """Do as `import_`."""
        return cast(
            str, await self._later(lambda ticket: self._read_import(ticket, session, state, any_model=any_model))
        )

    def info(self, session: str) -> Session:
        """Tell how far a session has come."""
        return cast(Session, self._now(lambda ticket: Info(checked(session), ticket)))

    async def ainfo(self, session: str) -> Session:
        """Do as `info`."""
        return cast(Session, await self._later(lambda ticket: Info(checked(session), ticket)))

    def sessions(self, prefix: str = "", *, after: str = "", limit: int = 1_000_000) -> list[str]:
        """Return the names of sessions in order: those that begin with `prefix`, from the first after `after` on."""
        return cast("list[str]", self._now(lambda ticket: Names(prefix, ticket, after=after, limit=limit)))

    async def asessions(self, prefix: str = "", *, after: str = "", limit: int = 1_000_000) -> list[str]:
        """Do as `sessions`."""
        return cast("list[str]", await self._later(lambda ticket: Names(prefix, ticket, after=after, limit=limit)))

    def _read_import(self, ticket: Ticket, session: str, state: bytes | State, *, any_model: bool) -> Import:
        facts = None if isinstance(state, State) else facts_of(bytes(state))
        if not isinstance(state, State):
            own = facts is not None and facts["fingerprint"] == self._served.fingerprint
            if not own and not any_model:
                whose = (
                    "does not say which model it belongs to" if facts is None else f"belongs to {facts['fingerprint']}"
                )
                raise SessionLost(
                    f"the state for session {session!r} {whose}, and this model is {self._served.fingerprint}. If you "
                    f"know that it fits, import it with any_model=True.",
                    "model",
                )
            state = from_bytes(bytes(state), source=f"the state for session {session!r}")
        kind = self._served.format
        if state.batch != 1 or not kind.fits(state):
            raise StateMismatch(
                f"the state for session {session!r} is {state!r}, but this model's are one row of {kind!r}."
            )
        facts = facts or {}
        row = None if facts.get("anew") else kind.rows(state)[0]
        return Import(checked(session), ticket, row=row, seq=facts.get("seq", 0), steps=facts.get("steps", 0))


def checked(session: str) -> str:
    """Return a session's name, if it is one."""
    if not isinstance(session, str) or not 0 < len(session) <= _LONGEST_NAME:
        raise BadInput(
            f"the session is {str(session)[:40]!r} ({type(session).__name__}), but a name of 1 to {_LONGEST_NAME} "
            f"characters is needed."
        )
    return session


def named(session: str | None) -> str:
    """Return a session's name, made up where none is given."""
    return uuid.uuid4().hex if session is None else checked(session)


def are_numbers(seqs: Sequence[Any]) -> bool:
    """Say whether these are numbers of inputs, or None."""
    return all([seq is None or (type(seq) is int and seq >= 1) for seq in seqs])
