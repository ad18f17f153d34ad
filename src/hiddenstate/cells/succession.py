"""The succession of one layer's calls: which continue earlier ones, which start anew, which get a wrong state."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from weakref import ref

import torch
from torch import Tensor

from ..state import tensors
from .handed_on import EndState, lies, memory_of, nearest
from .layer import Call

OPEN = 16  # runs that are open at the same time; beyond that, the one that was idle longest ends
_TURNS = 64  # the same for sequences fed in turns: runs that started alike, or whose end state somebody still holds
_COMPARED = 8  # runs whose values are compared with a state that was changed on the way
_PASSED = 256  # states that a run has continued from: if one of them comes in again, a new run begins
_AGAIN = 3  # consecutive calls with the same state that are reported


@dataclass(slots=True, eq=False)
class _SameStart:
    """Consecutive one-step calls from the same state, from none of which a call has continued."""

    calls: int = 1


@dataclass(slots=True, eq=False)
class OpenRun:
    """A run of a layer that a call may continue: the state its first call was given, and the one its last ended in."""

    begun: tuple[Tensor, ...]
    last: EndState | None = None  # None until its first call has ended
    number: int = -1  # of the model call that contained its last call
    steps: int = 0  # that it made in that model call
    again: _SameStart | None = None  # set if it is one call so far, which started from the same state as others


@dataclass(frozen=True, slots=True)
class Complaint:
    """What is wrong with how a loop outside the model passes states on."""

    seen: str  # how the layer was called: "called 5 times with …"
    cause: str
    way_out: str
    calls: int
    mixes_rows: bool = False  # whether one row's state went to all rows, rather than no state to the next call
    too_many: bool = False  # not a mistake: there are more runs in turns than this library follows

    def __str__(self) -> str:
        """Return the rest of a sentence that begins with the layer's name, and a second sentence."""
        return f"{self.seen}. Usually {self.cause}: {self.way_out}"


