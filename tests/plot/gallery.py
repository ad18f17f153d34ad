"""One picture of each kind, from formulas rather than random numbers, so that every machine draws the same.

Draw the baselines anew after a change that is meant, and look at them: python -m tests.plot.gallery
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch
from matplotlib import pyplot
from matplotlib.axes import Axes
from torch import Tensor

from hiddenstate import measure, plot
from hiddenstate.measure import (
    Comparison,
    Contributions,
    FixedPoints,
    Lyapunov,
    Memory,
    Novelty,
    Positions,
    Probe,
    Saturation,
)
from hiddenstate.recording import Trajectory

BASELINE = Path(__file__).resolve().parents[2] / "docs" / "assets" / "plots"  # what the page shows is what is tested
TEXT = "it was $5, ok\nend"


def waves(rows: int = 1, steps: int = 17, units: int = 6) -> Tensor:
    t = torch.arange(steps).view(1, -1, 1) / 5
    u, b = torch.arange(units).view(1, 1, -1), torch.arange(rows).view(-1, 1, 1)
    return torch.sin(t * (1 + u / 4) + b + u) * torch.exp(-t * 0.1 * b)


def walk(**kwargs: int) -> Trajectory:
    h = waves(**kwargs)
    gates = {"input": (h + 1) / 2, "forget": 1 - h.abs() / 2, "candidate": h, "output": (1 - h) / 2}
    return Trajectory(h, c=2 * h, gates=gates, track="lstm.l0", kind="lstm")


def fading_grads() -> Trajectory:
    h = waves(steps=30)
    return Trajectory(
        h, grads={"h": h * 10 ** ((torch.arange(30) - 29) / 4).view(1, -1, 1)}, track="rnn.l0", kind="rnn"
    )


def fading(rate: float = 0.8, lags: int = 30) -> Memory:
    curve = rate ** torch.arange(lags)
    length = int((curve >= 0.01).sum())
    half = math.log(0.5) / math.log(rate)
    return Memory(
        curve=curve, low=curve * 0.7, high=curve * 1.3, length=length, half_life=half, threshold=0.01, cut_off=False,
        rows=curve * torch.linspace(0.7, 1.3, 7).unsqueeze(1), exact=True,
    )  # fmt: skip


def pressed(units: int) -> Saturation:
    shares = torch.linspace(0, 0.9, units) ** 2
    size = {"mean_abs": 0.5, "max_abs": 1.0}
    return Saturation(float(shares.mean()), shares, shares.flip(0), threshold=0.95, range="tanh", **size)


def square(count: int = 12) -> Tensor:
    points = waves(steps=count)[0]
    return torch.cdist(points, points)


def settling(at: int | None = 7) -> Positions:
    return Positions(square(), decodability=0.5, settles_at=at, moves=torch.ones(12), tolerance=0.01)


def exponents(values: Tensor, dimension: float) -> Lyapunov:
    one = torch.zeros_like(values)
    return Lyapunov(values, one, values[None], values[None], True, dimension, steps=9, tolerance=0.01)


def sentences() -> Comparison:
    texts = ["the dog barks", "a dog barked at $5", "stocks fell today", "shares lost ground", "it rains",
             "the rain has not stopped since the morning, they say"]  # fmt: skip
    states = torch.tensor([[0.0, 0, 1], [0.2, 0.1, 1], [3, 1, 0], [3.1, 0.9, 0.1], [1, 3, 0], [1.2, 3.1, 0.3]])
    return measure.compare(states, labels=texts, clusters=3)


def knowing(steps: int = 12, top: float = 0.95) -> Probe:
    score = 0.5 + (top - 0.5) * (1 - torch.exp(-torch.arange(steps).double() / 3))
    flat = torch.full((steps,), 0.48, dtype=torch.float64)
    return Probe(score, 0.5, flat, classes=2, folds=5, rows=torch.full((steps,), 40))


def ring(count: int = 24, radius: float = 1.1) -> Tensor:
    turn = torch.arange(count) * (2 * math.pi / count)
    return torch.polar(radius * (0.6 + 0.4 * torch.cos(3 * turn)), turn)


def corners() -> FixedPoints:
    points = torch.cartesian_prod(*[torch.tensor([-1.0, 0.0, 1.0])] * 2)
    stable, none = (points != 0).all(1), torch.zeros(len(points))
    return FixedPoints(points, stable, points.to(torch.complex64), none, (~stable).int(), none + 1, 9, tolerance=1e-6)


def strange() -> Novelty:
    step = torch.arange(120, dtype=torch.float64)
    scores = 1.5 + step.mul(0.3).sin() + 9 * torch.exp(-((step - 64) ** 2) / 20)
    seen = torch.linspace(0.5, 3.0, 200, dtype=torch.float64)
    return Novelty(scores.masked_fill(step < 5, math.nan).unsqueeze(0), 2.9, 0.99, seen, "mahalanobis")


def added() -> Contributions:
    step = torch.arange(17.0)
    return Contributions((2 + step.sin()).unsqueeze(0), (3 - 3 * torch.exp(-step / 3)).unsqueeze(0), "weights")


GALLERY: dict[str, Callable[[], object]] = {
    "heatmap": lambda: plot.heatmap(walk(), tokens=list(TEXT)),
    "heatmap_gate": lambda: plot.heatmap(walk(), part="forget", order="similar"),
    "heatmap_many": lambda: plot.heatmap(waves(steps=5000, units=5000)),
    "gates": lambda: plot.gates(walk()),
    "trajectories": lambda: plot.trajectories(walk(rows=3, steps=60), labels=["a", "b", "$c"]),
    "trajectories_3d": lambda: plot.trajectories(walk(rows=2, steps=60), components=3),
    "heatmap_grads": lambda: plot.heatmap(fading_grads(), part="grads.h", log=True),
    "compare": lambda: plot.compare(sentences()),
    "compare_classes": lambda: plot.compare(measure.compare(waves(rows=40), labels=[row % 3 for row in range(40)])),
    "probe": lambda: plot.probe({"l0": knowing(top=0.8), "l1": knowing()}, tokens=list("hidden state")),
    "histogram": lambda: plot.histogram(walk(rows=5)),
    "histogram_layers": lambda: plot.histogram({"l0": waves(5), "l1": waves(5) ** 3, "l2": waves(5).relu() / 2}),
    "distances": lambda: plot.distances(settling()),
    "distances_sentences": lambda: plot.distances(sentences(), limits=(0, 4)),
    "memory": lambda: plot.memory(fading()),
    "saturation": lambda: plot.saturation(pressed(12)),
    "saturation_many": lambda: plot.saturation(pressed(5000)),
    "spectrum": lambda: plot.spectrum(ring()),
    "exponents": lambda: plot.spectrum(exponents(torch.linspace(0.2, -1, 12), 3.5)),
    "fixed_points": lambda: plot.fixed_points(corners(), traj=waves(rows=3, steps=40, units=2)),
    "novelty": lambda: plot.novelty(strange(), truth=torch.arange(120).sub(63).abs() < 8),
    "contributions": lambda: plot.contributions(added(), tokens=list(TEXT)),
    "attention": lambda: plot.attention(waves()[0, :, 0].softmax(0), tokens=list(TEXT)),
    "attention_heads": lambda: plot.attention(waves()[0].T.softmax(1), labels=[f"head {n}" for n in range(6)]),
}


def title(ax: Axes) -> str:
    return ax.get_title(loc="left")


def texts(ax: Axes) -> list[str]:
    return [text.get_text() for text in ax.texts]


def draw(name: str, path: Path) -> None:
    """Draw one picture of the gallery into a small file."""
    with pyplot.rc_context({**pyplot.rcParamsDefault, "backend": "agg", "figure.dpi": 80, "savefig.dpi": 80}):
        GALLERY[name]()
        # No metadata: a file then changes only when its picture does.
        pyplot.gcf().savefig(path, metadata={"Software": None})
        pyplot.close("all")


if __name__ == "__main__":
    BASELINE.mkdir(exist_ok=True)
    for one in GALLERY:
        draw(one, BASELINE / f"{one}.png")
        print(BASELINE / f"{one}.png")
