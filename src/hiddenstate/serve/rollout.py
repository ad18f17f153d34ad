"""Rolling out a new version of a model: which sessions a worker serves, and how older ones are migrated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

from ..errors import BadInput, Overloaded, ServeError, SessionLost
from ..state import Format, State, from_bytes
from .arena import SessionEntry
from .session import version_of

Migrate: TypeAlias = "Callable[[State], State] | Literal['drain'] | None"


class Rollout:
    """The version that a worker serves, and what becomes of sessions of other ones."""

    def __init__(self, version: int | None, migrate: Migrate) -> None:
        """Move older sessions on by `migrate`, leave them to other workers with "drain", or refuse them with None."""
        if version is not None and (type(version) is not int or version < 0):
            raise BadInput(f"version is {version!r}, but a number that rises from one version to the next is needed.")
        if not (migrate is None or migrate == "drain" or callable(migrate)):
            raise BadInput(f"migrate is {migrate!r}, but a function from State to State, 'drain' or None is needed.")
        if migrate is not None and version is None:
            what = "'drain'" if migrate == "drain" else "a function"
            raise BadInput(f"migrate is {what}, so a version is needed that tells older sessions from newer ones.")
        self.version, self._migrate = version, migrate

    def fingerprint(self, model: str) -> str:
        """Return the fingerprint of a model with its version in front."""
        return model if self.version is None else f"v{self.version}-{model}"

    def adopts(self, fingerprint: str, own: str) -> bool:
        """Return whether a session of the same model from before it had a version counts as one of this version."""
        return self.fingerprint(fingerprint) == own

    def moves(self, fingerprint: str) -> bool:
        """Return whether sessions with this fingerprint, which is another one, are moved on by this worker.

        Older ones alone: two models of one version would hand a session to and fro.
        """
        other = version_of(fingerprint)
        return callable(self._migrate) and self.version is not None and (other is None or other < self.version)

    def migrated(self, entry: SessionEntry, form: Format) -> bytes | None:
        """Return the state of a session as this version needs it, None for the initial state."""
        if entry.initial:
            return None
        assert callable(self._migrate)
        assert entry.state is not None
        whose = f"session {entry.session!r}, of version {version_of(entry.fingerprint)},"
        try:
            state = self._migrate(from_bytes(entry.state, source=f"the stored state of session {entry.session!r}"))
        except Exception as error:  # whatever a user's function raises
            raise SessionLost(
                f"{whose} was not moved on, since migrate raised {type(error).__name__}: {error}. It is as it was.",
                "model",
            ) from error
        if not isinstance(state, State) or state.batch != 1 or not form.fits(state):
            raise SessionLost(
                f"{whose} was not moved on, since migrate gave {state!r}, and this model's states are one row of "
                f"{form!r}. It is as it was.",
                "model",
            )
        spoilt = [name for name, part in state.items() if part.is_floating_point() and bool(part.isnan().any())]
        if spoilt:
            raise SessionLost(
                f"{whose} was not moved on, since migrate gave NaN in {', '.join(spoilt)}. It is as it was.", "model"
            )
        return form.rows(state)[0]

    def refusal(self, entry: SessionEntry, own: str) -> ServeError:
        """Return the error for a session of another version that this worker does not serve."""
        other = version_of(entry.fingerprint)
        named = f"session {entry.session!r} is of version {other}"
        if self.newer(entry.fingerprint):
            still = "a model without a version" if self.version is None else self.version
            return Overloaded(
                f"{named}, and this worker still serves {still}: another one has moved it on. Ask again: a worker of "
                f"the new version will answer. Where there is none, serve with version={other} or a higher one."
            )
        if other is not None and other == self.version:
            return SessionLost(
                f"{named}, but of another model ({entry.fingerprint}) than the one that this worker serves as that "
                f"version ({own}). A changed model, or a changed setting of it, needs a higher version: then "
                f"Engine(migrate=...) can move sessions on, once. Or let it start anew: reset({entry.session!r}).",
                "model",
            )
        if self._migrate == "drain":
            return Overloaded(
                f"{named}, which is being drained, and this worker serves {self.version}. Ask again: a worker that "
                f"serves it to its end will answer."
            )
        return SessionLost(
            f"session {entry.session!r} belongs to another model ({entry.fingerprint}) than the one served now "
            f"({own}): its state means nothing to this one. Serve that model again, move its sessions on with "
            f"Engine(migrate=...), or let the session start anew with reset({entry.session!r}).",
            "model",
        )

    def newer(self, fingerprint: str) -> bool:
        """Return whether this is the fingerprint of a later version; of any, where this worker serves without one."""
        other = version_of(fingerprint)
        return other is not None and (self.version is None or other > self.version)
