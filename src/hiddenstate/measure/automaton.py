"""States as a finite automaton: clusters of states, and the tokens that lead from one to the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import BadInput
from ..state import shown_in_short
from .clustering import Clusters, k_means
from .series import ManyStates, Series, as_series, refuse_bad

_MOST = 16  # clusters to try at most if no number was given
_ENOUGH = 0.01  # the least number of clusters whose accuracy is this close to the best is taken
_KEPT = 4096  # states used for clustering
_ROWS = 8  # with fewer rows, none is held out


@shown_in_short
@dataclass(frozen=True, slots=True, eq=False)
class Automaton:
    """Clusters of states, the table of transitions, and how well the automaton does without the model."""

    transitions: Tensor  # (clusters + 1, token) int64: the next cluster, -1 if never seen; the last row is the start
    tokens: tuple[Any, ...]  # the tokens of the columns
    states: Tensor  # (batch, time) int64, the cluster of each state; -1 in the padding
    agreement: float  # the share of steps at which, given only the tokens, it is in the cluster of the model's state
    accuracy: float | None  # the share of targets it predicts, given only the tokens
    outputs: tuple[Any, ...] | None  # the most frequent target in each cluster, and at the start
    rows: int  # the number of rows it was evaluated on
    held_out: bool  # whether these rows were held out
    taken: str = ""  # which axes were taken for rows and steps, if a plain tensor does not tell

    @property
    def start(self) -> int:
        """The number of the state before the first token."""
        return len(self.transitions) - 1

    def run(self, tokens: Sequence[Any]) -> list[int]:
        """Return the state after each token; -1 after a transition that was never seen."""
        state, path = self.start, []
        for token in tokens:
            known = state >= 0 and token in self.tokens
            state = int(self.transitions[state, self.tokens.index(token)]) if known else -1
            path.append(state)
        return path

    def dot(self) -> str:
        """Return the graph in the language of Graphviz; transitions between the same states share one arrow."""
        lines = ["digraph {", "  rankdir=LR;"]
        names = [*(str(number) for number in range(self.start)), "start"]
        for number, name in enumerate(names):
            said = "" if self.outputs is None or name == "start" else f"\\n{self.outputs[number]}"
            lines.append(f'  "{name}" [label="{name}{said}"];')
        for number, row in enumerate(self.transitions.tolist()):
            for target in sorted({one for one in row if one >= 0}):
                label = ", ".join(str(token) for token, one in zip(self.tokens, row, strict=True) if one == target)
                label = label.replace('"', r"\"")
                lines.append(f'  "{names[number]}" -> "{target}" [label="{label}"];')
        return "\n".join([*lines, "}"])

    def __str__(self) -> str:
        """Return one line."""
        kind = "unseen rows" if self.held_out else "rows, those it was made of"
        line = (
            f"{self.start} states, {len(self.tokens)} tokens: led by the tokens alone it is where the model is at "
            f"{self.agreement:.1%} of the steps of {self.rows} {kind}"
        )
        if self.accuracy is not None:
            line += f", and tells {self.accuracy:.1%} of the targets right"
        return f"{line}; {self.taken}" if self.taken else line


def automaton(
    traj: ManyStates,
    tokens: Tensor | Sequence[Sequence[Any]],
    clusters: int | None = None,
    *,
    targets: Tensor | Sequence[Any] | None = None,
    lengths: Tensor | None = None,
    part: str = "h",
    seed: int = 0,
) -> Automaton:
    """Return the finite automaton that states follow: their clusters, and the most frequent transition for each token.

    A random fourth of the rows is held out; the automaton is evaluated on these rows, given only their tokens.

    Args:
        traj: States of several sequences; the rows of many runs are taken together.
        tokens: The tokens of each row: (batch, time) whole numbers, or a sequence of tokens for each row.
        clusters: The number of states; by default the least from 2 to 16 whose accuracy is within 0.01 of the best.
        targets: A class for each row, predicted from its last state; or for each row and step.
        lengths: The real steps of each row of a plain tensor.
        part: Which part of a trajectory.
        seed: The seed of the clusters and of the choice of held-out rows.

    >>> bits = torch.randint(2, (40, 12), generator=torch.Generator().manual_seed(0))
    >>> parity = bits.cumsum(1) % 2
    >>> found = automaton(parity.unsqueeze(2).float(), bits, 2)
    >>> found.agreement, found.run([1, 1, 0]) in ([0, 1, 1], [1, 0, 0])
    (1.0, True)
    """
    series = refuse_bad(as_series(traj, lengths, part=part))
    codes, names = _coded(tokens, series, "tokens")
    wanted, classes = (None, ()) if targets is None else _targets(targets, series)
    if clusters is None and wanted is None:
        raise BadInput("how many states? Give clusters=, or targets=, by which the number is chosen.")
    batch = len(series.values)
    judge = torch.ones(batch, dtype=torch.bool)
    if batch >= _ROWS:  # a random choice, since rows are often sorted
        judge = torch.randperm(batch, generator=torch.Generator().manual_seed(seed)) < batch // 4
    learn = ~judge if batch >= _ROWS else judge
    different = len(torch.unique(series.values[learn][series.valid[learn]], dim=0))
    counts = [clusters] if clusters is not None else list(range(2, min(_MOST, different) + 1)) or [1]
    made = []
    for count in counts:
        parted = _parted(series, learn, count, seed)
        made.append(_Fitted(series, codes, wanted, learn).judged(parted, judge, (names, classes)))
        if made[-1].accuracy == 1.0:
            break
    best = max(one.accuracy or 0.0 for one in made)
    return next(one for one in made if (one.accuracy or 0.0) >= best - _ENOUGH)


def _parted(series: Series, learn: Tensor, count: int, seed: int) -> Clusters:
    entries = series.values[learn][series.valid[learn]]
    entries = entries[torch.arange(0, len(entries), -(-len(entries) // _KEPT), device=entries.device)]
    return k_means(entries, count, seed=seed)


@dataclass(frozen=True, slots=True, eq=False)
class _Fitted:
    """What an automaton is made from."""

    series: Series
    codes: Tensor  # (batch, time)
    wanted: Tensor | None  # (batch, time), -1 where there is no target
    learn: Tensor  # (batch,) bool

    def judged(self, parted: Clusters, judge: Tensor, names: tuple[tuple[Any, ...], tuple[Any, ...]]) -> Automaton:
        valid = self.series.valid.cpu()
        states = torch.full(valid.shape, -1)
        states[valid] = parted.nearest(self.series.entries).cpu()
        count = len(parted.centers)
        table = self._table(states, count, len(names[0]))
        outputs = None if self.wanted is None else self._outputs(states, count, len(names[1]))
        right = steps = told = asked = 0
        for row in judge.nonzero().flatten().tolist():
            state = count
            for step in range(int(valid[row].sum())):
                state = int(table[state, self.codes[row, step]]) if state >= 0 else -1
                right, steps = right + (state == int(states[row, step])), steps + 1
                if self.wanted is not None and outputs is not None and (aim := int(self.wanted[row, step])) >= 0:
                    told, asked = told + (state >= 0 and int(outputs[state]) == aim), asked + 1
        return Automaton(
            transitions=table,
            tokens=names[0],
            states=states,
            agreement=right / max(1, steps),
            accuracy=None if outputs is None else told / max(1, asked),
            outputs=None if outputs is None else tuple(names[1][int(code)] for code in outputs),
            rows=int(judge.sum()),
            held_out=not bool((judge & self.learn).any()),
            taken=self.series.assumed,
        )

    def _table(self, states: Tensor, count: int, tokens: int) -> Tensor:
        """Return the most frequent next state of each state and token: (count + 1, token), -1 if never seen."""
        before = torch.cat([torch.full((len(states), 1), count), states[:, :-1]], dim=1)
        used = (states >= 0) & self.learn.unsqueeze(1)
        seen = torch.zeros(count + 1, tokens, count, dtype=torch.int64)
        places = (before[used], self.codes[used], states[used])
        seen.index_put_(places, torch.ones(len(places[0]), dtype=torch.int64), accumulate=True)
        return torch.where(seen.sum(2) > 0, seen.argmax(2), -1)

    def _outputs(self, states: Tensor, count: int, classes: int) -> Tensor:
        assert self.wanted is not None
        used = (self.wanted >= 0) & self.learn.unsqueeze(1)
        seen = torch.zeros(count + 1, classes, dtype=torch.int64)
        places = (states[used], self.wanted[used])
        seen.index_put_(places, torch.ones(len(places[0]), dtype=torch.int64), accumulate=True)
        seen[seen.sum(1) == 0] = seen.sum(0)  # a state without targets predicts the most frequent target
        return seen.argmax(1)


def _coded(values: Any, series: Series, what: str) -> tuple[Tensor, tuple[Any, ...]]:
    """Return one code for each row and step, (batch, time), and the values that the codes stand for."""
    batch, time = series.valid.shape
    given = values.tolist() if isinstance(values, Tensor | np.ndarray) else [list(_plain(row)) for row in values]
    lengths = series.lengths.tolist()
    if len(given) != batch:
        raise BadInput(f"there are {what} for {len(given)} rows, but the states have {batch}.")
    for number, (row, length) in enumerate(zip(given, lengths, strict=True)):
        if not isinstance(row, list) or not length <= len(row) <= time:
            seen = len(row) if isinstance(row, list) else "no"
            raise BadInput(f"row {number} has {seen} {what}, but {length} steps: one for each step is needed.")
    real = [row[:length] for row, length in zip(given, lengths, strict=True)]
    names = tuple(sorted({token for row in real for token in row}, key=lambda token: (str(type(token)), token)))
    number_of = {token: code for code, token in enumerate(names)}
    codes = torch.zeros(batch, time, dtype=torch.int64)
    for place, row in enumerate(real):
        codes[place, : len(row)] = torch.tensor([number_of[token] for token in row], dtype=torch.int64)
    return codes, names


def _plain(one: Any) -> Any:
    """Return tensors and arrays as plain Python numbers, which can be compared."""
    return one.tolist() if isinstance(one, Tensor | np.ndarray | np.generic) else one


def _targets(targets: Any, series: Series) -> tuple[Tensor, tuple[Any, ...]]:
    given = targets.tolist() if isinstance(targets, Tensor | np.ndarray) else [_plain(one) for one in targets]
    valid = series.valid.cpu()
    if given and isinstance(given[0], list | tuple):
        codes, names = _coded(given, series, "targets")
        return codes.masked_fill(~valid, -1), names
    if len(given) != len(valid):
        raise BadInput(f"there are {len(given)} targets, but {len(valid)} rows: one for each row, or row and step.")
    names = tuple(sorted(set(given), key=lambda one: (str(type(one)), one)))
    codes = torch.full(valid.shape, -1)
    rows = torch.arange(len(valid))
    codes[rows, series.lengths.cpu() - 1] = torch.tensor([names.index(one) for one in given])
    return codes, names
