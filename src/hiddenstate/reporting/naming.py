"""The names that users give: a token for each step, a label for each row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..errors import BadInput
from ..plot import readable
from ..recording import Trajectory

Tokens = Sequence[str] | Sequence[Sequence[str]]


def labels_of(labels: Sequence[str] | None, rows: int) -> list[str]:
    """Return one label for each row, made up where none are given; a wrong count is refused."""
    if labels is None:
        return [f"row {row}" for row in range(rows)]
    if isinstance(labels, str) or len(labels) != rows:
        count = 1 if isinstance(labels, str) else len(labels)
        raise BadInput(f"there are {count} labels, but {rows} rows: one for each row is needed.")
    return [str(label) for label in labels]


def lengths_of(x: Any, first: Trajectory, *, batch_axis: int) -> list[int]:
    """Return the steps of each row as the user counts them.

    The first track knows best, save where a layer takes the batch for time: then the input itself is asked.
    """
    rows, steps = first.h.shape[:2]
    if isinstance(x, Tensor) and x.dim() > 1:
        own = (x.shape[batch_axis], x.shape[1 - batch_axis])
        if own == (steps, rows) and rows != steps:
            return [own[1]] * own[0]
    assert first.lengths is not None
    return [int(length) for length in first.lengths]


def tokens_of(tokens: Tokens | None, steps: list[int]) -> list[list[str]]:
    """Return the tokens of each row that has some, made visible; `steps` are those of each row."""
    if tokens is None:
        return []
    if isinstance(tokens, str) or all(isinstance(token, str) for token in tokens):
        flat: list[str] = [str(token) for token in tokens]
        if len(flat) != steps[0] and [len(row) for row in flat] == steps:  # a string for each row, read by characters
            return [readable(list(row), count) for row, count in zip(flat, steps, strict=True)]
        return [_checked(flat, 0, steps[0])]
    if len(tokens) > len(steps):
        raise BadInput(f"there are tokens for {len(tokens)} rows, but the input has {len(steps)}.")
    return [_checked(list(row), number, steps[number]) for number, row in enumerate(tokens)]


def _checked(tokens: list[str], row: int, steps: int) -> list[str]:
    if len(tokens) != steps:
        raise BadInput(
            f"there are {len(tokens)} tokens for row {row}, but it has {steps} steps: one for each step is needed. "
            f"Special tokens that the model is given, such as a start token, count too."
        )
    return readable(tokens, steps)
