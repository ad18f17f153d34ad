"""Positions: whether a layer knows where in a sequence it is when its input does not say."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..errors import BadInput
from ..state import shown_in_short
from .ridge import Readout, explained, held_out
from .series import Series, refuse_bad, valid_steps
from .system import System, at_rest, check_sequence
from .torch_system import as_system, driven

_FOLDS = 5


@shown_in_short
@dataclass(frozen=True, slots=True, eq=False)
class Positions:
    """How states move apart under a constant input."""

    distances: Tensor  # (time, time) Euclidean, mean over rows; symmetric, zero on the diagonal
    decodability: float  # R² of a linear readout of the step, on held-out steps; 0 if it finds nothing
    settles_at: int | None  # the first step from which on no move exceeds the tolerance; None if it never settles
    moves: Tensor  # (time,) length of the move into each step, mean over rows
    tolerance: float  # relative to the largest move

    def __str__(self) -> str:
        """Return one line."""
        settled = f"settles at step {self.settles_at}" if self.settles_at is not None else "never settles"
        return (
            f"over {len(self.distances)} steps of constant input the state {settled} (moves within "
            f"{self.tolerance:g} of the largest), and the step can be read from it with R² = {self.decodability:.3f}"
        )


def positions(
    layer: nn.Module,
    x: Tensor | None = None,
    *,
    steps: int = 50,
    state: object = None,
    tolerance: float = 0.01,
    time_axis: int | None = None,
    batch_axis: int | None = None,
) -> Positions:
    """Return how the state of a layer moves along time while its input is constant.

    Args:
        layer: A recurrent layer of one direction; its state is all parts of all its layers.
        x: The input in the layer's own layout; or (feature,), which is repeated for `steps` steps; by default ones.
            A cell is stepped along (batch, time, feature).
        steps: The number of steps, if x does not say it.
        state: The state to start from.
        tolerance: The state counts as settled once its moves are below this share of the largest.
        time_axis: Which axis of x is time, if not as the layer's own `batch_first` says.
        batch_axis: Which axis of x holds the rows.

    >>> gru = torch.nn.GRU(1, 8)
    >>> found = positions(gru, steps=40)
    >>> found.distances.shape, bool((found.distances.diagonal() == 0).all())
    (torch.Size([40, 40]), True)
    """
    if x is None or (x.dim() == 1 and x.is_floating_point()):
        system = as_system(layer, x)
        x = check_sequence(system, _constant(system, x, steps), at_least=2)
    else:
        system, x = driven(layer, x, time_axis=time_axis, batch_axis=batch_axis, at_least=2)
    with at_rest(system.layer.module):
        start = system.start(state, len(x))
        states = system.walk(x, start)[..., system.smooth]  # (batch, time, S)
    refuse_bad(Series(states, valid_steps(x, None), "the state"))
    states = states.double()
    first = start[:, system.smooth].double().unsqueeze(1)
    moves = torch.cat([first, states], dim=1).diff(dim=1).norm(dim=2).mean(0)  # (time,)
    distances = torch.cdist(states, states, compute_mode="donot_use_mm_for_euclid_dist").mean(0)
    return Positions(distances, _decodability(states), _settled(moves, tolerance), moves, tolerance)


def _constant(system: System, x: Tensor | None, steps: int) -> Tensor:
    if steps < 2:
        raise BadInput(f"{steps} steps are asked for, but positions are told apart from 2 on.")
    return (torch.ones(system.features()) if x is None else x).expand(1, steps, -1)


def _settled(moves: Tensor, tolerance: float) -> int | None:
    moving = (moves > tolerance * moves.max()).nonzero()
    first = int(moving[-1]) + 1 if len(moving) else 0
    return first if first < len(moves) else None


def _decodability(states: Tensor) -> float:
    """Read the step from the state: the rows of the readout are steps; all sequences of a step are in one fold."""
    batch, time, _ = states.shape
    features = states.transpose(0, 1).flatten(0, 1).unsqueeze(0)  # (1, time * batch, S)
    step = torch.arange(time, device=states.device).repeat_interleave(batch)
    targets = step.to(states.dtype).reshape(1, -1, 1)
    # The folds interleave steps. A readout with huge weights could read the step from the remains of an exponential
    # that has all but vanished, so directions with less than a thousandth of the largest spread do not count.
    folds = (step % min(_FOLDS, time)).unsqueeze(0)
    predicted = held_out(features, targets, folds, Readout(weakest=1e-6))
    score = float(explained(targets, predicted, folds >= 0))
    return max(0.0, score) if score == score else 0.0
