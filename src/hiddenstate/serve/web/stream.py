"""The WebSocket route: inputs in and outputs out as they come, several under way at once.

A binary frame is the number of the input (8 bytes, little-endian; 0: the next one), then its steps as raw bytes in the
model's dtype. The answer is a binary frame with that number, then the output: raw bytes where the model gives one
tensor, else a safetensors file. A text frame is a JSON object with a `type`:

    to the server      {"type": "push", "x": …, "seq": …, "timeout": …}  {"type": "reset"}
                       {"type": "info"}  {"type": "eof"}
    from the server    {"type": "ready", "seq": …, …}  {"type": "output", "seq": …, "y": …}  {"type": "reset"}
                       {"type": "eof", "seq": …}  {"type": "error", "kind": …, "message": …, …}

A client that reconnects learns from `ready` the last input applied, and repeats those it has no answer to: the ones
that were applied are answered again, the others are applied.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from fastapi import APIRouter, HTTPException, WebSocket, WebSocketDisconnect

from ...errors import BadInput, HiddenStateError
from ..session_operations import Push, outcomes, when_answered
from ..wire import from_json, named_tensors, pack, parse_json, to_json
from .callers import Caller
from .gateway import Gateway, numbers_in, off_loop
from .http_errors import facts_of, status_of

router = APIRouter()

_REFUSED = 4000  # plus the HTTP status: 4401 is no token, 4404 no such session, 4503 a store that is gone
_SEQ_BYTES = 8
_LOOK_AGAIN = 1.0  # seconds after which it is looked whether the caller's token is still known
_Answer: TypeAlias = "list[Push] | Awaitable[str | bytes]"  # inputs that will have results, or a frame to come


@router.websocket("/v1/sessions/{session}/stream")
async def stream(socket: WebSocket, session: str) -> None:
    """Serve one session until the client ends the stream."""
    gateway: Gateway = socket.app.state.gateway
    asked = socket.scope.get("subprotocols", [])
    await socket.accept(subprotocol=asked[0] if asked else None)
    try:
        caller = gateway.caller(socket)
        key = gateway.key(caller, session)
        with gateway.stream_of(caller):
            if socket.query_params.get("open", "").lower() in ("1", "true"):
                await gateway.begin(caller, key, exist_ok=True)
            await gateway.engine.ainfo(key)  # which raises where there is no such session
            await StreamConnection(socket, gateway, caller, key).run()
    except HTTPException as error:
        await _refuse(socket, {"kind": "HTTP", "message": error.detail}, error.status_code)
    except HiddenStateError as error:
        await _refuse(socket, facts_of(error, socket), status_of(error))


async def _refuse(socket: WebSocket, facts: dict[str, Any], status: int) -> None:
    try:
        await socket.send_text(json.dumps({"type": "error", **facts}))
        await socket.close(_REFUSED + status)
    except (WebSocketDisconnect, RuntimeError):
        return


class StreamConnection:
    """One stream: a reader that queues inputs as they come, and a writer that answers in their order."""

    def __init__(self, socket: WebSocket, gateway: Gateway, caller: Caller, key: str) -> None:
        """Connect `socket` to the session that the engine knows as `key`."""
        self._socket, self._gateway, self._caller, self._key = socket, gateway, caller, key
        self._answers: deque[_Answer | None] = deque()  # to be sent, in order; None: the end
        self._frames: list[tuple[memoryview, int | None]] = []  # received together, and not queued yet
        self._window = max(1, gateway.limits.window)
        self._under_way = 0
        self._look_again, self._revoked = time.monotonic() + _LOOK_AGAIN, False
        self._has_rate = (caller.inputs or gateway.limits.inputs) < math.inf
        self._changed: asyncio.Future[None] | None = None  # what reader and writer wait on
        self._step_bytes = gateway.engine.dtype.itemsize * math.prod(gateway.engine.step_shape)
        self._commands: dict[str, Callable[[dict[str, Any]], Awaitable[str | bytes]]] = {
            "push": self._push_json,
            "reset": self._reset,
            "info": self._ready,
        }

    async def run(self) -> None:
        """Write answers until the client sends `eof` or is gone."""
        reader = asyncio.ensure_future(self._read())
        try:
            await self._socket.send_text(await self._ready({}))
            while (answer := await self._next()) is not None:
                if isinstance(answer, list):
                    await self._send_all(answer)
                else:
                    text = await self._settled(answer)
                    await (self._socket.send_text(text) if isinstance(text, str) else self._socket.send_bytes(text))
                    self._done(1)
            if self._revoked:
                raise HTTPException(401, "the bearer token of this stream is no longer one that this server knows.")
            if not reader.result():
                return
            seq = (await self._gateway.engine.ainfo(self._key)).seq
            await self._socket.send_text(json.dumps({"type": "eof", "seq": seq}))
            await self._socket.close()
        except (WebSocketDisconnect, RuntimeError) as error:
            if isinstance(error, HiddenStateError):  # the session, or the store, is no longer there
                raise
            return  # the client is gone: what it sent is applied, and it may come back for the answers
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            self._abandon()

    async def _read(self) -> bool:
        """Read frames until the end; return whether the client ended the stream itself."""
        try:
            while True:
                frame = await self._socket.receive()
                if frame["type"] != "websocket.receive":
                    return False
                if time.monotonic() > self._look_again:
                    self._look_again = time.monotonic() + _LOOK_AGAIN
                    if not self._gateway.knows(self._caller, self._socket):
                        self._revoked = True
                        return False
                while self._has_rate and (wait := self._gateway.input_wait(self._caller)):
                    await asyncio.sleep(wait)  # not reading is how a stream is told to be slower
                data, text = frame.get("bytes"), frame.get("text")
                if data is not None:
                    self._push_bytes(data)
                else:
                    self._flush()
                    answer = await self._command(text or "")
                    if answer is None:
                        return True
                    # A task queues its operation when it first runs, which must be before the next frame is read.
                    await asyncio.sleep(0)
                    self._answer(answer)
                self._under_way += 1
                # Do not read from a client that does not read its answers.
                while self._under_way >= self._window:
                    await self._change()
        finally:
            self._flush()
            self._answer(None)

    async def _next(self) -> _Answer | None:
        while not self._answers:
            await self._change()
        return self._answers.popleft()

    def _answer(self, answer: _Answer | None) -> None:
        self._answers.append(answer)
        self._notify()

    def _done(self, count: int) -> None:
        self._under_way -= count
        self._notify()

    async def _change(self) -> None:
        """Wait until an answer was queued or sent, for which the writer or the reader is waiting."""
        if self._changed is None:
            self._changed = asyncio.get_running_loop().create_future()
        await self._changed

    def _notify(self) -> None:
        changed, self._changed = self._changed, None
        if changed is not None and not changed.done():
            changed.set_result(None)

    async def _command(self, text: str) -> Awaitable[str | bytes] | None:
        """Begin what a text frame asks for, and return its answer; None for the end."""
        try:
            self._limited(self._gateway.check_json, len(text))
            content = await off_loop(len(text), parse_json, text)
            kind = content.get("type") if isinstance(content, dict) else None
            if kind == "eof":
                return None
            command = self._commands.get(kind) if isinstance(kind, str) else None
            if command is None:
                raise BadInput('a text frame is a JSON object with a "type": push, reset, info or eof.')
            return asyncio.ensure_future(command(content))
        except HiddenStateError as error:
            return _failed(error)

    def _push_bytes(self, data: bytes) -> None:
        """Take a binary frame; all those that come in one turn of the event loop are queued together."""
        try:
            seq = int.from_bytes(data[:_SEQ_BYTES], "little")
            size = len(data) - _SEQ_BYTES
            if size < 0 or seq >= 2**62:
                raise BadInput(f"a binary frame begins with the number of the input, {_SEQ_BYTES} bytes.")
            if size > self._gateway.limits.steps * self._step_bytes:
                raise BadInput(
                    f"the frame has more steps than the {self._gateway.limits.steps} that are taken at most."
                )
            if not size or size % self._step_bytes:
                raise BadInput(
                    f"the frame has {size} bytes of input, but a step has {self._step_bytes}, "
                    f"and one or more are needed."
                )
        except HiddenStateError as error:
            self._flush()
            self._answer(_failed(error))
            return
        if not self._frames:
            asyncio.get_running_loop().call_soon(self._flush)
        self._frames.append((memoryview(data)[_SEQ_BYTES:], seq or None))

    def _flush(self) -> None:
        if self._frames:
            frames, self._frames = self._frames, []
            try:
                pushes = self._gateway.engine.submit_raw(self._key, frames)
            except HiddenStateError as error:
                for _ in frames:
                    self._answer(_failed(error))
                return
            self._answers.append(pushes)
            when_answered(pushes, self._notify)  # not now: the writer would wake only to wait again

    async def _send_all(self, pushes: list[Push]) -> None:
        engine, send = self._gateway.engine, self._socket.send_bytes
        for push, outcome in zip(pushes, await outcomes(pushes), strict=True):
            if isinstance(outcome, HiddenStateError):
                facts = facts_of(outcome, self._socket)
                await self._socket.send_text(json.dumps({"type": "error", **facts}))
                continue
            body = engine.output_raw(outcome)
            if body is None:
                body = pack(named_tensors(engine.output(outcome)))
            assert push.seq is not None
            await send(push.seq.to_bytes(_SEQ_BYTES, "little") + body)
        self._done(len(pushes))

    async def _push_json(self, content: dict[str, Any]) -> str:
        seq = content.get("seq")
        if seq is not None and (type(seq) is not int or not 1 <= seq < 2**62):
            raise BadInput(f"seq is {str(seq)[:40]}, but inputs are numbered from 1 on.")
        x = from_json(content.get("x"), self._gateway.engine.dtype, depth=len(self._gateway.engine.step_shape) + 1)
        self._limited(self._gateway.check_steps, x)
        timeout = content.get("timeout")
        if timeout is not None and not (type(timeout) in (int, float) and 0 < timeout < math.inf):
            raise BadInput(f"timeout is {str(timeout)[:40]}, but a number of seconds above 0 is needed.")
        push = self._gateway.engine.submit(self._key, x, seq)
        output = self._gateway.engine.output(await push.outcome(timeout))
        answer = {"type": "output", "seq": push.seq, "y": output}
        return (await off_loop(numbers_in(output), to_json, answer)).decode()

    async def _reset(self, content: dict[str, Any]) -> str:
        await self._gateway.engine.areset(self._key)
        return json.dumps({"type": "reset"})

    async def _ready(self, content: dict[str, Any]) -> str:
        engine = self._gateway.engine
        info = await engine.ainfo(self._key)
        facts = {"seq": info.seq, "steps": info.steps, "window": self._window}
        shape, dtype = list(engine.step_shape), str(engine.dtype).removeprefix("torch.")
        return json.dumps({"type": "ready", **facts, "step_shape": shape, "dtype": dtype, "outputs": engine.outputs})

    def _limited(self, check: Callable[[Any], None], what: Any) -> None:
        try:
            check(what)
        except HTTPException as error:
            raise BadInput(str(error.detail)) from None

    async def _settled(self, answer: Awaitable[str | bytes]) -> str | bytes:
        try:
            return await answer
        except HiddenStateError as error:
            return json.dumps({"type": "error", **facts_of(error, self._socket)})
        except TimeoutError as error:  # of an input that is under way
            return json.dumps({"type": "error", "kind": "TimeoutError", "message": str(error)})

    def _abandon(self) -> None:
        """Cancel answers that nobody will read."""
        for answer in self._answers:
            if isinstance(answer, asyncio.Future):
                answer.cancel()
            elif asyncio.iscoroutine(answer):
                answer.close()
        self._answers.clear()


async def _failed(error: HiddenStateError) -> str | bytes:
    raise error
