"""What looks across the cut is refused, and the line is named at which it first shows."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hiddenstate as hs
from hiddenstate.errors import CarryError, CarryWarning

FEATURES, UNITS, BATCH, STEPS = 3, 4, 2, 12


class Looking(nn.Module):
    """A layer that starts from zeros, with something around it that needs the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(FEATURES, UNITS, batch_first=True)
        self.norm = nn.BatchNorm1d(FEATURES)
        self.table = nn.Embedding(64, FEATURES)

    def run(self, x: Tensor) -> Tensor:
        return self.gru(x, x.new_zeros(1, len(x), UNITS))[0]


class Counted(Looking):
    """Positions from zero."""

    def forward(self, x: Tensor) -> Tensor:
        steps = torch.arange(x.shape[1])  # here
        return self.run(x + self.table(steps))


class Normed(Looking):
    """Statistics of the batch, along time too."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x.mT).mT  # here
        return self.run(x)


class Attended(Looking):
    """Each step looks at all."""

    def forward(self, x: Tensor) -> Tensor:
        out = self.run(x)
        return torch.softmax(out @ out.mT, -1) @ out  # here


class Windowed(Looking):
    """A convolution in front."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.nn.functional.avg_pool1d(x.mT, 3, 1, 1).mT  # here
        return self.run(x)


def line_of(kind: type[nn.Module]) -> str:
    code = kind.forward.__code__
    with open(__file__) as file:
        lines = file.read().splitlines()
    number = next(n for n in range(code.co_firstlineno, len(lines)) if lines[n - 1].endswith("# here"))
    return rf"first seen at test_proof\.py:{number}\b"


@pytest.fixture
def x() -> Tensor:
    return torch.randn(BATCH, STEPS, FEATURES, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("make", [Counted, Normed, Attended, Windowed])
@pytest.mark.filterwarnings("ignore:carried, but pieces:hiddenstate.errors.CarryWarning")
def test_the_line_that_looks_across_the_cut_is_named(make, x):
    model = make()
    with hs.Carry(model, override=True), pytest.raises(CarryError, match=line_of(make)):
        model(x)


class Centered(Looking):
    """The mean along time is taken away: which axis is time, no step tells."""

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x - x.mean(1, keepdim=True))


@pytest.mark.filterwarnings("ignore:carried, but pieces:hiddenstate.errors.CarryWarning")
def test_what_is_known_to_look_across_the_cut_is_refused_though_it_cannot_be_tried(x):
    model = Centered()
    with (
        hs.Carry(model, override=True),
        pytest.raises(CarryError, match=r"pieces do not give what the whole gives: 'gru': .* all steps .*exact=False"),
    ):
        model(x)


def test_told_otherwise_it_is_carried_and_said(x):
    model = Centered()
    with hs.Carry(model, override=True, exact=False) as carry, pytest.warns(CarryWarning, match="all steps"):
        model(x)
    assert carry.state is not None


class AttendsUnderCheckpointing(nn.Module):
    """A cell whose loop attends over a memory, all of it run once more in the backward pass."""

    def __init__(self, *, steps: bool, reentrant: bool) -> None:
        super().__init__()
        self.cell, self.query = nn.LSTMCell(3 + 4, 5), nn.Linear(5, 4)
        self.memory = nn.Parameter(torch.randn(6, 4))
        self.steps, self.again = steps, partial(checkpoint, use_reentrant=reentrant)

    def step(self, frame: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        read = torch.softmax(self.query(h) @ self.memory.T, -1) @ self.memory
        return self.cell(torch.cat([frame, read], 1), (h, c))

    def run(self, x: Tensor) -> Tensor:
        h, c, out = x.new_zeros(len(x), 5), x.new_zeros(len(x), 5), []
        for frame in x.unbind(1):
            h, c = self.again(self.step, frame, h, c) if self.steps else self.step(frame, h, c)
            out.append(h)
        return torch.stack(out, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x) if self.steps else self.again(self.run, x)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("steps", [False, True])
def test_where_neither_cells_nor_their_loop_can_be_carried_both_reasons_are_named(steps, reentrant):
    model, x = AttendsUnderCheckpointing(steps=steps, reentrant=reentrant), torch.randn(2, 8, 3, requires_grad=True)
    said = r"looks across the cut, first seen at .*; nor can what its loop starts from be replaced: 'loop\d+', a loop"
    way_out = r" in a forward, runs under activation checkpointing: .* Let the loop run without it\. Carry\("
    with hs.Carry(model, override=True), pytest.raises(CarryError, match=said + way_out):
        model(x)
