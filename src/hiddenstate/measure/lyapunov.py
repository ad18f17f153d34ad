"""Lyapunov exponents: how fast nearby states separate or converge."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..errors import BadInput
from ..state import shown_in_short
from .progress import tracked
from .series import first_bad, valid_steps, without_padding
from .system import System, at_rest
from .torch_system import driven

_CHUNK = 2**23  # numbers in the Jacobians that are held at once
_ALIGNED = 100  # steps in which the first directions turn towards the growing ones
_WIDE = 512  # with more coordinates, a few directions are pushed without computing Jacobians
_BLOCKS = 10  # pieces of a run that are compared to estimate the error


@shown_in_short
@dataclass(frozen=True, slots=True, eq=False)
class Lyapunov:
    """The exponents of a layer under its input: natural logarithm per step, mean over rows."""

    exponents: Tensor  # (k,) falling
    error: Tensor  # (k,) standard error of each, from blocks of steps
    rows: Tensor  # (batch, k) of each sequence, falling
    history: Tensor  # (time, k) the estimate after each counted step, not sorted
    converged: bool  # every error is within the tolerance
    dimension: float  # Kaplan–Yorke; NaN if k exponents are too few to compute it
    steps: int  # counted steps of the longest row
    tolerance: float
    interrupted: bool = False  # stopped by Ctrl-C: computed from the steps done until then

    @property
    def kind(self) -> str:
        """Return `chaotic` or `contracting` if the largest exponent is more than twice its error from 0."""
        first, doubt = float(self.exponents[0]), max(1e-3, 2 * float(self.error[0]))
        return "chaotic" if first > doubt else "contracting" if first < -doubt else "at the edge"

    def __str__(self) -> str:
        """Return one line."""
        first, error = float(self.exponents[0]), float(self.error[0])
        verdict = "converged" if self.converged else "not converged"
        stopped = ", interrupted" if self.interrupted else ""
        return (
            f"largest exponent {first:.4f} ± {error:.4f} per step ({self.kind}; above 0 nearby states part), "
            f"sum of {len(self.exponents)} {float(self.exponents.sum()):.4f}, Kaplan–Yorke dimension "
            f"{self.dimension:.2f}; {verdict} over {self.steps} steps (errors up to {self.tolerance:g}){stopped}"
        )


def lyapunov(
    layer: nn.Module,
    x: Tensor,
    warmup: int = 0,
    k: int | None = None,
    *,
    lengths: Tensor | None = None,
    state: object = None,
    tolerance: float = 0.01,
    time_axis: int | None = None,
    batch_axis: int | None = None,
    seed: int = 0,
) -> Lyapunov:
    """Return the Lyapunov exponents of a layer driven by `x`, the largest first.

    The directions are those of the whole state: `h` and `c` of all layers. In the first 100 steps they turn towards the
    growing ones; counting begins afterwards. If all exponents are asked for, their sum is the mean of ln |det J|.

    Args:
        layer: A recurrent layer of one direction.
        x: Its input in the layer's own layout: (time, batch, feature) with `batch_first=False`; for a cell
            (batch, time, feature).
        warmup: Steps that are run but not counted, until the state has reached its attractor.
        k: The number of exponents; all by default. A few are much cheaper than all of a large state.
        lengths: The real steps of each row.
        state: The state to start from: a State, the layer's own form, or vectors (batch, S).
        tolerance: An exponent counts as converged if its standard error is at most this.
        time_axis: Which axis of x is time, if not as the layer's own `batch_first` says.
        batch_axis: Which axis of x holds the rows.
        seed: The seed of the first directions.

    >>> ring = torch.nn.RNN(1, 2, nonlinearity="relu", bias=False, batch_first=True)
    >>> _ = ring.weight_hh_l0.data.copy_(torch.tensor([[0.0, 0.5], [0.5, 0.0]]))
    >>> _ = ring.weight_ih_l0.data.fill_(1.0)
    >>> lyapunov(ring, torch.ones(1, 200, 1)).exponents
    tensor([-0.6931, -0.6931], dtype=torch.float64)
    """
    system, x = driven(layer, x, time_axis=time_axis, batch_axis=batch_axis)
    valid = valid_steps(x, lengths)
    count = _checked(system, valid, warmup, k)
    x = without_padding(x, valid)
    logs: list[Tensor] = []
    with at_rest(system.layer.module):
        start = system.start(state, len(x))
        directions = _frame(len(x), system.size, count, seed).to(x.device)
        for turned, _ in _growth(system, x[:, :_ALIGNED], valid, start, directions):
            directions = turned
        try:
            for _, growth in tracked(_growth(system, x, valid, start, directions), "lyapunov", x.shape[1]):
                logs.append(growth)
        except KeyboardInterrupt:
            if not bool(valid[:, warmup : len(logs)].any()):
                raise  # no counted step was finished
    counted = valid[:, warmup : len(logs)]
    interrupted = len(logs) < x.shape[1]
    grown = torch.stack(logs, 1)[:, warmup:]
    return _spectrum(grown, counted, size=system.size, tolerance=tolerance, interrupted=interrupted)


def _growth(
    system: System, x: Tensor, valid: Tensor, vectors: Tensor, directions: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Push orthonormal directions (batch, S, k) along a run; after each step, yield them with ln of their growth."""
    for step, push in enumerate(_pushes(system, x, valid, vectors, few=directions.shape[2] * 4 <= system.size)):
        turned, growth = torch.linalg.qr(push(directions))
        logs = growth.diagonal(dim1=1, dim2=2).abs().log()
        directions = torch.where(valid[:, step, None, None], turned, directions)  # unchanged at padding
        if bool(logs[valid[:, step]].isnan().any()):
            row = int((logs.isnan().any(1) & valid[:, step]).nonzero()[0])
            raise BadInput(f"the derivative at step {step} of row {row} is NaN: the layer has no slope there.")
        yield directions, logs


