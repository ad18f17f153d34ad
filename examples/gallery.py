"""What a healthy, a saturated, a forgetful and a chaotic net look like, side by side.

All four are a tanh RNN of 48 units, trained to name the letter they read five steps ago. They differ in one thing
each, as it happens in real code: weights that start far too large, weight decay on the recurrence that is far too
strong, a wild recurrence that is never trained.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import hiddenstate as hs

UNITS, LETTERS, LAG, STEPS = 48, 4, 5, 60


class Recaller(nn.Module):
    """Names the letter that it read `LAG` steps ago."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.rnn = nn.RNN(LETTERS, UNITS, batch_first=True)
        self.head = nn.Linear(UNITS, LETTERS)
        with torch.no_grad():
            nn.init.orthogonal_(self.rnn.weight_hh_l0)
            if kind == "saturated":
                self.rnn.weight_ih_l0.mul_(60)
                self.rnn.weight_hh_l0.mul_(6)
            if kind == "chaotic":
                self.rnn.weight_hh_l0.copy_(torch.randn(UNITS, UNITS) * 2.5 / UNITS**0.5)
        if kind == "chaotic":
            self.rnn.requires_grad_(False)

    def forward(self, letters: Tensor) -> Tensor:
        """Return scores of letters (batch, time, letter)."""
        scores: Tensor = self.head(self.rnn(letters)[0])
        return scores


def batch(rows: int = 32, seed: int | None = None) -> tuple[Tensor, Tensor]:
    """Return letters (batch, time, letter), and which letter is to be named at each step."""
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    letters = torch.randint(LETTERS, (rows, STEPS), generator=generator)
    return F.one_hot(letters, LETTERS).float(), letters.roll(LAG, dims=1)


def loss(output: Tensor, y: Tensor) -> Tensor:
    """Return how badly letters were recalled, where there is something to recall."""
    return F.cross_entropy(output[:, LAG:].flatten(0, 1), y[:, LAG:].flatten())


def trained(kind: str, updates: int) -> nn.Module:
    """Return a net of one kind after its training."""
    torch.manual_seed(0)
    model = Recaller(kind)
    recurrent = {"params": [model.rnn.weight_hh_l0], "weight_decay": 25.0 if kind == "forgetful" else 0.0}
    others = [weight for name, weight in model.named_parameters() if name != "rnn.weight_hh_l0"]
    optimizer = torch.optim.AdamW([recurrent, {"params": others, "weight_decay": 0.0}], lr=2e-3)
    for _ in track(range(updates), description=f"{kind:10}", transient=True):
        x, y = batch()
        optimizer.zero_grad()
        loss(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model.eval()


def main(updates: int, picture: Path) -> None:
    """Train, draw and print."""
    torch.set_num_threads(1)
    kinds = ("healthy", "saturated", "forgetful", "chaotic")
    figure, axes = plt.subplots(4, 4, figsize=(18, 14), layout="constrained")
    table = Table("net", "recalled", "saturated", "memory", "Lyapunov exponent", "findings")
    x, y = batch(seed=1)
    for kind, column in zip(kinds, axes.T, strict=True):
        model = trained(kind, updates)
        with hs.record(model) as seen, torch.no_grad():
            right = float((model(x).argmax(-1) == y)[:, LAG:].float().mean())
        walk = seen["rnn.l0"]
        full, felt = hs.measure.saturation(walk), hs.measure.memory(model.rnn, x)
        grown = hs.measure.lyapunov(model.rnn, x[:8], k=1)
        hs.plot.heatmap(walk, column[0], order="similar", limits=1.0)
        hs.plot.histogram(walk, column[1])
        hs.plot.memory(felt, column[2])
        hs.plot.spectrum(hs.measure.jacobians(model.rnn, x[:4]), column[3])
        column[0].set_title(f"{kind}: recalls {right:.0%}", loc="left", fontsize="x-large")
        column[1].set_xlim(-1.02, 1.02)
        exponent = f"{float(grown.exponents[0]):+.3f} ± {float(grown.error[0]):.3f}"
        column[3].set_title(f"Lyapunov exponent {exponent}", loc="left", fontsize="medium")
        codes = ", ".join(found.code for found in hs.diagnose(model, x, targets=y, loss=loss)) or "none"
        length = f"{'at least ' if felt.cut_off else ''}{felt.length} steps"
        table.add_row(kind, f"{right:.0%}", f"{full.share:.0%}", length, exponent, codes)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=70)
    Console(width=110).print(table)
    print(f"drawn: {picture}")


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--updates", type=int, default=600)
    options.add_argument("--picture", type=Path, default=Path("gallery.png"))
    main(**vars(options.parse_args()))
