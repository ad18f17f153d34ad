"""What a layer's last call ended in: whether the next one goes on from it, starts anew, or is handed the same again."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..state import tensors
from .layer import Call

_MARK = "hiddenstate.ended"  # in the metadata of graph nodes, which die with the graph and keep nothing alive
_AGAIN = 3  # calls in a row with the same state that are told
_NEAR = 1000  # nodes that are searched behind a state: what lies between two steps, not a whole sequence


@dataclass(frozen=True, slots=True, eq=False)
class EndState:
    """The state in which a call ended; it holds no graph, only its values, so that their memory is not reused."""

    parts: tuple[Tensor, ...]
    mark: object | None  # left on the nodes that made it; None where it has no graph
    lies: tuple[tuple[int, tuple[int, ...]], ...] = ()  # where each part lies in memory, and how

    @classmethod
    def of(cls, native: Any) -> EndState:
        """Remember a state in a layer's own form, or any nest of tensors."""
        found = tuple(tensors(native).values())
        mark = object()
        made = [node for part in found if (node := part.grad_fn) is not None]
        for node in made:
            _metadata(node)[_MARK] = mark
        kept = tuple(part.detach() for part in found) if made else found
        return cls(kept, mark if made else None, _lies(found))

    def is_handed(self, parts: tuple[Tensor, ...]) -> bool:
        """Say whether these tensors are the very ones that it ended in: the quick answer in nearly all loops."""
        return bool(self.lies) and all(place for place, _ in self.lies) and _lies(parts) == self.lies

    def handed_on(self, given: Any) -> bool:
        """Say whether a state is this one, or was made of it: in memory, by its graph, or in what it holds."""
        parts = tuple(tensors(given).values())
        pairs = list(zip(parts, self.parts, strict=False))
        return (
            any(_one_memory(part, last) for part, last in pairs)
            or self._behind(parts)
            or any(_same_values(part.detach(), last) for part, last in pairs)
        )

    def _behind(self, parts: tuple[Tensor, ...]) -> bool:
        if self.mark is None:
            return False
        waiting, seen = deque(part.grad_fn for part in parts if part.grad_fn is not None), set[Any]()
        while waiting and len(seen) < _NEAR:
            node = waiting.popleft()
            if _metadata(node).get(_MARK) is self.mark:
                return True
            if node not in seen:
                seen.add(node)
                waiting.extend(inner for inner, _ in node.next_functions if inner is not None)
        return False


def _lies(parts: tuple[Tensor, ...]) -> tuple[tuple[int, tuple[int, ...]], ...]:
    try:
        return tuple((part.data_ptr(), part.stride()) for part in parts)
    except RuntimeError:  # a tensor without memory of its own: sparse, or within torch.func
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


def _one_memory(part: Tensor, last: Tensor) -> bool:
    """Say whether a tensor lies where the other does, or within it."""
    place = memory_of(part)
    return place is not None and place == memory_of(last)


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


def _no_state(parts: tuple[Tensor, ...]) -> bool:
    """Say whether a state is none, or zeros: what a sequence begins with."""
    return not any(bool(part.any()) for part in parts)


def _alike(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> bool:
    return len(ours) == len(theirs) and all(
        a.shape == b.shape and a.device == b.device and bool((a == b).all()) for a, b in zip(ours, theirs, strict=True)
    )


@dataclass(frozen=True, slots=True)
class Complaint:
    """What is wrong with how a loop outside the model hands states on."""

    seen: str  # what the layer was: "called 5 times with …"
    cause: str
    way_out: str
    calls: int
    mixes_rows: bool = False  # one row's state went to all, rather than none

    def __str__(self) -> str:
        """Return it as the rest of a sentence about the layer, and one more."""
        return f"{self.seen}. Usually {self.cause}: {self.way_out}"


@dataclass(slots=True, eq=False)
class Succession:
    """The calls of one layer as they come: which go on from the one before, and which are handed the same again."""

    last: EndState | None = None  # what the call before ended in
    number: int = -1  # of the model call that it belonged to
    steps: int = 0  # that were made in that model call
    begun: tuple[Tensor, ...] = ()  # what the run under way was handed at its beginning
    handed: bool = False  # whether some call was handed a state
    again: int = 0  # calls from outside in a row that were one step from one and the same state
    most_again: int = 0
    passed_on: int = 0  # calls that went on from the one before
    one_row: int = 0  # of these: how many were handed one row's state for all rows
    _given: tuple[Tensor, ...] | None = None  # what the call before was handed

    def goes_on(self, call: Call, number: int) -> bool:
        """Say whether a call goes on from the one before: it is handed the state in which that one ended.

        Within one call of the model a state may have been changed on the way by anything; from outside it has to be
        recognized. None, zeros, and what the run began with are where a sequence starts.
        """
        try:
            parts, steps = tuple(tensors(call.given_native).values()), call.steps
        except Exception:  # a layer that is called in a way of its own
            return False
        if self.last is not None and self.last.is_handed(parts):
            self.handed, self.again, self._given = True, 0, None
            self.passed_on += 1
            return True
        within = number == self.number
        on = self.last is not None and self._follows(parts, call, within=within)
        self._count(call, parts, on=on, again=steps == 1 and not within)
        if not on:
            self.begun = tuple(part.detach().clone() for part in parts)
        self.handed = self.handed or bool(parts)
        return on

    def ended(self, call: Call, number: int) -> None:
        """Remember what a call of this model call ended in."""
        before = self.steps if number == self.number else 0
        try:
            self.steps, self.last = before + call.steps, EndState.of(call.state_native)
        except Exception:  # a layer that is called, or answers, in a way of its own: nothing can go on from it
            self.steps, self.last = 0, None
        self.number = number

    def _follows(self, parts: tuple[Tensor, ...], call: Call, *, within: bool) -> bool:
        assert self.last is not None
        if not parts:  # of a cell that was never handed a state nobody knows where it begins
            return within and not call.layer.fused and not self.handed
        if self.last.handed_on(parts):
            return True
        if not within or _no_state(parts) or _alike(parts, self.begun):
            return False
        return self.last.mark is None or any(part.grad_fn is not None for part in parts)

    def _count(self, call: Call, parts: tuple[Tensor, ...], *, on: bool, again: bool) -> None:
        own = not parts and call.layer.kind in ("cell", "recurrent", "layer")  # such a cell may keep a state itself
        before, self._given = self._given, tuple(p.detach() for p in parts) if again and not own else None
        same = before is not None and self._given is not None and not on and _alike(self._given, before)
        self.again = self.again + 1 if same else 0
        self.most_again = max(self.most_again, self.again + 1 if self.again else 0)
        if on:
            self.passed_on += 1
            self.one_row += self._one_row(call, parts)

    def _one_row(self, call: Call, parts: tuple[Tensor, ...]) -> bool:
        """Say whether all rows were handed one row of the last state, whose rows differ."""
        assert self.last is not None
        pairs = list(zip(parts, self.last.parts, strict=False))
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

    def complaint(self) -> Complaint | None:
        """Say what is wrong with how states are handed on from outside; None where nothing is."""
        if self.most_again >= _AGAIN:
            return Complaint(
                f"called {self.most_again} times with the same state, one step each, so what one step gave never "
                f"reaches the next",
                "the new state is dropped",
                "hand it on, as in out, h = layer(x, h)",
                calls=self.most_again,
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
        return None
