"""A client that survives lost connections: it numbers its inputs, repeats those without an answer, and reconnects."""

from __future__ import annotations

import json
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any
from urllib.parse import quote

import safetensors.torch
import torch
from torch import Tensor

from .. import errors
from ..errors import (
    BadInput,
    HiddenStateError,
    MissingExtra,
    Overloaded,
    SequenceGap,
    ServeError,
    SessionExists,
    SessionLost,
    StoreFailed,
)
from .session import Session
from .wire import SAFETENSORS, as_dtype, is_single_step, pack, to_raw

_BUSY, _UNKNOWN, _TOO_MANY = 503, 404, 429
_SEQ_BYTES = 8  # in front of the binary frames of a stream


class Client:
    """Sessions on a server, through HTTP.

    Every input bears a number, so an input whose answer was lost on the way is repeated without being applied twice:
    for `patience` seconds a server that is away, restarts, or has no room is asked again.
    """

    def __init__(self, url: str, *, token: str | None = None, patience: float = 30.0, timeout: float = 30.0) -> None:
        """Talk to the server at `url`, for example `http://127.0.0.1:8080`."""
        try:
            import httpx
        except ModuleNotFoundError as error:
            raise MissingExtra("a client needs httpx: pip install 'hiddenstate[serve]'.") from error
        if not url.startswith(("http://", "https://")):
            raise BadInput(f"the address of the server is {url!r}, but one that begins with http:// is needed.")
        self._url, self._token, self._patience, self._timeout = url.rstrip("/"), token, patience, timeout
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        # Not through a proxy that the environment names: the server is where the address says.
        self._http = httpx.Client(base_url=self._url, headers=headers, timeout=timeout, trust_env=False)
        self._away = httpx.TransportError
        self._seqs: dict[str, int] = {}  # the last input known to be applied

    def open(self, session: str | None = None, *, exist_ok: bool = False) -> str:
        """Begin a session and return its name."""
        # The name is made up here: an answer that is lost must not leave a session behind that nobody knows of.
        name = uuid.uuid4().hex if session is None else session

        def begin() -> Any:
            return self._http.put(_path(name), params={"exist_ok": exist_ok})

        def ours() -> bool:
            if session is None:
                return True
            found = self.info(name)
            return found.seq == 0 and found.touched == found.opened

        self._begin(begin, ours)
        self._seqs.pop(name, None)
        return name

    def push(self, session: str, x: Tensor, seq: int | None = None, *, timeout: float | None = None) -> Any:
        """Apply one step or a piece, and return the output: a tensor, or a dict of tensors where there are several.

        With `timeout`, an input whose turn has not come on the server within so many seconds is `DeadlineExceeded`: it
        was not applied. One that is under way by then is a plain `TimeoutError`: repeat it with its `seq`.
        """
        number = self._next(session) if seq is None else seq
        headers = {"content-type": SAFETENSORS}
        path, data = f"{_path(session)}/steps", pack({"x": x})
        asked = {"seq": number} if timeout is None else {"seq": number, "timeout": timeout}
        answer = self._ask("POST", path, params=asked, content=data, headers=headers)
        self._seqs[session] = max(number, self._seqs.get(session, 0))
        return unwrapped(safetensors.torch.load(answer.content))

    def stream(self, session: str, xs: Iterable[Tensor], *, begin: bool = False) -> Iterator[Any]:
        """Apply many inputs through a WebSocket, several under way at once, and yield what `push` gives, in order.

        When the connection breaks, it is made again, and the stream goes on where it was. With `begin` a session that
        is not there is begun.
        """
        address = f"ws{self._url.removeprefix('http')}{_path(session)}/stream{'?open=true' if begin else ''}"
        stream = ClientStream(address, token=self._token, patience=self._patience, timeout=self._timeout)
        self._seqs.pop(session, None)
        for output in stream.run(iter(xs)):
            yield unwrapped(output) if isinstance(output, Mapping) else output

    def close(self, session: str) -> None:
        """End a session."""

        def end(tried: bool) -> Any:
            answer = self._http.delete(_path(session))
            # A try whose answer was lost may have ended it already.
            return None if tried and answer.status_code == _UNKNOWN else answer

        self._again(end)
        self._seqs.pop(session, None)

    def reset(self, session: str) -> None:
        """Put a session back in the initial state; the numbering of its inputs continues."""
        self._ask("POST", f"{_path(session)}/reset")

    def fork(self, session: str, target: str | None = None) -> str:
        """Begin another session in the state of this one."""
        name = uuid.uuid4().hex if target is None else target
        before = 0 if target is None else self.info(session).seq

        def begin() -> Any:
            return self._http.post(f"{_path(session)}/fork", json={"id": name})

        def ours() -> bool:
            if target is None:
                return True
            found = self.info(name)  # where its source was then; that may have gone on since
            return found.seq >= before and found.touched == found.opened

        self._begin(begin, ours)
        self._seqs.pop(name, None)
        return name

    def export(self, session: str) -> bytes:
        """Return a session's state as a safetensors file."""
        return bytes(self._ask("GET", f"{_path(session)}/state").content)

    def import_(self, session: str, state: bytes, *, any_model: bool = False) -> str:
        """Put a session where an exported one was."""
        headers = {"content-type": SAFETENSORS}
        self._ask("PUT", f"{_path(session)}/state", params={"any_model": any_model}, content=state, headers=headers)
        self._seqs.pop(session, None)
        return session

    def info(self, session: str) -> Session:
        """Return how far a session has come."""
        return Session(**self._ask("GET", _path(session)).json())

    def sessions(self, prefix: str = "", *, after: str = "", limit: int = 1000) -> list[str]:
        """List sessions in order."""
        asked = {"prefix": prefix, "after": after, "limit": limit}
        return list(self._ask("GET", "/v1/sessions", params=asked).json()["sessions"])

    def __enter__(self) -> Client:
        """Return the client."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Close the connections; the sessions stay."""
        self._http.close()

    def _next(self, session: str) -> int:
        if session not in self._seqs:
            self._seqs[session] = self.info(session).seq
        return self._seqs[session] + 1

    def _ask(self, method: str, path: str, **content: Any) -> Any:
        return self._again(lambda tried: self._http.request(method, path, **content))

    def _begin(self, begin: Callable[[], Any], ours: Callable[[], bool]) -> None:
        """Begin a session; one that is there already may be `ours`, begun by a try whose answer was lost."""
        lost = False

        def attempt(tried: bool) -> Any:
            nonlocal lost
            lost = tried
            return begin()

        try:
            self._again(attempt)
        except SessionExists:
            if not lost or not ours():
                raise

    def _again(self, ask: Callable[[bool], Any]) -> Any:
        """Ask until there is an answer or `patience` is over; `ask` is told whether an earlier try may have arrived."""
        end, pause, tried = time.monotonic() + self._patience, 0.05, False
        while True:
            try:
                answer = ask(tried)
                if answer is None or answer.status_code < 400:
                    return answer
                failure: Exception = _error(answer)
                if answer.status_code not in (_BUSY, _TOO_MANY):
                    raise failure
                tried = tried or answer.status_code == _BUSY  # which may come after it was done
                pause = max(pause, _retry_after(answer))
            except self._away as error:
                failure = ServeError(f"{self._url} does not answer: {type(error).__name__}: {error}")
                failure.__cause__ = error
                tried = True
            if time.monotonic() + pause > end:
                raise failure
            time.sleep(pause)
            pause = min(1.0, 2 * pause)


