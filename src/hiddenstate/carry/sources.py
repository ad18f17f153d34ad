"""Sources of sequences for streams: sequences of one dtype and shape, read one at a time."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..errors import BadInput

Readable = Tensor | np.ndarray[Any, Any]  # (time, ...)


class SequenceKind(NamedTuple):
    """What all sequences have in common."""

    dtype: torch.dtype
    shape: tuple[int, ...]  # without the time axis
    device: torch.device


class Source:
    """A list of sequences of one kind; each is checked whenever it is read."""

    def __init__(self, name: str, items: Any) -> None:
        listlike = hasattr(items, "__len__") and hasattr(items, "__getitem__") and getattr(items, "ndim", 1) > 0
        if not listlike or isinstance(items, str | bytes | Mapping | Set):
            raise BadInput(f"{name} is of type {type(items).__name__}, but a list of sequences (time, ...) is needed.")
        if not len(items):
            raise BadInput(f"{name} has 0 entries, so there is nothing to stream. Was a filter or a path too narrow?")
        self.name = name
        # A list is copied, since it could change; any other source may load on demand, and is kept.
        self.items = tuple(items) if isinstance(items, list) else items
        self.kind: SequenceKind = _kind(self._readable(0), f"{name}[0]")
        self.lengths: list[int] = []
        for index in range(len(self.items)):
            self.lengths.append(len(self.read(index)))

    def read(self, index: int) -> Readable:
        """Return sequence `index`, after checking that it has the kind of the others and its old length."""
        item = self._readable(index)
        for field, seen, needed in zip(
            SequenceKind._fields, _kind(item, f"{self.name}[{index}]"), self.kind, strict=True
        ):
            if seen != needed:
                raise BadInput(
                    f"{self.name}[{index}] has {field} {seen}, but {self.name}[0] has {needed}. Sequences may differ "
                    f"in time alone: bring all to one {field} first."
                )
        if index < len(self.lengths) and len(item) != self.lengths[index]:
            raise BadInput(
                f"{self.name}[{index}] has {len(item)} steps now, but had {self.lengths[index]} when Streams was "
                f"built. Sequences must stay as they are: build another Streams for other data."
            )
        return item

    def zeros(self, count: int) -> Tensor:
        """Return padding of `count` steps."""
        return torch.zeros(count, *self.kind.shape, dtype=self.kind.dtype, device=self.kind.device)

    def _readable(self, index: int) -> Readable:
        """Return sequence `index` as an array or tensor with at least one step."""
        place, given = f"{self.name}[{index}]", self.items[index]
        try:
            item: Readable = given if isinstance(given, Tensor | np.ndarray) else torch.as_tensor(given, device="cpu")
        except (TypeError, ValueError, RuntimeError) as problem:
            raise _unreadable(place, f"a {type(given).__name__}", problem) from problem
        if item.ndim == 0 or not len(item):
            raise BadInput(
                f"{place} has shape {tuple(item.shape)}, but (time, ...) with at least one step is needed. Leave empty "
                f"sequences out; put one single sequence in a list; repeat a label for each step of its sequence."
            )
        return item


def cut(item: Readable, offset: int, count: int) -> Tensor:
    """Return `count` steps of a sequence from `offset` on, as a tensor."""
    piece = item[offset : offset + count]
    # Only the piece of an array is copied. A copy is needed since torch takes no array that is read-only, reversed or
    # of another byte order; the whole may be a memory-mapped file larger than memory.
    return piece if isinstance(piece, Tensor) else torch.from_numpy(np.array(piece, dtype=_native(piece)))


def _kind(item: Readable, place: str) -> SequenceKind:
    if isinstance(item, Tensor):
        return SequenceKind(item.dtype, tuple(item.shape[1:]), item.device)
    try:
        dtype = torch.from_numpy(np.empty(0, dtype=_native(item))).dtype
    except TypeError as problem:
        raise _unreadable(place, f"an array of {item.dtype}", problem) from problem
    return SequenceKind(dtype, item.shape[1:], torch.device("cpu"))


def _native(item: np.ndarray[Any, Any]) -> np.dtype[Any]:
    native: np.dtype[Any] = item.dtype.newbyteorder("=")
    return native


def _unreadable(place: str, what: str, problem: Exception) -> BadInput:
    return BadInput(
        f"{place} is {what}, which torch cannot read ({problem}). Give tensors, arrays or lists of numbers; "
        f"a text is encoded first, as in list(text.encode())."
    )
