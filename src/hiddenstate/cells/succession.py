"""The calls of one layer as they come: which go on from one before, which start anew, and what is handed on wrongly."""

from __future__ import annotations

from collections import deque
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from weakref import ref

import torch
from torch import Tensor

from ..state import tensors
from .layer import Call

OPEN = 16  # runs that are kept open beside each other; the one that rested longest ends
_TURNS = 64  # the same of sequences that are fed in turns: they start alike, or somebody holds what they ended in
_COMPARED = 8  # of these, whose numbers are compared with those of a state that was changed on the way
_PASSED = 256  # states from which a run has gone on, and which begin another one when they are handed in again
_AGAIN = 3  # calls in a row with the same state that are told
_MARKS = "hiddenstate.ended"  # in the metadata of graph nodes, which die with the graph and keep nothing alive
_NEAR = 1000  # nodes that are searched behind a state: what lies between two steps, not a whole sequence

Lies: TypeAlias = tuple[tuple[int, tuple[int, ...]], ...]  # where each part lies in memory, and how


@dataclass(frozen=True, slots=True, eq=False)
class EndState:
    """The state in which a call ended; it holds no graph, only its values, so that their memory is not reused."""

    parts: tuple[Tensor, ...]
    mark: object | None  # left on the nodes that made it; None where it has no graph
    lies: Lies = ()
    memory: tuple[int | None, ...] = ()  # where the memory of each part begins
    made: tuple[ref[Tensor], ...] = ()  # the tensors themselves, as long as somebody else holds them

    @classmethod
    def of(cls, native: Any) -> EndState:
        """Remember a state in a layer's own form, or any nest of tensors."""
        found = tuple(tensors(native).values())
        mark = object()
        nodes = [node for part in found if (node := part.grad_fn) is not None]
        for node in nodes:  # beside the marks of others: several may listen to one layer
            _metadata(node).setdefault(_MARKS, set()).add(mark)
        kept = tuple(part.detach() for part in found)
        memory = tuple(memory_of(part) for part in kept)
        return cls(kept, mark if nodes else None, lies(found), memory, tuple(ref(part) for part in found))

    @property
    def held(self) -> bool:
        """Whether somebody still holds what it ended in, and may hand it on later."""
        return any(part() is not None for part in self.made)

    def is_handed(self, place: Lies) -> bool:
        """Say whether tensors that lie there are the very ones that it ended in, as in nearly all loops."""
        return bool(self.lies) and all(start for start, _ in self.lies) and place == self.lies

    def shares_memory(self, parts: tuple[Tensor, ...]) -> bool:
        """Say whether a state lies where this one does, or within it."""
        return self.lies_at(tuple(memory_of(part) for part in parts))

    def lies_at(self, places: tuple[int | None, ...]) -> bool:
        """Say whether one of its parts lies in the memory that begins where the same part of a state does."""
        return any(place is not None and place == last for place, last in zip(places, self.memory, strict=False))

    def equals(self, parts: tuple[Tensor, ...]) -> bool:
        """Say whether a state is a copy of this one."""
        pairs = zip(parts, self.parts, strict=False)
        return len(parts) == len(self.parts) and all(
            part.shape == last.shape and part.dtype == last.dtype and part.device == last.device and part.equal(last)
            for part, last in pairs
        )

    def holds(self, parts: tuple[Tensor, ...]) -> bool:
        """Say whether a state has the numbers of this one, scaled, or those that a mask has left, or its rows."""
        pairs = [(part.detach(), last) for part, last in zip(parts, self.parts, strict=False)]
        return any(_same_values(part, last) or _same_rows(part, last) for part, last in pairs)

    def handed_on(self, given: Any) -> bool:
        """Say whether a state is this one, or was made of it: in memory, by its graph, or in what it holds."""
        parts = tuple(tensors(given).values())
        return (
            self.shares_memory(parts)
            or (self.mark is not None and nearest(parts, {self.mark})[0] is not None)
            or self.holds(parts)
        )

    def likeness(self, parts: tuple[Tensor, ...]) -> float:
        """Return how alike a state is; below zero where it is not more so than one that has nothing to do with it."""
        found = [_likeness(part.detach(), last) for part, last in zip(parts, self.parts, strict=False)]
        return max(found, default=0.0)


