"""The client's side of a stream: what is under way is kept until it is answered, and sent again after a break."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from ..errors import HiddenStateError, MissingExtra, ServeError
from .wire import to_raw

_HEAD = 8


class Stream:
    """One WebSocket after another, as if they were one."""

    def __init__(self, address: str, *, token: str | None, patience: float, timeout: float) -> None:
        """Connect to `address` when `run` begins."""
        self._address, self._patience, self._timeout = address, patience, timeout
        self._headers = {} if token is None else {"authorization": f"Bearer {token}"}
        self._under_way: deque[tuple[int, bytes]] = deque()  # number and frame of what has no answer yet
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
                    for _, frame in self._under_way:
                        socket.send(frame)
                    while self._fill(socket, xs):
                        output = self._answer(socket)
                        progress, pause = time.monotonic(), 0.05
                        yield output
                    socket.send('{"type": "eof"}')
                    return
            except (OSError, WebSocketException, TimeoutError) as error:
                if time.monotonic() - progress + pause > self._patience:
                    raise ServeError(f"{self._address} does not answer: {type(error).__name__}: {error}") from error
            time.sleep(pause)
            pause = min(1.0, 2 * pause)

    def _ready(self, socket: Any) -> None:
        self._facts = _told(socket.recv(timeout=self._timeout))
        self._next = self._next or self._facts["seq"] + 1

    def _fill(self, socket: Any, xs: Iterator[Tensor]) -> bool:
        """Send as many inputs as may be under way; False when all are answered."""
        while len(self._under_way) < self._facts["window"]:
            x = next(xs, None)
            if x is None:
                break
            dtype = getattr(torch, self._facts["dtype"])
            frame = self._next.to_bytes(_HEAD, "little") + to_raw(torch.as_tensor(x).to(dtype))
            self._under_way.append((self._next, frame))
            self._next += 1
            socket.send(frame)
        return bool(self._under_way)

    def _answer(self, socket: Any) -> Tensor | dict[str, Tensor]:
        data = socket.recv(timeout=self._timeout)
        if isinstance(data, str):
            _told(data)
            raise ServeError(f"the server said {data[:200]} where an output was expected.")
        seq, _ = self._under_way[0]
        if int.from_bytes(data[:_HEAD], "little") != seq:
            raise ServeError(f"an answer to input {seq} was expected, but another one came.")
        self._under_way.popleft()
        outputs = self._facts["outputs"]
        if len(outputs) > 1 or outputs[0]["name"] != "y":
            return dict(safetensors.torch.load(bytes(data[_HEAD:])))
        flat = torch.frombuffer(bytearray(data[_HEAD:]), dtype=getattr(torch, outputs[0]["dtype"]))
        return flat.view(outputs[0]["shape"])


def _told(data: str | bytes) -> Mapping[str, Any]:
    """Return what a text frame says, or raise the error that it tells of."""
    from .client import as_error

    content: Mapping[str, Any] = json.loads(data)
    if content.get("type") == "error":
        error: HiddenStateError = as_error(content)
        raise error
    return content
