"""When do the states in between beat the last one? Gestures and speakers, told apart from four kinds of heads.

The same GRU reads real series from the aeon package; only what is made of its states differs: the last state, their
mean, a trained weighting of them, or classifiers tapped in on the way. Accuracy on the archive's own test series.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from series import Labeled, classification
from torch import Tensor, nn
from torch.nn import functional as F

from hiddenstate import pool

UNITS = 32


@dataclass(frozen=True)
class Task:
    """One set of series, and how long to train on it."""

    name: str
    about: str
    every: int  # keeps each n-th step
    epochs: int


TASKS = (
    Task("BasicMotions", "4 motions, 100 steps", every=1, epochs=60),
    Task("JapaneseVowels", "9 speakers, 7 to 29 steps", every=1, epochs=80),
    Task("PickupGestureWiimoteZ", "10 gestures, 29 to 361 steps, each third kept", every=3, epochs=100),
)


class Classifier(nn.Module):
    """A GRU, something that pools its states, and a linear layer."""

    def __init__(self, features: int, classes: int, head: nn.Module) -> None:
        super().__init__()
        self.gru = nn.GRU(features, UNITS, batch_first=True)
        self.head = head
        self.read = nn.Identity() if isinstance(head, pool.Taps) else nn.Linear(UNITS, classes)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Return logits, (batch, class), or one set for each tap, (batch, taps, class)."""
        logits: Tensor = self.read(self.head(self.gru(x)[0], lengths))
        return logits


def heads(train: Labeled, classes: int) -> dict[str, Callable[[], nn.Module]]:
    """What is compared; taps lie at the quarters of a middling series, and at each one's end."""
    middling = int(train.lengths.median())
    quarters = [middling // 4, middling // 2, 3 * middling // 4, -1]

    def taps() -> nn.Module:
        return pool.Taps(quarters, [nn.Linear(UNITS, classes) for _ in quarters], short="last")

    return {"Last": pool.Last, "Mean": pool.Mean, "Attention": lambda: pool.Attention(UNITS), "Taps": taps}


def fit(make: Callable[[], nn.Module], train: Labeled, classes: int, *, epochs: int, seed: int) -> Classifier:
    """Return a classifier trained on all series at once; with taps, each classifier has its own loss."""
    torch.manual_seed(seed)
    model = Classifier(train.x.shape[-1], classes, make())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(epochs):
        logits = model(train.x, train.lengths)
        if logits.dim() == 3:
            logits = logits.transpose(1, 2)  # cross_entropy wants the classes second
        loss = F.cross_entropy(logits, train.y if logits.dim() == 2 else train.y[:, None].expand(-1, logits.shape[2]))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model


@torch.no_grad()
def accuracy(model: Classifier, test: Labeled) -> float:
    """Return the share of series told right; taps vote with their probabilities."""
    logits = model.eval()(test.x, test.lengths)
    if logits.dim() == 3:
        logits = logits.softmax(-1).mean(1)
    return (logits.argmax(-1) == test.y).float().mean().item()


def compare(tasks: tuple[Task, ...], seeds: int, quick: bool) -> dict[str, dict[str, list[float]]]:
    """Return accuracies: task -> head -> one for each seed."""
    found: dict[str, dict[str, list[float]]] = {}
    with Progress(transient=True) as progress:
        bar = progress.add_task("training", total=len(tasks) * 4 * seeds)
        for task in tasks:
            train, test, classes = classification(task.name, task.every)
            found[task.name] = {}
            for name, make in heads(train, len(classes)).items():
                for seed in range(seeds):
                    model = fit(make, train, len(classes), epochs=1 if quick else task.epochs, seed=seed)
                    found[task.name].setdefault(name, []).append(accuracy(model, test))
                    progress.advance(bar)
    return found


def table(found: dict[str, dict[str, list[float]]]) -> Table:
    """Return mean and deviation for each task and head."""
    shown = Table(title="accuracy on unseen series in percent, mean ± deviation over seeds")
    shown.add_column("series")
    names = list(next(iter(found.values())))
    for name in names:
        shown.add_column(name, justify="right")
    for task, results in found.items():
        shown.add_row(task, *(f"{100 * statistics.mean(r):.1f} ± {100 * spread(r):.1f}" for r in results.values()))
    return shown


def spread(values: list[float]) -> float:
    """Return the standard deviation, zero for one value."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def draw(found: dict[str, dict[str, list[float]]], path: Path) -> None:
    """Write a panel for each task: every seed as a dot, the mean as a bar."""
    figure, axes = plt.subplots(1, len(found), figsize=(3.2 * len(found), 3.2), squeeze=False, layout="constrained")
    about = {task.name: task.about for task in TASKS}
    for ax, (task, results) in zip(axes[0], found.items(), strict=True):
        for place, values in enumerate(results.values()):
            ax.bar(place, statistics.mean(values), color=f"C{place}", alpha=0.35, width=0.7)
            offsets = torch.linspace(-0.15, 0.15, len(values))
            ax.scatter(place + offsets, values, color=f"C{place}", s=14, zorder=3)
        ax.set_xticks(range(len(results)), list(results), fontsize=8)
        ax.set_title(f"{task}\n{about[task].partition(', each')[0]}", fontsize=9)
        ax.set_ylim(0, 1.03)
        ax.spines[["top", "right"]].set_visible(False)
    axes[0, 0].set_ylabel("accuracy")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    """Train, print a table, write a figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder for the figure")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a few steps only, to see that it runs")
    settings = parser.parse_args()
    torch.set_num_threads(1)  # these matrices are too small to share
    console, start = Console(), time.perf_counter()
    found = compare(TASKS, 1 if settings.quick else settings.seeds, settings.quick)
    console.print(table(found))
    draw(found, settings.out / "pooling.png")
    console.print(f"{settings.out / 'pooling.png'} · {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
