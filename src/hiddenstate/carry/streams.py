"""Streams: sequences of unequal length cut into chunks, in which each row continues where it stopped."""

from __future__ import annotations

import hashlib
import operator
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapreplace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from ..errors import BadInput, StateMismatch
from .sources import Readable, Source, cut


class Chunk(NamedTuple):
    """The next steps of every row, zero beyond a row's length."""

    x: Tensor  # (batch, steps, ...)
    y: Tensor | None  # (batch, steps, ...)
    starts: Tensor  # (batch, steps) bool, True at the first step of a sequence
    lengths: Tensor  # (batch,) valid steps, 0 for a row without sequences left

    @property
    def mask(self) -> Tensor:
        """True at the valid steps, `(batch, steps)`."""
        steps = torch.arange(self.starts.shape[1], device=self.lengths.device)
        return steps < self.lengths[:, None]

    def to(self, device: torch.device | str | int, *, non_blocking: bool = False) -> Chunk:
        """Return the same chunk on `device`."""
        x, starts, lengths = (part.to(device, non_blocking=non_blocking) for part in (self.x, *self[2:]))
        y = None if self.y is None else self.y.to(device, non_blocking=non_blocking)
        return Chunk(x, y, starts, lengths)


class Streams(IterableDataset[Chunk]):
    """Chunks of `steps` steps, in which each row continues where it stopped in the chunk before.

    When a row's sequence ends, the next one in the queue begins, even in mid-chunk, and `starts` is True there: reset
    that row's state at this point. No step is lost or repeated. When the queue is empty, rows run out of sequences one
    after another, and `lengths` says how many steps of each row are still valid.

    >>> streams = Streams([[1, 2, 3], [4, 5], [6, 7, 8]], batch=2, steps=4)
    >>> first, second = streams
    >>> first.x.tolist(), second.x.tolist()
    ([[1, 2, 3, 0], [4, 5, 6, 7]], [[0, 0, 0, 0], [8, 0, 0, 0]])
    >>> first.starts.int().tolist(), first.lengths.tolist()
    ([[1, 0, 0, 0], [1, 0, 1, 0]], [3, 4])

    A checkpoint taken in the loop continues at the very next chunk:

    >>> for chunk in streams:
    ...     saved = streams.state_dict()
    ...     break
    >>> streams.load_state_dict(saved)
    >>> [chunk.x.tolist() for chunk in streams]
    [[[0, 0, 0, 0], [8, 0, 0, 0]]]

    A DataLoader takes it with `batch_size=None`, since a chunk is a batch already.

    Args:
        sequences: Tensors, arrays or lists of numbers `(time, ...)`, equal in all but time. Each is read when its turn
            comes, so a `__getitem__` of your own may load them on demand.
        batch: How many rows run side by side.
        steps: How many steps a chunk has.
        targets: `"next"`: y is x one step ahead, so a sequence of n gives n - 1 steps. Sequences parallel to
            `sequences`: y is cut from them. None: y is None.
        shuffle: Whether the sequences queue up in another order every epoch.
        seed: Determines that order together with the number of the epoch; the global random stream is not used.
    """

    def __init__(
        self,
        sequences: Sequence[Any] | Readable,
        batch: int,
        steps: int,
        *,
        targets: Sequence[Any] | Readable | str | None = None,
        shuffle: bool = False,
        seed: int = 0,
    ) -> None:
        """Read every sequence once to check it and to learn its length."""
        self._batch, self._steps = _integer("batch", batch, least=1), _integer("steps", steps, least=1)
        if isinstance(targets, str) and targets != "next":
            raise BadInput(f"targets is {targets!r}, but it can be 'next', a list parallel to sequences, or None.")
        self._x = Source("sequences", sequences)
        self._ahead = isinstance(targets, str)
        self._y = None if targets is None or isinstance(targets, str) else Source("targets", targets)
        self._check()
        self._lengths = [length - self._ahead for length in self._x.lengths]
        self._settings: dict[str, int | str] = {
            "batch": self._batch,
            "steps": self._steps,
            "targets": "next" if self._ahead else "none" if self._y is None else "given",
            "shuffle": int(shuffle),
            "seed": _integer("seed", seed),
            "sequences": len(self._lengths),
            "total": sum(self._lengths),
            "lengths": _digest(array("q", self._lengths).tobytes()).hex(),
        }
        self._epoch, self._chunk = 0, 0
        self._waiting = True  # the next iterator continues at (epoch, chunk) instead of starting a new epoch
        self._turn = 0  # number of the newest iterator: only the newest one moves the position
        self._planned: dict[int, _StreamPlan] = {}

    def __len__(self) -> int:
        """Return the number of chunks in the present or next epoch, counted from its beginning."""
        return self._plan(self._epoch).chunks

    def __iter__(self) -> Iterator[Chunk]:
        """Iterate over a new epoch; right after `load_state_dict`, over the rest of the saved one."""
        if get_worker_info() is not None:
            raise BadInput(
                "streams are read in a worker of a DataLoader, where each worker has a copy of all of them, and the "
                "position stays behind in it. Use num_workers=0: putting a chunk together is slicing."
            )
        if not self._waiting:
            self._epoch, self._chunk = self._epoch + 1, 0
        self._waiting = False
        self._turn += 1
        return self._run(self._plan(self._epoch), self._chunk, self._turn)

    def __repr__(self) -> str:
        total = f"{len(self._lengths)} sequences, {sum(self._lengths)} steps in all"
        return f"Streams({total}, batch={self._batch}, steps={self._steps}, targets={self._settings['targets']!r})"

    def state_dict(self) -> dict[str, int | str]:
        """Return the position after the last chunk given out, with what is needed to recognize the data."""
        return {**self._settings, "epoch": self._epoch, "chunk": self._chunk}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a saved position: the next iterator continues at the very next chunk."""
        missing = [key for key in self.state_dict() if key not in state]
        if missing:
            raise StateMismatch(
                f"the state lacks {', '.join(missing)}, so it is not one that Streams.state_dict() gave. "
                f"In a checkpoint with several parts, pass the one saved from Streams."
            )
        differing = [
            f"{key} is {state[key]!r} in the state but {value!r} here"
            for key, value in self._settings.items()
            if state[key] != value
        ]
        if differing:
            raise StateMismatch(
                f"the state belongs to other data or settings: {'; '.join(differing)}. A position means something "
                f"only in the same sequences, in the same order: build Streams as it was when the state was saved."
            )
        epoch, chunk = state["epoch"], state["chunk"]
        whole = type(epoch) is int and type(chunk) is int and min(epoch, chunk) >= 0
        if not whole or chunk > self._plan(epoch).chunks:
            raise StateMismatch(
                f"the state stands after chunk {chunk!r} of epoch {epoch!r}, where no epoch of these sequences goes. "
                f"It was changed after it was saved: take an older checkpoint."
            )
        self._epoch, self._chunk, self._waiting = epoch, chunk, True
        self._turn += 1

    def _check(self) -> None:
        """Raise if the sequences cannot fill the rows, or do not fit their targets."""
        lengths, batch = self._x.lengths, self._batch
        if len(lengths) < batch:
            raise BadInput(
                f"sequences has {len(lengths)} entries, but batch={batch} rows need at least one each. One long "
                f"text is cut into rows first, Streams(text.chunk({batch}), {batch}, ...); or use a smaller batch."
            )
        if self._ahead and min(lengths) < 2:
            raise BadInput(
                f"sequences[{lengths.index(1)}] has 1 step, but targets='next' needs at least 2: a last step has no "
                f"next one. Leave such sequences out: [s for s in sequences if len(s) > 1]."
            )
        targets = lengths if self._y is None else self._y.lengths
        if len(targets) != len(lengths):
            raise BadInput(
                f"targets has {len(targets)} entries, but sequences has {len(lengths)}. "
                f"Give one target sequence for each sequence, in the same order."
            )
        for index, (given, needed) in enumerate(zip(targets, lengths, strict=True)):
            if given != needed:
                raise BadInput(
                    f"targets[{index}] has {given} steps, but sequences[{index}] has {needed}. There is one target "
                    f"for each step; where y is x one step ahead, use targets='next'."
                )

    def _plan(self, epoch: int) -> _StreamPlan:
        """Return which sequence runs in which row in `epoch`; the last answer is cached."""
        key = epoch if self._settings["shuffle"] else 0
        if key not in self._planned:
            order: Sequence[int] = range(len(self._lengths))
            if self._settings["shuffle"]:
                # Hashed: with seed + epoch, one run's second epoch would be the next run's first.
                word = _digest(f"{self._settings['seed']} {epoch}".encode())
                source = torch.Generator(device="cpu").manual_seed(int.from_bytes(word, "big") >> 1)
                order = torch.randperm(len(self._lengths), generator=source, device="cpu").tolist()
            self._planned = {key: _StreamPlan.of(order, self._lengths, batch=self._batch, steps=self._steps)}
        return self._planned[key]

    def _run(self, plan: _StreamPlan, first: int, turn: int) -> Iterator[Chunk]:
        """Yield the chunks of one epoch from the `first` on."""
        held: dict[int, _Held] = {}
        for number in range(first, plan.chunks):
            chunk = self._build(plan, number, held)
            if turn == self._turn:
                self._chunk = number + 1
            yield chunk
        if turn == self._turn:
            self._epoch, self._chunk, self._waiting = self._epoch + 1, 0, True

    def _build(self, plan: _StreamPlan, number: int, held: dict[int, _Held]) -> Chunk:
        """Build chunk `number`; `held` keeps each row's present sequence, so that a sequence is read once per epoch."""
        target = self._x if self._ahead else self._y
        xs, ys, firsts, lengths = [], [], [], []
        for row in range(self._batch):
            filled = 0
            for sequence, offset, count in plan.pieces(row, number):
                if row not in held or held[row].sequence != sequence:
                    held[row] = self._read(sequence)
                if offset == 0:
                    firsts.append(row * self._steps + filled)
                _, x, y = held[row]
                xs.append(cut(x, offset, count))
                if y is not None:
                    ys.append(cut(y, offset, count))
                filled += count
            lengths.append(filled)
            if filled < self._steps:
                xs.append(self._x.zeros(self._steps - filled))
                if target is not None:
                    ys.append(target.zeros(self._steps - filled))
        device, shape = self._x.kind.device, (self._batch, self._steps)
        starts = torch.zeros(self._batch * self._steps, dtype=torch.bool, device=device)
        starts[torch.tensor(firsts, dtype=torch.int64, device=device)] = True
        return Chunk(
            x=torch.cat(xs).view(*shape, *self._x.kind.shape),
            y=None if target is None else torch.cat(ys).view(*shape, *target.kind.shape),
            starts=starts.view(shape),
            lengths=torch.tensor(lengths, dtype=torch.int64, device=device),
        )

    def _read(self, sequence: int) -> _Held:
        x = self._x.read(sequence)
        if self._y is not None:
            return _Held(sequence, x, self._y.read(sequence))
        return _Held(sequence, x, x[1:] if self._ahead else None)


