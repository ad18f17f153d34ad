"""The state in which a call of a layer ended, and recognizing that state among the arguments of a later call."""

from __future__ import annotations

from collections import deque
from collections.abc import Container
from dataclasses import dataclass
from typing import Any, TypeAlias
from weakref import ref

import torch
from torch import Tensor

from ..state import tensors

_MARKS = "hiddenstate.ended"  # a key in the metadata of graph nodes: it dies with the graph, and keeps nothing alive
_NEAR = 1000  # nodes to search behind a state: enough for what lies between two steps, not for a whole sequence

Lies: TypeAlias = tuple[tuple[int, tuple[int, ...]], ...]  # for each part, its address in memory and its strides


@dataclass(frozen=True, slots=True, eq=False)
class EndState:
    """The state in which a call ended. It keeps the values, so that their memory is not reused, but not the graph."""

    parts: tuple[Tensor, ...]
    mark: object | None  # left on the graph nodes that made the state; None if it has no graph
    lies: Lies = ()
    memory: tuple[int | None, ...] = ()  # the address at which the memory of each part begins
    made: tuple[ref[Tensor], ...] = ()  # the tensors themselves; these references do not keep them alive

    @classmethod
    def of(cls, native: Any) -> EndState:
        """Remember a state, in a layer's own form or any other nesting of tensors."""
        found = tuple(tensors(native).values())
        mark = object()
        nodes = [node for part in found if (node := part.grad_fn) is not None]
        for node in nodes:  # a node may have several marks, as several listeners may hear one layer
            _metadata(node).setdefault(_MARKS, set()).add(mark)
        kept = tuple(part.detach() for part in found)
        memory = tuple(memory_of(part) for part in kept)
        return cls(kept, mark if nodes else None, lies(found), memory, tuple(ref(part) for part in found))

    @property
    def held(self) -> bool:
        """Whether somebody still holds a tensor of this state, and may hand it to a later call."""
        return any(part() is not None for part in self.made)

    def is_handed(self, place: Lies) -> bool:
        """Say whether tensors at this place are the very ones that the call ended in, as in nearly all loops."""
        return bool(self.lies) and all(start for start, _ in self.lies) and place == self.lies

    def shares_memory(self, parts: tuple[Tensor, ...]) -> bool:
        """Say whether a state shares memory with this one."""
        return self.lies_at(tuple(memory_of(part) for part in parts))

    def lies_at(self, places: tuple[int | None, ...]) -> bool:
        """Say whether some part of this state lies in memory that begins at the address given for that part."""
        return any(place is not None and place == last for place, last in zip(places, self.memory, strict=False))

    def equals(self, parts: tuple[Tensor, ...]) -> bool:
        """Say whether a state has the same values as this one."""
        pairs = zip(parts, self.parts, strict=False)
        return len(parts) == len(self.parts) and all(
            part.shape == last.shape and part.dtype == last.dtype and part.device == last.device and part.equal(last)
            for part, last in pairs
        )

    def holds(self, parts: tuple[Tensor, ...]) -> bool:
        """Say whether a state has the values of this one, scaled or partly masked, or rows of it in another order."""
        pairs = [(part.detach(), last) for part, last in zip(parts, self.parts, strict=False)]
        return any(_same_values(part, last) or _same_rows(part, last) for part, last in pairs)

    def handed_on(self, given: Any) -> bool:
        """Say whether a state is this one, or was made from it, judging by its memory, its graph and its values."""
        parts = tuple(tensors(given).values())
        return (
            self.shares_memory(parts)
            or (self.mark is not None and nearest(parts, {self.mark})[0] is not None)
            or self.holds(parts)
        )

    def likeness(self, parts: tuple[Tensor, ...]) -> float:
        """Return how similar a state is to this one; negative if no more so than an unrelated state would be."""
        found = [_likeness(part.detach(), last) for part, last in zip(parts, self.parts, strict=False)]
        return max(found, default=0.0)


def nearest(parts: tuple[Tensor, ...], marks: Container[object]) -> tuple[object | None, bool]:
    """Return the nearest mark in the graph behind some tensors, and whether that graph was searched to its end."""
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
    """Return address and strides of each tensor; nothing if one has no memory of its own."""
    try:
        return tuple((part.data_ptr(), part.stride()) for part in parts)
    except RuntimeError:  # a sparse tensor, or one inside torch.func
        return ()


def _metadata(node: Any) -> dict[Any, Any]:
    found: dict[Any, Any] = node.metadata
    return found


def memory_of(tensor: Tensor) -> int | None:
    """Return the address at which a tensor's memory begins; None if it has no memory of its own."""
    try:
        return tensor.untyped_storage().data_ptr() or None
    except (RuntimeError, NotImplementedError):
        return None


def _same_values(part: Tensor, last: Tensor) -> bool:
    """Say whether a tensor has the values of another one, scaled or partly masked."""
    if part.shape != last.shape or part.device != last.device or part.device.type == "meta":
        return False
    telling = (part != 0) & (last != 0) & (last.abs() != 1)  # zeros and saturated units may be equal by chance
    theirs, ours = last[telling], part[telling]
    # Two random numbers of few bits are often equal; of many bits, hardly ever.
    enough = 2 + part.numel() // (1000 if part.element_size() >= 4 else 5)
    if int((ours == theirs).sum()) >= enough or (bool(part.any()) and torch.equal(part, last)):
        return True
    if len(theirs) < 4 or part.element_size() < 4 or not part.is_floating_point() or bool((theirs == theirs[0]).all()):
        return False
    ratio = ours / theirs
    scale = ratio.median()
    return int(((ratio - scale).abs() <= 1e-5 * scale.abs()).sum()) * 2 > max(len(theirs), 6)


def _same_rows(part: Tensor, last: Tensor) -> bool:
    """Say whether most rows of a tensor are rows of the other, in any order, as a beam search picks them."""
    if part.shape != last.shape or part.dim() < 2 or part.device != last.device or part.device.type == "meta":
        return False
    ours, theirs = part.flatten(0, -2), last.flatten(0, -2)
    telling = (ours != ours[:, :1]).sum(1) > 2  # zeros, and rows of few different values, may be equal by chance
    at = (ours[:, :1] == theirs[:, 0]).int().argmax(1)
    same = (ours == theirs[at]).all(1) & telling
    return int(same.sum()) * 2 > int(telling.sum())


def _likeness(part: Tensor, last: Tensor) -> float:
    """Return by how much the correlation of two tensors exceeds what chance allows; 0 if it cannot be computed."""
    if part.shape != last.shape or part.device != last.device or not part.is_floating_point():
        return 0.0
    ours, theirs = part.flatten().float(), last.flatten().float()
    ours, theirs = ours - ours.mean(), theirs - theirs.mean()
    size = float(ours.norm() * theirs.norm())
    chance = min(max(0.5, 3 / part.numel() ** 0.5), 0.9)
    return float(ours @ theirs) / size - chance if size > 0 else 0.0
