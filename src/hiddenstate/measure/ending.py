"""The state in which each of several sequences ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..cells import layers, unwrap
from ..errors import BadInput, NotRecurrent
from ..recording import Recording, Trajectory, record
from .rest import at_rest
from .series import Series, as_series, refuse_bad

Pool = Literal["last", "mean", "max"]


@dataclass(frozen=True, slots=True)
class Ending:
    """What is taken from a run: which part of which track, and how its steps become one state."""

    pool: Pool
    part: str
    track: str | None


def pooled(series: Series, pool: Pool, *, reverse: bool = False) -> Tensor:
    """Return one state for each row (batch, unit); a reverse track ends at its first position."""
    if not bool(series.valid.any(1).all()):
        row = int((~series.valid.any(1)).nonzero()[0])
        raise BadInput(f"row {row} has no real step, so it ends in no state: leave it out.")
    if pool == "last":
        return series.values[:, 0] if reverse else series.final
    if pool == "mean":
        return series.values.sum(1) / series.lengths.unsqueeze(1)
    return series.values.masked_fill(~series.valid.unsqueeze(-1), -torch.inf).amax(1)


def final_states(
    model: nn.Module,
    inputs: Sequence[Any],
    wanted: Ending,
    *,
    tokenize: Callable[[Any], Any] | None,
    time_axis: int,
) -> Tensor:
    """Run each input alone, as it is, and return the states they end in: (input, unit)."""
    model = unwrap(model)
    if not layers(model):
        raise NotRecurrent(f"{type(model).__name__} has no recurrent layer, so it has no states to compare.")
    if not len(inputs):
        raise BadInput("there are no inputs to compare: inputs= is a list with one entry for each sequence.")
    device = next((weight.device for weight in model.parameters()), torch.device("cpu"))
    states = []
    for number, one in enumerate(inputs):
        x = _numbers(one, tokenize, number).to(device).unsqueeze(1 - time_axis)
        with at_rest(model), torch.no_grad(), record(model) as recording:
            model(x)
        states.append(_end(recording, wanted))
    return torch.cat(states)


def _numbers(one: Any, tokenize: Callable[[Any], Any] | None, number: int) -> Tensor:
    if tokenize is not None:
        one = tokenize(one)
    if isinstance(one, str):
        raise BadInput(f"input {number} is a string: give tokenize=, which turns a string into numbers.")
    x = torch.as_tensor(one)
    if x.dim() == 0 or not len(x):
        raise BadInput(f"input {number} has no steps: its shape is {tuple(x.shape)}, and (time, ...) is needed.")
    return x


def _end(recording: Recording, wanted: Ending) -> Tensor:
    if wanted.track is not None:
        return _pooled(recording[wanted.track], wanted)
    last = list(recording)[-1]
    names = [last.removesuffix("_reverse"), last] if last.endswith("_reverse") else [last]
    return torch.cat([_pooled(recording.runs(name)[-1], wanted) for name in names], dim=1)


def _pooled(traj: Trajectory, wanted: Ending) -> Tensor:
    return pooled(refuse_bad(as_series(traj, part=wanted.part)), wanted.pool, reverse=traj.track.endswith("_reverse"))
