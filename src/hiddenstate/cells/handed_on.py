"""The state in which a call of a layer ended, and how it is recognized in what a later call is handed."""

from __future__ import annotations

from collections import deque
from collections.abc import Container
from dataclasses import dataclass
from typing import Any, TypeAlias
from weakref import ref

import torch
from torch import Tensor

from ..state import tensors

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
