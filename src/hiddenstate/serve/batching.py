"""The model's part of a tick: inputs of many sessions in as few calls as can be."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import ModelFailed, ServeError
from ..state import Format, State, from_bytes
from .arena import array_of
from .batch import Batch, Kind, Ran, Unit
from .facts import At
from .inputs import Chain, Output
from .model import Served
from .stores import Blobs, Ints

_OF_NUMPY = (torch.float32, torch.float64)
_FORMATS = 64  # kept at once: one for each length and nesting of output that is in use


class Batching:
    """Runs inputs in groups of like length, and tells apart the rows that failed."""

    def __init__(
        self,
        served: Served,
        gather: Callable[[At], State],
        *,
        keep: bool,
        put_back: Callable[[Chain], None],
    ) -> None:
        """Run on `served`, with states from `gather`; answers are kept if `keep`.

        A chain that fails is cut to its first input, and `put_back` sees to the others.
        """
        self._served, self._gather, self._put_back = served, gather, put_back
        self._keep = keep
        self._formats: dict[tuple[Any, ...], Format] = {}

    def batches(self, units: Sequence[Unit], slots: Ints, anew: Sequence[bool]) -> list[Batch]:
        """Return inputs in groups that go into one call each."""
        groups: dict[tuple[bool, int, int], list[int]] = {}
        ragged = self._served.ragged
        for row, unit in enumerate(units):
            # Within a factor of two of each other, so that padding never costs more than the work itself.
            if type(unit) is Chain:
                key = (anew[row], -len(unit.pushes), unit.pushes[0].steps)
            else:
                steps: int = unit.steps  # type: ignore[union-attr]
                key = (anew[row], 1, steps.bit_length() if ragged else steps)
            if key in groups:
                groups[key].append(row)
            else:
                groups[key] = [row]
        if len(groups) == 1:
            return [Batch(list(units), slots, bool(anew[0]))]
        return [Batch([units[row] for row in rows], slots[rows], key[0]) for key, rows in groups.items()]

    def run(self, batches: Sequence[Batch]) -> list[Ran]:
        """Return what was run; inputs that failed have their reason for a result."""
        ran: list[Ran] = []
        for batch in batches:
            self._run(batch, ran)
        return ran

    def answered(self, answer: Any) -> Output:
        """Return what an input was answered with, from what the store kept of it."""
        if isinstance(answer, bytes):
            state = from_bytes(answer, source="an answer that was kept")
        else:
            kind, row = answer
            state = kind.state([row])
        places = map(str, range(len(self._served.layout.leaves)))
        return Output([state.get(place) for place in places], 0, None)

    def _run(self, batch: Batch, ran: list[Ran]) -> None:
        kinds = batch.kinds()
        steps = None if len({kind.steps * kind.inputs for kind in kinds}) == 1 else batch.lengths()
        try:
            before = None if batch.anew else self._gather(batch.at)
            leaves, after = self._served.run(batch.joined(self._served.layout, padded=steps is not None), before, steps)
        except Exception as error:  # whatever a user's model raises
            self._run_apart(batch, error, ran)
            return
        if len(kinds) == 1:
            self._finish(Ran(batch, kinds[0], after, self._cut(leaves, kinds[0]), None), ran)
            return
        for kind in kinds:
            rows = [row for row, unit in enumerate(batch.apart) if Kind.of(unit) == kind]
            index = torch.tensor(rows)
            some = [None if leaf is None else leaf.index_select(0, index.to(leaf.device)) for leaf in leaves]
            self._finish(Ran(batch.select(rows), kind, after.select(index), self._cut(some, kind), None), ran)

    def _run_apart(self, batch: Batch, error: Exception, ran: list[Ran]) -> None:
        """One bad input must not fail the others: halve until it is alone."""
        unit = batch.apart[0]
        if len(batch) > 1:
            half = len(batch) // 2
            self._run(batch.select(range(half)), ran)
            self._run(batch.select(range(half, len(batch))), ran)
        elif isinstance(unit, Chain) and len(unit) > 1:
            self._put_back(unit)
            self._run(batch, ran)
        else:
            (unit.pushes[0] if isinstance(unit, Chain) else unit).result = _failure(error)

    def _finish(self, found: Ran, ran: list[Ran]) -> None:
        """Take out the rows that failed, and cut outputs to the inputs there are."""
        # Copies: what is kept must not change when a model uses its tensors again, or a caller changes its answer.
        found.after = self._own(found.after, found.leaves)
        kept = [None if leaf is None else _copy(leaf) for leaf in found.leaves] if self._keep else found.leaves
        bad = _bad_rows(kept, of=found.kind.inputs) | _bad_rows(self._telling(found.after))
        if self._keep:
            found.answers = self._answers(kept)
        if bad:
            self._fail(found, bad, ran)
            good = [row for row in range(len(found.batch)) if row not in bad]
            if not good:
                return
            found = found.select(good)
        ran.append(found)

    def _fail(self, found: Ran, bad: set[int], ran: list[Ran]) -> None:
        again = []
        for row in sorted(bad):
            unit = found.batch.apart[row]
            if isinstance(unit, Chain) and len(unit) > 1:
                self._put_back(unit)
                again.append(row)
            else:
                (unit.pushes[0] if isinstance(unit, Chain) else unit).result = _not_a_number(found.after, row)
        if again:
            self._run(found.batch.select(again), ran)

    def _own(self, after: State, leaves: list[Tensor | None]) -> State:
        """Return states that are nobody else's."""
        shared = {leaf.untyped_storage().data_ptr() for leaf in leaves if leaf is not None}
        if self._served.tidy and shared.isdisjoint([part.untyped_storage().data_ptr() for part in after.values()]):
            return after
        return State({name: _copy(part) for name, part in after.items()}, after.batch_axis)

    def _telling(self, state: State) -> list[Tensor]:
        """Return the parts, rows first, one of which holds a NaN if any part does."""
        names = self._served.telling
        return [part.movedim(state.batch_axis[name], 0) for name, part in state.items() if name in names]

    def _cut(self, leaves: list[Tensor | None], kind: Kind) -> list[Tensor | None]:
        """Return outputs `(row, step, ...)` as those of each input, `(input, ...)`, without steps that none has."""
        cut: list[Tensor | None] = []
        for number, leaf in enumerate(leaves):
            if leaf is not None and self._served.has_steps(number):
                leaf = leaf[:, : kind.steps * kind.inputs]
                if kind.inputs > 1:
                    leaf = leaf.reshape(-1, kind.steps, *leaf.shape[2:])
                if kind.alone:
                    leaf = leaf[:, 0]
            cut.append(leaf)
        return cut

    def _answers(self, leaves: list[Tensor | None]) -> Blobs:
        state = State({str(place): leaf for place, leaf in enumerate(leaves) if leaf is not None})
        key = tuple((name, leaf.dtype, leaf.shape[1:]) for name, leaf in state.items())
        kind = self._formats.get(key)
        if kind is None:
            if len(self._formats) >= _FORMATS:
                self._formats.clear()
            kind = self._formats[key] = Format(state)
        return Blobs(kind, state)


