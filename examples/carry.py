"""Carry the state from batch to batch, and see what it is worth: a character model on Python's own help texts.

Two equal models read the same text in the same chunks. One goes on from the state it ended in, the other starts from
zeros in every chunk, as a model does when nobody carries its state. Both are judged on text they have not seen.
"""

from __future__ import annotations

import argparse
import math
from pydoc_data import topics

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import hiddenstate as hs

STEPS = 16  # of a chunk: what a model without a carried state can look back to
ROWS = 32


class CharacterModel(nn.Module):
    """An ordinary model: it knows nothing of carried state."""

    def __init__(self, symbols: int, units: int = 160) -> None:
        super().__init__()
        self.embed = nn.Embedding(symbols, 32)
        self.lstm = nn.LSTM(32, units, batch_first=True)
        self.head = nn.Linear(units, symbols)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits for the next character at each step."""
        return self.head(self.lstm(self.embed(tokens))[0])


def texts() -> tuple[Tensor, Tensor, int]:
    """Return the text to train on, the text to judge on, and the number of symbols."""
    text = "\n".join(topics.topics[name] for name in sorted(topics.topics))
    symbols = sorted(set(text))
    number = {symbol: place for place, symbol in enumerate(symbols)}
    tokens = torch.tensor([number[symbol] for symbol in text])
    cut = int(0.95 * len(tokens))
    return tokens[:cut], tokens[cut:], len(symbols)


def loss_of(model: nn.Module, chunk: hs.carry.Chunk) -> Tensor:
    """Return the mean loss over the real steps of a chunk, in nats a character."""
    return F.cross_entropy(model(chunk.x)[chunk.mask], chunk.y[chunk.mask])


def judge(model: nn.Module, text: Tensor, *, carried: bool) -> float:
    """Return the loss on unseen text; training's own state is untouched by it."""
    carry = hs.Carry.of(model)
    total = steps = 0.0
    with carry.fresh(), torch.no_grad():
        for chunk in hs.Streams(text.chunk(ROWS), ROWS, STEPS, targets="next"):
            if not carried:
                carry.reset()
            real = int(chunk.mask.sum())
            total += float(loss_of(model, chunk)) * real
            steps += real
    return total / steps


def train(model: nn.Module, text: Tensor, updates: int, *, carried: bool, tell: Progress) -> None:
    """Train in chunks that go on where the last one stopped."""
    task = tell.add_task("state carried  " if carried else "state forgotten", total=updates)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    carry = hs.Carry.of(model)
    chunks = iter(hs.Streams(text.chunk(ROWS), ROWS, STEPS, targets="next"))
    for _ in range(updates):
        if not carried:
            carry.reset()
        loss = loss_of(model, next(chunks))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        tell.advance(task)


def main() -> None:
    """Train both models and print what the carried state was worth."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--updates", type=int, default=700)
    updates = parser.parse_args().updates
    seen, unseen, symbols = texts()
    table = Table("state between chunks", "loss on unseen text", "perplexity")
    with Progress() as tell:
        for carried in (False, True):
            torch.manual_seed(0)
            model = CharacterModel(symbols)
            with hs.Carry(model):
                train(model, seen, updates, carried=carried, tell=tell)
                loss = judge(model, unseen, carried=carried)
            table.add_row("carried" if carried else "forgotten", f"{loss:.3f}", f"{math.exp(loss):.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
