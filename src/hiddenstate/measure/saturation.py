"""How much of a state is pressed against the ends of its activation's range."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from ..errors import BadInput
from ..recording import Trajectory
from .series import Series, as_series, refuse_bad

Range = Literal["tanh", "sigmoid", "none"]
_SIGMOIDS = ("input", "forget", "output", "reset", "update")
_TORCH_KINDS = ("rnn", "lstm", "gru", "rnn_cell", "lstm_cell", "gru_cell")


@dataclass(frozen=True, slots=True, eq=False)
class Saturation:
    """The share of values near the ends of their range, overall, of each unit, and at each step."""

    share: float
    units: Tensor  # (unit,) share of each unit
    steps: Tensor  # (time,) share at each step; NaN at a step that no row reaches
    mean_abs: float
    max_abs: float
    threshold: float
    range: Range  # "tanh": ±1, "sigmoid": 0 and 1, "none": nothing to press against, so every share is 0
    gates: Mapping[str, Saturation] = field(default_factory=dict)  # of each recorded gate

    def __str__(self) -> str:
        """Return one line, and one for each gate."""
        lines = [
            f"{self.share:.1%} saturated ({self._rule()}), |h| is {self.mean_abs:.3g} on average, "
            f"{self.max_abs:.3g} at most"
        ]
        lines += [f"  {name}: {gate.share:.1%} saturated ({gate._rule()})" for name, gate in self.gates.items()]
        return "\n".join(lines)

    def _rule(self) -> str:
        if self.range == "none":
            return "an unbounded activation, which cannot saturate"
        return f"≥ {self.threshold:g} of the range of {self.range}"


def saturation(
    traj: Trajectory | Tensor,
    threshold: float = 0.95,
    *,
    lengths: Tensor | None = None,
    part: str = "h",
    activation: Literal["auto", "tanh", "sigmoid", "relu", "none"] = "auto",
) -> Saturation:
    """Return how much of `traj` is saturated: |h| ≥ threshold for tanh, ≥ threshold or ≤ 1 - threshold for a sigmoid.

    A cell state `c`, a relu and a projection have no bounds, so nothing of them saturates. `activation="auto"` takes
    the sigmoid for sigmoid gates, and tanh for all else, unless a torch layer's values exceed 1, as no tanh can.

    >>> states = torch.tensor([[[0.99, 0.0], [-0.99, 0.5]]])
    >>> print(saturation(states))
    50.0% saturated (≥ 0.95 of the range of tanh), |h| is 0.62 on average, 0.99 at most
    """
    if not 0 < threshold <= 1:
        raise BadInput(
            f"the threshold is a share of the activation's range, above 0 and up to 1, but is {threshold!r}."
        )
    series = refuse_bad(as_series(traj, lengths, part=part))
    gates: dict[str, Saturation] = {}
    if isinstance(traj, Trajectory) and part == "h":
        gates = {name: saturation(traj, threshold, part=name) for name in traj.gates}
    return _measured(series, threshold, _range(traj, series, activation, part), gates)


def _measured(series: Series, threshold: float, bounds: Range, gates: dict[str, Saturation]) -> Saturation:
    size = series.values.abs()
    if bounds == "sigmoid":
        pressed = (series.values >= threshold) | (series.values <= 1 - threshold)
    else:
        pressed = size >= threshold
    real = series.valid.unsqueeze(-1)
    pressed = pressed & real if bounds != "none" else pressed & False
    count, units = int(series.valid.sum()), size.shape[-1]
    return Saturation(
        share=int(pressed.sum()) / (count * units),
        units=pressed.sum((0, 1)) / count,
        steps=pressed.sum((0, 2)) / (series.valid.sum(0) * units),
        mean_abs=float(size.double().sum()) / (count * units),
        max_abs=float(size.max()),
        threshold=threshold,
        range=bounds,
        gates=gates,
    )


def _range(traj: Trajectory | Tensor, series: Series, activation: str, part: str) -> Range:
    if activation in ("relu", "none"):
        return "none"
    if activation in ("tanh", "sigmoid"):
        return "tanh" if activation == "tanh" else "sigmoid"
    if activation != "auto":
        raise BadInput(f"activation is one of auto, tanh, sigmoid, relu and none, but is {activation!r}.")
    if not isinstance(traj, Trajectory):
        return "tanh"
    if part in traj.gates and part in _SIGMOIDS:
        return "sigmoid"
    unbounded = part == "c" or (traj.kind in _TORCH_KINDS and float(series.values.abs().max()) > 1)
    return "none" if unbounded else "tanh"