class ClientStream:
    """A stream over one WebSocket after another: after a break, inputs without an answer are sent again."""

    def __init__(self, address: str, *, token: str | None, patience: float, timeout: float) -> None:
        """Connect to `address` when `run` begins."""
        self._address, self._patience, self._timeout = address, patience, timeout
        self._headers = {} if token is None else {"authorization": f"Bearer {token}"}
        # Number and frame of each input without an answer, and whether it was one step without a time axis.
        self._under_way: deque[tuple[int, bytes, bool]] = deque()
        self._next = 0
        self._facts: Mapping[str, Any] = {}

    def run(self, xs: Iterator[Tensor]) -> Iterator[Tensor | dict[str, Tensor]]:
        """Yield an output for each input, in order."""
        try:
            from websockets.exceptions import WebSocketException
            from websockets.sync.client import connect
        except ModuleNotFoundError as error:
            raise MissingExtra("a stream needs websockets: pip install 'hiddenstate[serve]'.") from error
        progress, pause = time.monotonic(), 0.05
        while True:
            try:
                options: dict[str, Any] = {"max_size": None, "open_timeout": self._timeout, "proxy": None}
                with connect(self._address, additional_headers=self._headers, compression=None, **options) as socket:
                    self._ready(socket)
                    for _, frame, _ in self._under_way:
                        socket.send(frame)
                    while self._fill(socket, xs):
                        output = self._answer(socket)
                        progress, pause = time.monotonic(), 0.05
                        yield output
                    socket.send('{"type": "eof"}')
                    return
            except (OSError, WebSocketException, TimeoutError, Overloaded, StoreFailed) as error:
                if time.monotonic() - progress + pause > self._patience:
                    if isinstance(error, ServeError):
                        raise
                    raise ServeError(f"{self._address} does not answer: {type(error).__name__}: {error}") from error
            time.sleep(pause)
            pause = min(1.0, 2 * pause)

    def _ready(self, socket: Any) -> None:
        self._facts = _checked_text(socket.recv(timeout=self._timeout))
        self._next = self._next or self._facts["seq"] + 1

    def _fill(self, socket: Any, xs: Iterator[Tensor]) -> bool:
        """Send as many inputs as may be under way; return False when all are answered."""
        while len(self._under_way) < self._facts["window"]:
            x = next(xs, None)
            if x is None:
                break
            given = torch.as_tensor(x)
            single_step = is_single_step(given.shape, self._facts["step_shape"])
            data = to_raw(as_dtype(given, getattr(torch, self._facts["dtype"])))
            frame = self._next.to_bytes(_SEQ_BYTES, "little") + data
            self._under_way.append((self._next, frame, single_step))
            self._next += 1
            socket.send(frame)
        return bool(self._under_way)

    def _answer(self, socket: Any) -> Tensor | dict[str, Tensor]:
        data = socket.recv(timeout=self._timeout)
        if isinstance(data, str):
            _checked_text(data)
            raise ServeError(f"the server said {data[:200]} where an output was expected.")
        seq, _, single_step = self._under_way[0]
        if int.from_bytes(data[:_SEQ_BYTES], "little") != seq:
            raise ServeError(f"an answer to input {seq} was expected, but another one came.")
        self._under_way.popleft()
        outputs = self._facts["outputs"]
        # The answer to one step has no axis for steps, as with `push`; frames are always pieces.
        stepwise = {output["name"] for output in outputs if single_step and output["shape"][:1] == [-1]}
        if len(outputs) > 1 or outputs[0]["name"] != "y":
            found = safetensors.torch.load(bytes(data[_SEQ_BYTES:]))
            return {name: tensor.squeeze(0) if name in stepwise else tensor for name, tensor in found.items()}
        flat = torch.frombuffer(bytearray(data[_SEQ_BYTES:]), dtype=getattr(torch, outputs[0]["dtype"]))
        whole = flat.view(outputs[0]["shape"])
        return whole.squeeze(0) if stepwise else whole


