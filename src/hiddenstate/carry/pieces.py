"""Comparing the results of an input in pieces with those of the whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from ..errors import CarryError
from ..state import Path, mapped, tensors
from .culprit import first_difference, made_by

Times: TypeAlias = "Sequence[tuple[Path, int]]"  # for each input along time: its path in (args, kwargs), its time axis
Inputs: TypeAlias = "tuple[tuple[Any, ...], dict[str, Any]]"

_STEPS = 8  # inputs are repeated to this length if possible: it allows two cuts with three steps in each piece
_FEWEST = 4


class PieceRunner(Protocol):
    """Calls a model, from its own start or continuing from where the last call ended."""

    def __call__(self, inputs: Inputs, *, on: bool) -> Any:
        """Return the result of the call."""


@dataclass(frozen=True, slots=True)
class PiecesAndWhole:
    """The result of comparing pieces with the whole: whether it could be tried, and how far apart they are."""

    tried: bool
    error: float = 0.0
    tolerance: float = 0.0
    at: int = 0
    why_not: str = ""  # why it could not be tried, or why only this could be tried
    refused: bool = False  # it could be tried, but a piece cannot be carried
    line: str = ""  # the line that made the first difference
    drawn: bool = False  # no two calls give the same result

    @property
    def holds(self) -> bool:
        """Whether pieces were seen to give what the whole gives."""
        return self.tried and self.error <= self.tolerance


def compare_pieces(inputs: Inputs, times: Times, run: PieceRunner) -> PiecesAndWhole:
    """Run the whole and two pieces, once with an even cut and once with an odd one, and compare them."""
    if not times:
        return PiecesAndWhole(False, why_not="which of its inputs runs along time was not seen")
    tried = _compared(_long_enough(inputs, times), times, run)
    path, axis = times[0]
    if tried.why_not and not tried.refused and tensors(inputs)[path].shape[axis] >= _FEWEST:
        return _compared(inputs, times, run)  # the model only takes this number of steps
    return tried


def _compared(inputs: Inputs, times: Times, run: PieceRunner) -> PiecesAndWhole:
    steps = tensors(inputs)[times[0][0]].shape[times[0][1]]
    try:
        whole = run(inputs, on=False)
        outcomes = [_cut(inputs, times, run, (whole, cut)) for cut in (steps // 2, steps // 2 + 1)]
        worst = max(outcomes, key=lambda one: (one.tried, one.error))
        if worst.tried and not worst.holds and _gap(whole, run(inputs, on=False)) > 0:
            return PiecesAndWhole(False, why_not="it draws random numbers in every call", drawn=True)
        if worst.tried and not worst.holds:
            worst = replace(worst, line=_line(inputs, times, run, worst))
    except CarryError as error:
        return PiecesAndWhole(False, why_not=str(error), refused=True)
    except Exception as error:  # any error of the model for an input of another length
        return PiecesAndWhole(False, why_not=f"a piece of its input could not be run ({type(error).__name__}: {error})")
    return worst


def _line(inputs: Inputs, times: Times, run: PieceRunner, outcome: PiecesAndWhole) -> str:
    """Return the line of the model at which pieces first give something else than the whole."""
    whole = made_by(partial(run, inputs, on=False))
    first = made_by(partial(run, _piece(inputs, times, slice(None, outcome.at)), on=False))
    second = made_by(partial(run, _piece(inputs, times, slice(outcome.at, None)), on=True))

    def apart(*three: Tensor) -> bool:
        same = three[0].shape == three[1].shape == three[2].shape
        gap = distance(three[0], three[2]) if same else difference(*three)
        return gap is not None and gap > tolerance_of([three[0]])

    return first_difference(whole, (first, second), apart)


def without_dropout(model: nn.Module) -> None:
    """Switch off dropout, and leave all other modes."""
    for module in model.modules():
        if "Dropout" in type(module).__name__ or getattr(module, "dropout", False):
            module.training = False


def _cut(inputs: Inputs, times: Times, run: PieceRunner, tried: tuple[Any, int]) -> PiecesAndWhole:
    whole, cut = tried
    first = run(_piece(inputs, times, slice(None, cut)), on=False)
    second = run(_piece(inputs, times, slice(cut, None)), on=True)
    outputs = [list(tensors(each).values()) for each in (whole, first, second)]
    errors = [difference(*three) for three in zip(*outputs, strict=False)]
    found = [error for error in errors if error is not None]
    if not found:
        return PiecesAndWhole(False, why_not="its output shows neither the steps nor the last of them")
    return PiecesAndWhole(True, max(found), tolerance_of(outputs[0]), cut)


def _gap(one: Any, other: Any) -> float:
    pairs = zip(tensors(one).values(), tensors(other).values(), strict=False)
    return max((distance(a, b) for a, b in pairs if a.shape == b.shape), default=0.0)


def _long_enough(inputs: Inputs, times: Times) -> Inputs:
    """Repeat an input that is too short to be cut."""

    def repeated(tensor: Tensor, axis: int) -> Tensor:
        return torch.cat([tensor] * -(-_STEPS // max(1, tensor.shape[axis])), dim=axis)

    return _along(inputs, times, repeated)


def _piece(inputs: Inputs, times: Times, steps: slice) -> Inputs:
    return _along(inputs, times, lambda tensor, axis: tensor[(slice(None),) * axis + (steps,)])


def _along(inputs: Inputs, times: Times, change: Callable[[Tensor, int], Tensor]) -> Inputs:
    """Return the inputs with a change to those along time: those seen to be, and those of the same size there."""
    found, axes = tensors(inputs), dict(times)
    path, axis = times[0]
    front, steps = found[path].shape[:2], found[path].shape[axis]
    for other, tensor in found.items():
        alone = front.count(steps) == 1 and tensor.dim() > axis and tensor.shape[axis] == steps
        if other not in axes and (alone or (tensor.dim() > 1 and tensor.shape[:2] == front)):
            axes[other] = axis
    made: Inputs = mapped(inputs, lambda at, end: change(end, axes[at]) if at in axes else end)
    return made


def difference(whole: Tensor, first: Tensor, second: Tensor) -> float | None:
    """Compare along the axis that was cut; without one, compare the second piece's result with that of the whole."""
    for axis in range(whole.dim()):
        if first.dim() == second.dim() == whole.dim():
            sizes = [t.shape[axis] for t in (first, second)]
            rest = [tuple(t.shape[:axis] + t.shape[axis + 1 :]) for t in (whole, first, second)]
            if sum(sizes) == whole.shape[axis] and rest[0] == rest[1] == rest[2]:
                gap = distance(torch.cat([first, second], dim=axis), whole)
                return gap if gap <= tolerance_of([whole]) else min(gap, _row_by_row(whole, first, second, axis))
    return distance(second, whole) if second.shape == whole.shape else None


