"""What all routes share: the engine, who is calling, and what they may do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import HTTPException, Request, WebSocket

from ...errors import BadInput
from ..engine import Engine
from .limits import Limits, Rate, Tokens, authorization_of

LONGEST_NAME = 256


class Desk:
    """An engine behind tokens and limits. A caller's sessions lie under its own name, out of reach of all others."""

    def __init__(
        self, engine: Engine, *, tokens: Mapping[str, str] | Sequence[str] | None = None, limits: Limits | None = None
    ) -> None:
        """Serve `engine` to the holders of `tokens`, to everybody where that is None."""
        self.engine = engine
        self.limits = limits or Limits()
        self.draining = False
        self._tokens = Tokens(tokens)
        self._rate = Rate(self.limits.new_sessions)

    def caller(self, connection: Request | WebSocket) -> str:
        """Return the name of whoever calls."""
        name = self._tokens.caller(authorization_of(connection))
        if name is None:
            raise HTTPException(
                401, "a bearer token is needed that this server knows.", headers={"www-authenticate": "Bearer"}
            )
        connection.state.caller = name
        return name

    def key(self, caller: str, session: str) -> str:
        """Return the name under which the engine knows a caller's session."""
        if not 0 < len(session) <= LONGEST_NAME or not session.isprintable():
            raise BadInput(f"the name of a session has 1 to {LONGEST_NAME} printable characters.")
        return f"{caller}:{session}" if caller else session

    def name(self, caller: str, key: str) -> str:
        """Return the name under which the caller knows it."""
        return key.removeprefix(f"{caller}:") if caller else key

    def admit_new(self, caller: str) -> None:
        """Let a caller begin one more session, if it has not begun too many just now."""
        if not self._rate.take(caller):
            raise HTTPException(
                429, f"more than {self.limits.new_sessions:g} new sessions a second.", headers={"retry-after": "1"}
            )

    def check_steps(self, x: Any) -> None:
        """Refuse an input of too many steps."""
        shape = self.engine.step_shape
        steps = x.shape[0] if x.dim() > len(shape) else 1
        if steps > self.limits.steps:
            raise HTTPException(413, f"the input has {steps} steps, and at most {self.limits.steps} are taken at once.")
