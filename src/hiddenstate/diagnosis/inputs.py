"""What a model is called with: where the rows and the steps are in it, and how to change single ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from ..errors import BadInput
from ..state import Path, ends, mapped, numbers
from .substitutes import another_state, other_steps

Kind = Literal["sequence", "features", "state", "lengths", "mask", "other"]
_STATE_NAMES = ("hidden", "state", "hx", "h0", "h_0", "prev", "carry", "memory", "hc")


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor among the arguments: what it is, and where its rows and steps are."""

    path: Path
    kind: Kind
    rows: int | None = None
    time: int | None = None
    steps: int = 0


@dataclass(frozen=True, slots=True)
class Cut:
    """How much of a large input is looked at."""

    rows: int
    all_rows: int
    steps: int
    all_steps: int

    def __str__(self) -> str:
        """Return it in words."""
        rows = f"{self.rows} of {self.all_rows} rows" if self.rows != self.all_rows else ""
        steps = f"{self.steps} of {self.all_steps} steps" if self.steps != self.all_steps else ""
        return f"measured on {' and '.join(filter(None, (rows, steps)))}"


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """The arguments of one call, and what is known of them."""

    args: tuple[Any, ...]
    slots: tuple[Slot, ...]
    batch: int  # rows; 1 where there is no batch axis
    batched: bool
    steps: int  # of the main sequence
    main: Path  # of the main sequence
    lengths: Tensor | None = None  # (batch,) on the CPU, as the user told
    vocabulary: int | None = None  # of tokens, where an embedding told
    pad_token: int | None = None

    @property
    def valid(self) -> Tensor:
        """Which steps are real: bool (batch, steps)."""
        if self.lengths is None:
            return torch.ones(self.batch, self.steps, dtype=torch.bool)
        return torch.arange(self.steps) < self.lengths.unsqueeze(1)

    @property
    def last(self) -> Tensor:
        """The last real step of each row: (batch,)."""
        return self.valid.sum(1) - 1

    def known_lengths(self) -> Tensor | None:
        """Return the lengths as the user told them, or as they are among the arguments: (batch,)."""
        if self.lengths is not None:
            return self.lengths
        found = [self.get(slot.path) for slot in self.slots if slot.kind == "lengths" and slot.rows is not None]
        return torch.as_tensor(found[0]).detach().cpu().long() if found else None

    def slot(self, path: Path) -> Slot:
        """Return what is known of one argument."""
        return next(slot for slot in self.slots if slot.path == path)

    def get(self, path: Path) -> Any:
        """Return one argument."""
        return dict(ends(self.args))[path]

    def select(self, rows: Sequence[int]) -> Inputs:
        """Return the call with these rows only, in this order."""

        def pick(slot: Slot, end: Any) -> Any:
            if slot.rows is None:
                return len(rows) if type(end) is int and slot.kind == "lengths" else end
            if numbers(end):
                return type(end)(end[row] for row in rows)
            if isinstance(end, PackedSequence):
                padded, lengths = unpacked(end)
                return packed(padded[list(rows)], lengths[list(rows)], end)
            return end.index_select(slot.rows, torch.tensor(list(rows), device=end.device))

        lengths = None if self.lengths is None else self.lengths[list(rows)]
        return replace(self._with(pick), batch=len(rows), lengths=lengths)

    def crop(self, steps: int, paths: Iterable[Path]) -> Inputs:
        """Return the call with the first `steps` steps of these sequences."""
        chosen = set(paths)

        def cut(slot: Slot, end: Any) -> Any:
            if slot.kind == "lengths" and slot.rows is not None and self.main in chosen:
                return type(end)(min(n, steps) for n in end) if numbers(end) else end.clamp(max=steps)
            if slot.path not in chosen or slot.time is None:
                return end
            if isinstance(end, PackedSequence):
                padded, lengths = unpacked(end)
                return packed(padded[:, :steps], lengths.clamp(max=steps), end)
            return end.narrow(slot.time, 0, steps)

        cropped = self._with(cut)
        if self.main not in chosen:
            return cropped
        lengths = None if self.lengths is None else self.lengths.clamp(max=steps)
        return replace(cropped, steps=steps, lengths=lengths)

    def tail(self, start: int, paths: Iterable[Path]) -> Inputs:
        """Return the call with the steps from `start` on; for sequences without lengths."""
        chosen = set(paths)

        def cut(slot: Slot, end: Any) -> Any:
            if slot.path not in chosen or slot.time is None:
                return end
            return end.narrow(slot.time, start, slot.steps - start)

        return replace(self._with(cut), steps=self.steps - start)

    def shortened(self, steps: int, *, others: bool = True) -> Inputs:
        """Return the call with `steps` steps: of each row's real ones as large a share as of its padding.

        Other sequences, of other lengths, keep so many of their steps too, unless `others` is false.
        """
        known = self.known_lengths()
        fewer = None if known is None else (known * steps + self.steps - 1) // self.steps
        place = torch.arange(steps).expand(self.batch, -1)
        if known is not None and fewer is not None:  # (batch, steps): where each row's steps come from
            place = torch.where(place < fewer.unsqueeze(1), place, place + (known - fewer).unsqueeze(1))

        def cut(slot: Slot, end: Any) -> Any:
            if slot.kind == "lengths" and slot.rows is not None and fewer is not None:
                return type(end)(fewer.tolist()) if numbers(end) else fewer.to(end)
            if slot.time is None:
                return end
            if isinstance(end, PackedSequence):
                padded, lengths = unpacked(end)
                kept = fewer if fewer is not None and slot.path == self.main else lengths.clamp(max=steps)
                return packed(padded[:, :steps], kept, end)
            if slot.steps != self.steps:
                return end.narrow(slot.time, 0, min(steps, slot.steps)) if others else end
            if known is None or slot.rows is None:
                return end.narrow(slot.time, 0, steps)
            by_rows = end.movedim((slot.rows, slot.time), (0, 1))
            chosen = by_rows[torch.arange(self.batch).unsqueeze(1), place.to(end.device)]
            return chosen.movedim((0, 1), (slot.rows, slot.time))

        touched = {s.path: min(steps, s.steps) for s in self.slots if others or s.steps == self.steps}
        slots = tuple(replace(s, steps=touched.get(s.path, s.steps)) if s.time is not None else s for s in self.slots)
        return replace(self._with(cut), slots=slots, steps=steps, lengths=fewer if self.lengths is not None else None)

    def other_rows(self, rows: Tensor, *, seed: int = 0) -> Inputs:
        """Return the call with these rows (a mask) holding other values, in everything that has rows."""

        def change(slot: Slot, end: Any) -> Any:
            if slot.kind == "state" and slot.rows is None and isinstance(end, Tensor) and bool(rows.all()):
                return another_state(end, seed)
            if slot.rows is None or slot.kind in ("lengths", "mask", "other") or numbers(end):
                return end
            if slot.kind == "state":
                return _where(rows, end, another_state(end, seed), slot.rows)
            if isinstance(end, PackedSequence):
                padded, lengths = unpacked(end)
                mask = rows.unsqueeze(1) & (torch.arange(padded.shape[1]) < lengths.unsqueeze(1))
                return packed(other_steps(padded, mask, self, seed=seed), lengths, end)
            whole = end.movedim(slot.rows, 0)
            if slot.time is None:
                return other_steps(whole.unsqueeze(1), rows.unsqueeze(1), self, seed=seed)[:, 0].movedim(0, slot.rows)
            valid = self.valid if slot.steps == self.steps else torch.ones(self.batch, slot.steps, dtype=torch.bool)
            return self._changed(slot, end, rows.unsqueeze(1) & valid, seed)

        return self._with(change)

    def other_steps(self, steps: Tensor, paths: Iterable[Path], *, seed: int = 0) -> Inputs:
        """Return the call with these steps, a mask (batch, steps), holding other values in these sequences."""
        chosen = set(paths)

        def change(slot: Slot, end: Any) -> Any:
            if slot.path not in chosen or slot.time is None or slot.kind != "sequence":
                return end
            if isinstance(end, PackedSequence):
                padded, lengths = unpacked(end)
                return packed(other_steps(padded, steps, self, seed=seed), lengths, end)
            return self._changed(slot, end, steps, seed)

        return self._with(change)

    def put(self, path: Path, value: Any) -> Inputs:
        """Return the call with one argument replaced."""
        return replace(self, args=mapped(self.args, lambda at, end: value if at == path else end))

    def with_lengths(self, lengths: Tensor) -> Inputs:
        """Return the call with other lengths, also among the arguments."""

        def change(slot: Slot, end: Any) -> Any:
            if slot.kind != "lengths" or slot.rows is None:
                return end
            return type(end)(lengths.tolist()) if numbers(end) else lengths.to(end)

        return replace(self._with(change), lengths=lengths)

    def _changed(self, slot: Slot, end: Tensor, mask: Tensor, seed: int) -> Tensor:
        assert slot.time is not None
        if not self.batched or slot.rows is None:
            return other_steps(end.movedim(slot.time, 0)[None], mask[:1], self, seed=seed)[0].movedim(0, slot.time)
        order = end.movedim((slot.rows, slot.time), (0, 1))
        return other_steps(order, mask, self, seed=seed).movedim((0, 1), (slot.rows, slot.time))

    def _with(self, change: Callable[[Slot, Any], Any]) -> Inputs:
        known = {slot.path: slot for slot in self.slots}
        args = mapped(self.args, lambda path, end: change(known[path], end) if path in known else end)
        return replace(self, args=_laid_out_as(self.args, args))


