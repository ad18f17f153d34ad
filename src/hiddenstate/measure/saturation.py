"""Saturation: how much of a state is close to the ends of its activation's range."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from ..errors import BadInput
from ..recording import Trajectory
from ..state import shown_in_short
from .series import ManyStates, Series, as_series, refuse_bad, several

Range = Literal["tanh", "sigmoid", "none"]
_SIGMOIDS = ("input", "forget", "output", "reset", "update")
_TORCH_KINDS = ("rnn", "lstm", "gru", "rnn_cell", "lstm_cell", "gru_cell")


@shown_in_short
@dataclass(frozen=True, slots=True, eq=False)
class Saturation:
    """The share of values near the ends of their range: overall, for each unit, and at each step."""

    share: float
    units: Tensor  # (unit,) share of each unit
    steps: Tensor  # (time,) share at each step; NaN at a step that no row reaches
    mean_abs: float
    max_abs: float
    threshold: float
    range: Range  # "tanh": ±1, "sigmoid": 0 and 1, "none": unbounded, so that every share is 0
    gates: Mapping[str, Saturation] = field(default_factory=dict)  # for each recorded gate

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
    traj: ManyStates,
    threshold: float = 0.95,
    *,
    lengths: Tensor | None = None,
    part: str = "h",
    activation: Literal["auto", "tanh", "sigmoid", "relu", "none"] = "auto",
) -> Saturation:
    """Return how much of `traj` is saturated: |h| ≥ threshold for tanh, ≥ threshold or ≤ 1 - threshold for a sigmoid.

    A cell state `c`, a relu and a projection are unbounded, so they cannot saturate. `activation="auto"` means sigmoid
    for sigmoid gates, and tanh for all else, unless a torch layer's values exceed 1, which no tanh can.
    Many runs of unequal length, `recording.runs("l0")` or an iterator of them, are measured together, one at a time.

    >>> states = torch.tensor([[[0.99, 0.0], [-0.99, 0.5]]])
    >>> print(saturation(states))
    50.0% saturated (≥ 0.95 of the range of tanh), |h| is 0.62 on average, 0.99 at most
    """
    # A model beside its data is refused below: it is not states.
    wrong = not isinstance(threshold, int | float) or not 0 < threshold <= 1
    if wrong and not isinstance(traj, torch.nn.Module):
        raise BadInput(
            f"the threshold is a share of the activation's range, above 0 and up to 1, but is {threshold!r}."
        )
    total = RunningSaturation(threshold, part, activation)
    if lengths is not None:
        total.add(traj, as_series(traj, lengths, part=part))
    else:
        for run, series in several(traj, part=part, final=True):
            total.add(run, series)
    return total.result()


class RunningSaturation:
    """Saturation accumulated run by run."""

    def __init__(self, threshold: float = 0.95, part: str = "h", activation: str = "auto") -> None:
        """Start without any runs."""
        self.threshold, self.part, self.activation = threshold, part, activation
        self._together: Saturation | None = None
        self._reached = torch.zeros(0)  # (time,) the number of rows that reach each step

    def add(self, traj: ManyStates, series: Series) -> None:
        """Add one run."""
        refuse_bad(series)
        gates: dict[str, Saturation] = {}
        if isinstance(traj, Trajectory) and self.part == "h":
            gates = {name: saturation(traj, self.threshold, part=name) for name in traj.gates}
        one = _measured(series, self.threshold, _range(traj, series, self.activation, self.part), gates)
        rows = series.valid.sum(0).cpu()
        if self._together is None:
            self._together, self._reached = one, rows
        else:
            self._together, self._reached = _merged(self._together, one, (self._reached, rows))

    @property
    def any(self) -> bool:
        """Whether a run was added."""
        return self._together is not None

    def result(self) -> Saturation:
        """Return the saturation of all runs together."""
        assert self._together is not None
        return self._together


def _merged(one: Saturation, other: Saturation, reached: tuple[Tensor, Tensor]) -> tuple[Saturation, Tensor]:
    """Return the saturation of both together, and the number of rows that reach each step, from those of each."""
    longest = max(len(rows) for rows in reached)
    rows = [functional.pad(r, (0, longest - len(r))) for r in reached]
    # A value beyond the range shows that the activation is unbounded, for all runs.
    unbounded = "none" in (one.range, other.range)
    share = [float(r.sum()) / float(rows[0].sum() + rows[1].sum()) for r in rows]
    weights = [0.0, 0.0] if unbounded else share
    steps = sum(
        functional.pad(found.steps.cpu().nan_to_num(), (0, longest - len(found.steps))) * r * (not unbounded)
        for found, r in zip((one, other), rows, strict=True)
    )
    merged = Saturation(
        share=weights[0] * one.share + weights[1] * other.share,
        units=weights[0] * one.units + weights[1] * other.units,
        steps=steps / (rows[0] + rows[1]),
        mean_abs=share[0] * one.mean_abs + share[1] * other.mean_abs,
        max_abs=max(one.max_abs, other.max_abs),
        threshold=one.threshold,
        range="none" if unbounded else one.range,
        gates={
            name: _merged(gate, other.gates[name], reached)[0]
            for name, gate in one.gates.items()
            if name in other.gates
        },
    )
    return merged, rows[0] + rows[1]


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


def _range(traj: ManyStates, series: Series, activation: str, part: str) -> Range:
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
