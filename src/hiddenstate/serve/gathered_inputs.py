"""Inputs that coroutines give one by one, gathered in each turn of their event loop and run as one operation.

An object, a future and a place in the queue for each input cost more than its share of the model call. Those of one
turn are a `PushMany`, as if one caller had given them, and each coroutine is woken with its own output.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..errors import ServeError
from .futures import GatheredFuture, ResultFuture, notify_all, running_loop
from .model import ServedModel
from .queue import caller_of
from .session import LONGEST_NAME
from .session_operations import PushMany, SessionOperation

# What was gathered, by caller: sessions, inputs, their numbers, and the future of all.
_Gathered: TypeAlias = "dict[str, tuple[list[str], list[Tensor], list[int | None], GatheredFuture]]"


class GatheredInputs:
    """Gathers single steps, as tensors on the CPU in the model's own dtype, by event loop and caller."""

    def __init__(self, model: ServedModel, *, submit: Callable[[Sequence[SessionOperation]], None]) -> None:
        """Gather inputs for `model`, and hand them to `submit`, in the event loop they came from."""
        self._shape, self._dtype = torch.Size(model.layout.step_shape), model.layout.dtype
        self._rebuild, self._submit = model.rebuild, submit
        self._lock = threading.Lock()
        self._gathered: dict[asyncio.AbstractEventLoop, _Gathered] = {}  # in this turn of each event loop
        self._closed = False

    def add(self, session: str, x: Any, seq: int | None) -> asyncio.Future[Any] | None:
        """Take an input in, and return the future of its output; None for one that has to be looked at closely.

        Where it cannot be run with the others, the future's result is a list of one outcome instead.
        """
        if type(x) is not Tensor or x.shape != self._shape or x.dtype is not self._dtype or x.requires_grad:
            return None
        if type(session) is not str or not 0 < len(session) <= LONGEST_NAME or not x.is_cpu:
            return None
        if seq is not None and (type(seq) is not int or seq < 1):
            return None
        loop, caller = asyncio.get_running_loop(), caller_of(session)
        waiter = loop.create_future()
        with self._lock:
            if self._closed:
                return None
            own = self._gathered.get(loop)
            if own is None:
                for ended in [other for other in self._gathered if other.is_closed()]:
                    del self._gathered[ended]
                own = self._gathered[loop] = {}
                loop.call_soon(self.flush)
            if caller not in own:
                own[caller] = [], [], [], GatheredFuture(loop, self._rebuild)
            sessions, xs, seqs, future = own[caller]
            sessions.append(session)
            xs.append(x)
            seqs.append(seq)
            future.waiters.append(waiter)
        return waiter

    def flush(self) -> None:
        """Submit what was gathered in the event loop that runs in this thread, if there is one."""
        if self._gathered:
            loop = running_loop()
            with self._lock:
                gathered = None if loop is None else self._gathered.pop(loop, None)
            if gathered is not None:
                self._submit_all(gathered, self._submit)

    def close(self, submit: Callable[[Sequence[SessionOperation]], None]) -> None:
        """Gather no more, and hand what was gathered in any event loop to `submit`."""
        with self._lock:
            self._closed = True
            left, self._gathered = self._gathered, {}
        for gathered in left.values():
            self._submit_all(gathered, submit)

    def _submit_all(self, gathered: _Gathered, submit: Callable[[Sequence[SessionOperation]], None]) -> None:
        for sessions, xs, seqs, future in gathered.values():
            source, numbers = torch.stack(xs).unsqueeze(1), seqs if any(seqs) else None
            many = PushMany(sessions, future, source, single_step=True, seqs=numbers)
            try:
                submit([many])
            except ServeError:
                for push in many.as_pushes():
                    self._submit_one(push)

    def _submit_one(self, push: SessionOperation) -> None:
        """Submit one input by itself, or fail it: there may be room for some of those that were gathered."""
        try:
            self._submit([push])
        except ServeError as error:
            push.result = error
            complete: list[ResultFuture] = []
            push.deliver(complete)
            notify_all(complete)