def unpacked(sequence: PackedSequence) -> tuple[Tensor, Tensor]:
    """Return a packed sequence as (batch, time, ...) and its lengths."""
    padded, lengths = pad_packed_sequence(sequence, batch_first=True)
    return padded, lengths


def packed(padded: Tensor, lengths: Tensor, like: PackedSequence) -> PackedSequence:
    """Return (batch, time, ...) packed as `like` was."""
    ordered = like.sorted_indices is None
    padded = padded[:, : int(lengths.max())]
    return pack_padded_sequence(padded, lengths.cpu(), batch_first=True, enforce_sorted=ordered)


def _laid_out_as(old: Any, new: Any) -> Any:
    """Return `new` in memory as `old` was: a model may well rely on it with view."""
    before = dict(ends(old))

    def settle(path: Path, end: Any) -> Any:
        like = before.get(path)
        return (
            end.contiguous() if isinstance(end, Tensor) and isinstance(like, Tensor) and like.is_contiguous() else end
        )

    return mapped(new, settle)


def _where(rows: Tensor, old: Tensor, new: Tensor, axis: int) -> Tensor:
    shape = [1] * old.dim()
    shape[axis] = -1
    return torch.where(rows.to(old.device).reshape(shape), new, old)


def lengths_of(given: Any, rows: int, axis: int) -> Tensor | None:
    """Return the user's lengths as int64 (batch,), checked against the rows."""
    if given is None:
        return None
    lengths = torch.as_tensor(given).detach().cpu().long().reshape(-1)
    if len(lengths) != rows:
        raise BadInput(
            f"lengths has {len(lengths)} entries, but the sequences have {rows} rows at batch_axis={axis}. "
            f"For (time, batch, feature) say batch_axis=1."
        )
    return lengths


def state_named(name: str) -> bool:
    """Say whether an argument of this name is a state."""
    name = name.lower().strip("_")
    return name in ("h", "c", "hs", "past") or any(word in name for word in _STATE_NAMES)
