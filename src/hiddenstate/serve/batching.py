"""The model's part of a tick: inputs of many sessions in as few calls as can be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..errors import ModelFailed, ServeError
from ..state import Format, State, from_bytes
from .ops import Push
from .served import Served
from .slab import Entry

Input: TypeAlias = "tuple[Push, Entry]"
_FORMATS = 64  # kept at once: one for each length and nesting of output that is in use


@dataclass(slots=True)
class Ran:
    """Inputs that the model took in one call, and what it made of them."""

    inputs: list[Input]
    after: State  # of as many rows
    answers: list[Any]  # as the store keeps them
    results: list[Any]  # as the callers get them


class Batching:
    """Runs inputs in groups of like length, and tells apart the rows that failed."""

    def __init__(self, served: Served, gather: Callable[[Sequence[int]], State], *, sealed: bool, keep: bool) -> None:
        """Run on `served`, with states from `gather`; answers are kept if `keep`, as files if `sealed`."""
        self._served, self._gather = served, gather
        self._sealed, self._keep = sealed, keep
        self._formats: dict[tuple[Any, ...], Format] = {}

    def run(self, inputs: Sequence[Input]) -> tuple[list[Ran], list[tuple[Push, Exception]]]:
        """Return what was run, and what failed with its reason."""
        groups: dict[tuple[bool, int], list[Input]] = {}
        ragged = self._served.ragged
        for one in inputs:
            steps = len(one[0].piece)
            # Within a factor of two of each other, so that padding never costs more than the work itself.
            groups.setdefault((one[1].anew, steps.bit_length() if ragged else steps), []).append(one)
        ran: list[Ran] = []
        failed: list[tuple[Push, Exception]] = []
        for group in groups.values():
            self._run_group(group, ran, failed)
        return ran, failed

    def answered(self, answer: Any) -> Any:
        """Return what a caller got, from what the store kept of it."""
        if isinstance(answer, bytes):
            state = from_bytes(answer, source="an answer that was kept")
        else:
            kind, row = answer
            state = kind.state([row])
        leaves = [
            state[str(place)][0] if str(place) in state else None for place in range(len(self._served.layout.leaves))
        ]
        return self._served.rebuild(leaves)

    def _run_group(self, group: list[Input], ran: list[Ran], failed: list[tuple[Push, Exception]]) -> None:
        try:
            before = None if group[0][1].anew else self._gather([entry.slot for _, entry in group])
            leaves, after = self._served.run([push.piece for push, _ in group], before)
        except Exception as error:  # whatever a user's model raises
            if len(group) > 1:
                # One bad input must not fail the others: halve until it is alone.
                half = len(group) // 2
                self._run_group(group[:half], ran, failed)
                self._run_group(group[half:], ran, failed)
                return
            failed.append((group[0][0], _failure(error)))
            return
        for rows in self._alike(group):
            whole = len(rows) == len(group)
            some = group if whole else [group[row] for row in rows]
            index = None if whole else torch.tensor(rows)
            mine = [_rows(leaf, index) for leaf in leaves]
            self._finish(some, mine, after if index is None else after.select(index), ran, failed)

    def _alike(self, group: list[Input]) -> list[list[int]]:
        """Rows of the group that have the same number of steps and were given in the same way."""
        alike: dict[tuple[int, bool], list[int]] = {}
        for row, (push, _) in enumerate(group):
            alike.setdefault((len(push.piece), push.alone), []).append(row)
        return list(alike.values())

    def _finish(
        self,
        group: list[Input],
        leaves: list[Tensor | None],
        after: State,
        ran: list[Ran],
        failed: list[tuple[Push, Exception]],
    ) -> None:
        push = group[0][0]
        steps = len(push.piece)
        for place, leaf in enumerate(leaves):
            if leaf is not None and self._served.has_steps(place):
                leaves[place] = leaf[:, 0] if push.alone else leaf[:, :steps]
        bad = _bad_rows([*leaves, *(part.movedim(after.batch_axis[name], 0) for name, part in after.items())])
        if bad:
            failed.extend((group[row][0], ModelFailed(_NAN)) for row in sorted(bad))
            good = [row for row in range(len(group)) if row not in bad]
            if not good:
                return
            index = torch.tensor(good)
            group, after = [group[row] for row in good], after.select(index)
            leaves = [_rows(leaf, index) for leaf in leaves]
        ran.append(Ran(group, after, self._answers(leaves, len(group)), self._results(group, leaves)))

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

    def _results(self, group: list[Input], leaves: list[Tensor | None]) -> list[Any]:
        if self._served.layout.tree.is_leaf() and leaves[0] is not None:
            results: list[Any] = list(leaves[0].unbind(0))
        else:
            columns = [[None] * len(group) if leaf is None else leaf.unbind(0) for leaf in leaves]
            results = [self._served.rebuild(row) for row in zip(*columns, strict=True)]
        for place, (push, _) in enumerate(group):
            if push.back is not None:
                row = [None if leaf is None else leaf[place].to(push.back) for leaf in leaves]
                results[place] = self._served.rebuild(row)
        return results


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


def _rows(leaf: Tensor | None, index: Tensor | None) -> Tensor | None:
    return leaf if leaf is None or index is None else leaf.index_select(0, index.to(leaf.device))


def _bad_rows(tensors: Sequence[Tensor | None]) -> set[int]:
    """Return the rows in which a NaN is."""
    bad: set[int] = set()
    for tensor in tensors:
        # A sum is NaN if anything in it is: one number tells that all is well.
        if tensor is None or not tensor.is_floating_point() or not bool(tensor.sum().isnan()):
            continue
        bad.update(
            torch.isnan(tensor).flatten(1).any(1).nonzero()[:, 0].tolist()
            if tensor.dim() > 1
            else torch.isnan(tensor).nonzero()[:, 0].tolist()
        )
    return bad
