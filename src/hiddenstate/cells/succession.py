"""The calls of one layer as they come: which go on from one before, which start anew, and what is handed on wrongly."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from weakref import ref

import torch
from torch import Tensor

from ..state import tensors
from .handed_on import EndState, lies, memory_of, nearest
from .layer import Call

OPEN = 16  # runs that are kept open beside each other; the one that rested longest ends
_TURNS = 64  # the same of sequences that are fed in turns: they start alike, or somebody holds what they ended in
_COMPARED = 8  # of these, whose numbers are compared with those of a state that was changed on the way
_PASSED = 256  # states from which a run has gone on, and which begin another one when they are handed in again
_AGAIN = 3  # calls in a row with the same state that are told


@dataclass(slots=True, eq=False)
class _SameStart:
    """Calls in a row from one and the same state, one step each, from which no call has gone on."""

    calls: int = 1


@dataclass(slots=True, eq=False)
class OpenRun:
    """A run of a layer that a call may go on with: what its last call ended in, and what its first was handed."""

    begun: tuple[Tensor, ...]
    last: EndState | None = None  # None before its first call has ended
    number: int = -1  # of the model call that it was in last
    steps: int = 0  # that it made in that model call
    again: _SameStart | None = None  # where its first call, the only one so far, was handed what others were


@dataclass(frozen=True, slots=True)
class Complaint:
    """What is wrong with how a loop outside the model hands states on."""

    seen: str  # what the layer was: "called 5 times with …"
    cause: str
    way_out: str
    calls: int
    mixes_rows: bool = False  # one row's state went to all, rather than none
    too_many: bool = False  # nothing is wrong but that there are more runs in turns than are followed

    def __str__(self) -> str:
        """Return it as the rest of a sentence about the layer, and one more."""
        return f"{self.seen}. Usually {self.cause}: {self.way_out}"


@dataclass(slots=True, eq=False)
class Succession:
    """The calls of one layer: each goes on with the run whose end it is handed, or begins another one.

    Several runs may be open at a time, as in a model that steps one cell along two sentences in one loop.
    """

    open: list[OpenRun] = field(default_factory=list)  # the one with the latest call last
    handed: bool = False  # whether some call was handed a state
    passed_on: int = 0  # calls that went on from another
    one_row: int = 0  # of these: how many were handed one row's state for all rows
    _passed: deque[ref[Tensor]] = field(default_factory=lambda: deque(maxlen=_PASSED))
    _given: tuple[Tensor, ...] | None = None  # what the call before was handed, where it came from outside
    _again: _SameStart = field(default_factory=_SameStart)  # the calls before this one that were handed the same
    _told: list[_SameStart] = field(default_factory=list)  # earlier ones that may have to be told
    _lost: list[_SameStart] = field(default_factory=list)  # one for each run of theirs that ended, as there were many
    _parted: int = 0  # calls that may well go on from a run that is lost
    _latest: OpenRun | None = None

    def goes_on(self, call: Call, number: int) -> bool:
        """Say whether a call goes on from one before: it is handed the state in which that one ended."""
        return self.run_of(call, number).last is not None

    def run_of(self, call: Call, number: int) -> OpenRun:
        """Return the run that a call belongs to: one that is open, or one that begins with it.

        Within one call of the model a state may have been changed on the way by anything; from outside it has to be
        recognized. None, zeros, and what a run began with are where a sequence starts.
        """
        run = None
        try:
            parts, steps = tuple(tensors(call.given_native).values()), call.steps
        except Exception:  # a layer that is called in a way of its own
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
            if self._lost and parts and not same and not _no_state(parts):  # may well go on from one that is lost
                self._lost.pop().calls -= 1
                self._parted += 1
            run = OpenRun(tuple(part.detach().clone() for part in parts), again=self._again if same else None)
            self._again.calls += same
            if self._again.calls == 2 and same and self._latest is not None:  # the first of them
                self._latest.again = self._again
        self._latest = run
        return run

    def ended(self, call: Call, number: int, run: OpenRun | None = None) -> list[OpenRun]:
        """Remember what a call of this model call ended in; return the runs that nothing can go on with any more.

        `run` is the one that the call belongs to; without it, the one that was asked for last.
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
        except Exception:  # a layer that is called, or answers, in a way of its own: nothing can go on from it
            return [run]
        run.number = number
        over = self._over(others) if begins and len(others) >= OPEN else []
        self._lost += [each.again for each in over if each.again is not None]
        self.open = [*(each for each in others if each not in over), run]
        return over

    @staticmethod
    def _over(others: list[OpenRun]) -> list[OpenRun]:
        """Return the runs that end as another begins: those that rested longest, of those that wait for no turn."""
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
        """Return the run that a call without a state goes on with: of a cell of the user's own, which may keep it."""
        run = self.open[-1] if self.open else None
        if run is None or run.last is None or run.number != number or self.handed or call.layer.kind != "cell":
            return None
        kept = {memory_of(t) for inner in call.layer.module.modules() for t in tensors(vars(inner)).values()}
        by_itself = any(memory_of(part) in kept - {None} for part in run.last.parts)
        return run if by_itself or not run.last.held else None  # what others hold may still be handed on

    def _recognized(self, parts: tuple[Tensor, ...]) -> OpenRun | None:
        """Return the run whose end state this is, or was made of: in memory, by its graph, or in what it holds."""
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
        if _no_state(parts) or self._is_passed(parts):  # zeros have no numbers to be known by
            return None
        same = next((run for run, last in ends if last.equals(parts)), None)  # a copy
        return same or next((run for run, last in ends[:_COMPARED] if last.holds(parts)), None)

    def _is_passed(self, parts: tuple[Tensor, ...]) -> bool:
        return any(part() is each for part in self._passed for each in parts)

    def _changed(self, parts: tuple[Tensor, ...], number: int) -> OpenRun | None:
        """Return the run whose end state a model has made into this one, in ways that leave nothing to know it by."""
        runs = [(run, run.last) for run in reversed(self.open) if run.number == number and run.last is not None]
        if not runs or _no_state(parts) or self._is_passed(parts) or any(_alike(parts, run.begun) for run, _ in runs):
            return None
        run, last, like = max(((*each, each[1].likeness(parts)) for each in runs), key=lambda each: each[2])
        unlike = like < 0
        if last.mark is None:  # no graph tells: what is unlike a state that may still be handed on is another start
            return None if unlike and last.held else run
        if all(part.grad_fn is None for part in parts):
            return None
        return None if unlike and nearest(parts, ())[1] else run  # a whole graph without a mark: made of something else

    def _is_same(self, call: Call, parts: tuple[Tensor, ...], *, on: bool, told: bool) -> bool:
        """Say whether a call from outside is one step from the state that the call before was handed."""
        own = not parts and call.layer.kind in ("cell", "recurrent", "layer")  # such a cell may keep a state itself
        before, self._given = self._given, tuple(p.detach() for p in parts) if told and not own else None
        if before is not None and self._given is not None and not on and _alike(self._given, before):
            return True
        self._told = [each for each in (*self._told, self._again) if each.calls >= _AGAIN]
        self._again = _SameStart()
        return False

    def _one_row(self, call: Call, parts: tuple[Tensor, ...], run: OpenRun) -> bool:
        """Say whether all rows were handed one row of the last state, or the mean of all, though its rows differ."""
        pairs = zip(parts, run.last.parts if run.last is not None else (), strict=False)
        try:
            axes = tuple(call.given.batch_axis.values()) if call.given is not None else ()
        except Exception:  # a state in a form of its own, whose rows nobody knows
            return False
        for (part, last), axis in zip(pairs, axes, strict=False):
            if part.shape == last.shape and axis is not None and part.dim() > axis and part.shape[axis] > 1:
                rows, before = part.detach().movedim(axis, 0).flatten(1), last.movedim(axis, 0).flatten(1)
                if bool((rows == rows[:1]).all()) and not bool((before == before[:1]).all()):
                    mean = before.mean(0) if before.is_floating_point() else before[0]
                    return bool((before == rows[:1]).all(1).any()) or torch.allclose(rows[0], mean)
        return False

    def complaint(self, *, over: bool = True) -> Complaint | None:
        """Say what is wrong with how states are handed on from outside; None where nothing is.

        Before all calls were heard, `over=False`, as many that start alike may be sequences fed in turns, which go on
        later: nothing is said until there are more than could be under way.
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
    """Say whether a state is none, or zeros: what a sequence begins with."""
    return not any(bool(part.any()) for part in parts)


def _alike(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> bool:
    return len(ours) == len(theirs) and all(
        a.shape == b.shape and a.device == b.device and bool((a == b).all()) for a, b in zip(ours, theirs, strict=True)
    )