def _not_a_number(after: State, row: int) -> ModelFailed:
    parts = [name for name, part in after.items() if bool(part.select(after.batch_axis[name], row).isnan().any())]
    return ModelFailed(
        f"the model gave NaN for this input, in its {'state ' + ', '.join(parts) if parts else 'output'}, so the "
        f"session keeps the state it had before. Usually the input holds NaN, or is far larger than what the model was "
        f"trained on."
    )


def _failure(error: Exception) -> Exception:
    if isinstance(error, ServeError):
        return error
    failure = ModelFailed(
        f"the model raised {type(error).__name__} for this input: {error}. The session keeps the state it had before."
    )
    failure.__cause__ = error
    return failure


def _copy(tensor: Tensor) -> Tensor:
    if (held := array_of(tensor)) is None:
        return tensor.clone(memory_format=torch.contiguous_format)
    copy = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    array_of(copy)[...] = held
    return copy


def _bad_rows(tensors: Sequence[Tensor | None], *, of: int = 1) -> set[int]:
    """Return the rows in which a NaN is; `of` entries of a tensor make a row."""
    floating = [tensor for tensor in tensors if tensor is not None and tensor.is_floating_point() and tensor.numel()]
    # A sum is NaN if anything in it is: one number tells that all is well.
    if not floating or not math.isnan(_sum(floating)):
        return set()
    bad: set[int] = set()
    for tensor in floating:
        bad.update((torch.isnan(tensor).reshape(len(tensor), -1).any(1).nonzero()[:, 0] // of).tolist())
    return bad


def _sum(tensors: Sequence[Tensor]) -> float:
    if all([tensor.device.type == "cpu" and tensor.dtype in _OF_NUMPY for tensor in tensors]):
        with np.errstate(all="ignore"):  # in one thread, as slots are copied
            return sum([float(tensor.detach().resolve_neg().numpy().sum()) for tensor in tensors])
    return float(torch.stack([tensor.sum().float() for tensor in tensors]).sum())
