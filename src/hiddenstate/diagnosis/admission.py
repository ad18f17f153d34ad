"""Admitting a patient: its arguments read (which is the sequence, where rows and steps are), or invented for a cell."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_sequence

from ..cells import (
    Calling,
    called,
    calling,
    input_axes,
    is_mask,
    rows_beside_steps,
    sequence_among,
    started,
    unheard,
    untouched,
    unwrap_to_call,
)
from ..errors import BadInput
from ..state import Path, ends, mapped, numbers, tensors
from .argument_names import is_state, path_name
from .inputs import Argument, ModelInputs, lengths_of, unpacked
from .padding import unread_padding, with_padding
from .patient import Patient
from .stepped import (
    Stepped,
    handed_a_state,
    insists_on_a_state,
    invented_sequence,
    stepped,
    takes_one_step,
    the_model_itself,
)
from .thresholds import Thresholds


def admit(
    model: nn.Module,
    inputs: tuple[Any, ...],
    kwargs: Mapping[str, Any] = MappingProxyType({}),
    *,
    call: Callable[..., Any] | None = None,
    lengths: Any,
    axes: tuple[int | None, int | None],
    thresholds: Thresholds,
    **more: Any,
) -> Patient:
    """Return the patient, ready for its first call; `axes` are those of rows and steps, as far as they are told."""
    model = unwrap_to_call(model, weights=True)
    assumed: list[str] = []
    if call is not None:
        model, inputs, how = called(model, inputs, call)
        itself = None
    else:
        itself = the_model_itself(model, given=bool(inputs or kwargs)) or handed_a_state(model, inputs)
        itself = itself or (None if kwargs else insists_on_a_state(model, inputs))
        how, inputs = calling(model, inputs, kwargs), (*inputs, *kwargs.values())
    batch_axis = _batch_axis(how.names, inputs, axes, lengths=lengths, targets=more.get("targets"), assumed=assumed)
    if axes == (None, None) and call is None and not kwargs and itself is None:
        batch_axis = _of_columns(model, inputs, assumed) or batch_axis
    alone = itself is not None and takes_one_step(itself, inputs)
    if alone and itself is not None:
        model, inputs = stepped(itself, inputs, assumed, time_axis=_time_axis(batch_axis))
        batch_axis, how = 0 if isinstance(model, Stepped) and model.time_axis == 1 else batch_axis, Calling(())
    elif not inputs:
        if itself is None:
            raise BadInput(
                f"hs.diagnose({type(model).__name__}) was given no inputs. They can be invented for a cell or a torch "
                f"layer by itself; a whole model wants them: hs.diagnose(model, x)."
            )
        inputs, batch_axis = invented_sequence(itself, assumed)
    elif len(inputs) == 1 and isinstance(inputs[0], Tensor) and not kwargs and call is None:
        inputs = _with_states(model, inputs[0], assumed)
    if not how.keywords and call is None:
        how = calling(model, inputs, {})
    args, flat = _unflattened(how.names, inputs) if axes == (None, None) else (inputs, frozenset())
    args, ragged, lengths = _padded(model, how, args, lengths)
    read = read_inputs(how, args, batch_axis=1 if flat else batch_axis, lengths=lengths)
    assumed += [
        f"padding is where {read.name(a.path) or 'a mask'} says so" for a in read.arguments if a.real is not None
    ]
    assumed += [
        f"{name} does not hold one value at the real steps of each row and the other one behind them, so what padding "
        f"does was not examined; lengths= tells it"
        for name in unread_padding(read)
    ]
    return Patient(model, replace(read, flat=flat, ragged=ragged), thresholds, assumed=assumed, alone=alone, **more)


def _padded(
    model: nn.Module, how: Calling, args: tuple[Any, ...], lengths: Any
) -> tuple[tuple[Any, ...], frozenset[Path], Any]:
    """Return the arguments with a list of sequences, one for each row, as one tensor with its lengths."""
    first = args[0] if args else None
    rows = list(first) if isinstance(first, list | tuple) and len(first) > 1 and lengths is None else []
    if not rows or not all(isinstance(row, Tensor) and row.dim() == 2 for row in rows):
        return args, frozenset(), lengths
    alike = len({len(row) for row in rows}) == 1
    sure = isinstance(first, list) and not alike  # else they may be steps, or a pair of other things
    if len({row.shape[1:] for row in rows}) > 1 or not (sure or _takes_sequences(model, how, rows, args[1:])):
        return args, frozenset(), lengths
    return (pad_sequence(rows, batch_first=True), *args[1:]), frozenset({(0,)}), [len(row) for row in rows]


def _takes_sequences(model: nn.Module, how: Calling, rows: list[Tensor], rest: tuple[Any, ...]) -> bool:
    """Try whether a model takes a list of sequences of which the last is shorter, and gives a row for each."""
    if len(rows[-1]) < 2:
        return False
    with untouched(model), unheard(), torch.no_grad():
        model.eval()
        try:
            given = how(model, ([*(row.clone() for row in rows[:-1]), rows[-1][:-1].clone()], *rest))
        except Exception:  # a trial: whatever a user's model raises means that it does not take this
            return False
    # Rows come first, or second behind steps: the second of two axes has units.
    return any(len(rows) in tensor.shape[: max(1, tensor.dim() - 1)][:2] for tensor in tensors(given).values())


def _unflattened(names: tuple[str, ...], args: tuple[Any, ...]) -> tuple[tuple[Any, ...], frozenset[Path]]:
    """Return the arguments with rows and steps on two axes, where a state of fewer rows tells that they share one."""
    found = {path: end for path, end in ends(args) if isinstance(end, Tensor)}
    states = {path for path in found if path[0] > 0 and _is_state(found, path, names)}
    first = next((end for path, end in found.items() if path not in states), None)
    if not states or first is None or not first.dim():
        return args, frozenset()
    rows = rows_beside_steps(first, [found[path] for path in states])
    if rows is None or first.shape[1:2] == (rows,):
        return args, frozenset()
    flat = frozenset(path for path, end in found.items() if path not in states and end.shape[:1] == first.shape[:1])
    return mapped(args, lambda path, end: end.unflatten(0, (-1, rows)) if path in flat else end), flat


def _batch_axis(
    names: tuple[str, ...],
    inputs: tuple[Any, ...],
    axes: tuple[int | None, int | None],
    *,
    lengths: Any,
    targets: Any,
    assumed: list[str],
) -> int:
    """Return where the rows are: as told, or as something beside the sequence tells that has one entry for each."""
    batch_axis, time_axis = axes
    x = next((i for i in inputs if isinstance(i, Tensor)), None) if names[:1] else None
    x = x if x is not None and x.dim() > 1 else None
    if batch_axis is not None or time_axis is not None:
        if batch_axis is None and x is not None:
            return input_axes(nn.Identity(), x, time_axis=time_axis).batch or 0
        return batch_axis or 0
    if x is None or x.shape[0] == x.shape[1]:
        return 0
    found = {path: end for path, end in ends(inputs) if path[0] > 0}
    states = [end for path, end in found.items() if isinstance(end, Tensor) and _is_state(found, path, names)]
    counts = [each for each in inputs[1:] if lengths is None and _counts_steps(each, x)]
    beside = {"lengths": counts[0] if counts else lengths, "targets": targets, "the state": states or None}
    for what, value in beside.items():
        if what == "the state" and any(end.shape[:1] == x.shape[:1] for end in states):
            continue  # rows first, as those of the input
        if _rows_told(what, value, x) == x.shape[1]:
            assumed.append(f"{x.shape[1]} rows on axis 1, as {what} has so many; batch_axis= says otherwise")
            return 1
    return 0


def _of_columns(model: nn.Module, inputs: tuple[Any, ...], assumed: list[str]) -> int | None:
    """Return the axis of rows where each step is a column, (feature, 1), as W @ x takes it; None where it is not.

    Tried: a second column runs, and one feature less does not.
    """
    x = inputs[0] if inputs else None
    steps = list(x) if isinstance(x, list | tuple) or (isinstance(x, Tensor) and x.dim() == 3) else []
    shapes = {tuple(step.shape) if isinstance(step, Tensor) and step.is_floating_point() else () for step in steps}
    if len(steps) < 2 or len(shapes) != 1 or len(shape := shapes.pop()) != 2 or shape[1] != 1 or shape[0] < 2:
        return None

    def runs(change: Callable[[Tensor], Tensor]) -> bool:
        changed = torch.stack([change(step) for step in steps]) if isinstance(x, Tensor) else [*map(change, steps)]
        with untouched(model), unheard(), torch.no_grad():
            model.eval()
            try:
                model(changed, *inputs[1:])
            except Exception:  # a trial: whatever a user's model raises means that it does not take this
                return False
        return True

    if not runs(lambda step: step.expand(-1, 2)) or runs(lambda step: step[1:]):
        return None
    axis = 2 if isinstance(x, Tensor) else 1
    assumed.append(
        f"each step is a column of {shape[0]} features, so rows are on axis {axis}; batch_axis= says otherwise"
    )
    return axis


def _counts_steps(value: Any, x: Tensor) -> bool:
    """Whether an argument has a number of steps for each row, if steps are on axis 0."""
    if not numbers(value) and not (isinstance(value, Tensor) and value.dim() == 1 and not value.is_floating_point()):
        return False
    told = torch.as_tensor(value)
    return len(told) == x.shape[1] and int(told.min()) >= 1 and int(told.max()) == x.shape[0]


def _rows_told(what: str, value: Any, x: Tensor) -> int | None:
    """Return how many rows something beside the sequence has, where it tells."""
    if value is None:
        return None
    if what == "lengths":
        return len(value)
    if what == "targets":
        return len(value) if isinstance(value, Tensor) and value.dim() == 1 else None
    # (layers, rows, units), or (rows, units) beside a sequence that has an axis for both rows and steps.
    axes = 3 if x.is_floating_point() else 2
    rows = {int(end.shape[end.dim() - 2]) if end.dim() == 3 or x.dim() >= axes else None for end in value}
    return rows.pop() if len(rows) == 1 and all(end.dim() in (2, 3) for end in value) else None


def _with_states(model: nn.Module, x: Tensor, assumed: list[str]) -> tuple[Any, ...]:
    """Return the inputs, and the first states that the model's forward insists on beside its sequence."""
    try:
        beside = started(model, x).beside(x)
    except BadInput as error:  # the first call fails then
        assumed.append(
            f"no state was given, and none could be handed in: {error} hs.diagnose(model, x, state) gives one"
        )
        return (x,)
    if beside:
        what = "None was" if all(state is None for state in beside) else "first states were"
        assumed.append(f"the model insists on a state, and none was given: {what} handed in")
    return (x, *beside)


