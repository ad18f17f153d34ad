"""A survey of a data set: every track's statistics and saturation over all batches, in one pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..errors import BadInput
from ..state import shown_in_short
from .runs_of import recordings_of
from .saturation import RunningSaturation, Saturation
from .series import as_series, first_bad
from .statistics import RunningStatistics, Statistics


@shown_in_short
@dataclass(frozen=True, slots=True, eq=False)
class Survey:
    """What the states of each track do over all batches."""

    statistics: Mapping[str, Statistics]  # by track
    saturation: Mapping[str, Saturation]  # by track, over the batches without NaN or Inf
    first_bad: Mapping[str, tuple[int, int, int]]  # by track, (batch, row, step) of the first NaN or Inf
    batches: int
    rows: int
    steps: int  # of all rows together in the longest track; real ones if lengths are known
    interrupted: bool = False  # stopped by Ctrl-C: covers the batches until then
    untold: int = 0  # batches without known lengths: if they are padded, padding was counted

    @property
    def padding(self) -> str:
        """A note that padding may have been counted, "" if it was not."""
        if not self.untold:
            return ""
        where = "" if self.untold == self.batches else f" of {self.untold} batches"
        return (
            f" (nothing tells the lengths of rows{where}: padding, where there is any, counts; lengths= leaves it out)"
        )

    def still(self, track: str, threshold: float = 1e-5) -> Tensor:
        """Return the units that vary by less than `threshold` over the whole data set: (n,) indices."""
        found = self.statistics[track]
        return (found.max - found.min < threshold).nonzero().flatten()

    def __str__(self) -> str:
        """Return one line, and one for each track."""
        stopped = "; interrupted, of the batches until then" if self.interrupted else ""
        real = "" if self.untold else "real "
        lines = [f"{self.batches} batches, {self.rows:,} rows, {self.steps:,} {real}steps{self.padding}{stopped}"]
        for track, found in self.statistics.items():
            pressed = self.saturation.get(track)
            share = f", {pressed.share:.1%} saturated" if pressed is not None else ""
            still = len(self.still(track))
            lines.append(f"  {track}: {found}{share}, {still} of {len(found.mean)} units still")
            if track in self.first_bad:
                batch, row, step = self.first_bad[track]
                lines[-1] += f"; the first NaN or Inf is in batch {batch}, at row {row}, step {step}"
        return "\n".join(lines)


def survey(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    threshold: float = 0.95,
    call: Callable[[nn.Module, Any], Any] | None = None,
    lengths: Callable[[Any], Any] | None = None,
    gates: bool = False,
) -> Survey:
    """Return statistics and saturation of every track over a whole data set, in one pass; one batch is held at a time.

    Args:
        model: Any model with recurrent layers; it runs in eval mode and comes back unchanged.
        batches: A DataLoader, or any other iterable of batches: see `runs_of`.
        threshold: The threshold of saturation.
        call: How to call the model with a batch, if not as usual: `lambda model, batch: ...`.
        lengths: The real steps of each row of a batch, if the batch does not say them: a function of the batch.
        gates: Whether to measure the saturation of gates as well.

    >>> gru = torch.nn.GRU(3, 8, batch_first=True)
    >>> found = hs.measure.survey(gru, [torch.randn(4, 7, 3), torch.randn(2, 5, 3)])
    >>> found.batches, found.rows, found.steps, list(found.statistics)
    (2, 6, 38, ['l0'])
    """
    if not 0 < threshold <= 1:
        raise BadInput(f"the threshold is a share of the range, above 0 and up to 1, but is {threshold!r}.")
    tracks: dict[str, tuple[RunningStatistics, RunningSaturation]] = {}
    bad: dict[str, tuple[int, int, int]] = {}
    done = rows = untold = 0
    interrupted = False
    try:
        for recording, real in recordings_of(model, batches, call=call, lengths=lengths, gates=gates):
            most, told = 0, real is not None
            for track in recording:
                for run in recording.runs(track):
                    if not run.h.is_floating_point():
                        continue  # a token that is fed back is not a state of real numbers
                    cut = run if real is None else run.without_padding(real)
                    series = as_series(cut)
                    numbers, pressed = tracks.setdefault(track, (RunningStatistics(), RunningSaturation(threshold)))
                    numbers.add(series)
                    most, told = max(most, len(series.values)), told or not bool(series.valid.all())
                    where = first_bad(series.values, series.valid)
                    if where is None:
                        pressed.add(cut, series)
                    else:
                        bad.setdefault(track, (done, *where[:2]))
            done, rows, untold = done + 1, rows + most, untold + (not told and most > 1)
    except KeyboardInterrupt:
        if not done:
            raise
        interrupted = True
    if not done:
        raise BadInput("there are no batches to look at. An iterator that was used up gives none.")
    found = {track: numbers.result() for track, (numbers, _) in tracks.items()}
    shares = {track: pressed.result() for track, (_, pressed) in tracks.items() if pressed.any}
    most_steps = max(one.count for one in found.values())
    return Survey(found, shares, bad, done, rows, most_steps, interrupted, untold)
