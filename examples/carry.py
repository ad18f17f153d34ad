"""Carry the state from chunk to chunk, and see what it is worth: a character model on Python's own help texts.

Each paragraph is a sequence of its own. `hs.Streams` lays them into rows, so that where one ends the next begins, in
the middle of a chunk. Three equal models read the same chunks. One forgets its state after each, as a model does when
nobody carries it; one carries it, also from one paragraph into the next; one is told where paragraphs begin. All are
judged on text they have not seen.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable
from itertools import islice
from pydoc_data import topics

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adam, Optimizer

import hiddenstate as hs

ROWS, STEPS = 32, 16  # of a chunk; a model that forgets can look back no further
WAYS = ("forgotten", "carried", "carried, anew for each paragraph")


class CharacterModel(nn.Module):
    """An ordinary model: it knows nothing of carried state."""

    def __init__(self, symbols: int, units: int = 160) -> None:
        super().__init__()
        self.embed = nn.Embedding(symbols, 32)
        self.gru = nn.GRU(32, units, batch_first=True)
        self.head = nn.Linear(units, symbols)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits for the next character at each step."""
        return self.head(self.gru(self.embed(tokens))[0])


def read(model: nn.Module, chunks: Iterable[hs.carry.Chunk], way: str, learn: Optimizer | None = None) -> float:
    """Read chunk by chunk, and learn from each where there is an optimizer; return the loss, in nats a character."""
    total = count = 0.0
    with hs.Carry(model) as carry, torch.set_grad_enabled(learn is not None):
        for chunk in chunks:
            if way == "forgotten":
                carry.reset()
            elif way != "carried":
                carry.mark(starts=chunk.starts, lengths=chunk.lengths)
            loss = F.cross_entropy(model(chunk.x)[chunk.mask], chunk.y[chunk.mask])
            if learn is not None:
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                learn.step()
                learn.zero_grad()
            total += loss.item() * len(chunk.y[chunk.mask])
            count += len(chunk.y[chunk.mask])
    return total / count


def main() -> None:
    """Train all three and print what the carried state was worth."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--updates", type=int, default=700)
    updates = parser.parse_args().updates
    paragraphs = [part for text in topics.topics.values() for part in text.split("\n\n") if len(part) > STEPS]
    symbols = sorted(set("".join(paragraphs)))
    texts = [torch.tensor([symbols.index(symbol) for symbol in part]) for part in paragraphs]
    cut = int(0.95 * len(texts))
    table = Table("state between chunks", "loss on unseen text", "perplexity")
    for way in WAYS:
        torch.manual_seed(0)
        model = CharacterModel(len(symbols))
        chunks = islice(hs.Streams(texts[:cut], ROWS, STEPS, targets="next", shuffle=True), updates)
        read(model, track(chunks, way, total=updates), way, Adam(model.parameters(), 3e-3))
        loss = read(model, hs.Streams(texts[cut:], ROWS, STEPS, targets="next"), way)
        table.add_row(way, f"{loss:.3f}", f"{math.exp(loss):.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
