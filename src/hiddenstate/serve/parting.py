"""Which inputs of a tick can be run at once, and which have to be looked into."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from .arena import Slab
from .batch import Batch, Unit
from .batching import Batching
from .inputs import Chain, Many, Push
from .session_operations import Op
from .stores import Ints, Store

_Bools: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.bool_]]"
_LARGEST = 2**63 - 1  # no session comes so far


class Parting:
    """Parts inputs that come next in sessions whose states are in their slots from everything else."""

    def __init__(self, slab: Slab, store: Store, batching: Batching, *, put_back: Callable[[Chain], None]) -> None:
        """Look in `slab`; of a chain that cannot be run as one, `put_back` sees to all but the first input."""
        self._slab, self._store, self._batching, self._put_back = slab, store, batching, put_back

    def part(self, ops: list[Op], now: float, tick: int) -> tuple[list[Batch], list[Op]]:
        """Return the one in batches, and the other."""
        batches: list[Batch] = []
        others: list[Op] = []
        units: list[Unit] = []
        for op in ops:
            if type(op) is Many:
                slots = self._slab.find(op.sessions)
                anew = self._slab.facts.anew[slots]
                if self._come_next(op.seqs, slots, now).all() and (anew == anew[0]).all():
                    self._slab.facts.used[slots] = tick
                    batches.append(Batch(op, slots, bool(anew[0])))
                else:
                    units += op.apart()
            elif isinstance(op, Push | Chain):
                units.append(op)
            else:
                others.append(op)
        if units:
            good = self._good(units, now)
            batches += self.batches([unit for unit, fits in zip(units, good, strict=True) if fits], tick)
            others += [_first(unit) for unit, fits in zip(units, good, strict=True) if not fits]
        return batches, others

    def batches(self, units: Sequence[Unit], tick: int) -> list[Batch]:
        """Return inputs to sessions that have slots as they are to be run."""
        if not units:
            return []
        slots = self._slab.find([unit.session for unit in units])
        self._slab.facts.used[slots] = tick
        return self._batching.batches(units, slots, self._slab.facts.anew[slots].tolist())

    def _good(self, units: Sequence[Unit], now: float) -> list[bool]:
        slots = self._slab.find([unit.session for unit in units])
        good: list[bool] = self._come_next([_first(unit).seq for unit in units], slots, now).tolist()
        for unit, slot, fits in zip(units, slots.tolist(), good, strict=True):
            if type(unit) is Chain and not (fits and unit.follows(int(self._slab.facts.seq[slot]))):
                self._put_back(unit)
        return good

    def _come_next(self, seqs: Sequence[int | None] | None, slots: Ints, now: float) -> _Bools:
        """Say of each input whether it comes next in a session that is at hand and has not expired."""
        facts, good = self._slab.facts, slots >= 0
        if seqs is not None and any(seqs):
            wanted = np.array([min(seq or 0, _LARGEST) for seq in seqs], np.int64)
            good &= (wanted == 0) | (wanted == facts.seq[slots] + 1)
        if self._store.ttl is not None:
            good &= facts.touched[slots] >= now - self._store.ttl
        return good


def _first(unit: Unit) -> Push:
    return unit.pushes[0] if isinstance(unit, Chain) else unit
