"""The model's part of a tick: inputs of many sessions in as few calls as can be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..errors import ModelFailed, ServeError
from ..state import Format, State, from_bytes
from .ops import Output, Push
from .served import Served
from .slab import Entry

Input: TypeAlias = "tuple[Push, Entry]"
_FORMATS = 64  # kept at once: one for each length and nesting of output that is in use


@dataclass(slots=True)
class Ran:
    """Inputs that the model took in one call, and what it made of them."""

    inputs: list[Input]
    after: State  # of as many rows
    leaves: list[Tensor | None]  # its outputs, each (row, ...)
    answers: list[Any]  # the same as the store keeps them, one for each row


class Batching:
    """Runs inputs in groups of like length, and tells apart the rows that failed."""

    def __init__(self, served: Served, gather: Callable[[Sequence[int]], State], *, sealed: bool, keep: bool) -> None:
        """Run on `served`, with states from `gather`; answers are kept if `keep`, as files if `sealed`."""
        self._served, self._gather = served, gather
        self._sealed, self._keep = sealed, keep
        self._formats: dict[tuple[Any, ...], Format] = {}

    def run(self, inputs: Sequence[Input]) -> list[Ran]:
        """Return what was run; inputs that failed have their reason for a result."""
        groups: dict[tuple[bool, int], list[Input]] = {}
        ragged = self._served.ragged
        for one in inputs:
            steps = one[0].steps
            # Within a factor of two of each other, so that padding never costs more than the work itself.
            key = (one[1].anew, steps.bit_length() if ragged else steps)
            if key in groups:
                groups[key].append(one)
            else:
                groups[key] = [one]
        ran: list[Ran] = []
        for group in groups.values():
            self._run_group(group, ran)
        return ran

    def answered(self, answer: Any) -> Output:
        """Return what an input was answered with, from what the store kept of it."""
        if isinstance(answer, bytes):
            state = from_bytes(answer, source="an answer that was kept")
        else:
            kind, row = answer
            state = kind.state([row])
        places = map(str, range(len(self._served.layout.leaves)))
        return Output([state.get(place) for place in places], 0, answer)

    def _run_group(self, group: list[Input], ran: list[Ran]) -> None:
        kinds = {(push.steps, push.alone) for push, _ in group}
        try:
            before = None if group[0][1].anew else self._gather([entry.slot for _, entry in group])
            steps = None if len({steps for steps, _ in kinds}) == 1 else [push.steps for push, _ in group]
            leaves, after = self._served.run(_joined(group, steps), before, steps)
        except Exception as error:  # whatever a user's model raises
            if len(group) > 1:
                # One bad input must not fail the others: halve until it is alone.
                half = len(group) // 2
                self._run_group(group[:half], ran)
                self._run_group(group[half:], ran)
            else:
                group[0][0].result = _failure(error)
            return
        if len(kinds) == 1:
            self._finish(group, leaves, after, ran)
            return
        for kind in kinds:
            rows = [row for row, (push, _) in enumerate(group) if (push.steps, push.alone) == kind]
            index = torch.tensor(rows)
            self._finish([group[r] for r in rows], [_rows(leaf, index) for leaf in leaves], after.select(index), ran)

    def _finish(self, group: list[Input], leaves: list[Tensor | None], after: State, ran: list[Ran]) -> None:
        """Cut outputs to the steps there are, and take out the rows that failed."""
        push = group[0][0]
        for place, leaf in enumerate(leaves):
            if leaf is not None and self._served.has_steps(place):
                leaves[place] = leaf[:, 0] if push.alone else leaf[:, : push.steps]
        bad = _bad_rows([*leaves, *(part.movedim(after.batch_axis[name], 0) for name, part in after.items())])
        if bad:
            for row in bad:
                group[row][0].result = ModelFailed(_NAN)
            good = [row for row in range(len(group)) if row not in bad]
            if not good:
                return
            index = torch.tensor(good)
            group, after = [group[row] for row in good], after.select(index)
            leaves = [_rows(leaf, index) for leaf in leaves]
        ran.append(Ran(group, after, leaves, self._answers(leaves, len(group))))

    def _answers(self, leaves: list[Tensor | None], rows: int) -> list[Any]:
        if not self._keep:
            return [None] * rows
        state = State({str(place): leaf for place, leaf in enumerate(leaves) if leaf is not None})
        key = tuple((name, leaf.dtype, leaf.shape[1:]) for name, leaf in state.items())
        kind = self._formats.get(key)
        if kind is None:
            if len(self._formats) >= _FORMATS:
                self._formats.clear()
            kind = self._formats[key] = Format(state)
        if self._sealed:
            return [kind.seal(row) for row in kind.rows(state)]
        return [(kind, row) for row in kind.rows(state)]


_NAN = (
    "the model gave NaN for this input, so the session keeps the state it had before. Usually the input holds NaN, or "
    "is far larger than what the model was trained on."
)


def _failure(error: Exception) -> Exception:
    if isinstance(error, ServeError):
        return error
    failure = ModelFailed(
        f"the model raised {type(error).__name__} for this input: {error}. The session keeps the state it had before."
    )
    failure.__cause__ = error
    return failure


def _joined(group: list[Input], steps: list[int] | None) -> Tensor:
    """Return the pieces of a group as one tensor `(row, step, ...)`, padded where their steps differ."""
    if steps is not None:
        return torch.nn.utils.rnn.pad_sequence([push.piece for push, _ in group], batch_first=True)
    source, first = group[0][0].source, group[0][0].row
    if all([push.source is source for push, _ in group]):
        rows = [push.row for push, _ in group]
        if rows == list(range(first, first + len(group))):
            return source[first : first + len(group)]
    if all([len(push.source) == 1 for push, _ in group]):
        return torch.cat([push.source for push, _ in group])
    return torch.stack([push.piece for push, _ in group])


def _rows(leaf: Tensor | None, index: Tensor | None) -> Tensor | None:
    return leaf if leaf is None or index is None else leaf.index_select(0, index.to(leaf.device))


def _bad_rows(tensors: Sequence[Tensor | None]) -> set[int]:
    """Return the rows in which a NaN is."""
    floating = [tensor for tensor in tensors if tensor is not None and tensor.is_floating_point() and tensor.numel()]
    # A sum is NaN if anything in it is: one number tells that all is well.
    if not floating or not torch.stack([tensor.sum().float() for tensor in floating]).sum().isnan():
        return set()
    bad: set[int] = set()
    for tensor in floating:
        bad.update(torch.isnan(tensor).reshape(len(tensor), -1).any(1).nonzero()[:, 0].tolist())
    return bad
