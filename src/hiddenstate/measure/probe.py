"""Probes: how well a linear readout finds a target in the states, at every step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import Tensor

from ..errors import BadInput
from ..recording import Recording, Trajectory
from ..state import shown_in_short
from .progress import tracked
from .ridge import Readout, explained, held_out
from .series import ManyStates, Series, as_series, as_tensor, refuse_bad

_SHUFFLES = 5  # controls with shuffled targets, averaged
_CHUNK = 2**22  # numbers in the states that are fitted at once


@shown_in_short
@dataclass(frozen=True, slots=True, eq=False)
class Probe:
    """The score of a linear readout at each step, with the scores of chance and of shuffled targets."""

    accuracy: Tensor  # (time,) share of correct rows, or R² for real targets; NaN where too few rows are left
    chance: float  # share of the most frequent class; 0 for R²
    shuffled: Tensor  # (time,) the score with targets assigned to rows at random
    classes: int  # 0 for real targets
    folds: int
    rows: Tensor  # (time,) real rows at each step
    interrupted: bool = False  # stopped by Ctrl-C: later steps are NaN
    taken: str = ""  # where rows and steps were taken to lie, where neither states nor targets tell

    @property
    def r2(self) -> Tensor:
        """The score, under its name for real targets."""
        if self.classes:
            raise AttributeError("these targets are classes, so their score is accuracy; real targets have an r2")
        return self.accuracy

    def __str__(self) -> str:
        """Return one line."""
        name = "accuracy" if self.classes else "R²"
        known = self.accuracy.nan_to_num(-torch.inf)
        best = int(known.argmax())
        finite = (~self.accuracy.isnan()).nonzero().flatten()
        last = int(finite[-1]) if len(finite) else 0
        stopped = "; interrupted, later steps are missing" if self.interrupted else ""
        return (
            f"{name} {float(self.accuracy[last]):.3f} at step {last}, {float(self.accuracy[best]):.3f} at best (step "
            f"{best}); chance {self.chance:.3f}, shuffled targets {float(self.shuffled[last]):.3f} "
            f"({self.folds} folds){stopped}{'; ' if self.taken else ''}{self.taken}"
        )


@overload
def probe(
    traj: ManyStates,
    targets: Any,
    folds: int = ...,
    seed: int = ...,
    *,
    lengths: Tensor | None = ...,
    part: str = ...,
) -> Probe: ...
@overload
def probe(
    traj: Mapping[str, Trajectory], targets: Any, folds: int = ..., seed: int = ..., *, part: str = ...
) -> dict[str, Probe]: ...
def probe(
    traj: ManyStates | Mapping[str, Trajectory],
    targets: Any,
    folds: int = 5,
    seed: int = 0,
    *,
    lengths: Tensor | None = None,
    part: str = "h",
) -> Probe | dict[str, Probe]:
    """Return how well `targets` can be read from the states at each step, by a cross-validated linear readout.

    Whole numbers, booleans and strings are classes; real numbers are regressed. There is one target for each row, or
    one for each row and step. States are (batch, time, unit), or final ones (batch, unit), or a list of runs, whose
    rows are taken together. For a recording or a mapping of trajectories, every track gets its own probe.

    >>> label = torch.arange(40) % 2
    >>> states = torch.randn(40, 3, 8)
    >>> states[:, 2, 0] += 10 * label
    >>> probe(states, label).accuracy[2]
    tensor(1., dtype=torch.float64)
    """
    if isinstance(traj, Mapping):
        runs = {name: traj.runs(name) for name in traj} if isinstance(traj, Recording) else traj
        return {name: probe(one, targets, folds, seed, part=part) for name, one in runs.items()}
    states: Any = as_tensor(traj)
    if isinstance(states, Tensor) and states.dim() == 2:  # final states (batch, unit): one step per row
        states = states.unsqueeze(1)
    series = refuse_bad(as_series(states, lengths, part=part))
    batch = len(series.values)
    if not 2 <= folds <= batch:
        raise BadInput(
            f"{batch} rows cannot be split into {folds} folds: from 2 to {batch} are possible. "
            f"A probe learns from rows, so give it many sequences, hundreds rather than tens."
        )
    wanted, classes = _targets(targets, series)  # (time or 1, batch, output)
    generator = torch.Generator().manual_seed(seed)
    parts = _folds(wanted if classes else None, series.valid.T.cpu(), folds, generator)  # (time, batch)
    orders = [_shuffled(parts, generator).to(wanted.device) for _ in range(_SHUFFLES)]
    folded = _FoldedTargets(wanted, parts.to(wanted.device), orders, classes)
    scores = torch.full((series.values.shape[1], 1 + _SHUFFLES), torch.nan, dtype=torch.float64)
    interrupted = False
    stride = max(1, _CHUNK // series.values[:, 0].numel())
    steps = range(0, len(scores), stride)
    try:
        for begin in tracked(steps, "probe", len(steps)):
            piece = slice(begin, min(begin + stride, len(scores)))
            scores[piece] = _scores(series, folded, piece).cpu()
    except KeyboardInterrupt:
        interrupted = True
    return Probe(
        accuracy=scores[:, 0],
        chance=_chance(wanted, series.valid) if classes else 0.0,
        shuffled=scores[:, 1:].mean(1),
        classes=classes,
        folds=folds,
        rows=series.valid.sum(0),
        interrupted=interrupted,
        taken=series.assumed if len(wanted) > 1 or batch == series.values.shape[1] else "",
    )


@dataclass(frozen=True, slots=True)
class _FoldedTargets:
    """What to read from the states, and which rows are held out together."""

    wanted: Tensor  # (time or 1, batch, output)
    parts: Tensor  # (time, batch) the fold of each row, -1 for padding
    orders: list[Tensor]  # for each control, (time, batch): the row whose target each row gets
    classes: int


def _scores(series: Series, folded: _FoldedTargets, piece: slice) -> Tensor:
    """Return the scores of the targets and of each shuffle: (step, 1 + shuffles)."""
    features = series.values[:, piece].transpose(0, 1).double()  # (step, batch, unit)
    valid, parts = series.valid[:, piece].T, folded.parts[piece]
    goal = folded.wanted[piece] if len(folded.wanted) > 1 else folded.wanted.expand(len(features), -1, -1)
    goals = [goal, *(goal.gather(1, order[piece].unsqueeze(-1).expand_as(goal)) for order in folded.orders)]
    # The decomposition of the states is the costly part, so the controls are computed with it as further outputs.
    predicted = held_out(features, torch.cat(goals, dim=2), parts, Readout(groups=len(goals))).chunk(len(goals), dim=2)
    scores = []
    for aim, guess in zip(goals, predicted, strict=True):
        if folded.classes:
            right = (aim.argmax(2) == guess.argmax(2)) & valid
            scores.append(right.sum(1) / valid.sum(1))
        else:
            scores.append(explained(aim, guess, valid))
    enough = valid.sum(1) >= 2 * (int(folded.parts.max()) + 1)
    return torch.stack(scores, dim=1).double().masked_fill(~enough.unsqueeze(1), torch.nan)


def _targets(targets: Any, series: Series) -> tuple[Tensor, int]:
    """Return targets as (time or 1, batch, output), with classes one-hot, and the number of classes."""
    given = _numbers(targets)
    batch, time = series.valid.shape
    given = given.to(series.values.device)
    if given.dim() == 0 or len(given) != batch:
        raise BadInput(f"there are {batch} rows, but targets have shape {tuple(given.shape)}: one for each row.")
    by_step = given.dim() > 1 and given.shape[1] == time
    outputs = given.dim() - 1 - by_step
    if outputs > int(given.is_floating_point()):
        raise BadInput(
            f"targets have shape {tuple(given.shape)}, but ({batch},) or ({batch}, {time}) is needed: one for each "
            f"row, or one for each row and step. Real targets may have one axis more, of outputs."
        )
    steps = given.transpose(0, 1) if by_step else given.unsqueeze(0)  # (time or 1, batch, ...)
    if not given.is_floating_point():
        names, codes = torch.unique(steps, return_inverse=True)
        return torch.nn.functional.one_hot(codes, len(names)).double(), len(names)
    steps = steps.unsqueeze(-1) if steps.dim() == 2 else steps
    if by_step:  # targets of padding do not count, even if they are NaN
        steps = steps.masked_fill(~series.valid.T.unsqueeze(-1), 0)
    if not bool(steps.isfinite().all()):
        raise BadInput("targets hold NaN or Inf: leave those rows out.")
    return steps.double(), 0


def _numbers(targets: Any) -> Tensor:
    if isinstance(targets, Tensor):
        return targets.detach()
    if isinstance(targets, Sequence) and len(targets) and isinstance(targets[0], str):
        names = {name: code for code, name in enumerate(sorted(set(targets)))}
        return torch.tensor([names[name] for name in targets])
    return torch.as_tensor(targets)


def _folds(classes: Tensor | None, valid: Tensor, folds: int, generator: torch.Generator) -> Tensor:
    """Deal the real rows of each step into folds at random, so that every fold gets its share of each class."""
    time, batch = valid.shape
    order = torch.randperm(batch, generator=generator)
    codes = torch.zeros(1, batch, dtype=torch.int64) if classes is None else classes.argmax(2).cpu()
    codes = codes.expand(time, batch).masked_fill(~valid, batch)  # padding comes last, after every class
    order = order[codes[:, order].argsort(dim=1, stable=True)]  # (time, batch)
    parts = torch.empty(time, batch, dtype=torch.int64)
    parts.scatter_(1, order, (torch.arange(batch) % folds).expand(time, batch))
    return parts.masked_fill(~valid, -1)


def _shuffled(parts: Tensor, generator: torch.Generator) -> Tensor:
    """Return rows in another order, each within its own fold: (time, batch).

    If they were shuffled freely, a class that is rare in training would be common in the test, and scores below chance.
    """
    shift = torch.rand(parts.shape[1], generator=generator, dtype=torch.float64)
    order = torch.empty_like(parts)
    return order.scatter_(1, parts.argsort(dim=1, stable=True), (parts + shift).argsort(dim=1))


def _chance(wanted: Tensor, valid: Tensor) -> float:
    counts = (wanted * valid.T.unsqueeze(-1)).sum((0, 1)) if len(wanted) > 1 else wanted[0][valid.any(1)].sum(0)
    return float(counts.max() / counts.sum())
