"""Inputs made from what callers pass, and outputs as callers get them; inputs of coroutines are gathered."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..errors import BadInput, ServeError
from .futures import GatheredFuture, ResultFuture, notify_all, running_loop
from .model import ServedModel
from .queue import caller_of
from .session import LONGEST_NAME, checked
from .session_operations import OutputRow, Push, PushMany, SessionOperation

_CPU = torch.device("cpu")
# What was gathered, by caller: sessions, inputs, their numbers, and the future of all.
_Gathered: TypeAlias = "dict[str, tuple[list[str], list[Tensor], list[int | None], GatheredFuture]]"


class PushFactory:
    """Reads inputs for a model, and rebuilds its outputs."""

    def __init__(self, model: ServedModel) -> None:
        """Read inputs for `model`."""
        self._model = model

    def one(self, future: ResultFuture, session: str, x: Any, seq: int | None, *, place: int = 0) -> Push:
        """Return the input of one session."""
        piece, single_step = self._model.read(x)
        if seq is not None and not _are_seqs([seq]):
            raise BadInput(f"seq is {seq!r}, but inputs are numbered from 1 on.")
        steps = 1 if single_step else len(piece)
        return Push(checked(session), future, piece, steps=steps, single_step=single_step, seq=seq, place=place)

    def raw(self, future: ResultFuture, session: str, frames: Sequence[tuple[memoryview, int | None]]) -> list[Push]:
        """Return inputs of one session, each given as the raw bytes of its steps and its number."""
        width = self._model.layout.width
        return [
            Push(session, future, data, steps=len(data) // width, single_step=False, seq=seq, place=place)
            for place, (data, seq) in enumerate(frames)
        ]

    def many(
        self,
        future: ResultFuture,
        sessions: Sequence[str],
        xs: Sequence[Any] | Tensor,
        seqs: Sequence[int | None] | None,
    ) -> list[PushMany] | list[Push]:
        """Return one input for each of many sessions."""
        if isinstance(xs, Tensor) and set(map(type, sessions)) == {str} and (seqs is None or _are_seqs(seqs)):
            source, single_step = self._model.read_rows(xs)
            numbers = None if seqs is None else list(seqs)
            return [PushMany(list(sessions), future, source, single_step=single_step, seqs=numbers)]
        each = enumerate(zip(sessions, xs, seqs or [None] * len(sessions), strict=True))
        return [self.one(future, session, x, seq, place=place) for place, (session, x, seq) in each]

    def output(self, outcome: OutputRow, x: Any = None) -> Any:
        """Return an output, on the device of its input."""
        return self._model.output(outcome, x.device if isinstance(x, Tensor) else _CPU)

    def outputs(self, future: ResultFuture, xs: Sequence[Any] | Tensor, *, raises: bool) -> Any:
        """Return the outputs of many inputs, in one tensor where the inputs were; raise the first error, or list it."""
        results = future.results
        if len(future.rows) == 1 and future.rows[0][1] == len(results) and raises:
            return self._rebuilt(future.rows[0][2], xs)
        for place, count, leaves in future.rows:
            results[place : place + count] = [OutputRow(leaves, row, None) for row in range(count)]
        if raises:
            for result in results:
                if isinstance(result, Exception):
                    raise result
            if isinstance(xs, Tensor):
                return self._stacked(results, xs)
        return [r if isinstance(r, Exception) else self.output(r, x) for r, x in zip(results, xs, strict=True)]

    def _stacked(self, outcomes: list[OutputRow], xs: Tensor) -> Any:
        """Return all outputs in one tensor, `(session, ...)`."""
        columns = zip(*([None if leaf is None else leaf[o.row] for leaf in o.leaves] for o in outcomes), strict=True)
        found = [[leaf for leaf in column if leaf is not None] for column in columns]
        return self._rebuilt([torch.stack(column) if column else None for column in found], xs)

    def _rebuilt(self, leaves: list[Tensor | None], xs: Any) -> Any:
        return self._model.rebuild([None if leaf is None else leaf.to(xs.device) for leaf in leaves])


def _are_seqs(seqs: Sequence[Any]) -> bool:
    return all([seq is None or (isinstance(seq, int) and seq >= 1 and not isinstance(seq, bool)) for seq in seqs])


class GatheredInputs:
    """Gathers single steps that coroutines give, as tensors on the CPU in the model's own dtype, by loop and caller.

    An object, a future and a place in the queue for each input cost more than its share of the model call. Those of one
    turn of an event loop are a `PushMany`, as if one caller had given them, and each coroutine is woken with its own
    output.
    """

    def __init__(self, model: ServedModel, *, submit: Callable[[Sequence[SessionOperation]], None]) -> None:
        """Gather inputs for `model`, and hand them to `submit`, in the event loop they came from."""
        self._shape, self._dtype = torch.Size(model.layout.step_shape), model.layout.dtype
        self._rebuild, self._submit = model.rebuild_all, submit
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