def nearest(parts: tuple[Tensor, ...], marks: Container[object]) -> tuple[object | None, bool]:
    """Return the mark that is nearest in the graph behind some tensors, and whether the search came to its end."""
    waiting, seen = deque(part.grad_fn for part in parts if part.grad_fn is not None), set[Any]()
    while waiting and len(seen) < _NEAR:
        node = waiting.popleft()
        found = next((mark for mark in _metadata(node).get(_MARKS, ()) if mark in marks), None)
        if found is not None:
            return found, True
        if node not in seen:
            seen.add(node)
            waiting.extend(inner for inner, _ in node.next_functions if inner is not None)
    return None, not waiting


def lies(parts: tuple[Tensor, ...]) -> Lies:
    """Return where each tensor lies in memory, and how; nothing for tensors without memory of their own."""
    try:
        return tuple((part.data_ptr(), part.stride()) for part in parts)
    except RuntimeError:  # sparse, or within torch.func
        return ()


def _metadata(node: Any) -> dict[Any, Any]:
    found: dict[Any, Any] = node.metadata
    return found


def memory_of(tensor: Tensor) -> int | None:
    """Return where the memory begins in which a tensor lies; None where it has none of its own."""
    try:
        return tensor.untyped_storage().data_ptr() or None
    except (RuntimeError, NotImplementedError):
        return None


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
        """Say whether all rows were handed one row of the last state, whose rows differ."""
        pairs = zip(parts, run.last.parts if run.last is not None else (), strict=False)
        try:
            axes = tuple(call.given.batch_axis.values()) if call.given is not None else ()
        except Exception:  # a state in a form of its own, whose rows nobody knows
            return False
        for (part, last), axis in zip(pairs, axes, strict=False):
            if part.shape == last.shape and axis is not None and part.dim() > axis and part.shape[axis] > 1:
                rows, before = part.detach().movedim(axis, 0).flatten(1), last.movedim(axis, 0).flatten(1)
                if bool((rows == rows[:1]).all()) and not bool((before == before[:1]).all()):
                    return bool((before == rows[:1]).all(1).any())
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
                f"called {self.one_row} times with one row's state for all rows of the batch, though the last call "
                f"left a state for each",
                "the state was indexed and expanded on the way",
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


def _same_values(part: Tensor, last: Tensor) -> bool:
    """Say whether a tensor holds the numbers of the other, all of them scaled, or those that a mask has left."""
    if part.shape != last.shape or part.device != last.device or part.device.type == "meta":
        return False
    telling = (part != 0) & (last != 0) & (last.abs() != 1)  # zeros and saturated units are equal by chance
    theirs, ours = last[telling], part[telling]
    # Two random numbers of few bits are often equal, of many bits hardly ever.
    enough = 2 + part.numel() // (1000 if part.element_size() >= 4 else 5)
    if int((ours == theirs).sum()) >= enough or (bool(part.any()) and torch.equal(part, last)):
        return True
    if len(theirs) < 4 or part.element_size() < 4 or not part.is_floating_point() or bool((theirs == theirs[0]).all()):
        return False
    ratio = ours / theirs
    scale = ratio.median()
    return int(((ratio - scale).abs() <= 1e-5 * scale.abs()).sum()) * 2 > max(len(theirs), 6)


def _same_rows(part: Tensor, last: Tensor) -> bool:
    """Say whether most rows of a tensor are rows of the other, in whatever order, as a beam search chooses them."""
    if part.shape != last.shape or part.dim() < 2 or part.device != last.device or part.device.type == "meta":
        return False
    ours, theirs = part.flatten(0, -2), last.flatten(0, -2)
    telling = (ours != ours[:, :1]).sum(1) > 2  # zeros, and rows of few different numbers, are equal by chance
    at = (ours[:, :1] == theirs[:, 0]).int().argmax(1)
    same = (ours == theirs[at]).all(1) & telling
    return int(same.sum()) * 2 > int(telling.sum())


def _likeness(part: Tensor, last: Tensor) -> float:
    """Return by how much the correlation of two tensors exceeds what chance may bring; 0 where none can be told."""
    if part.shape != last.shape or part.device != last.device or not part.is_floating_point():
        return 0.0
    ours, theirs = part.flatten().float(), last.flatten().float()
    ours, theirs = ours - ours.mean(), theirs - theirs.mean()
    size = float(ours.norm() * theirs.norm())
    chance = min(max(0.5, 3 / part.numel() ** 0.5), 0.9)
    return float(ours @ theirs) / size - chance if size > 0 else 0.0
