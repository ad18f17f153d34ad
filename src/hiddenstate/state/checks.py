"""Checks that tensors make a state, and that two states fit each other."""

from __future__ import annotations

from collections.abc import Mapping
from operator import index
from typing import TYPE_CHECKING, Any, SupportsIndex

from torch import Tensor

from ..errors import StateMismatch

if TYPE_CHECKING:
    from .value import State

_NATIVE = "A native state, such as nn.LSTM's tuple, becomes a State with Layer.to_state."


def check_parts(parts: Any) -> None:
    """Raise unless `parts` is a mapping of at least one name to a tensor."""
    if not isinstance(parts, Mapping):
        raise StateMismatch(
            f"a state is made of named parts, as in State({{'h': h}}), but this is {type(parts).__name__}. {_NATIVE}"
        )
    if not parts:
        raise StateMismatch("a state needs at least one part, for example State({'h': h}).")
    for name, part in parts.items():
        if not isinstance(name, str):
            raise StateMismatch(f"part names are strings, but this one is {name!r}.")
        if not isinstance(part, Tensor):
            raise StateMismatch(f"part {name!r} is {type(part).__name__}, but a tensor is needed. {_NATIVE}")


def check_axes(parts: Mapping[str, Tensor], batch_axis: int | Mapping[str, int]) -> dict[str, int]:
    """Return the batch axis of each part, counted from the front, after checking that all parts have as many rows."""
    given = batch_axis if isinstance(batch_axis, Mapping) else dict.fromkeys(parts, batch_axis)
    if given.keys() != parts.keys():
        raise StateMismatch(
            f"batch_axis names {', '.join(map(str, given)) or 'no part'}, but the state has {', '.join(parts)}: "
            f"give one number for all parts, or one for each part."
        )
    axes = {name: _axis(name, part, given[name]) for name, part in parts.items()}
    rows = {name: part.shape[axes[name]] for name, part in parts.items()}
    count = next(iter(rows.values()))
    if any(other != count for other in rows.values()):  # not a set: a size that torch.export keeps open has no hash
        _check_rows(parts, axes, rows)
    return axes


def _check_rows(parts: Mapping[str, Tensor], axes: dict[str, int], rows: dict[str, int]) -> None:
    """Raise if the parts of one layer differ in their number of rows; each layer of a model may have its own number."""
    firsts: dict[str, str] = {}  # layer -> the first of its parts
    for name, part in parts.items():
        first = firsts.setdefault(name.rpartition(".")[0], name)
        if rows[name] != rows[first]:
            raise StateMismatch(
                f"part {first!r} has {rows[first]} rows (axis {axes[first]} of {tuple(parts[first].shape)}), "
                f"but part {name!r} has {rows[name]} (axis {axes[name]} of {tuple(part.shape)}). "
                f"Often batch_axis is wrong: torch's recurrent layers have it at 1, cells at 0."
            )


def check_fit(state: State, other: State) -> None:
    """Raise unless the rows of `other` could be put among the rows of `state`."""
    if other.keys() != state.keys():
        raise StateMismatch(
            f"this state has the parts {', '.join(state)}, but the other has {', '.join(other)}. "
            f"States of different kinds of layers cannot be mixed; hs.Bridge leads from one to the other."
        )
    for name in state:
        _check_part(name, (state[name], state.batch_axis[name]), (other[name], other.batch_axis[name]))


def check_shapes(parts: Mapping[str, Tensor], wanted: State) -> None:
    """Raise if a part lacks an axis that `wanted` has, or has it in another place; other differences in size pass.

    The error names the axis and the code that adds or moves it.
    """
    for name, part in parts.items():
        if name in wanted and wanted.batch > 1 and part.shape != wanted[name].shape:
            advice = _misplaced(name, tuple(part.shape), tuple(wanted[name].shape), wanted.batch_axis[name])
            if advice:
                shapes = f"part {name!r} of the state has shape {tuple(part.shape)}, but {tuple(wanted[name].shape)}"
                raise StateMismatch(f"{shapes} is needed: {advice}.")


def _misplaced(name: str, seen: tuple[int, ...], wanted: tuple[int, ...], axis: int) -> str:
    """Say which axis is missing, has a single entry or is in the wrong place, and how to fix it; "" if none is."""
    without = wanted[:axis] + wanted[axis + 1 :]  # the shape of one row, without the batch axis
    stacked = axis == 1 and len(wanted) == 3  # (layers, batch, unit)
    every = f"one for each of {wanted[0]} layers and directions" if stacked else ""
    if seen == (*wanted[:axis], 1, *wanted[axis + 1 :]):
        return f"it has one row for all, and one for each is needed: {name}.expand{wanted}.contiguous()"
    if stacked and seen == wanted[1:]:
        fix = f"{name}.unsqueeze(0)" if wanted[0] == 1 else f"torch.stack([{name}, ...]), {every}"
        return f"the axis of layers is missing, which comes first: {fix}"
    if seen == without or (stacked and seen == wanted[2:]):
        return f"the axis of rows is missing, axis {axis}: {name}.expand{wanted}.contiguous() starts all rows alike"
    if stacked and seen == (wanted[1], wanted[0], wanted[2]):
        turns = "batch_first=True turns inputs and outputs alone"
        return f"the rows are on axis 0, and belong on axis 1 ({turns}): {name}.transpose(0, 1).contiguous()"
    if stacked and seen == (wanted[1], 1, wanted[2]):
        fix = f"{name}.transpose(0, 1).repeat({wanted[0]}, 1, 1)"
        return f"the rows are on axis 0, and belong on axis 1, with {every}: {fix}"
    if axis == 0 and len(seen) == len(wanted) + 1 and seen[1:] == wanted:
        return f"it has an axis of layers in front, as a fused layer's state has, and a cell's has none: {name}[0]"
    return ""


def _axis(name: str, part: Tensor, axis: int) -> int:
    # Test for the plain type first: asking for the SupportsIndex protocol costs more than all other checks together.
    if type(axis) is not int and (isinstance(axis, bool) or not isinstance(axis, SupportsIndex)):
        raise StateMismatch(f"the batch axis of part {name!r} is {axis!r}, but a whole number is needed.")
    if not -part.dim() <= axis < part.dim():
        raise StateMismatch(
            f"part {name!r} has shape {tuple(part.shape)}, so it has no axis {axis} for the batch. "
            f"An unbatched state is a batch of one row: part.unsqueeze({min(max(axis, 0), part.dim())})."
        )
    return index(axis) % part.dim()


def _check_part(name: str, mine: tuple[Tensor, int], theirs: tuple[Tensor, int]) -> None:
    (part, axis), (other, other_axis) = mine, theirs
    if axis != other_axis:
        raise StateMismatch(f"part {name!r} has its batch axis at {axis}, but the other state's is at {other_axis}.")
    shape, other_shape = list(part.shape), list(other.shape)
    del shape[axis], other_shape[axis]
    if shape != other_shape:
        raise StateMismatch(
            f"part {name!r} has shape {tuple(part.shape)}, but the other state's has {tuple(other.shape)}: they may "
            f"differ in rows (axis {axis}) only. Usually the states come from layers of different sizes."
        )
    if part.dtype != other.dtype:
        raise StateMismatch(
            f"part {name!r} is {part.dtype}, but the other state's is {other.dtype}. "
            f"Often one was made under autocast: cast it with other.to({part.dtype})."
        )
    if part.device != other.device:
        raise StateMismatch(
            f"part {name!r} is on {part.device}, but the other state's is on {other.device}. "
            f"Move it with other.to({str(part.device)!r})."
        )
