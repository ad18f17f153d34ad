"""Inputs made of what callers give, and outputs as callers get them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import BadInput
from .futures import ResultFuture
from .model import ServedModel
from .session import checked
from .session_operations import OutputRow, Push, PushMany

_CPU = torch.device("cpu")


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
