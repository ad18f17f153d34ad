"""Jacobians: how the next state depends on the previous one, at every step of a run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from ..state import shown_in_short
from .progress import tracked
from .series import Series, refuse_bad, valid_steps, without_padding
from .system import System, at_rest
from .torch_system import driven

_CHUNK = 2**25  # numbers in the Jacobians that are computed at once


@shown_in_short
@dataclass(frozen=True, eq=False)
class Jacobians:
    """d next state / d state at each step; `eigenvalues` and `spectral_radius` are computed when first used.

    Rows and columns are the coordinates of the whole state: `h` of each layer, then `c` of each layer, then other parts
    in the order of the cell's own state.
    """

    values: Tensor  # (batch, time, S, S) rows are the next state's coordinates; zero in the padding
    valid: Tensor  # (batch, time) bool
    states: Tensor  # (batch, time, S) the states after each step
    interrupted: bool = False  # stopped by Ctrl-C: later steps are not valid

    @cached_property
    def eigenvalues(self) -> Tensor:
        """The eigenvalues at each step, largest first: complex (batch, time, S); NaN in the padding."""
        values = self.values if self.values.dtype in (torch.float32, torch.float64) else self.values.float()
        found = torch.full(values.shape[:-1], torch.nan, dtype=values.dtype.to_complex(), device=values.device)
        real = torch.linalg.eigvals(values[self.valid])
        found[self.valid] = real.gather(-1, real.abs().argsort(-1, descending=True))
        return found

    @cached_property
    def spectral_radius(self) -> Tensor:
        """The largest modulus of an eigenvalue at each step: (batch, time); NaN in the padding."""
        return self.eigenvalues.abs().select(-1, 0)

    def __str__(self) -> str:
        """Return one line."""
        radius = self.spectral_radius[self.valid]
        growing = float((radius > 1).float().mean())
        stopped = "; interrupted, later steps are missing" if self.interrupted else ""
        return (
            f"Jacobians of {self.values.shape[-1]} coordinates at {len(radius)} steps: spectral radius "
            f"{float(radius.mean()):.4g} on average, {float(radius.max()):.4g} at most, above 1 at {growing:.1%} "
            f"of the steps{stopped}"
        )


def jacobians(
    layer: nn.Module,
    x: Tensor,
    *,
    lengths: Tensor | None = None,
    state: object = None,
    time_axis: int | None = None,
    batch_axis: int | None = None,
) -> Jacobians:
    """Return d s_t / d s_(t-1) at every step of `x`, where s is the whole state of the layer.

    `x` is in the layer's own layout: (time, batch, feature) with `batch_first=False`; for a cell (batch, time,
    feature). `time_axis=` or `batch_axis=` overrides this. Results are always (batch, time, ...).

    Torch's layers are computed by closed forms, as in eval mode; other cells by autograd, for all steps at once.

    >>> gru = torch.nn.GRU(1, 2, batch_first=True)
    >>> for weight in gru.parameters(): _ = torch.nn.init.zeros_(weight)
    >>> print(jacobians(gru, torch.zeros(1, 3, 1)))
    Jacobians of 2 coordinates at 3 steps: spectral radius 0.5 on average, 0.5 at most, above 1 at 0.0% of the steps
    """
    system, x = driven(layer, x, time_axis=time_axis, batch_axis=batch_axis)
    valid = valid_steps(x, lengths)
    x = without_padding(x, valid)
    with at_rest(system.layer.module):
        start = system.start(state, len(x))
        walked = system.walk(x, start)  # (batch, time, entry)
        states = refuse_bad(Series(walked.masked_fill(~valid.unsqueeze(-1), 0), valid, "the state")).values
        before = torch.cat([start.unsqueeze(1), walked[:, :-1]], dim=1)
        values, done = _at_all(system, x, before)
    values[~valid] = 0
    reached = torch.arange(x.shape[1], device=valid.device) < done
    return Jacobians(values, valid & reached, states[..., system.smooth], interrupted=done < x.shape[1])


def _at_all(system: System, x: Tensor, before: Tensor) -> tuple[Tensor, int]:
    batch, time = x.shape[:2]
    size = system.size
    stride = max(1, _CHUNK // (batch * size * size))
    if stride >= time:
        return system.jacobians(x.flatten(0, 1), before.flatten(0, 1)).reshape(batch, time, size, size), time
    values = before.new_zeros(batch, time, size, size)
    done = 0
    try:
        for begin in tracked(range(0, time, stride), "jacobians", -(-time // stride)):
            piece = slice(begin, begin + stride)
            inputs, states = x[:, piece].flatten(0, 1), before[:, piece].flatten(0, 1)
            values[:, piece] = system.jacobians(inputs, states).reshape(batch, -1, size, size)
            done = min(begin + stride, time)
    except KeyboardInterrupt:
        if not done:
            raise
    return values, done
