"""One picture of each kind, from formulas rather than random numbers, so that every machine draws the same.

Draw the baselines anew after a change that is meant, and look at them: python -m tests.plot.gallery
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
from matplotlib import pyplot
from torch import Tensor

from hiddenstate import plot
from hiddenstate.recording import Trajectory

BASELINE = Path(__file__).parent / "baseline"
TEXT = "it was $5, ok\nend"


def waves(rows: int = 1, steps: int = 17, units: int = 6) -> Tensor:
    t = torch.arange(steps).view(1, -1, 1) / 5
    u, b = torch.arange(units).view(1, 1, -1), torch.arange(rows).view(-1, 1, 1)
    return torch.sin(t * (1 + u / 4) + b + u) * torch.exp(-t * 0.1 * b)


def walk(**kwargs: int) -> Trajectory:
    h = waves(**kwargs)
    gates = {"input": (h + 1) / 2, "forget": 1 - h.abs() / 2, "candidate": h, "output": (1 - h) / 2}
    return Trajectory(h, c=2 * h, gates=gates, track="lstm.l0", kind="lstm")


def fading(rate: float = 0.8, lags: int = 30) -> SimpleNamespace:
    curve = rate ** torch.arange(lags)
    length = int((curve >= 0.01).sum())
    half = math.log(0.5) / math.log(rate)
    return SimpleNamespace(
        curve=curve, low=curve * 0.7, high=curve * 1.3, length=length, half_life=half, threshold=0.01, cut_off=False
    )


def pressed(units: int) -> SimpleNamespace:
    shares = torch.linspace(0, 0.9, units) ** 2
    return SimpleNamespace(share=float(shares.mean()), units=shares, steps=shares.flip(0), threshold=0.95)


def square(count: int = 12) -> Tensor:
    points = waves(steps=count)[0]
    return torch.cdist(points, points)


def ring(count: int = 24, radius: float = 1.1) -> Tensor:
    turn = torch.arange(count) * (2 * math.pi / count)
    return torch.polar(radius * (0.6 + 0.4 * torch.cos(3 * turn)), turn)


def corners() -> SimpleNamespace:
    points = torch.cartesian_prod(*[torch.tensor([-1.0, 0.0, 1.0])] * 2)
    return SimpleNamespace(points=points, stable=(points != 0).all(1), eigenvalues=points.to(torch.complex64))


GALLERY: dict[str, Callable[[], object]] = {
    "heatmap": lambda: plot.heatmap(walk(), tokens=list(TEXT)),
    "heatmap_gate": lambda: plot.heatmap(walk(), part="forget", order="similar"),
    "heatmap_many": lambda: plot.heatmap(waves(steps=5000, units=5000)),
    "gates": lambda: plot.gates(walk()),
    "trajectories": lambda: plot.trajectories(walk(rows=3, steps=60), labels=["a", "b", "$c"]),
    "trajectories_3d": lambda: plot.trajectories(walk(rows=2, steps=60), components=3),
    "distances": lambda: plot.distances(SimpleNamespace(distances=square(), settles_at=7)),
    "memory": lambda: plot.memory(fading()),
    "saturation": lambda: plot.saturation(pressed(12)),
    "saturation_many": lambda: plot.saturation(pressed(5000)),
    "spectrum": lambda: plot.spectrum(ring()),
    "exponents": lambda: plot.spectrum(SimpleNamespace(exponents=torch.linspace(0.2, -1, 12), dimension=3.5)),
    "fixed_points": lambda: plot.fixed_points(corners(), traj=waves(rows=3, steps=40, units=2)),
    "attention": lambda: plot.attention(waves()[0, :, 0].softmax(0), tokens=list(TEXT)),
    "attention_heads": lambda: plot.attention(waves()[0].T.softmax(1), labels=[f"head {n}" for n in range(6)]),
}


def draw(name: str, path: Path) -> None:
    """Draw one picture of the gallery into a small file."""
    with pyplot.rc_context({**pyplot.rcParamsDefault, "backend": "agg", "figure.dpi": 60, "savefig.dpi": 60}):
        GALLERY[name]()
        # No metadata: a file then changes only when its picture does.
        pyplot.gcf().savefig(path, metadata={"Software": None})
        pyplot.close("all")


if __name__ == "__main__":
    BASELINE.mkdir(exist_ok=True)
    for one in GALLERY:
        draw(one, BASELINE / f"{one}.png")
        print(BASELINE / f"{one}.png")
