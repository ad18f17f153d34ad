"""Watch a patient's signal step by step: is the state after every step worth more than the one at the end?

A GRU learns to foresee normal signals. Then it reads on, one step a call, its state carried from call to call. A report
is due for each chunk of steps. It can look at the state that the chunk ended in, which is what most code keeps, or
at the state after every step. How strange a state is: its distance from the states of the normal signal.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from series import anomalies
from torch import Tensor, nn
from torch.nn import functional as F

import hiddenstate as hs

UNITS = 32
CHUNK = 64  # steps that one report speaks of


@dataclass(frozen=True)
class Signal:
    """A long series, how much of its beginning is known to be normal, and which steps are not."""

    name: str
    x: Tensor  # (time, feature), scaled by its beginning
    normal: int
    labels: Tensor  # (time,) bool


class Foresight(nn.Module):
    """A GRU that says what comes next, and shows its states."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.gru = nn.GRU(features, UNITS, batch_first=True)
        self.read = nn.Linear(UNITS, features)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the next step as foreseen, and the states."""
        states, _ = self.gru(x)
        return self.read(states), states


def signals() -> list[Signal]:
    """Return both series of the package; one of them has no anomaly in it, whatever its collection is known for."""
    found = []
    for name, file, normal in (
        ("KDD-TSAD_135", "135_UCR_Anomaly_InternalBleeding16_TEST.csv", 1200),  # what its own training file holds
        ("Daphnet_S06R02E0", "S06R02E0.csv", 3520),  # half of it
    ):
        x, labels = anomalies(name, file)
        found.append(Signal(name, (x - x[:normal].mean(0)) / x[:normal].std(0), normal, labels))
    return found


def train(signal: Signal, *, epochs: int, seed: int) -> Foresight:
    """Return a model of the normal beginning, read in rows that go on where they stopped."""
    torch.manual_seed(seed)
    model = Foresight(signal.x.shape[1])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    rows = signal.x[: signal.normal].reshape(4, -1, signal.x.shape[1])  # (row, time, feature)
    with hs.Carry(model) as carry:
        for _ in range(epochs):
            carry.reset()
            for start in range(0, rows.shape[1] - 1, 50):
                piece = rows[:, start : start + 51]
                loss = F.mse_loss(model(piece[:, :-1])[0], piece[:, 1:])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    return model.eval()


@torch.no_grad()
def stream(model: Foresight, x: Tensor) -> Tensor:
    """Return the state after every step, (time, unit), each step a call of its own."""
    with hs.Carry(model):
        return torch.cat([model(step.reshape(1, 1, -1))[1][0] for step in x])


def strangeness(states: Tensor, normal: int) -> Tensor:
    """Return how far each state is from the cloud of normal ones, in its own deviations: (time,)."""
    known = states[CHUNK:normal]  # the first chunk is still under the spell of the zero state
    return hs.measure.novelty(states.unsqueeze(0), known.unsqueeze(0)).scores[0]


def auc(scores: Tensor, labels: Tensor) -> float:
    """Return the chance that an anomaly scores above a normal one, ties counted half; NaN where there is no anomaly."""
    return hs.measure.Novelty(scores.unsqueeze(0), 0.0, 0.99, scores, "mahalanobis").auc(labels.unsqueeze(0))


def judge(scores: Tensor, signal: Signal) -> dict[str, float]:
    """Return what both ways of reporting find in the part that was not trained on.

    Where a chunk happens to end matters to one of them, so each number is a mean over eight ways to cut.
    """
    cuts = [judge_cut(scores, signal, shift) for shift in range(0, CHUNK, CHUNK // 8)]
    return {name: statistics.mean(cut[name] for cut in cuts) for name in cuts[0]}


def judge_cut(scores: Tensor, signal: Signal, shift: int) -> dict[str, float]:
    """Return the same for chunks that start `shift` steps later."""
    known = chunks(scores, CHUNK + shift, signal.normal)
    fresh = chunks(scores, signal.normal + shift, len(scores))  # (chunk, step)
    labels = chunks(signal.labels, signal.normal + shift, len(scores))
    final, every, bad = fresh[:, -1], fresh.amax(1), labels.any(1)
    return {
        "step, final": auc(final.repeat_interleave(CHUNK), labels.flatten()),
        "step, all": auc(fresh.flatten(), labels.flatten()),
        "chunk, final": auc(final, bad),
        "chunk, all": auc(every, bad),
        "alarms, final": alarms(final, bad, float(known[:, -1].max())),
        "alarms, all": alarms(every, bad, float(known.max())),
    }


def chunks(values: Tensor, start: int, stop: int) -> Tensor:
    """Return whole chunks of the values between start and stop: (chunk, step)."""
    count = (stop - start) // CHUNK
    return values[start : start + count * CHUNK].reshape(count, CHUNK)


def alarms(scores: Tensor, labels: Tensor, limit: float) -> float:
    """Return the share of normal chunks that are stranger than any chunk trained on."""
    return (scores[~labels] > limit).double().mean().item()


def table(found: dict[str, list[dict[str, float]]]) -> Table:
    """Return mean and deviation over seeds, final state against all states."""
    shown = Table(title="the final state of a chunk against all its states, mean ± deviation over seeds")
    for column in ("series", "measure", "final state", "all states"):
        shown.add_column(column, justify="left" if column in ("series", "measure") else "right")
    for name, results in found.items():
        for kind, about in (
            ("step", "ROC AUC, each step"),
            ("chunk", "ROC AUC, each chunk"),
            ("alarms", "false alarms, chunks"),
        ):
            shown.add_row(
                name if kind == "step" else "", about, *(cell([r[f"{kind}, {way}"] for r in results]) for way in WAYS)
            )
    return shown


WAYS = ("final", "all")


def cell(values: list[float]) -> str:
    """Return mean ± deviation, or why there is none."""
    if values[0] != values[0]:
        return "no anomaly"
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.3f} ± {spread:.3f}"


def draw(signal: Signal, scores: Tensor, path: Path) -> None:
    """Write the signal around its anomaly, and what both ways of reporting see there."""
    middle = int(signal.labels.nonzero().float().mean())
    shown = slice(middle - 6 * CHUNK, middle + 6 * CHUNK)
    steps = torch.arange(shown.start, shown.stop)
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(8, 4), sharex=True, layout="constrained")
    top.plot(steps, signal.x[shown, 0], color="0.3", linewidth=0.8)
    top.set_ylabel("signal")
    bottom.plot(steps, scores[shown], color="C0", linewidth=0.9, label="after every step")
    ends = torch.arange(shown.start - shown.start % CHUNK + CHUNK - 1, shown.stop, CHUNK)
    bottom.plot(ends, scores[ends], "o", color="C1", markersize=5, label="at the end of a chunk")
    bottom.set_ylabel("strangeness of the state")
    bottom.set_xlabel("step")
    bottom.legend(frameon=False, fontsize=8)
    for ax in (top, bottom):
        places = signal.labels[shown].nonzero().flatten() + shown.start
        ax.axvspan(places[0], places[-1], color="C3", alpha=0.3, linewidth=0)
        ax.spines[["top", "right"]].set_visible(False)
    top.set_title(f"{signal.name}: the labeled anomaly (red), seed 0", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    """Train, stream, print a table, write a figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder for the figure")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a few steps only, to see that it runs")
    settings = parser.parse_args()
    torch.set_num_threads(1)  # these matrices are too small to share
    console, start = Console(), time.perf_counter()
    found: dict[str, list[dict[str, float]]] = {}
    seeds = 1 if settings.quick else settings.seeds
    with Progress(transient=True) as progress:
        bar = progress.add_task("training and streaming", total=2 * seeds)
        for signal in signals():
            for seed in range(seeds):
                model = train(signal, epochs=1 if settings.quick else 72000 // signal.normal, seed=seed)
                scores = strangeness(stream(model, signal.x), signal.normal)
                found.setdefault(signal.name, []).append(judge(scores, signal))
                if seed == 0 and signal.labels.any():
                    draw(signal, scores, settings.out / "anomalies.png")
                progress.advance(bar)
    console.print(table(found))
    console.print(f"{settings.out / 'anomalies.png'} · {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
