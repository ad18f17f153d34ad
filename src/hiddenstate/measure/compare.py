"""Which sequences end in states that are alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..errors import BadInput, MissingExtra
from ..recording import Trajectory
from .ending import Ending, Pool, final_states, pooled
from .series import as_series, refuse_bad


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """The final states of some sequences: a map of them, and how far they are from each other."""

    coordinates: Tensor  # (batch, components)
    explained: Tensor  # (components,) share of the variance along each; NaN for t-SNE, which keeps no such account
    distances: Tensor  # (batch, batch) Euclidean, symmetric, zero on the diagonal
    neighbors: Tensor  # (batch, batch - 1) the other rows, nearest first
    states: Tensor  # (batch, unit) what was compared
    labels: tuple[Any, ...] | None
    agreement: float | None  # share of rows whose nearest neighbor has their label
    method: str

    def __str__(self) -> str:
        """Return one line."""
        rows = len(self.states)
        how = "t-SNE" if self.method == "tsne" else f"PCA holds {float(self.explained.sum()):.1%} of the variance"
        line = f"{rows} states in {self.coordinates.shape[1]} dimensions ({how})"
        if rows > 1:
            nearest, away = self.neighbors[:, 0], self.distances.masked_fill(self._same(), torch.inf)
            a = int(away.amin(1).argmin())
            line += f"; closest are {self._name(a)} and {self._name(int(nearest[a]))}, {float(away.min()):.3g} apart"
        return line + (f"; {self.agreement:.1%} lie next to their own label" if self.agreement is not None else "")

    def _same(self) -> Tensor:
        return torch.eye(len(self.states), dtype=torch.bool, device=self.distances.device)

    def _name(self, row: int) -> str:
        return f"{row}" if self.labels is None else f"{row} ({self.labels[row]})"


def compare(
    traj: Trajectory | Tensor | None = None,
    labels: Sequence[Any] | Tensor | None = None,
    components: int = 2,
    *,
    model: nn.Module | None = None,
    inputs: Sequence[Any] | None = None,
    tokenize: Callable[[Any], Any] | None = None,
    lengths: Tensor | None = None,
    part: str = "h",
    track: str | None = None,
    pool: Pool = "last",
    method: Literal["pca", "tsne"] = "pca",
    time_axis: int = 1,
    seed: int = 0,
) -> Comparison:
    """Return a map of final states and the distances between them.

    Give a trajectory (or states (batch, time, unit) with lengths), or a model with inputs of any lengths, each run on
    its own: tensors (time, ...), or whatever `tokenize` turns into them. Each row's last real step counts, or the mean
    or maximum over its steps. t-SNE needs scikit-learn: `pip install hiddenstate[analysis]`.

    Args:
        traj: States of several sequences.
        labels: One for each sequence; kept beside the map, and compared with the nearest neighbors.
        components: The dimensions of the map.
        model: Makes the states, in eval mode, when there is no `traj`; it comes back untouched.
        inputs: One for each sequence, without a batch axis.
        tokenize: Turns an input into numbers for the model.
        lengths: The real steps of each row of a plain tensor.
        part: Which part of a trajectory: `h`, `c`, or a gate.
        track: Which track of the model; by default the last layer's, both directions joined.
        pool: `"last"`, `"mean"` or `"max"` over the steps of a sequence.
        method: `"pca"` or `"tsne"`.
        time_axis: 0 for a model that takes time first.
        seed: Of t-SNE.

    >>> states = torch.tensor([0.0, 1.0, 5.0]).reshape(3, 1, 1).expand(3, 4, 2)
    >>> print(compare(states, labels=["a", "b", "c"], components=1))
    3 states in 1 dimensions (PCA holds 100.0% of the variance); closest are 0 (a) and 1 (b), 1.41 apart; ...
    """
    if (traj is None) == (model is None):
        raise BadInput("compare takes a trajectory, or model= and inputs=: one of the two.")
    if pool not in ("last", "mean", "max"):
        raise BadInput(f"pool is one of last, mean and max, but is {pool!r}.")
    if traj is not None:
        reverse = isinstance(traj, Trajectory) and traj.track.endswith("_reverse")
        states = pooled(refuse_bad(as_series(traj, lengths, part=part)), pool, reverse=reverse)
    else:
        assert model is not None
        wanted = Ending(pool=pool, part=part, track=track)
        states = final_states(model, inputs or (), wanted, tokenize=tokenize, time_axis=time_axis)
    if components < 1:
        raise BadInput(f"a map has 1 dimension or more, not {components}.")
    names = _labels(labels, len(states))
    distances = torch.cdist(states.double(), states.double(), compute_mode="donot_use_mm_for_euclid_dist")
    coordinates, explained = _pca(states, components) if method == "pca" else _tsne(states, components, method, seed)
    neighbors = _neighbors(distances)
    agreement = None
    if names is not None and len(names) > 1:
        agreement = sum(names[row] == names[near] for row, near in enumerate(neighbors[:, 0].tolist())) / len(names)
    distances = distances.to(states.dtype)
    return Comparison(coordinates, explained, distances, neighbors, states, names, agreement, method)


def _labels(labels: Sequence[Any] | Tensor | None, rows: int) -> tuple[Any, ...] | None:
    if labels is None:
        return None
    names = tuple(labels.tolist() if isinstance(labels, Tensor) else labels)
    if len(names) != rows:
        raise BadInput(f"there are {len(names)} labels for {rows} sequences: give one for each.")
    return names


def _pca(states: Tensor, components: int) -> tuple[Tensor, Tensor]:
    centered = states.double() - states.double().mean(0)
    left, sizes, right = torch.linalg.svd(centered, full_matrices=False)
    # An axis may point either way: the one where its largest weight is positive is the same on every machine.
    heaviest = right.gather(1, right.abs().argmax(1, keepdim=True)).squeeze(1)
    placed = left * sizes * torch.where(heaviest < 0, -1.0, 1.0)
    coordinates = placed.new_zeros(len(states), components)
    shares = placed.new_zeros(components)
    found = min(components, len(sizes))
    coordinates[:, :found] = placed[:, :found]
    total = float((sizes**2).sum())
    shares[:found] = sizes[:found] ** 2 / total if total else 0
    return coordinates.to(states.dtype), shares.to(states.dtype)


def _tsne(states: Tensor, components: int, method: str, seed: int) -> tuple[Tensor, Tensor]:
    if method != "tsne":
        raise BadInput(f"method is pca or tsne, but is {method!r}.")
    try:
        from sklearn.manifold import TSNE  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError as error:
        raise MissingExtra(
            "t-SNE comes from scikit-learn, which is not installed: pip install hiddenstate[analysis]. "
            "method='pca' needs nothing more."
        ) from error
    if len(states) < 4:
        raise BadInput(f"t-SNE needs 4 sequences or more, but there are {len(states)}: use method='pca'.")
    perplexity = min(30.0, (len(states) - 1) / 3)
    place = TSNE(components, perplexity=perplexity, init="pca", random_state=seed).fit_transform
    coordinates = torch.from_numpy(place(states.cpu().numpy())).to(states)
    return coordinates, torch.full((components,), torch.nan, dtype=states.dtype, device=states.device)


def _neighbors(distances: Tensor) -> Tensor:
    rows = len(distances)
    own = torch.eye(rows, dtype=torch.bool, device=distances.device)
    return distances.masked_fill(own, torch.inf).argsort(dim=1, stable=True)[:, : rows - 1]
