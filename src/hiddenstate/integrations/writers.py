"""Writers that pass a Monitor's numbers and findings to TensorBoard or Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..diagnosis import Episode
from ..plot import heatmap
from ..recording import Recording


class TensorBoardWriter:
    """Writes numbers as scalars and findings as text to your `torch.utils.tensorboard.SummaryWriter`."""

    def __init__(self, writer: Any, prefix: str = "hiddenstate/") -> None:
        """Write to `writer` under names that begin with `prefix`. Closing the writer is up to you."""
        self._writer, self._prefix = writer, prefix

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Add one scalar for each number."""
        for name, number in numbers.items():
            self._writer.add_scalar(self._prefix + name, number, step)

    def finding(self, step: int, episode: Episode) -> None:
        """Add the finding as text."""
        event = "began" if episode.ended is None else "ended"
        self._writer.add_text(f"{self._prefix}findings", f"{event}: {episode.finding}", step)

    def states(self, recording: Recording, step: int, *, row: int = 0) -> None:
        """Add a histogram of every part and gate of each track, over all runs, and a heatmap of `h` of one row."""
        for track in recording:
            runs = recording.runs(track)
            for name in (*runs[0].states, *runs[0].gates):
                values = torch.cat([run.real(name) for run in runs])
                self._writer.add_histogram(f"{self._prefix}{track}/{name}", values, step)
            figure = heatmap(runs[-1], row=row, order="similar").figure
            self._writer.add_figure(f"{self._prefix}{track}", figure, step)

    def close(self) -> None:
        """Flush the writer."""
        self._writer.flush()


class WandbWriter:
    """Writes numbers as metrics to a run of W&B; a finding is a metric that is 1 while it lasts."""

    def __init__(self, run: Any, prefix: str = "hiddenstate/") -> None:
        """Write to `run`, as `wandb.init` returns it. Finishing the run is up to you."""
        self._run, self._prefix = run, prefix
        # W&B counts its own steps and cannot go back, so our step is logged as a separate number.
        self._step = f"{prefix}step"

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log all numbers of one look."""
        self._run.log({self._step: step, **{self._prefix + name: number for name, number in numbers.items()}})

    def finding(self, step: int, episode: Episode) -> None:
        """Log that a finding began or ended, and keep its text in the run's summary."""
        code = f"{self._prefix}{episode.finding.code}"
        self._run.log({self._step: step, code: float(episode.ended is None)})
        self._run.summary[code] = str(episode)

    def close(self) -> None:
        """Do nothing: the run belongs to the caller."""