def read_inputs(how: Calling, args: tuple[Any, ...], *, batch_axis: int, lengths: Any) -> ModelInputs:
    """Return the arguments with all that can be told of them before the model has run."""
    found = dict(ends(args))
    names = how.names
    main = sequence_among(_sequences(found, names))
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
    read = ModelInputs(args, tuple(arguments), batch, batched, steps, main, told, calling=how)
    in_rows = [s for s in arguments if s.kind == "lengths" and s.rows is not None]
    by_name = [s for s in in_rows if "len" in path_name(names, s.path).lower()]
    return with_padding(replace(read, lengths=read.known_lengths()) if by_name and batched else read)


def _sequences(found: dict[Path, Any], names: tuple[str, ...]) -> dict[Path, Any]:
    """Return the arguments that may be the sequence."""
    tensors = {path: end for path, end in found.items() if isinstance(end, Tensor | PackedSequence)}
    tensors = {path: end for path, end in tensors.items() if not _is_state(found, path, names)}
    if not tensors:
        raise BadInput("none of the inputs is a tensor or a packed sequence: hs.diagnose(model, x) needs one sequence.")
    return tensors


def _is_state(found: dict[Path, Any], path: Path, names: tuple[str, ...]) -> bool:
    """Whether an argument is a state, by its name or by being one of a pair; the first argument is none."""
    if path[0] > 0 and is_state(path_name(names, path), found[path]):
        return True
    return (path[0] > 0 or len(path) > 2) and len(path) > 1 and _looks_like_state(found, path)


