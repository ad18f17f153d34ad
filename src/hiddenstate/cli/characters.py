"""A small character model on text that ships with Python, for the demo."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from pydoc_data import topics

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..carry import Carry, Chunk, Streams

STEPS = 16  # of a chunk: a model without a carried state cannot look back further
ROWS = 32


class CharacterModel(nn.Module):
    """An ordinary model, which knows nothing of carried state."""

    def __init__(self, symbols: int, units: int = 128) -> None:
        """Make a model for an alphabet of `symbols` characters."""
        super().__init__()
        self.embed = nn.Embedding(symbols, 32)
        self.lstm = nn.LSTM(32, units, batch_first=True)
        self.head = nn.Linear(units, symbols)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the scores of the next symbol at each step."""
        scores: Tensor = self.head(self.lstm(self.embed(tokens))[0])
        return scores


class Text:
    """Python's own help texts, with one number for each character."""

    def __init__(self) -> None:
        """Read the texts; the last twentieth is held out to evaluate a model on unseen text."""
        whole = "\n".join(topics.topics[name] for name in sorted(topics.topics))
        self.symbols = sorted(set(whole))
        self._number = {symbol: place for place, symbol in enumerate(self.symbols)}
        numbers = self.encode(whole)
        cut = int(0.95 * len(numbers))
        self.seen, self.unseen = numbers[:cut], numbers[cut:]

    def encode(self, text: str) -> Tensor:
        """Return one number for each symbol."""
        return torch.tensor([self._number[symbol] for symbol in text])

    def decode(self, numbers: Tensor) -> list[str]:
        """Return the symbols."""
        return [self.symbols[number] for number in numbers.tolist()]

    def prose(self, rows: int, steps: int) -> Tensor:
        """Return the pieces of the unseen text with the most letters, (rows, steps), so that they contain no tables."""
        letters = torch.tensor([symbol.isalpha() for symbol in self.symbols])
        pieces = self.unseen[: len(self.unseen) // steps * steps].view(-1, steps)
        return pieces[letters[pieces].sum(1).argsort(descending=True, stable=True)[:rows]]


def train(model: nn.Module, text: Tensor, updates: int, *, carried: bool, tell: Callable[[], None]) -> None:
    """Train in chunks that continue where the last one stopped; without `carried`, each chunk starts from zeros."""
    optimizer = torch.optim.Adam(model.parameters(), 4e-3)
    with Carry(model) as carry:
        for chunk in islice(_again_and_again(text), updates):
            if not carried or bool(chunk.starts.any()):  # at the start of an epoch, all rows start anew
                carry.reset()
            loss = _loss(model, chunk)
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            tell()


def judge(model: nn.Module, text: Tensor, *, carried: bool) -> float:
    """Return the mean loss on unseen text, in nats per character."""
    total = count = 0.0
    with Carry(model) as carry, torch.no_grad():
        for chunk in Streams(text.chunk(ROWS), ROWS, STEPS, targets="next"):
            if not carried:
                carry.reset()
            real = int(chunk.mask.sum())
            total += real * float(_loss(model, chunk))
            count += real
    return total / count


def _again_and_again(text: Tensor) -> Iterator[Chunk]:
    while True:
        yield from Streams(text.chunk(ROWS), ROWS, STEPS, targets="next")


def _loss(model: nn.Module, chunk: Chunk) -> Tensor:
    assert chunk.y is not None
    return F.cross_entropy(model(chunk.x)[chunk.mask], chunk.y[chunk.mask])
