"""Reading a call's arguments: which is the sequence, where its rows and steps are, what else there is."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ..errors import BadInput
from ..state import Path, ends, numbers
from .inputs import Argument, ModelInputs, lengths_of, state_named, unpacked


def read_inputs(model: nn.Module, args: tuple[Any, ...], *, batch_axis: int, lengths: Any) -> ModelInputs:
    """Return the arguments with all that can be told of them before the model has run."""
    found = dict(ends(args))
    names = _names(model, len(args))
    main = _main(found, names)
    x = found[main]
    if isinstance(x, PackedSequence):
        _, own = unpacked(x)
        batch, steps, batched = len(own), int(own.max()), True
        told: Tensor | None = own
    else:
        if not -x.dim() <= batch_axis < x.dim():
            raise BadInput(f"batch_axis is {batch_axis}, but the sequences have shape {tuple(x.shape)}.")
        batch_axis %= x.dim()
        # Tokens on one axis are a sequence, unless something beside them has as many rows.
        single = x.dim() == 1 and _beside(found, main, len(x))
        batched = x.dim() > 1 or single
        batch = x.shape[batch_axis] if batched else 1
        steps = 1 if single else x.shape[_time_axis(batch_axis)] if batched else x.shape[0]
        told = lengths_of(lengths, batch, batch_axis)
    if batch == 0 or steps == 0:
        raise BadInput(f"the sequences have {batch} rows and {steps} steps: there is nothing to look at.")
    arguments = [
        _argument(path, end, main=main, names=names, batch=batch if batched else None, axis=batch_axis, steps=steps)
        for path, end in found.items()
    ]
    arguments = [
        Argument(argument.path, "state", argument.rows)
        if len(argument.path) > 1 and argument.path[:-1] != main[:-1] and _looks_like_state(found, argument.path)
        else argument
        for argument in arguments
    ]
    arguments = [_as_lengths(argument, found[argument.path], told, batch, steps) for argument in arguments]
    read = ModelInputs(args, tuple(arguments), batch, batched, steps, main, told)
    by_name = [s for s in arguments if s.kind == "lengths" and s.rows is not None and "len" in names[s.path[0]].lower()]
    return replace(read, lengths=read.known_lengths()) if by_name and batched else read


def _main(found: dict[Path, Any], names: list[str]) -> Path:
    def is_state(path: Path) -> bool:
        if path[0] > 0 and state_named(names[path[0]]):
            return True
        return (path[0] > 0 or len(path) > 2) and len(path) > 1 and _looks_like_state(found, path)

    tensors = {p: e for p, e in found.items() if isinstance(e, Tensor | PackedSequence) and not is_state(p)}
    if not tensors:
        raise BadInput("none of the inputs is a tensor or a packed sequence: hs.diagnose(model, x) needs one sequence.")

    def rank(item: tuple[Path, Any]) -> int:
        end = item[1]
        if isinstance(end, PackedSequence):
            return 0
        if end.dtype == torch.bool:
            return 4
        if end.dim() >= 3 or (end.dim() == 2 and not end.is_floating_point()):
            return 0
        return 1 if end.dim() == 2 else 2

    return min(tensors.items(), key=rank)[0]


def _beside(found: dict[Path, Any], main: Path, rows: int) -> bool:
    others = [end for path, end in found.items() if path != main and isinstance(end, Tensor) and end.dim() > 1]
    return any(rows in end.shape[:2] for end in others)


def _looks_like_state(found: dict[Path, Any], path: Path) -> bool:
    siblings = [end for other, end in found.items() if other[:-1] == path[:-1]]
    pair = len(siblings) == 2 and all(isinstance(s, Tensor) and s.dim() in (2, 3) for s in siblings)
    return pair and siblings[0].shape == siblings[1].shape and siblings[0].is_floating_point()


def _argument(
    path: Path, end: Any, *, main: Path, names: list[str], batch: int | None, axis: int, steps: int
) -> Argument:
    if isinstance(end, PackedSequence):
        return Argument(path, "sequence", 0, 1, int(unpacked(end)[1].max()))
    if not isinstance(end, Tensor):
        # A batch size handed in as a number goes with the rows, as lengths do.
        return Argument(path, "lengths" if type(end) is int and end == batch and batch > 1 else "other")
    if path == main:
        if batch is None:
            return Argument(path, "sequence", None, 0, end.shape[0])
        if end.dim() == 1:
            return Argument(path, "sequence", 0)
        time = _time_axis(axis)
        return Argument(path, "sequence", axis, time, end.shape[time])
    rows = _rows_of(end, batch, axis)
    if state_named(names[path[0]]) or (len(path) > 1 and end.dim() == 3 and end.shape[1] == batch):
        return Argument(path, "state", 1 if end.dim() == 3 and end.shape[1] == batch else rows)
    if rows is None:
        return Argument(path, "other")
    if end.dim() == 1:
        return Argument(path, "features" if end.is_floating_point() else "other", rows)
    if rows == 1 and axis == 0:
        return Argument(path, "state", rows)
    beside = 1 - rows if rows < 2 else None  # the axis of time
    marks = end.dtype == torch.bool or (end.dim() == 2 and bool(((end == 0) | (end == 1)).all()))
    if marks:
        return Argument(
            path, "mask", rows, beside if beside is not None and end.shape[beside] == steps else None, steps
        )
    if end.dim() == 2 and end.is_floating_point() and (beside is None or end.shape[beside] != steps):
        return Argument(path, "features", rows)
    return Argument(path, "sequence", rows, beside, end.shape[beside] if beside is not None else 0)


def _rows_of(end: Tensor, batch: int | None, axis: int) -> int | None:
    candidates = [axis, 0, 1] if end.dim() > 1 else [0]
    return next((a for a in candidates if a < end.dim() and end.shape[a] == batch), None)


def _as_lengths(argument: Argument, end: Any, told: Tensor | None, batch: int, steps: int) -> Argument:
    """Take whole numbers, one for each row and none beyond the steps, for lengths."""
    if numbers(end) and len(end) == batch:
        values = torch.tensor(end)
    elif isinstance(end, Tensor) and end.dim() == 1 and not end.is_floating_point() and argument.rows == 0:
        values = end.detach().cpu().long()
    else:
        return argument
    same = told is not None and torch.equal(values, told)
    if same or (told is None and int(values.min()) >= 1 and int(values.max()) == steps):
        return Argument(argument.path, "lengths", 0)
    return argument


def _time_axis(batch_axis: int) -> int:
    return 1 if batch_axis == 0 else 0


def _names(model: nn.Module, count: int) -> list[str]:
    try:
        taken = [
            p
            for p in inspect.signature(model.forward).parameters.values()
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
    except (TypeError, ValueError):
        taken = []
    return [taken[place].name if place < len(taken) else "" for place in range(count)]
