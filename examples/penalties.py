"""Do penalties on states help? A character model on Python's own help texts, with and without them.

The model is an ordinary one and stays so: `Penalty` watches its LSTM, and one term is added to the loss. The training
text is short on purpose, so that there is something to overfit. All are judged on text they have not seen.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from pydoc_data import topics

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import hiddenstate as hs

ROWS, STEPS = 16, 64
LETTERS = 20_000  # to train on, and as many to judge on
# The coefficients of the paper that brought them up (Merity, McCann and Socher, 2017): 2 and 1.
SETTINGS: dict[str, dict[str, float]] = {
    "none": {},
    "activity": {"activity": 2.0},
    "temporal": {"temporal": 1.0},
    "both": {"activity": 2.0, "temporal": 1.0},
}


@dataclass(frozen=True)
class Course:
    """How one training went."""

    unseen: list[float]  # the loss on unseen text after each epoch
    known: float  # the loss on the training text at the end


class CharacterModel(nn.Module):
    """An ordinary model: it knows nothing of penalties."""

    def __init__(self, symbols: int, units: int = 96) -> None:
        super().__init__()
        self.embed = nn.Embedding(symbols, 32)
        self.lstm = nn.LSTM(32, units, batch_first=True)
        self.head = nn.Linear(units, symbols)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits for the next character at each step."""
        logits: Tensor = self.head(self.lstm(self.embed(tokens))[0])
        return logits


def texts() -> tuple[Tensor, Tensor, int]:
    """Return the text to train on, the text to judge on, and the number of symbols."""
    text = "\n".join(topics.topics[name] for name in sorted(topics.topics))[: 2 * LETTERS]
    number = {symbol: place for place, symbol in enumerate(sorted(set(text)))}
    tokens = torch.tensor([number[symbol] for symbol in text])
    return tokens[:LETTERS], tokens[LETTERS:], len(number)


def train(known: Tensor, unseen: Tensor, symbols: int, *, epochs: int, seed: int, **coefficients: float) -> Course:
    """Return the losses of a model trained with these penalties."""
    torch.manual_seed(seed)
    model = CharacterModel(symbols)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    penalty = hs.regularize.Penalty(model, **coefficients) if coefficients else None
    carry, losses = hs.Carry(model), []
    for _ in range(epochs):
        carry.reset()
        for chunk in hs.Streams(known.chunk(ROWS), ROWS, STEPS, targets="next"):
            loss = F.cross_entropy(model(chunk.x)[chunk.mask], chunk.y[chunk.mask])
            if penalty is not None:
                loss = loss + penalty(chunk.lengths)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        with carry.fresh():
            losses.append(judge(model, unseen))
    with carry.fresh():
        return Course(losses, judge(model, known))


@torch.no_grad()
def judge(model: CharacterModel, text: Tensor) -> float:
    """Return the loss on a text, in nats a character."""
    model.eval()
    total = steps = 0.0
    for chunk in hs.Streams(text.chunk(ROWS), ROWS, 4 * STEPS, targets="next"):
        loss = F.cross_entropy(model(chunk.x)[chunk.mask], chunk.y[chunk.mask], reduction="sum")
        total, steps = total + loss.item(), steps + chunk.mask.sum().item()
    model.train()
    return total / steps


def table(found: dict[str, list[Course]]) -> Table:
    """Return the losses at the end and at their best, and how each seed compares with itself unpenalized."""
    shown = Table(title="loss in nats a character, mean ± deviation over seeds")
    for column in ("penalty", "training text", "unseen, end", "unseen, best", "best - none"):
        shown.add_column(column, justify="left" if column == "penalty" else "right")
    plain = [min(course.unseen) for course in found["none"]]
    for name, courses in found.items():
        lowest = [min(course.unseen) for course in courses]
        shown.add_row(
            name,
            cell([course.known for course in courses]),
            cell([course.unseen[-1] for course in courses]),
            cell(lowest),
            "" if name == "none" else cell([a - b for a, b in zip(lowest, plain, strict=True)], sign="+"),
        )
    return shown


def cell(values: list[float], sign: str = "") -> str:
    """Return mean ± deviation."""
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):{sign}.3f} ± {spread:.3f}"


def draw(found: dict[str, list[Course]], path: Path) -> None:
    """Write the losses on unseen text along training: thin lines are seeds, thick ones their mean."""
    figure, ax = plt.subplots(figsize=(6.5, 3.8), layout="constrained")
    for place, (name, courses) in enumerate(found.items()):
        unseen = torch.tensor([course.unseen for course in courses])  # (seed, epoch)
        epochs = range(1, unseen.shape[1] + 1)
        ax.plot(epochs, unseen.T, color=f"C{place}", alpha=0.25, linewidth=0.7)
        ax.plot(epochs, unseen.mean(0), color=f"C{place}", linewidth=2, label=name)
    ax.set_xlabel("epoch")
    ax.set_ylabel("loss on unseen text, nats a character")
    ax.legend(title="penalty", frameon=False, fontsize=8)
    ax.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    """Train, print a table, write a figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder for the figure")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=24)
    parser.add_argument("--quick", action="store_true", help="a few steps only, to see that it runs")
    settings = parser.parse_args()
    torch.set_num_threads(1)  # these matrices are too small to share
    console, start = Console(), time.perf_counter()
    known, unseen, symbols = texts()
    if settings.quick:
        known, unseen = known[:3000], unseen[:3000]
    seeds, epochs = (1, 1) if settings.quick else (settings.seeds, settings.epochs)
    found: dict[str, list[Course]] = {}
    with Progress(transient=True) as progress:
        bar = progress.add_task("training", total=len(SETTINGS) * seeds)
        for name, coefficients in SETTINGS.items():
            for seed in range(seeds):
                course = train(known, unseen, symbols, epochs=epochs, seed=seed, **coefficients)
                found.setdefault(name, []).append(course)
                progress.advance(bar)
    console.print(table(found))
    draw(found, settings.out / "penalties.png")
    console.print(f"{settings.out / 'penalties.png'} · {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