def _beside(found: dict[Path, Any], main: Path, rows: int) -> bool:
    others = [end for path, end in found.items() if path != main and isinstance(end, Tensor) and end.dim() > 1]
    return any(rows in end.shape[:2] for end in others)


def _looks_like_state(found: dict[Path, Any], path: Path) -> bool:
    siblings = [end for other, end in found.items() if other[:-1] == path[:-1]]
    pair = len(siblings) == 2 and all(isinstance(s, Tensor) and s.dim() in (2, 3) for s in siblings)
    return pair and siblings[0].shape == siblings[1].shape and siblings[0].is_floating_point()


def _argument(
    path: Path, end: Any, *, main: Path, names: tuple[str, ...], batch: int | None, axis: int, steps: int
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
    stacked = len(path) > 1 and end.dim() == 3 and end.shape[1] == batch and end.is_floating_point()
    if is_state(path_name(names, path), end) or stacked:
        return Argument(path, "state", 1 if end.dim() == 3 and end.shape[1] == batch else rows)
    if rows is None:
        return Argument(path, "other")
    if end.dim() == 1:
        return Argument(path, "features" if end.is_floating_point() else "other", rows)
    if rows == 1 and axis == 0:
        return Argument(path, "state", rows)
    beside = 1 - rows if rows < 2 else None  # the axis of time
    if is_mask(end):
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
    # A list with a number for each row goes with the rows, whatever it counts.
    return replace(argument, rows=0)


def _time_axis(batch_axis: int) -> int:
    return 1 if batch_axis == 0 else 0
