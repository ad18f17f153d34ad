"""Comparing sequences by their final states: which end in similar states."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ..cells import as_layer, input_axes, is_step, layers, started, unwrap_to_call
from ..errors import BadInput, HiddenStateError, MissingExtra, NotRecurrent
from ..recording import Recording, Trajectory, record
from ..state import shown_in_short
from ..unrolling import unroll
from .clustering import k_means
from .series import ManyStates, States, as_series, as_tensor, refuse_bad, several
from .system import at_rest

PoolName = Literal["last", "mean", "max"]


@shown_in_short
@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """The final states of some sequences: a map of them, and the distances between them."""

    coordinates: Tensor  # (batch, components)
    explained: Tensor  # (components,) share of the variance along each; NaN for t-SNE, which does not define it
    distances: Tensor  # (batch, batch) Euclidean, symmetric, zero on the diagonal
    neighbors: Tensor  # (batch, batch - 1) the other rows, nearest first
    states: Tensor  # (batch, unit) the compared states
    labels: tuple[Any, ...] | None
    agreement: float | None  # share of rows whose nearest neighbor has their label; None if no two rows share one
    method: str
    clusters: Tensor | None = None  # (batch,) the number of each row's cluster; the largest cluster is 0
    taken: str = ""  # which states were compared, if a plain tensor could be read in several ways

    def __str__(self) -> str:
        """Return one line."""
        rows = len(self.states)
        how = "t-SNE" if self.method == "tsne" else f"PCA holds {float(self.explained.sum()):.1%} of the variance"
        line = (
            f"{rows} states{f' ({self.taken})' if self.taken else ''} in {self.coordinates.shape[1]} dimensions ({how})"
        )
        if rows > 1:
            nearest, away = self.neighbors[:, 0], self.distances.masked_fill(self._same(), torch.inf)
            a = int(away.amin(1).argmin())
            line += f"; closest are {self._name(a)} and {self._name(int(nearest[a]))}, {float(away.min()):.3g} apart"
        if self.clusters is not None:
            sizes = self.clusters.bincount().tolist()
            line += f"; {len(sizes)} clusters of {', '.join(map(str, sizes))}"
        return line + (f"; {self.agreement:.1%} lie next to their own label" if self.agreement is not None else "")

    def _same(self) -> Tensor:
        return torch.eye(len(self.states), dtype=torch.bool, device=self.distances.device)

    def _name(self, row: int) -> str:
        return f"{row}" if self.labels is None else f"{row} ({self.labels[row]})"


def compare(
    traj: ManyStates | Sequence[Tensor] | None = None,
    labels: Sequence[Any] | Tensor | None = None,
    components: int = 2,
    *,
    model: nn.Module | None = None,
    inputs: Sequence[Any] | None = None,
    tokenize: Callable[[Any], Any] | None = None,
    lengths: Tensor | None = None,
    part: str = "h",
    track: str | None = None,
    pool: PoolName = "last",
    method: Literal["pca", "tsne"] = "pca",
    clusters: int | None = None,
    time_axis: int | None = None,
    seed: int = 0,
) -> Comparison:
    """Return a map of final states and the distances between them.

    Give a trajectory (or states (batch, time, unit) with lengths, or final states (batch, unit), as h_n[-1]), or a
    model with inputs of any lengths, each of which is run separately: tensors (time, ...), or anything that `tokenize`
    turns into them. Each row's last real step counts, or the mean or maximum over its steps. A plain tensor with three
    axes may also be stacked final states, h_n: the result says how it was read, and if labels fit both readings, it is
    an error. t-SNE needs scikit-learn: `pip install hiddenstate[analysis]`.

    Args:
        traj: States of several sequences: also a recording of one track or its runs, such as the batches of a data set,
            or a list of final states, one for each sequence.
        labels: One for each sequence; shown on the map, and compared between nearest neighbors.
        components: The number of dimensions of the map.
        model: Makes the states, in eval mode, if there is no `traj`; it comes back unchanged.
        inputs: One for each sequence, without a batch axis.
        tokenize: Turns an input into numbers for the model.
        lengths: The real steps of each row of a plain tensor.
        part: Which part of a trajectory: `h`, `c`, or a gate.
        track: Which track of the model; by default the last layer's, with both directions joined.
        pool: `"last"`, `"mean"` or `"max"` over the steps of a sequence.
        method: `"pca"` or `"tsne"`.
        clusters: The number of clusters to divide the states into, by k-means; the map shows them.
        time_axis: 0 for a model that takes time first, 1 for one that takes the batch first; deduced if not given.
        seed: The seed of t-SNE and of the clusters.

    >>> states = torch.tensor([0.0, 1.0, 5.0]).reshape(3, 1, 1).expand(3, 4, 2)
    >>> print(compare(states, labels=["a", "b", "c"], components=1))
    3 states in 1 dimensions (PCA holds 100.0% of the variance); closest are 0 (a) and 1 (b), 1.41 apart
    """
    if (traj is None) == (model is None):
        raise BadInput("compare takes a trajectory, or model= and inputs=: one of the two.")
    if pool not in ("last", "mean", "max"):
        raise BadInput(f"pool is one of last, mean and max, but is {pool!r}.")
    taken = ""
    if traj is not None:
        rows = None if labels is None else len(labels)
        if lengths is None:
            taken = _taken(as_tensor(traj), rows, pool)
        states = _final_states_of(traj, rows, lengths, part=part, pool=pool)
    else:
        assert model is not None
        runs = _runs(model, inputs or (), tokenize=tokenize, time_axis=time_axis)
        states = torch.cat([_end_of(run, track=track, part=part, pool=pool) for run in runs])
    if components < 1:
        raise BadInput(f"a map has 1 dimension or more, not {components}.")
    names = _labels(labels, len(states))
    distances = torch.cdist(states.double(), states.double(), compute_mode="donot_use_mm_for_euclid_dist")
    coordinates, explained = _pca(states, components) if method == "pca" else _tsne(states, components, method, seed)
    neighbors = _neighbors(distances)
    agreement = None
    if names is not None and len(set(map(str, names))) < len(names):  # otherwise no neighbors share a label
        agreement = sum(names[row] == names[near] for row, near in enumerate(neighbors[:, 0].tolist())) / len(names)
    distances = distances.to(states.dtype)
    parted = None if clusters is None else k_means(states, clusters, seed=seed).numbers
    return Comparison(coordinates, explained, distances, neighbors, states, names, agreement, method, parted, taken)


def _final_states_of(traj: Any, rows: int | None, lengths: Tensor | None, *, part: str, pool: PoolName) -> Tensor:
    """Return one state for each row of one run or of many runs; one run is held in memory at a time."""
    listed = isinstance(traj, list) and bool(traj) and isinstance(traj[0], Trajectory)
    if listed or isinstance(traj, Recording | Iterator):
        each = [_final_states(run, part=part, pool=pool) for run, _ in several(traj, part=part)]
        return torch.cat([states.to(each[0].device) for states in each])
    return _final_states(_with_time(traj, rows), lengths, part=part, pool=pool)


def _taken(traj: Any, labels: int | None, pool: PoolName) -> str:
    """Say how a plain tensor with three axes was read, which may be h_n as well; raise if labels fit both readings."""
    if not isinstance(traj, Tensor) or traj.dim() != 3 or traj.shape[1] < 2:
        return ""
    rows, steps = traj.shape[:2]
    if labels == rows == steps:
        raise BadInput(
            f"this tensor {tuple(traj.shape)} may be {rows} sequences of {steps} steps, or stacked final states, h_n, "
            f"of {rows} layers and {steps} sequences, and {labels} labels fit both. Give h_n[-1] for the last layer's "
            f"final states; states along time tell it by lengths=torch.full(({rows},), {steps}), or as rec[track]."
        )
    if labels == rows or (rows == 1 and labels == steps):
        return ""
    return f"of each row of {tuple(traj.shape)}, the {pool} of {steps} steps; of h_n give h_n[-1]"


def _with_time(traj: Any, labels: int | None) -> Any:
    """Return final states as states of one step each, (batch, 1, unit), and anything else unchanged."""
    if isinstance(traj, PackedSequence):
        return traj
    if isinstance(traj, list | tuple) and traj:
        one = [as_tensor(state) for state in traj]
        if not all(isinstance(state, Tensor) and state.dim() and state.numel() == state.shape[-1] for state in one):
            seen = ", ".join(str(tuple(getattr(s, "shape", type(s).__name__))) for s in one[:3])
            raise BadInput(
                f"a list holds one final state (unit,) for each sequence, but these are {seen}, … Of (h_n, c_n) give "
                f"h_n[-1]."
            )
        return torch.stack([state.flatten() for state in one]).unsqueeze(1)
    traj = as_tensor(traj)
    if not isinstance(traj, Tensor):
        return traj
    if traj.dim() == 3 and len(traj) == 1 < traj.shape[1] == labels:
        return traj.transpose(0, 1)  # h_n of one layer
    if traj.dim() == 3 and labels == traj.shape[1] != len(traj) and traj.shape[1] > 1:
        raise BadInput(
            f"there are {labels} labels, but this tensor {tuple(traj.shape)} has {len(traj)} rows of {traj.shape[1]} "
            f"steps. Stacked final states, h_n (layers, batch, unit), are compared layer by layer, h_n[-1]; states "
            f"with time first want h.transpose(0, 1)."
        )
    if traj.dim() > 3 and traj.shape[1:-1].numel() == 1:
        traj = traj.flatten(1)
    return traj.unsqueeze(1) if traj.dim() == 2 else traj


def _final_states(traj: States, lengths: Tensor | None = None, *, part: str, pool: PoolName) -> Tensor:
    """Return one state for each row, (batch, unit); a reverse track ends at its first position."""
    series = refuse_bad(as_series(traj, lengths, part=part))
    if not bool(series.valid.any(1).all()):
        row = int((~series.valid.any(1)).nonzero()[0])
        raise BadInput(f"row {row} has no real step, so it ends in no state: leave it out.")
    if pool == "last":
        reverse = isinstance(traj, Trajectory) and traj.track.endswith("_reverse")
        return series.values[:, 0] if reverse else series.final
    if pool == "mean":
        return series.values.sum(1) / series.lengths.unsqueeze(1)
    return series.values.masked_fill(~series.valid.unsqueeze(-1), -torch.inf).amax(1)


def _runs(
    model: nn.Module, inputs: Sequence[Any], *, tokenize: Callable[[Any], Any] | None, time_axis: int | None
) -> Iterator[Recording]:
    """Run each input separately, and yield its recording."""
    model = unwrap_to_call(model)
    if not layers(model):
        raise NotRecurrent(f"{type(model).__name__} has no recurrent layer, so it has no states to compare.")
    if not len(inputs):
        raise BadInput("there are no inputs to compare: inputs= is a list with one entry for each sequence.")
    device = next((weight.device for weight in model.parameters()), torch.device("cpu"))
    first = _numbers(inputs[0], tokenize, 0).to(device)
    call, time = _called(model, first, time_axis)
    for number, one in enumerate(inputs):
        x = _numbers(one, tokenize, number).to(device).unsqueeze(1 - time)
        with at_rest(model), torch.no_grad(), record(model) as recording:
            try:
                call(x)
            except HiddenStateError:
                raise
            except Exception as error:
                raise BadInput(_not_taken(model, x.squeeze(1 - time), number, error)) from error
        yield recording


def _not_taken(model: nn.Module, x: Tensor, number: int, error: Exception) -> str:
    single = [axis for axis, size in enumerate(x.shape[:2]) if size == 1 and x.dim() > 1]
    hint = f" It may have one already: give x.squeeze({single[0]})." if single else ""
    return (
        f"input {number} has shape {tuple(x.shape)}, and {type(model).__name__} does not take it as one row "
        f"({type(error).__name__}: {error}). Inputs are single sequences, (time, ...), without a batch axis.{hint}"
    )


def _called(model: nn.Module, x: Tensor, time_axis: int | None) -> tuple[Callable[[Tensor], Any], int]:
    """Return a function that calls the model with a batch of one, and the time axis of that; `x` is `(time, ...)`."""
    if is_step(model, x.unsqueeze(0)):
        return partial(unroll, as_layer(model, x[:1]).module, time_axis=1), 1
    several = x.unsqueeze(0).expand(3, *x.shape)
    call = started(model, several)
    return call, input_axes(model, several, call=call).time if time_axis is None else time_axis


def _numbers(one: Any, tokenize: Callable[[Any], Any] | None, number: int) -> Tensor:
    if tokenize is not None:
        one = tokenize(one)
    if isinstance(one, str):
        raise BadInput(f"input {number} is a string: give tokenize=, which turns a string into numbers.")
    x = torch.as_tensor(one)
    if x.dim() == 0 or not len(x):
        raise BadInput(f"input {number} has no steps: its shape is {tuple(x.shape)}, and (time, ...) is needed.")
    return x


def _end_of(recording: Recording, *, track: str | None, part: str, pool: PoolName) -> Tensor:
    """Return the state that a run ended in, (1, unit): of a track, or of the last layer with its directions joined."""
    if track is not None:
        return _final_states(recording[track], part=part, pool=pool)
    last = list(recording)[-1]
    names = [last.removesuffix("_reverse"), last] if last.endswith("_reverse") else [last]
    return torch.cat([_final_states(recording.runs(name)[-1], part=part, pool=pool) for name in names], dim=1)


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
    # The sign of an axis is arbitrary: making its largest weight positive gives the same result on every machine.
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
    # With the smallest rate of scikit-learn's own rule, a few dozen points fly far apart.
    how = {"perplexity": min(30.0, (len(states) - 1) / 3), "learning_rate": max(len(states) / 48, 5.0)}
    place = TSNE(components, init="pca", random_state=seed, **how).fit_transform
    coordinates = torch.from_numpy(place(states.cpu().numpy())).to(states)
    return coordinates, torch.full((components,), torch.nan, dtype=states.dtype, device=states.device)


def _neighbors(distances: Tensor) -> Tensor:
    rows = len(distances)
    own = torch.eye(rows, dtype=torch.bool, device=distances.device)
    return distances.masked_fill(own, torch.inf).argsort(dim=1, stable=True)[:, : rows - 1]
