"""Writing each row of a state as a file of its own, quickly: for a store of many small states of one kind."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from ..errors import StateMismatch
from .files import checksum_of_kind, to_bytes
from .value import State, from_bytes

_Bytes: TypeAlias = "np.ndarray[tuple[int, int], np.dtype[np.uint8]]"
_WHOLE_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHECKSUM = re.compile(r'(\\"crc32\\": )\d+')  # as written in the metadata, where JSON is quoted within JSON


class Format:
    """Reads and writes the rows of one kind of state, each as the bytes that `to_bytes` would make of it.

    Whatever is the same in all rows is worked out once, from any state of that kind:

    >>> state = State({"h": torch.randn(1, 3, 4), "c": torch.randn(1, 3, 4)}, batch_axis=1)
    >>> each = Format(state)
    >>> data = [each.seal(row) for row in each.rows(state)]
    >>> data[2] == to_bytes(state.select([2]))
    True
    >>> torch.equal(each.state([each.unseal(row) for row in data])["c"], state["c"])
    True
    """

    __slots__ = ("_axes", "_frame", "_kinds", "_seeds", "_spans", "nbytes")

    def __init__(self, state: State) -> None:
        """Learn names, axes, dtypes and row shapes from `state`, which may have any number of rows except none."""
        row = state.select([0]).detach().to("cpu")
        data = to_bytes(row)
        text = data[8 : 8 + int.from_bytes(data[:8], "little")].decode()
        self._axes = dict(row.batch_axis)
        self._kinds = {name: (part.dtype, _row_shape(part, self._axes[name])) for name, part in row.items()}
        spans = {name: tuple(json.loads(text)[name]["data_offsets"]) for name in row}
        self._spans: dict[str, tuple[int, int]] = dict(sorted(spans.items(), key=lambda item: item[1]))
        self.nbytes = max(end for _, end in spans.values())
        self._seeds = {name: _seed(name, self._axes[name], part) for name, part in row.items()}
        self._frame = _CHECKSUM.sub(r"\g<1>%d", text.rstrip().replace("%", "%%"), len(row))

    def pieces(self, state: State) -> list[_Bytes]:
        """Return the bytes of each part as a `(row, byte)` array, without headers. The arrays may be views."""
        return [self._matrix(name, state[name]) for name in self._spans]

    def rows(self, state: State) -> list[bytes]:
        """Return the bytes of each row, its parts one after another, without a header."""
        pieces = self.pieces(state)
        whole = pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis=1)
        width, data = whole.shape[1], whole.tobytes()
        return [data[at : at + width] for at in range(0, width * len(whole), width)] if width else [b""] * len(whole)

    def state(self, rows: Sequence[bytes]) -> State:
        """Return the state whose rows have these bytes, as `rows` gives them."""
        whole = np.frombuffer(bytearray().join(rows), dtype=np.uint8).reshape(len(rows), self.nbytes)
        parts = {name: self._tensor(name, whole) for name in self._kinds}
        return State(parts, self._axes)

    def seal(self, row: bytes) -> bytes:
        """Return a row's file: a header with checksums, then its bytes."""
        view = memoryview(row)
        sums = tuple(zlib.crc32(view[slice(*self._spans[name])], seed) for name, seed in self._seeds.items())
        header = (self._frame % sums).encode()
        header += b" " * (-len(header) % 8)
        return len(header).to_bytes(8, "little") + header + row

    def unseal(self, data: bytes, *, source: str = "these bytes") -> bytes:
        """Return the bytes in a row's file without the header; raise if it is damaged or of another kind of state."""
        row = data[len(data) - self.nbytes :]
        if len(row) == self.nbytes and self.seal(row) == data:
            return row
        state = from_bytes(data, source=source)  # raises if damaged; else only its header differs
        if state.batch != 1 or not self.fits(state):
            raise StateMismatch(f"{source} holds {state!r}, which is not a state of this kind: {self!r}.")
        return self.rows(state)[0]

    def fits(self, state: State) -> bool:
        """Say whether `state` is of this kind, whatever its rows and device."""
        kinds = {name: (part.dtype, _row_shape(part, state.batch_axis[name])) for name, part in state.items()}
        return kinds == self._kinds and dict(state.batch_axis) == self._axes

    def __repr__(self) -> str:
        """Return the parts with their dtypes and the shape of a row."""
        kinds = (f"{name} {shape} {str(dtype).removeprefix('torch.')}" for name, (dtype, shape) in self._kinds.items())
        return f"Format({', '.join(kinds)})"

    def _matrix(self, name: str, part: Tensor) -> _Bytes:
        if not part.numel():
            return np.zeros((part.shape[self._axes[name]], 0), np.uint8)
        front = part.detach().movedim(self._axes[name], 0).cpu()
        if front.is_complex() or front.is_neg():
            front = (
                torch.view_as_real(front.resolve_conj().resolve_neg()) if front.is_complex() else front.resolve_neg()
            )
        # View as integers of the same width first, since numpy does not know every kind of float. Then flatten: a view
        # as bytes needs a last axis of stride 1, and torch may give an axis of length one any stride.
        whole = front.view(_WHOLE_NUMBERS[front.element_size()]).numpy()
        return np.ascontiguousarray(whole).reshape(-1).view(np.uint8).reshape(len(front), -1)

    def _tensor(self, name: str, whole: _Bytes) -> Tensor:
        (dtype, shape), (begin, end) = self._kinds[name], self._spans[name]
        if begin == end:
            return torch.zeros(len(whole), *shape, dtype=dtype).movedim(0, self._axes[name])
        flat = torch.from_numpy(whole[:, begin:end].copy().reshape(-1)).view(dtype)
        return flat.view(len(whole), *shape).movedim(0, self._axes[name])


def _row_shape(part: Tensor, axis: int) -> tuple[int, ...]:
    shape = list(part.shape)
    del shape[axis]
    return tuple(shape)


def _seed(name: str, axis: int, part: Tensor) -> int:
    stored = torch.view_as_real(part) if part.is_complex() else part
    return checksum_of_kind({"name": name, "axis": axis, "complex": part.is_complex()}, stored)