@dataclass(slots=True, eq=False)
class Succession:
    """The calls of one layer. A call continues the run whose end state it is given, or begins a new run.

    Several runs may be open at a time, as when a model steps one cell along two sentences in the same loop.
    """

    open: list[OpenRun] = field(default_factory=list)  # the one with the latest call comes last
    handed: bool = False  # whether any call was given a state
    passed_on: int = 0  # calls that continued an earlier one
    one_row: int = 0  # of these, calls that were given one row's state for all rows
    _passed: deque[ref[Tensor]] = field(default_factory=lambda: deque(maxlen=_PASSED))
    _given: tuple[Tensor, ...] | None = None  # the state given to the call before, if it came from outside
    _again: _SameStart = field(default_factory=_SameStart)  # the latest calls that were given the same state
    _told: list[_SameStart] = field(default_factory=list)  # earlier such calls that may have to be reported
    _lost: list[_SameStart] = field(default_factory=list)  # one for each of their runs that was closed to make room
    _parted: int = 0  # calls that may continue a run that was closed to make room
    _latest: OpenRun | None = None

    def goes_on(self, call: Call, number: int) -> bool:
        """Say whether a call continues an earlier one: it is given the state in which that one ended."""
        return self.run_of(call, number).last is not None

    def run_of(self, call: Call, number: int) -> OpenRun:
        """Return the run that a call belongs to: an open one that it continues, or a new one.

        Inside one call of the model, any operation may have changed the state on the way; between calls of the model,
        the state has to be recognizable. None, zeros, and the state that a run began with start a new run.
        """
        run = None
        try:
            parts, steps = tuple(tensors(call.given_native).values()), call.steps
        except Exception:  # a layer with a calling convention of its own
            self._latest = OpenRun(())
            return self._latest
        place = lies(parts) if parts else ()
        exact = next((run for run in reversed(self.open) if run.last is not None and run.last.is_handed(place)), None)
        if exact is not None:
            self._latest, self._given = exact, None
            self._goes_on_with(exact)
            return exact
        run = (
            self._without_state(call, number) if not parts else self._recognized(parts) or self._changed(parts, number)
        )
        within = any(each.number == number for each in self.open)
        same = self._is_same(call, parts, on=run is not None, told=steps == 1 and not within)
        if run is not None:
            self.one_row += self._one_row(call, parts, run)
            self._goes_on_with(run)
        else:
            self.one_row += self._latest is not None and self._one_row(call, parts, self._latest)
            if self._lost and parts and not same and not _no_state(parts):  # may continue a run that was closed
                self._lost.pop().calls -= 1
                self._parted += 1
            run = OpenRun(tuple(part.detach().clone() for part in parts), again=self._again if same else None)
            self._again.calls += same
            if self._again.calls == 2 and same and self._latest is not None:  # the call before was the first of them
                self._latest.again = self._again
        self._latest = run
        return run

    def ended(self, call: Call, number: int, run: OpenRun | None = None) -> list[OpenRun]:
        """Remember the state that a call ended in; return the runs that no call can continue any more.

        `run` is the run that the call belongs to; without it, the one that `run_of` returned last.
        """
        run = run or self._latest or OpenRun(())
        if run.last is not None:
            self._passed.extend(run.last.made)
        before = run.steps if number == run.number else 0
        others = [each for each in self.open if each is not run]
        begins = len(others) == len(self.open)
        self.open = others
        try:
            run.steps, run.last = before + call.steps, EndState.of(call.state_native)
        except Exception:  # a layer with conventions of its own: no call can continue this run
            return [run]
        run.number = number
        over = self._over(others) if begins and len(others) >= OPEN else []
        self._lost += [each.again for each in over if each.again is not None]
        self.open = [*(each for each in others if each not in over), run]
        return over

    @staticmethod
    def _over(others: list[OpenRun]) -> list[OpenRun]:
        """Return the runs to close when another begins: those idle longest, rather not those waiting their turn."""
        waits = [run.again is not None or (run.last is not None and run.last.held) for run in others]
        idle = [run for run, waiting in zip(others, waits, strict=True) if not waiting][: len(others) + 1 - OPEN]
        return idle or others[: max(0, len(others) + 1 - _TURNS)]

    def _goes_on_with(self, run: OpenRun) -> None:
        self.handed = True
        self.passed_on += 1
        if run.again is not None:
            run.again.calls -= 1
            run.again = None

    def _without_state(self, call: Call, number: int) -> OpenRun | None:
        """Return the run that a call without a state continues, if the user's own cell keeps its state itself."""
        run = self.open[-1] if self.open else None
        if run is None or run.last is None or run.number != number or self.handed or call.layer.kind != "cell":
            return None
        kept = {memory_of(t) for inner in call.layer.module.modules() for t in tensors(vars(inner)).values()}
        by_itself = any(memory_of(part) in kept - {None} for part in run.last.parts)
        return run if by_itself or not run.last.held else None  # a state that others hold may still be passed on

    def _recognized(self, parts: tuple[Tensor, ...]) -> OpenRun | None:
        """Return the run whose end state this is or was made from, judging by memory, graph and values."""
        self.handed = True
        ends = [(run, run.last) for run in reversed(self.open) if run.last is not None]
        places = tuple(memory_of(part) for part in parts)
        found = next((run for run, last in ends if last.lies_at(places)), None)
        if found is not None or not ends:
            return found
        marked = {last.mark: run for run, last in reversed(ends) if last.mark is not None}
        mark, _ = nearest(parts, marked)
        if mark is not None:
            return marked[mark]
        if _no_state(parts) or self._is_passed(parts):  # zeros cannot be recognized by their values
            return None
        same = next((run for run, last in ends if last.equals(parts)), None)  # a copy
        return same or next((run for run, last in ends[:_COMPARED] if last.holds(parts)), None)

    def _is_passed(self, parts: tuple[Tensor, ...]) -> bool:
        return any(part() is each for part in self._passed for each in parts)

    def _changed(self, parts: tuple[Tensor, ...], number: int) -> OpenRun | None:
        """Return the run whose end state the model has turned into this one, leaving nothing to recognize."""
        runs = [(run, run.last) for run in reversed(self.open) if run.number == number and run.last is not None]
        if not runs or _no_state(parts) or self._is_passed(parts) or any(_alike(parts, run.begun) for run, _ in runs):
            return None
        run, last, like = max(((*each, each[1].likeness(parts)) for each in runs), key=lambda each: each[2])
        unlike = like < 0
        if last.mark is None:  # no graph: a dissimilar state is a new start if the old one may still be passed on
            return None if unlike and last.held else run
        if all(part.grad_fn is None for part in parts):
            return None
        return None if unlike and nearest(parts, ())[1] else run  # no mark in the whole graph: another start

    def _is_same(self, call: Call, parts: tuple[Tensor, ...], *, on: bool, told: bool) -> bool:
        """Say whether a call from outside is one step from the same state as the call before."""
        own = not parts and call.layer.kind in ("cell", "recurrent", "layer")  # such a cell may keep its state itself
        before, self._given = self._given, tuple(p.detach() for p in parts) if told and not own else None
        if before is not None and self._given is not None and not on and _alike(self._given, before):
            return True
        self._told = [each for each in (*self._told, self._again) if each.calls >= _AGAIN]
        self._again = _SameStart()
        return False

    def _one_row(self, call: Call, parts: tuple[Tensor, ...], run: OpenRun) -> bool:
        """Say whether all rows were given one row of the last state, or the mean of all, although its rows differ."""
        pairs = zip(parts, run.last.parts if run.last is not None else (), strict=False)
        try:
            axes = tuple(call.given.batch_axis.values()) if call.given is not None else ()
        except Exception:  # a state in a form of its own, without known rows
            return False
        for (part, last), axis in zip(pairs, axes, strict=False):
            if part.shape == last.shape and axis is not None and part.dim() > axis and part.shape[axis] > 1:
                rows, before = part.detach().movedim(axis, 0).flatten(1), last.movedim(axis, 0).flatten(1)
                if bool((rows == rows[:1]).all()) and not bool((before == before[:1]).all()):
                    mean = before.mean(0) if before.is_floating_point() else before[0]
                    return bool((before == rows[:1]).all(1).any()) or torch.allclose(rows[0], mean)
        return False

    def complaint(self, *, over: bool = True) -> Complaint | None:
        """Return what is wrong with how states are passed on from outside; None if nothing is.

        With `over=False`, more calls may follow, so calls that start alike may be sequences fed in turns which continue
        later: nothing is reported until there are more of them than can be followed.
        """
        again = max(each.calls for each in (*self._told, self._again))
        if again >= (_AGAIN if over else _TURNS):
            return Complaint(
                f"called {again} times with the same state, one step each, so what one step gave never "
                f"reaches the next",
                "the new state is dropped",
                "hand it on, as in out, h = layer(x, h)",
                calls=again,
            )
        if self.one_row and 2 * self.one_row > self.passed_on:
            return Complaint(
                f"called {self.one_row} times with one state for all rows of the batch, though the last call "
                f"left a state for each",
                "the state was indexed and expanded, or averaged over the rows, on the way",
                "hand it on as it is",
                calls=self.one_row,
                mixes_rows=True,
            )
        if self._parted >= _AGAIN:
            return Complaint(
                f"called in turns along more than {_TURNS} sequences, which is as many as are followed: at least "
                f"{self._parted} calls are runs of their own, though they may go on from others",
                "each of many callers is stepped by itself",
                "step some of them at a time, or all as the rows of one batch",
                calls=self._parted,
                too_many=True,
            )
        return None


def _no_state(parts: tuple[Tensor, ...]) -> bool:
    """Say whether a state is None or zeros, as at the start of a sequence."""
    return not any(bool(part.any()) for part in parts)


def _alike(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> bool:
    return len(ours) == len(theirs) and all(
        a.shape == b.shape and a.device == b.device and bool((a == b).all()) for a, b in zip(ours, theirs, strict=True)
    )
