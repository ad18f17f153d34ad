"""The input of a measure of states: values (batch, time, unit), and which of them are real."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence
from torch.utils.data import DataLoader, Dataset

from ..errors import BadInput
from ..recording import Recording, Trajectory, refuse_time_first

States: TypeAlias = "Trajectory | Tensor | PackedSequence | np.ndarray[Any, Any]"  # of one run
_ASSUMED = "rows on axis 0 and time on axis 1: assumed, since a plain tensor does not tell"

ManyStates: TypeAlias = "States | Iterable[States] | Recording"  # of one run, or of many, whatever their lengths


@dataclass(frozen=True, slots=True, eq=False)
class Series:
    """One quantity along time; padding never counts."""

    values: Tensor  # (batch, time, unit), floating, detached, zero in the padding
    valid: Tensor  # (batch, time) bool
    name: str
    assumed: str = ""  # where rows and steps lie, where neither a trajectory nor lengths tell

    @property
    def entries(self) -> Tensor:
        """All real steps of all rows, one after another: (entry, unit)."""
        return self.values[self.valid]

    @property
    def lengths(self) -> Tensor:
        """The real steps of each row: (batch,)."""
        return self.valid.sum(1)

    @property
    def final(self) -> Tensor:
        """The last real step of each row: (batch, unit)."""
        rows = torch.arange(len(self.values), device=self.values.device)
        return self.values[rows, self.lengths - 1]


def as_series(traj: ManyStates, lengths: Tensor | None = None, *, part: str = "h", final: bool = False) -> Series:
    """Return one part of a trajectory, or a tensor or array with its lengths, after checks; many runs are joined.

    With `final=True`, where steps do not matter, `final` states (batch, unit) count as rows of one step each.
    """
    if isinstance(traj, Recording | list | Iterator) and lengths is None:
        return _stacked([series for _, series in several(traj, part=part, final=final)])
    if isinstance(traj, Trajectory):
        if lengths is not None:
            raise BadInput("a Trajectory knows its own lengths: lengths= is for plain tensors.")
        return _series(traj.part(part), traj.valid, part)
    traj = as_tensor(traj)
    if isinstance(traj, PackedSequence) and lengths is None:
        traj, lengths = pad_packed_sequence(traj, batch_first=True)
    if not isinstance(traj, Tensor):
        raise BadInput(_no_states(traj))
    if final and traj.dim() == 2 and lengths is None:
        traj = traj.unsqueeze(1)
    if traj.dim() != 3:
        raise BadInput(
            f"states are (batch, time, unit), but this tensor has shape {tuple(traj.shape)}. "
            f"One sequence without a batch axis becomes one with h.unsqueeze(0); "
            f"the last states of several, (batch, unit), with h.unsqueeze(1)."
        )
    if not final or lengths is not None:
        refuse_time_first(traj)
    assumed = _ASSUMED if lengths is None and min(traj.shape[:2]) > 1 else ""
    return replace(_series(traj, valid_steps(traj, lengths), "the tensor"), assumed=assumed)


def pieces(traj: ManyStates, lengths: Tensor | None = None, *, part: str = "h") -> Iterator[Series]:
    """Yield the one run, or each of several, as a series."""
    if lengths is not None:
        yield as_series(traj, lengths, part=part)
    else:
        yield from (series for _, series in several(traj, part=part, final=True))


def several(traj: ManyStates, *, part: str = "h", final: bool = False) -> Iterator[tuple[States, Series]]:
    """Yield each run with its series, all with the same number of units; an iterator is read one run at a time."""
    units = None
    for number, run in enumerate(runs_in(traj)):
        series = as_series(run, part=part, final=final)
        units = units or series.values.shape[2]
        if series.values.shape[2] != units:
            raise BadInput(
                f"run {number} has {series.values.shape[2]} units, but those before it have {units}: "
                f"runs that are measured together are of one track."
            )
        yield run, series
    if units is None:
        raise BadInput("there is nothing to measure: no run at all. An iterator that was used up gives none.")


def runs_in(traj: ManyStates) -> Iterable[States]:
    """Return the runs in a recording of one track, or in a list or iterator; a single run is returned in a list."""
    if isinstance(traj, Mapping):
        names = list(traj)
        if len(names) == 1 and isinstance(traj, Recording):
            return traj.runs(names[0])
        one = repr(names[0]) if names else "'l0'"
        raise BadInput(
            f"these are trajectories by track ({', '.join(map(str, names)) or 'none yet'}), and one measure is of one "
            f"track: give recording[{one}], or all its runs, recording.runs({one})."
        )
    if isinstance(traj, DataLoader | Dataset):
        raise BadInput(_no_states(traj))
    one_run = isinstance(traj, Trajectory | Tensor | PackedSequence | np.ndarray | nn.Module)
    return [traj] if one_run or not isinstance(traj, Iterable) else traj  # type: ignore[list-item, return-value]


def _stacked(runs: list[Series]) -> Series:
    """Return the rows of several runs as one series, padded to the longest."""
    time = max(run.values.shape[1] for run in runs)

    def below(parts: list[Tensor]) -> Tensor:
        padded = [
            torch.cat([part, part.new_zeros(len(part), time - part.shape[1], *part.shape[2:])], 1) for part in parts
        ]
        return torch.cat([part.to(padded[0].device) for part in padded])

    first = runs[0]
    return replace(first, values=below([run.values for run in runs]), valid=below([run.valid for run in runs]))


def _no_states(given: object) -> str:
    said = f"states are a Trajectory or a tensor (batch, time, unit), but this is {type(given).__name__}. "
    if isinstance(given, nn.Module):
        return said + "States of a model are recorded, hs.record(model), or hs.measure.runs_of(model, loader)."
    if isinstance(given, DataLoader | Dataset):
        return said + (
            "It holds inputs: their states are hs.measure.runs_of(model, loader), and hs.measure.survey(model, loader) "
            "measures them in one pass."
        )
    if isinstance(given, tuple):
        return said + "A recurrent layer returns (output, state): give its output. Several runs come as a list."
    return said + "A recording holds one trajectory for each track: give one of them, recording['l0']."


def as_tensor(values: Any) -> Any:
    """Return a numpy array as a tensor that shares its memory, and anything else unchanged."""
    if not isinstance(values, np.ndarray):
        return values
    if values.dtype.kind not in "fiubc":
        raise BadInput(f"states are numbers, but this array is of {values.dtype}: often rows of unequal length.")
    return torch.as_tensor(values if values.flags.writeable else values.copy())


def valid_steps(x: Tensor, lengths: Tensor | None) -> Tensor:
    """Return which steps of `x (batch, time, ...)` are real: bool (batch, time)."""
    batch, time = x.shape[:2]
    if lengths is None:
        return torch.ones(batch, time, dtype=torch.bool, device=x.device)
    lengths = torch.as_tensor(lengths, device=x.device)
    if lengths.shape != (batch,):
        raise BadInput(f"lengths have shape {tuple(lengths.shape)}, but there are {batch} rows: one length for each.")
    if lengths.is_floating_point() or lengths.dtype == torch.bool:
        raise BadInput(f"lengths are {lengths.dtype}, but whole numbers of steps are needed: mask.sum(1) of a mask.")
    if batch and not 0 <= int(lengths.min()) <= int(lengths.max()) <= time:
        raise BadInput(f"lengths go from {int(lengths.min())} to {int(lengths.max())}, but there are {time} steps.")
    return torch.arange(time, device=x.device) < lengths.unsqueeze(1)


def without_padding(x: Tensor, valid: Tensor) -> Tensor:
    """Return `x (batch, time, ...)` with zeros in the padding, which may hold NaN."""
    if not x.is_floating_point() or bool(valid.all()):
        return x
    return x.masked_fill(~valid.reshape(*valid.shape, *[1] * (x.dim() - 2)), 0)


def refuse_bad(series: Series) -> Series:
    """Return the series if all real values are finite; else raise and say where the first NaN or Inf is."""
    where = first_bad(series.values, series.valid)
    if where is not None:
        row, step, unit = where
        raise BadInput(
            f"{series.name} has {series.values[row, step, unit].item()} at step {step} of row {row} (unit {unit}), the "
            f"first of {int((~series.entries.isfinite()).sum())} values that are not finite: from there on nothing can "
            f"be measured. hs.measure.statistics counts them; the cause is upstream, in the input, the weights or a "
            f"loss that overflowed."
        )
    return series


def first_bad(values: Tensor, valid: Tensor) -> tuple[int, int, int] | None:
    """Return (row, step, unit) of the earliest real value that is not finite; None if all are."""
    bad = ~values.isfinite() & valid.unsqueeze(-1)
    if not bool(bad.any()):
        return None
    step, row, unit = bad.transpose(0, 1).nonzero()[0].tolist()
    return row, step, unit


def _series(values: Tensor, valid: Tensor, name: str) -> Series:
    if values.dim() != 3:
        values = values.flatten(2)  # a part with more axes, such as a matrix memory, counts as units
    if not bool(valid.any()):
        rows, steps = valid.shape
        raise BadInput(
            f"there is nothing to measure: {rows} rows of {steps} steps, none of them real. "
            f"Often a batch was filtered until nothing was left, or all lengths are 0."
        )
    values = values.detach()
    if values.is_complex():
        values = torch.view_as_real(values).flatten(2)
    if not values.is_floating_point():
        raise BadInput(f"{name} is {values.dtype}, but states are floating point numbers.")
    if values.dtype in (torch.float16, torch.bfloat16):
        values = values.float()  # sums over many steps would lose precision
    if not bool(valid.all()):
        values = values.masked_fill(~valid.unsqueeze(-1), 0)
    return Series(values, valid, name)
