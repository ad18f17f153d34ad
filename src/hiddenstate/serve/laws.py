"""What must hold of a model before it may be served: pieces equal the whole, and rows do not mix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..carry import check_split
from ..cells import untouched
from ..errors import HiddenStateError, NotServable
from ..state import State
from .trial import Layout

if TYPE_CHECKING:
    from .model import Served

_STEPS = 6


def check_split_law(model: nn.Module, layout: Layout) -> None:
    """Refuse a model of which two pieces do not equal the whole."""
    if layout.steps_axis is None:
        return  # it sees one step at a time: pieces are all there is
    x = _steps(layout.sample, 0).unsqueeze(layout.rows_axis)
    split = check_split(model, x, time_axis=layout.steps_axis)
    if not split:
        raise NotServable(
            f"{type(model).__name__} cannot be served: a session fed in pieces would not equal one call. {split}"
        )


def check_rows(served: Served) -> State:
    """Refuse a model whose rows influence each other; return the state that three rows are in after two steps."""
    pieces = [_steps(served.layout.sample, row) for row in range(3)]
    with untouched(served.model):
        _, middle = served.run(torch.stack([piece[:2] for piece in pieces]), None)
        together = _rows(served, [piece[2:] for piece in pieces], middle)
        alone = [_rows(served, [piece[2:]], middle.select([row]))[0] for row, piece in enumerate(pieces)]
    gap, what = _gap(together, alone)
    if what:
        raise NotServable(
            f"{type(served.model).__name__} cannot be served: what it gives for a row changes by {gap:.2g} with the "
            f"rows beside it (in {what}), so one caller's input would reach another. Usually something normalizes over "
            f"the batch."
        )
    return middle


def lengths_may_differ(served: Served) -> bool:
    """Say whether pieces of different lengths in one call give what each gives alone."""
    pieces = [_steps(served.layout.sample, row)[:steps] for row, steps in enumerate((4, 1, 2))]
    with untouched(served.model):
        _, state = served.run(torch.stack([piece[:1] for piece in pieces]), None)
        try:
            together = _rows(served, pieces, state)
        except (HiddenStateError, RuntimeError, ValueError):
            return False
        alone = [_rows(served, [piece], state.select([row]))[0] for row, piece in enumerate(pieces)]
    return not _gap(together, alone)[1]


def _steps(sample: Tensor, begin: int) -> Tensor:
    return sample[(torch.arange(_STEPS) + begin).to(sample.device) % len(sample)]


def _rows(served: Served, pieces: Sequence[Tensor], state: State) -> list[dict[str, Tensor]]:
    """Everything that each row gets, by name: its outputs up to its own length, and its state."""
    steps = [len(piece) for piece in pieces]
    x = nn.utils.rnn.pad_sequence(list(pieces), batch_first=True)
    leaves, after = served.run(x, state, None if min(steps) == max(steps) else steps)
    return [
        {
            **{
                f"output {place}": leaf[row, : len(piece)] if served.has_steps(place) else leaf[row]
                for place, leaf in enumerate(leaves)
                if leaf is not None
            },
            **{f"the state {name}": part.select(after.batch_axis[name], row) for name, part in after.items()},
        }
        for row, piece in enumerate(pieces)
    ]


def _gap(some: list[dict[str, Tensor]], others: list[dict[str, Tensor]]) -> tuple[float, str]:
    """Return the largest difference, and where it is; nowhere, if rounding alone may make it."""
    gaps: dict[str, float] = {}
    allowed = 0.0
    for mine, theirs in zip(some, others, strict=True):
        for name, a in mine.items():
            b = theirs[name]
            if a.shape != b.shape:
                return float("inf"), name
            if not a.numel():
                continue
            if not a.is_floating_point():
                gap = float((a != b).any())
            else:
                eps = torch.finfo(a.dtype).eps
                allowed = max(allowed, max(1.0, float(b.abs().max())) * (1e3 * eps if eps < 1e-4 else 8 * eps))
                gap = float((a - b).abs().nan_to_num(nan=float("inf")).max())
            gaps[name] = max(gap, gaps.get(name, 0.0))
    worst, gap = max(gaps.items(), key=lambda item: item[1], default=("", 0.0))
    return gap, worst if not gap <= allowed else ""
