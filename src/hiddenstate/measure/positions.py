"""Whether a layer knows where in a sequence it is, when its input says nothing about it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..errors import BadInput
from .rest import at_rest
from .ridge import Readout, explained, held_out
from .series import Series, refuse_bad, valid_steps
from .system import System, check_sequence
from .torch_system import as_system

_FOLDS = 5


@dataclass(frozen=True, slots=True, eq=False)
class Positions:
    """How states move apart under a constant input."""

    distances: Tensor  # (time, time) Euclidean, mean over rows; symmetric, zero on the diagonal
    decodability: float  # R² of a linear readout of the step, on steps it has not seen; 0 where it finds nothing
    settles_at: int | None  # first step from which on no move exceeds the tolerance; None where they go on
    moves: Tensor  # (time,) length of the move into each step, mean over rows
    tolerance: float  # share of the largest move

    def __str__(self) -> str:
        """Return one line."""
        settled = f"settles at step {self.settles_at}" if self.settles_at is not None else "never settles"
        return (
            f"over {len(self.distances)} steps of constant input the state {settled} (moves within "
            f"{self.tolerance:g} of the largest), and the step can be read from it with R² = {self.decodability:.3f}"
        )


def positions(
    layer: nn.Module, x: Tensor | None = None, *, steps: int = 50, state: object = None, tolerance: float = 0.01
) -> Positions:
    """Return how the state of a layer moves along time when its input does not.

    Args:
        layer: A recurrent layer of one direction; its state is all parts of all its layers.
        x: The input: (batch, time, feature), or (feature,), which is then given at each of `steps` steps; ones by
            default.
        steps: How many steps, where x does not say.
        state: Where to start from.
        tolerance: The share of the largest move below which the state counts as standing still.

    >>> gru = torch.nn.GRU(1, 8)
    >>> found = positions(gru, steps=40)
    >>> found.distances.shape, bool((found.distances.diagonal() == 0).all())
    (torch.Size([40, 40]), True)
    """
    system = as_system(layer, x)
    x = _sequence(system, x, steps)
    with at_rest(system.layer.module):
        start = system.start(state, len(x))
        states = system.walk(x, start)[..., system.smooth]  # (batch, time, S)
    refuse_bad(Series(states, valid_steps(x, None), "the state"))
    states = states.double()
    first = start[:, system.smooth].double().unsqueeze(1)
    moves = torch.cat([first, states], dim=1).diff(dim=1).norm(dim=2).mean(0)  # (time,)
    distances = torch.cdist(states, states, compute_mode="donot_use_mm_for_euclid_dist").mean(0)
    return Positions(distances, _decodability(states), _settled(moves, tolerance), moves, tolerance)


def _sequence(system: System, x: Tensor | None, steps: int) -> Tensor:
    if x is None:
        width = system.spec.input_size
        if width is None:
            raise BadInput(
                f"how many features {type(system.layer.module).__name__} takes is unknown: give x (feature,), "
                f"the constant input, or the cell an input_size."
            )
        x = torch.ones(width)
    if x.dim() == 1 and x.is_floating_point():
        if steps < 2:
            raise BadInput(f"{steps} steps are asked for, but positions are told apart from 2 on.")
        x = x.expand(1, steps, -1)
    return check_sequence(system, x, at_least=2)


def _settled(moves: Tensor, tolerance: float) -> int | None:
    moving = (moves > tolerance * moves.max()).nonzero()
    first = int(moving[-1]) + 1 if len(moving) else 0
    return first if first < len(moves) else None


def _decodability(states: Tensor) -> float:
    """Read the step from the state: the rows of the readout are steps, all sequences of a step in one fold."""
    batch, time, _ = states.shape
    features = states.transpose(0, 1).flatten(0, 1).unsqueeze(0)  # (1, time * batch, S)
    step = torch.arange(time, device=states.device).repeat_interleave(batch)
    targets = step.to(states.dtype).reshape(1, -1, 1)
    # Folds of steps that interleave. A readout with huge weights could live on what is left of an exponential when
    # it has all but died away, so directions with less than a thousandth of the largest spread do not count.
    folds = (step % min(_FOLDS, time)).unsqueeze(0)
    predicted = held_out(features, targets, folds, Readout(weakest=1e-6))
    score = float(explained(targets, predicted, folds >= 0))
    return max(0.0, score) if score == score else 0.0
