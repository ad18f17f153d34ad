"""Comparing pooling heads on recorded states: each is trained and scored on the same folds."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import BadInput
from .attention import Attention
from .last import Last
from .mean import Mean
from .peaks import Max
from .steps import Lengths, Source, read_steps
from .taps import Taps

_ROUNDS = 60  # iterations of LBFGS
_DECAY = 1e-3  # weight decay: factor of the sum of squared weights


@dataclass(frozen=True, slots=True, eq=False)
class HeadScores:
    """The score of each head on held-out rows, fold by fold; all heads had the same folds."""

    scores: Mapping[str, Tensor]  # name -> (folds,) accuracy, or R² for real targets
    chance: float  # the share of the most frequent class; 0 for R²
    classes: int  # 0 for real targets

    @property
    def best(self) -> str:
        """The name of the head with the highest mean score."""
        return max(self.scores, key=lambda name: float(self.scores[name].mean()))

    def __str__(self) -> str:
        """Return a line for each head, best first, with its distance from the best on the same folds."""
        ranked = sorted(self.scores.items(), key=lambda one: -float(one[1].mean()))
        wide = max(len(name) for name in self.scores)
        score = "accuracy" if self.classes else "R²"
        lines = [f"{score} on unseen rows, {len(ranked[0][1])} folds; chance {self.chance:.3f}"]
        for name, scores in ranked:
            behind = ranked[0][1] - scores
            doubt = float(behind.std()) / len(behind) ** 0.5
            apart = "" if name == ranked[0][0] else f", {float(behind.mean()):.3f} ± {doubt:.3f} behind"
            lines.append(f"  {name:<{wide}}  {float(scores.mean()):.3f} ± {float(scores.std()):.3f}{apart}")
        return "\n".join(lines)


def compare_heads(
    h: Source | np.ndarray[Any, Any],
    targets: Tensor | Sequence[Any],
    heads: Mapping[str, nn.Module] | None = None,
    *,
    lengths: Lengths | None = None,
    folds: int = 5,
    seed: int = 0,
) -> HeadScores:
    """Return how well targets can be read from states by each head with a linear readout, cross-validated.

    The states are not changed: heads and readouts are trained as copies, anew in each fold.

    Args:
        h: States (batch, time, unit), as a tensor or an array, a trajectory or a packed sequence.
        targets: One for each row: classes as whole numbers, booleans or strings; real numbers are regressed.
        heads: Pools by name. By default: last, mean, max, attention, and taps at the quarters of the longest row.
        lengths: The real steps of each row of a plain tensor.
        folds: The number of parts that the rows are dealt into.
        seed: The seed of the folds.

    >>> h = torch.randn(60, 9, 4, generator=torch.Generator().manual_seed(0))
    >>> compare_heads(h, h[:, 4, 0] > 0, {"last": Last(), "step 4": Taps([4])}).best
    'step 4'
    """
    with torch.no_grad():  # heads are trained on fixed states, whatever made them
        steps = read_steps(torch.as_tensor(h) if isinstance(h, np.ndarray) else h, lengths)
    states = steps.filled(0.0).detach().float()
    wanted, classes = _targets(targets, states)
    rows = len(states)
    if not 2 <= folds <= rows // 2:
        raise BadInput(f"{rows} rows cannot be split into {folds} folds: from 2 to {rows // 2} are possible.")
    real = steps.lengths if steps.lengths is not None else torch.full((rows,), states.shape[1], device=states.device)
    states = _standard(states, real)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        named = dict(heads) if heads is not None else _usual(states)
        part = _dealt(wanted if classes else None, rows, folds)
    if not named:
        raise BadInput("there is no head to compare: heads= is empty.")
    found: dict[str, list[float]] = {name: [] for name in named}
    for fold in range(folds):
        test = (part == fold).to(states.device)
        for name, head in named.items():
            guess = _trained(head, states, real, wanted, (~test, classes))
            found[name].append(_score(guess[test], wanted[test], classes))
    chance = float(wanted.bincount().max()) / rows if classes else 0.0
    return HeadScores({name: torch.tensor(scores) for name, scores in found.items()}, chance, classes)


def _usual(states: Tensor) -> dict[str, nn.Module]:
    time = states.shape[1]
    quarters = sorted({round(step * (time - 1) / 4) for step in range(5)})
    attention = Attention(states.shape[2])
    nn.init.zeros_(attention.score.weight)  # so that it starts as the mean
    return {"last": Last(), "mean": Mean(), "max": Max(), "attention": attention, "taps": Taps(quarters, short="last")}


def _standard(states: Tensor, lengths: Tensor) -> Tensor:
    """Scale each unit by its own deviation over all real steps, so that one decay suits all units."""
    valid = (torch.arange(states.shape[1], device=states.device) < lengths.unsqueeze(1)).unsqueeze(-1)
    entries = states[valid.squeeze(-1)]
    return ((states - entries.mean(0)) / entries.std(0).clamp(min=1e-8)).where(valid, 0.0)


def _targets(targets: Any, states: Tensor) -> tuple[Tensor, int]:
    if not isinstance(targets, Tensor):
        names = sorted(set(targets), key=str) if any(isinstance(one, str) for one in targets) else None
        targets = torch.tensor([names.index(one) for one in targets] if names else list(targets))
    if targets.shape != states.shape[:1]:
        raise BadInput(f"targets have shape {tuple(targets.shape)}, but there are {len(states)} rows: one for each.")
    targets = targets.detach().to(states.device)
    if targets.is_floating_point():
        if not bool(targets.isfinite().all()):
            raise BadInput("targets hold NaN or Inf: leave those rows out.")
        return (targets.float() - targets.float().mean()) / targets.float().std().clamp(min=1e-8), 0
    codes = torch.unique(targets, return_inverse=True)[1]
    if not bool(codes.any()):
        raise BadInput("all targets are of one class: there is nothing to tell apart.")
    return codes, int(codes.max()) + 1


def _dealt(classes: Tensor | None, rows: int, folds: int) -> Tensor:
    """Deal rows into folds at random, so that every fold gets its share of each class: (rows,)."""
    order = torch.randperm(rows)
    if classes is not None:
        order = order[classes.cpu()[order].argsort(stable=True)]
    part = torch.empty(rows, dtype=torch.int64)
    part[order] = torch.arange(rows) % folds
    return part


def _trained(head: nn.Module, states: Tensor, lengths: Tensor, wanted: Tensor, how: tuple[Tensor, int]) -> Tensor:
    """Return the predictions for all rows of a copy of `head`, trained with a readout on the marked rows."""
    train, classes = how
    own = copy.deepcopy(head).to(states.device, torch.float32).requires_grad_()
    with torch.no_grad():
        width = own(states, lengths).flatten(1).shape[1]
    # No weights are drawn, so the random stream is not used.
    readout = nn.utils.skip_init(nn.Linear, width, classes or 1, device=states.device)  # type: ignore[no-untyped-call]
    weights = [readout.weight, readout.bias, *own.parameters()]
    nn.init.zeros_(readout.weight), nn.init.zeros_(readout.bias)
    optimizer = torch.optim.LBFGS(weights, max_iter=_ROUNDS, line_search_fn="strong_wolfe")

    def said() -> Tensor:
        result: Tensor = readout(own(states, lengths).flatten(1))
        return result

    def loss() -> Tensor:
        optimizer.zero_grad()
        guess, aim = said()[train], wanted[train]
        error = nn.functional.cross_entropy(guess, aim) if classes else nn.functional.mse_loss(guess.squeeze(1), aim)
        total = error + _DECAY * sum(_squares(weights))
        total.backward()  # type: ignore[no-untyped-call]
        return total

    with torch.enable_grad():
        optimizer.step(loss)  # type: ignore[no-untyped-call]
    return said().detach()


def _squares(weights: list[nn.Parameter]) -> Iterator[Tensor]:
    return (weight.square().sum() for weight in weights)


def _score(guess: Tensor, wanted: Tensor, classes: int) -> float:
    if classes:
        return float((guess.argmax(1) == wanted).float().mean())
    missed, total = (guess.squeeze(1) - wanted).square().sum(), (wanted - wanted.mean()).square().sum()
    return float(1 - missed / total.clamp(min=1e-12))