def unwrapped(tensors: Mapping[str, Tensor]) -> Any:
    """Return the one tensor, or several by their names within the output."""
    if set(tensors) == {"y"}:
        return tensors["y"]
    return {name.removeprefix("y."): tensor for name, tensor in tensors.items()}


def as_error(facts: Mapping[str, Any]) -> HiddenStateError | TimeoutError:
    """Return the error that a server reports."""
    kind, message = facts.get("kind"), str(facts.get("message"))
    if kind == "TimeoutError":
        return TimeoutError(message)
    if kind == "SessionLost":
        return SessionLost(message, str(facts.get("reason", "unknown")))
    if kind == "SequenceGap":
        return SequenceGap(message, int(facts.get("seq", 0)))
    found = getattr(errors, str(kind), None)
    if isinstance(found, type) and issubclass(found, HiddenStateError):
        return found(message)
    return ServeError(message)


def _error(answer: Any) -> HiddenStateError | TimeoutError:
    try:
        found = answer.json()["error"]
        return Overloaded(str(found["message"])) if answer.status_code == _TOO_MANY else as_error(found)
    except (ValueError, KeyError, TypeError, AttributeError):
        kind = Overloaded if answer.status_code in (_BUSY, _TOO_MANY) else ServeError
        return kind(f"the server answered {answer.status_code}: {answer.text[:200]}")


def _retry_after(answer: Any) -> float:
    """Return the seconds after which a server that has too much to do, says who asks too often, may be asked again."""
    said = answer.headers.get("retry-after", "")
    return float(said) if answer.status_code == _TOO_MANY and said.isdecimal() else 0.0


def _path(session: str) -> str:
    if not isinstance(session, str) or not session or session in (".", ".."):
        raise BadInput(f"the session is {session!r}, but a name is needed, which . and .. are not.")
    return f"/v1/sessions/{quote(session, safe='')}"


def _checked_text(data: str | bytes) -> Mapping[str, Any]:
    """Return the content of a text frame, or raise the error that it reports."""
    content: Mapping[str, Any] = json.loads(data)
    if content.get("type") == "error":
        raise as_error(content)
    return content
