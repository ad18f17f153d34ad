"""Real series for the examples, read from the files inside the `aeon` package: nothing is downloaded, nothing imported.

Only the files are needed, so `pip install --no-deps aeon` is enough, and no compiler for time series comes along.
"""

from __future__ import annotations

import csv
import importlib.util
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


@dataclass(frozen=True)
class Labeled:
    """Series with one label each."""

    x: Tensor  # (batch, time, feature), zero beyond a row's length
    lengths: Tensor  # (batch,)
    y: Tensor  # (batch,)


def folder() -> Path:
    """Return where aeon keeps its series, or say how to get them."""
    found = importlib.util.find_spec("aeon")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("this example reads series that come with aeon: pip install --no-deps aeon")
    return Path(found.submodule_search_locations[0]) / "datasets" / "data"


def classification(name: str, every: int = 1) -> tuple[Labeled, Labeled, list[str]]:
    """Return what to train on, what to judge on (as the archive splits them), and the names of the classes.

    Features are scaled by the training series' mean and deviation; `every` keeps each n-th step.
    """
    series, labels = zip(*(_read_ts(folder() / name / f"{name}_{part}.ts") for part in ("TRAIN", "TEST")), strict=True)
    classes = sorted(set(labels[0]))
    steps = torch.cat(series[0])
    mean, deviation = steps.mean(0), steps.std(0)
    train, test = (
        Labeled(
            pad_sequence([((row - mean) / deviation)[::every] for row in rows], batch_first=True),
            torch.tensor([len(row[::every]) for row in rows]),
            torch.tensor([classes.index(label) for label in names]),
        )
        for rows, names in zip(series, labels, strict=True)
    )
    return train, test, classes


def _read_ts(path: Path) -> tuple[list[Tensor], list[str]]:
    """Read a .ts file: after @data a line for each series, its features and then its label parted by colons."""
    lines = path.read_text(encoding="utf-8").splitlines()
    start = next(number for number, line in enumerate(lines) if line.strip().lower() == "@data")
    series, labels = [], []
    for line in filter(None, map(str.strip, lines[start + 1 :])):
        *features, label = line.split(":")
        series.append(torch.tensor([[float(value) for value in feature.split(",")] for feature in features]).T)
        labels.append(label)
    return series, labels


def anomalies(name: str, file: str) -> tuple[Tensor, Tensor]:
    """Return one long series (time, feature) and whether each of its steps is anomalous, bool (time,)."""
    with open(folder() / name / file, newline="", encoding="utf-8") as handle:
        rows = list(csv.reader(handle))[1:]
    values = torch.tensor([[float(value) for value in row[1:-1]] for row in rows])
    return values, torch.tensor([row[-1] == "1" for row in rows])