class _Held(NamedTuple):
    """The sequence that a row is in the middle of."""

    sequence: int
    x: Readable  # (time, ...)
    y: Readable | None  # (time, ...)


@dataclass(frozen=True, slots=True)
class _StreamPlan:
    """Which sequence runs in which row and when, for one epoch."""

    begins: list[list[int]]  # for each row: the steps at which its sequences begin, then the step at which it runs out
    sequences: list[list[int]]  # for each row, its sequences in order
    steps: int

    @classmethod
    def of(cls, order: Sequence[int], lengths: list[int], *, batch: int, steps: int) -> _StreamPlan:
        """Give each sequence in `order` to the row that is free first; of two, to the lower one."""
        begins: list[list[int]] = [[] for _ in range(batch)]
        sequences: list[list[int]] = [[] for _ in range(batch)]
        free = [(0, row) for row in range(batch)]  # sorted, so it is a heap
        for sequence in order:
            begin, row = free[0]
            begins[row].append(begin)
            sequences[row].append(sequence)
            heapreplace(free, (begin + lengths[sequence], row))
        for end, row in free:
            begins[row].append(end)
        return cls(begins, sequences, steps)

    @property
    def chunks(self) -> int:
        """The number of chunks that the longest row fills."""
        return -(-max(row[-1] for row in self.begins) // self.steps)

    def pieces(self, row: int, chunk: int) -> Iterator[tuple[int, int, int]]:
        """Yield (sequence, offset, steps) for each piece that fills `row` of `chunk`, in order."""
        begins, start, stop = self.begins[row], chunk * self.steps, (chunk + 1) * self.steps
        place = bisect_right(begins, start) - 1
        while place < len(begins) - 1 and begins[place] < stop:
            begin = max(begins[place], start)
            yield self.sequences[row][place], begin - begins[place], min(begins[place + 1], stop) - begin
            place += 1


def _integer(name: str, value: int, *, least: int | None = None) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__") or (least is not None and value < least):
        bound = "" if least is None else f" of at least {least}"
        raise BadInput(f"{name} is {value!r}, but a whole number{bound} is needed.")
    return operator.index(value)


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=8).digest()
