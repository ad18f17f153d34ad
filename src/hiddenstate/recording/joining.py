"""Joining several runs into one trajectory: along time, row by row, or as the rows of one batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..errors import BadInput
from ..state import State
from .trajectory import Trajectory


def joined(runs: Sequence[Trajectory]) -> Trajectory:
    """Return runs of one track joined along time; padding between runs is removed, padding at the end is zero.

    >>> pieces = torch.randn(2, 6, 3).split(2, dim=1)
    >>> joined([Trajectory(piece) for piece in pieces]).h.equal(torch.cat(pieces, dim=1))
    True
    """
    first, *others = runs
    if not others:
        return first
    _refuse(runs)
    lengths = torch.stack([_lengths(run) for run in runs])  # (run, batch)
    starts = lengths.cumsum(0) - lengths
    time = int(lengths.sum(0).max()) if lengths.numel() else 0

    def along(each: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        names = [name for name in each[0] if all(name in values for values in each)]
        return {name: _placed([values[name] for values in each], lengths, starts, time) for name in names}

    states = along([run.states for run in runs])
    h, c = states.pop(first.name), states.pop("c", None) if first.c is not None else None
    return replace(
        first,
        h=h,
        c=c,
        others=states,
        lengths=lengths.sum(0).to(h.device),
        gates=along([run.gates for run in runs]),
        grads=along([run.grads for run in runs]),
    )


def stacked(runs: Sequence[Trajectory]) -> Trajectory:
    """Return runs of one track as the rows of one trajectory, first run first; short rows are padded.

    >>> stacked([Trajectory(torch.ones(2, 3, 1)), Trajectory(torch.ones(1, 5, 1))]).lengths
    tensor([3, 3, 5])
    """
    first, *others = runs
    if not others:
        return first
    _refuse_other_units(runs)
    if len({run.every for run in runs}) > 1:
        raise BadInput(f"the runs of {first.track!r} were not recorded with the same every=: their steps differ.")
    time = max(run.h.shape[1] for run in runs)

    def below(each: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        names = [name for name in each[0] if all(name in values for values in each)]
        return {name: torch.cat([_padded(values[name], time).to(first.h.device) for values in each]) for name in names}

    states = below([run.states for run in runs])
    h, c = states.pop(first.name), states.pop("c", None) if first.c is not None else None
    starts = [run.initial for run in runs if run.initial is not None]
    return replace(
        first,
        h=h,
        c=c,
        others=states,
        lengths=torch.cat([_lengths(run) for run in runs]).to(h.device),
        gates=below([run.gates for run in runs]),
        grads=below([run.grads for run in runs]),
        initial=State.cat(starts) if len(starts) == len(runs) else None,
    )


def _padded(part: Tensor, time: int) -> Tensor:
    missing = time - part.shape[1]
    return part if not missing else torch.cat([part, part.new_zeros(len(part), missing, *part.shape[2:])], dim=1)


def _placed(pieces: list[Tensor], lengths: Tensor, starts: Tensor, time: int) -> Tensor:
    """Return pieces `(batch, time, unit)` put one after another in each row, at the given starts."""
    if bool((lengths == torch.tensor([piece.shape[1] for piece in pieces]).unsqueeze(1)).all()):
        return torch.cat(pieces, dim=1)
    batch, units = pieces[0].shape[0], pieces[0].shape[2]
    whole = pieces[0].new_zeros(batch * time, units)
    for piece, length, start in zip(pieces, lengths, starts, strict=True):
        row, step = (torch.arange(piece.shape[1]) < length.unsqueeze(1)).nonzero(as_tuple=True)
        place = row * time + start[row] + step
        whole = whole.index_copy(0, place.to(whole.device), piece[row.to(piece.device), step.to(piece.device)])
    return whole.view(batch, time, units)


def _refuse(runs: Sequence[Trajectory]) -> None:
    track, first = runs[0].track, runs[0]
    if any(run.every > 1 for run in runs):
        raise BadInput(
            f"the runs of {track!r} were recorded with every={first.every}, each counted from its own first step, so "
            f"they have no even steps together. Record with every=1, and thin the joined run: joined[:, ::10]."
        )
    for number, run in enumerate(runs):
        if len(run.h) != len(first.h):
            raise BadInput(
                f"run {number + 1} of {track!r} has {len(run.h)} rows, run 1 has {len(first.h)}: runs are joined row "
                f"by row. The last batch of an epoch is often smaller: use drop_last=True. "
                f"Where runs are sequences of their own, as the batches of a data set: rec.stacked({track!r})."
            )
    _refuse_other_units(runs)


def _refuse_other_units(runs: Sequence[Trajectory]) -> None:
    first = runs[0]
    for number, run in enumerate(runs):
        if run.h.shape[2] != first.h.shape[2]:
            raise BadInput(
                f"run {number + 1} of {first.track!r} has {run.h.shape[2]} units, run 1 has {first.h.shape[2]}."
            )


def _lengths(run: Trajectory) -> Tensor:
    assert run.lengths is not None
    return run.lengths.cpu()