def _pushes(
    system: System, x: Tensor, valid: Tensor, vectors: Tensor, *, few: bool
) -> Iterator[Callable[[Tensor], Tensor]]:
    """Yield, for each step, a function that pushes directions through it."""
    # Without a closed form, a whole Jacobian costs S backwards; with one, S² numbers. A few directions need neither.
    if few and (type(system) is System or system.size > _WIDE):
        for step, inputs in enumerate(x.unbind(1)):
            box = [vectors]

            def push(directions: Tensor, inputs: Tensor = inputs, box: list[Tensor] = box) -> Tensor:
                box[0], grown = system.tangents(inputs, box[0], directions)
                return grown

            yield push
            vectors = box[0]
            _refuse(vectors.unsqueeze(1), valid[:, step : step + 1], step)
        return
    stride = max(1, _CHUNK // (len(x) * system.size**2))
    for first in range(0, x.shape[1], stride):
        piece = x[:, first : first + stride]
        walked = system.walk(piece, vectors)
        _refuse(walked, valid[:, first : first + stride], first)
        before = torch.cat([vectors.unsqueeze(1), walked[:, :-1]], dim=1)
        found = system.jacobians(piece.flatten(0, 1), before.flatten(0, 1)).double()
        vectors = walked[:, -1]
        for matrix in found.reshape(*piece.shape[:2], system.size, system.size).unbind(1):
            yield matrix.matmul


def _refuse(states: Tensor, valid: Tensor, first: int) -> None:
    where = first_bad(states, valid[:, : states.shape[1]])
    if where is not None:
        row, step, _ = where
        raise BadInput(
            f"the state is not finite from step {first + step} of row {row} on: the layer's dynamics run away, or its "
            f"input or weights hold NaN. hs.measure.statistics says which unit is first."
        )


def _checked(system: System, valid: Tensor, warmup: int, k: int | None) -> int:
    count = system.size if k is None else k
    if not 1 <= count <= system.size:
        raise BadInput(f"k is {k}, but this layer's state has {system.size} coordinates: from 1 to {system.size}.")
    shortest = int(valid.sum(1).min())
    if warmup < 0 or shortest <= warmup:
        raise BadInput(
            f"the shortest sequence has {shortest} steps and {warmup} are warmup, so none is left to count: "
            f"give longer sequences, or a shorter warmup."
        )
    return count


def _frame(rows: int, size: int, count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    frame: Tensor = torch.linalg.qr(torch.randn(size, count, dtype=torch.float64, generator=generator))[0]
    return frame.expand(rows, -1, -1)


def _spectrum(logs: Tensor, counted: Tensor, *, size: int, tolerance: float, interrupted: bool) -> Lyapunov:
    """Average the growth of each direction over the counted steps of each row, then over rows."""
    real = counted.unsqueeze(-1)  # (batch, time, 1)
    sums = logs.where(real, 0).cumsum(1)  # (batch, time, k)
    steps = counted.cumsum(1).unsqueeze(-1)
    rows = (sums[:, -1] / steps[:, -1]).sort(dim=1, descending=True).values
    exponents = rows.mean(0)
    error = _error(logs, counted)
    return Lyapunov(
        exponents=exponents,
        error=error,
        rows=rows,
        history=(sums / steps.clamp(min=1)).mean(0),
        converged=bool((error <= tolerance).all()) and not interrupted,
        dimension=_kaplan_yorke(exponents.tolist(), size),
        steps=int(steps.max()),
        tolerance=tolerance,
        interrupted=interrupted,
    )


def _error(logs: Tensor, counted: Tensor) -> Tensor:
    """Return the standard error of each exponent from the scatter of blocks; inf if there is only one block."""
    blocks = []
    for row, real in zip(logs, counted, strict=True):
        pieces = row[real].tensor_split(_BLOCKS)
        blocks += [piece.mean(0) for piece in pieces if len(piece)]
    means = torch.stack(blocks)  # (block, k)
    if len(means) < 2:
        return torch.full_like(means[0], math.inf)
    error = means.std(0) / math.sqrt(len(means))
    # A direction that collapses at every step has the exponent -inf in every block: its error is zero.
    return error.masked_fill((means == -math.inf).all(0), 0).nan_to_num(nan=math.inf)


def _kaplan_yorke(exponents: list[float], size: int) -> float:
    total = 0.0
    for count, exponent in enumerate(exponents):
        if total + exponent < 0:
            return count + total / abs(exponent) if math.isfinite(exponent) else float(count)
        total += exponent
    return float(size) if len(exponents) == size else math.nan
