"""The inputs of a model: where their rows and steps are, and how to change single ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from ..cells import Calling
from ..errors import BadInput
from ..state import Path, ends, mapped, numbers
from .argument_names import path_name

Kind = Literal["sequence", "features", "state", "lengths", "mask", "other"]


@dataclass(frozen=True, slots=True)
class Argument:
    """One tensor or number among the arguments: what it is, and where its rows and steps are."""

    path: Path
    kind: Kind
    rows: int | None = None  # the axis of rows, None where it has none
    time: int | None = None  # the axis of steps
    steps: int = 0
    real: int | None = None  # of a mask of padding, what stands at real steps: 1 or 0


@dataclass(frozen=True, slots=True)
class Excerpt:
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
class ModelInputs:
    """The arguments of one call, and what is known of them."""

    args: tuple[Any, ...]
    arguments: tuple[Argument, ...]  # what is known of each tensor and number in `args`
    batch: int  # rows; 1 where there is no batch axis
    batched: bool
    steps: int  # of the main sequence
    main: Path  # of the main sequence
    lengths: Tensor | None = None  # (batch,) on the CPU, as the user told
    vocabulary: int | None = None  # of tokens, where an embedding told
    pad_token: int | None = None
    calling: Calling = field(default_factory=lambda: Calling(()))
    ragged: frozenset[Path] = frozenset()  # what the model takes as a list of sequences, and is one padded tensor here
    flat: frozenset[Path] = (
        frozenset()
    )  # what the model takes with rows and steps on one axis, and has two of them here

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
        found = [self.get(a.path) for a in self.arguments if a.kind == "lengths" and a.rows is not None]
        return torch.as_tensor(found[0]).detach().cpu().long() if found else None

    def own_args(self) -> tuple[Any, ...]:
        """Return the arguments as the model takes them, in tensors of their own."""

        def copy(path: Path, end: Any) -> Any:
            if isinstance(end, PackedSequence):
                return end._replace(data=end.data.clone())
            if not isinstance(end, Tensor):
                return end
            if path in self.ragged and self.lengths is not None:
                return [row[:steps].clone() for row, steps in zip(end, self.lengths.tolist(), strict=True)]
            return end.flatten(0, 1).clone() if path in self.flat else end.clone()

        return mapped(self.args, copy)  # type: ignore[no-any-return]

    def name(self, path: Path) -> str:
        """Return what an argument is called by the nearest that has a name, "" where nothing tells."""
        return path_name(self.calling.names, path)

    def argument(self, path: Path) -> Argument:
        """Return what is known of one argument."""
        return next(argument for argument in self.arguments if argument.path == path)

    def get(self, path: Path) -> Any:
        """Return one argument."""
        return dict(ends(self.args))[path]

    def select(self, rows: Sequence[int]) -> ModelInputs:
        """Return the inputs with these rows only, in this order."""

        def pick(argument: Argument, end: Any) -> Any:
            if argument.rows is None:
                return len(rows) if type(end) is int and argument.kind == "lengths" else end
            if numbers(end):
                return type(end)(end[row] for row in rows)
            if isinstance(end, PackedSequence):
                padded, lengths = unpacked(end)
                return packed(padded[list(rows)], lengths[list(rows)], end)
            return end.index_select(argument.rows, torch.tensor(list(rows), device=end.device))

        lengths = None if self.lengths is None else self.lengths[list(rows)]
        return replace(self._with(pick), batch=len(rows), lengths=lengths)

    def crop(self, steps: int, paths: Iterable[Path]) -> ModelInputs:
        """Return the inputs with the first `steps` steps of these sequences."""
        chosen = set(paths)

        def cut(argument: Argument, end: Any) -> Any:
            if argument.kind == "lengths" and argument.rows is not None and self.main in chosen:
                return type(end)(min(n, steps) for n in end) if numbers(end) else end.clamp(max=steps)
            if argument.path not in chosen or argument.time is None:
                return end
            if isinstance(end, PackedSequence):
                padded, lengths = unpacked(end)
                return packed(padded[:, :steps], lengths.clamp(max=steps), end)
            return end.narrow(argument.time, 0, steps)

        cropped = self._with(cut)
        if self.main not in chosen:
            return cropped
        lengths = None if self.lengths is None else self.lengths.clamp(max=steps)
        return replace(cropped, steps=steps, lengths=lengths)

    def tail(self, start: int, paths: Iterable[Path]) -> ModelInputs:
        """Return the inputs with the steps from `start` on; for sequences without lengths."""
        chosen = set(paths)

        def cut(argument: Argument, end: Any) -> Any:
            if argument.path not in chosen or argument.time is None:
                return end
            return end.narrow(argument.time, start, argument.steps - start)

        return replace(self._with(cut), steps=self.steps - start)

    def shortened(self, steps: int, *, others: bool = True) -> ModelInputs:
        """Return the inputs with `steps` steps: of each row's real ones as large a share as of its padding.

        Other sequences, of other lengths, keep so many of their steps too, unless `others` is false.
        """
        known = self.known_lengths()
        fewer = None if known is None else (known * steps + self.steps - 1) // self.steps
        place = torch.arange(steps).expand(self.batch, -1)
        if known is not None and fewer is not None:  # (batch, steps): where each row's steps come from
            place = torch.where(place < fewer.unsqueeze(1), place, place + (known - fewer).unsqueeze(1))

        def cut(argument: Argument, end: Any) -> Any:
            if argument.kind == "lengths" and argument.rows is not None and fewer is not None:
                return type(end)(fewer.tolist()) if numbers(end) else fewer.to(end)
            if argument.time is None:
                return end
            if isinstance(end, PackedSequence):
                padded, lengths = unpacked(end)
                kept = fewer if fewer is not None and argument.path == self.main else lengths.clamp(max=steps)
                return packed(padded[:, :steps], kept, end)
            if argument.steps != self.steps:
                return end.narrow(argument.time, 0, min(steps, argument.steps)) if others else end
            if known is None or argument.rows is None:
                return end.narrow(argument.time, 0, steps)
            by_rows = end.movedim((argument.rows, argument.time), (0, 1))
            chosen = by_rows[torch.arange(self.batch).unsqueeze(1), place.to(end.device)]
            return chosen.movedim((0, 1), (argument.rows, argument.time))

        touched = {s.path: min(steps, s.steps) for s in self.arguments if others or s.steps == self.steps}
        arguments = tuple(
            replace(s, steps=touched.get(s.path, s.steps)) if s.time is not None else s for s in self.arguments
        )
        return replace(
            self._with(cut), arguments=arguments, steps=steps, lengths=fewer if self.lengths is not None else None
        )

    def other_rows(self, rows: Tensor, *, seed: int = 0) -> ModelInputs:
        """Return the inputs with these rows (a mask) holding other values, in everything that has rows."""

        def change(argument: Argument, end: Any) -> Any:
            if argument.kind == "state" and argument.rows is None and isinstance(end, Tensor) and bool(rows.all()):
                return another_state(end, seed)
            if argument.rows is None or argument.kind in ("lengths", "mask", "other") or numbers(end):
                return end
            if argument.kind == "state":
                return _where(rows, end, another_state(end, seed), argument.rows)
            if isinstance(end, PackedSequence):
                padded, lengths = unpacked(end)
                mask = rows.unsqueeze(1) & (torch.arange(padded.shape[1]) < lengths.unsqueeze(1))
                return packed(_other_values(padded, mask, self, seed=seed), lengths, end)
            whole = end.movedim(argument.rows, 0)
            if argument.time is None:
                return _other_values(whole.unsqueeze(1), rows.unsqueeze(1), self, seed=seed)[:, 0].movedim(
                    0, argument.rows
                )
            valid = (
                self.valid if argument.steps == self.steps else torch.ones(self.batch, argument.steps, dtype=torch.bool)
            )
            return self._changed(argument, end, rows.unsqueeze(1) & valid, seed)

        return self._with(change)

    def other_steps(self, steps: Tensor, paths: Iterable[Path], *, seed: int = 0) -> ModelInputs:
        """Return the inputs with these steps, a mask (batch, steps), holding other values in these sequences."""
        chosen = set(paths)

        def change(argument: Argument, end: Any) -> Any:
            if argument.path not in chosen or argument.time is None or argument.kind != "sequence":
                return end
            if isinstance(end, PackedSequence):
                padded, lengths = unpacked(end)
                return packed(_other_values(padded, steps, self, seed=seed), lengths, end)
            return self._changed(argument, end, steps, seed)

        return self._with(change)

    def put(self, path: Path, value: Any) -> ModelInputs:
        """Return the inputs with one argument replaced."""
        return replace(self, args=mapped(self.args, lambda at, end: value if at == path else end))

    def with_lengths(self, lengths: Tensor) -> ModelInputs:
        """Return the inputs with other lengths, also among the arguments and in masks of padding."""
        here = torch.arange(self.steps) < lengths.unsqueeze(1)  # (batch, steps)

        def change(argument: Argument, end: Any) -> Any:
            if argument.real is not None and argument.rows is not None and argument.time is not None:
                marks = here if argument.rows < argument.time else here.T
                return (marks == bool(argument.real)).reshape(end.shape).to(end)
            if argument.kind != "lengths" or argument.rows is None:
                return end
            return type(end)(lengths.tolist()) if numbers(end) else lengths.to(end)

        return replace(self._with(change), lengths=lengths)

    def _changed(self, argument: Argument, end: Tensor, mask: Tensor, seed: int) -> Tensor:
        assert argument.time is not None
        if not self.batched or argument.rows is None:
            return _other_values(end.movedim(argument.time, 0)[None], mask[:1], self, seed=seed)[0].movedim(
                0, argument.time
            )
        order = end.movedim((argument.rows, argument.time), (0, 1))
        return _other_values(order, mask, self, seed=seed).movedim((0, 1), (argument.rows, argument.time))

    def _with(self, change: Callable[[Argument, Any], Any]) -> ModelInputs:
        known = {argument.path: argument for argument in self.arguments}
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


def _other_values(x: Tensor, mask: Tensor, inputs: ModelInputs, *, seed: int) -> Tensor:
    """Return `x (batch, time, ...)` with the steps in `mask (batch, time)` holding other values.

    They come from other places of the same tensor, so that they are of its kind: counts stay counts.
    """
    generator = torch.Generator().manual_seed(seed)
    where = mask.to(x.device)
    if x.is_floating_point() or x.is_complex():
        new = _other_floats(x, generator)
    elif x.dtype == torch.bool:
        new = x ^ (torch.rand(x.shape, generator=generator) < 0.5).to(x.device)
    else:
        new = _other_tokens(x, inputs, generator)
        if inputs.pad_token is not None and x.dim() == 2:
            where = where & (x != inputs.pad_token)  # moving a padding token would change how long a row is
    return torch.where(where.reshape(*where.shape, *[1] * (x.dim() - 2)), new, x)


def spread(x: Tensor) -> float:
    """Return how far the values of a tensor vary, 1 where they do not."""
    return (float(x.detach().std()) if x.numel() > 1 else 0.0) or 1.0


def another_state(state: Tensor, seed: int) -> Tensor:
    """Return a state unlike this one, within the bounds of a tanh."""
    if not state.is_floating_point():
        return state
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(state.shape, generator=generator, dtype=torch.float64).to(state)
    return (0.5 * state + 0.5 * noise).clamp(-0.9, 0.9)


def _other_floats(x: Tensor, generator: torch.Generator) -> Tensor:
    steps = x.detach().reshape(x.shape[0] * x.shape[1], -1)
    order = torch.randperm(len(steps), generator=generator).to(x.device)
    new = steps[order].reshape(x.shape)
    finite = steps[steps.isfinite()]
    if x.is_complex():
        return new + torch.randn(x.shape, generator=generator, dtype=torch.complex128).to(x)
    varied = float(finite.std()) if finite.numel() > 1 else 0.0
    if varied > 0 and bool((finite == finite.round()).all()):
        return _unlike(x, new, steps, generator)  # counts, marks, one-hot rows: noise would make them something else
    noise = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x)
    new = new + (0.5 * varied or 1.0) * noise
    if finite.numel() and varied > 0 and float(finite.min()) >= 0:
        new = new.abs()  # probabilities, durations, magnitudes
        if float(finite.max()) <= 1:
            new = new.clamp(max=float(finite.max()))
    return new


def _unlike(x: Tensor, new: Tensor, steps: Tensor, generator: torch.Generator) -> Tensor:
    for _ in range(4):
        same = (new == x).flatten(2).all(2) if x.dim() > 2 else new == x  # (batch, time)
        if not bool(same.any()):
            break
        again = steps[torch.randint(len(steps), (len(steps),), generator=generator).to(x.device)].reshape(x.shape)
        new = torch.where(same.reshape(*same.shape, *[1] * (x.dim() - 2)), again, new)
    return new


def _other_tokens(x: Tensor, inputs: ModelInputs, generator: torch.Generator) -> Tensor:
    top = inputs.vocabulary if inputs.vocabulary is not None else int(x.max()) + 1
    known = torch.unique(x)
    if inputs.pad_token is not None:
        known = known[known != inputs.pad_token]
    if len(known) < 2:
        low = 1 if top > 2 and (inputs.pad_token == 0 or inputs.pad_token is None) else 0
        known = torch.arange(low, max(top, low + 1), device=x.device, dtype=x.dtype)
    drawn = known[torch.randint(len(known), x.shape, generator=generator).to(x.device)]
    for _ in range(6):
        same = drawn == x
        if not bool(same.any()):
            break
        drawn = torch.where(same, known[torch.randint(len(known), x.shape, generator=generator).to(x.device)], drawn)
    return drawn  # type: ignore[no-any-return]