def _row_by_row(whole: Tensor, first: Tensor, second: Tensor, axis: int) -> float:
    """Compare pieces whose axis has the steps of one row after those of another, as outputs flattened for a loss do."""
    common = math.gcd(first.shape[axis], second.shape[axis])
    gaps = [math.inf]
    for rows in (rows for rows in range(2, common + 1) if common % rows == 0):
        parted = [p.reshape(*p.shape[:axis], rows, -1, *p.shape[axis + 1 :]) for p in (first, second)]
        gaps.append(distance(torch.cat(parted, dim=axis + 1).flatten(axis, axis + 1), whole))
    return min(gaps)


def distance(a: Tensor, b: Tensor) -> float:
    """Return the largest difference between two tensors of the same shape."""
    if not a.numel():
        return 0.0
    if not (a.is_floating_point() or a.is_complex()):
        return float((a != b).any())
    gap = (a - b).abs()
    return float("inf") if bool(gap.isnan().any()) else float(gap.max())


def tolerance_of(outputs: list[Tensor]) -> float:
    """Return how far two ways of computing these outputs may be apart."""
    floating = [out for out in outputs if out.is_floating_point()]
    if not floating:
        return 0.5
    eps = max(torch.finfo(out.dtype).eps for out in floating)
    scale = max([1.0, *(float(out.abs().max()) for out in floating if out.numel())])
    return scale * (1e3 * eps if eps < 1e-4 else 8 * eps)
