"""What crosses a loop is carried where it starts, also where cells are only a part of what crosses, or called twice."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd import Variable

import hiddenstate as hs
from hiddenstate.errors import CarryError
from tests.support.untouched import untouched

pytestmark = pytest.mark.usefixtures("no_warnings")

FEATURES, UNITS, BATCH, STEPS = 3, 4, 3, 12


class Attentive(nn.Module):
    """What the cell is handed is read by attention too."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.keys = nn.GRUCell(FEATURES + UNITS, UNITS), nn.Parameter(torch.randn(6, UNITS))

    def forward(self, x: Tensor) -> Tensor:
        h, out = x.new_zeros(len(x), UNITS), []
        for frame in x.unbind(1):
            context = torch.softmax(h @ self.keys.T, -1) @ self.keys
            h = self.cell(torch.cat([frame, context], -1), h)
            out.append(h)
        return torch.stack(out, 1)


class FeedingEachOther(nn.Module):
    """Two cells, each of which reads what the other gave."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.GRUCell(FEATURES + UNITS, 5), nn.GRUCell(5, UNITS)

    def forward(self, x: Tensor) -> Tensor:
        one, other, out = x.new_zeros(len(x), 5), x.new_zeros(len(x), UNITS), []
        for frame in x.transpose(0, 1):
            one = self.one(torch.cat([frame, other], -1), one)
            other = self.other(one, other)
            out.append(other)
        return torch.stack(out, 1)


class Masked(nn.Module):
    """A state that ends with an episode, before the cell reads it; in most steps the mask is one."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(FEATURES, UNITS)

    def forward(self, x: Tensor) -> Tensor:
        h, out = x.new_zeros(len(x), UNITS), []
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h * (x[:, t, :1] < 1))
            out.append(h)
        return torch.stack(out, 1)


class Skipping(nn.Module):
    """Rows that keep their state in some steps; both parts start from one tensor, which a cell reads."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(FEATURES, UNITS)

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(len(x), UNITS)
        out = []
        for frame in x.unbind(1):
            new, keep = self.cell(frame, (h, c)), frame[:, :1] > 0.5
            h, c = torch.where(keep, h, new[0]), torch.where(keep, c, new[1])
            out.append(h)
        return torch.stack(out, 1)


class TwoStreams(nn.Module):
    """One cell for two sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(FEATURES, UNITS)

    def forward(self, x: Tensor) -> Tensor:
        left, right, out = x.new_zeros(len(x), UNITS), x.new_zeros(len(x), UNITS), []
        for frame in x.unbind(1):
            left, right = self.cell(frame, left), self.cell(-frame, right)
            out.append(left * right)
        return torch.stack(out, 1)


class Delayed(nn.Module):
    """The state of two steps ago counts too; both start from one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(FEATURES + 2 * UNITS, UNITS)

    def forward(self, x: Tensor) -> Tensor:
        h = before = x.new_zeros(len(x), UNITS)
        out = []
        for frame in x.unbind(1):
            h, before = torch.tanh(self.mix(torch.cat([frame, h, before], -1))), h
            out.append(h)
        return torch.stack(out, 1)


class Started(nn.Module):
    """An Elman loop from a start that is made in some way."""

    def __init__(self, start) -> None:
        super().__init__()
        self.mix, self.table, self.start = nn.Linear(FEATURES + UNITS, UNITS), nn.Embedding(1, UNITS), start

    def forward(self, x: Tensor) -> Tensor:
        h, out = self.start(self, x), []
        for frame in x.unbind(1):
            h = torch.tanh(self.mix(torch.cat([frame, h], -1)))
            out.append(h)
        return torch.stack(out, 1)


MODELS = {
    "attention": Attentive,
    "cells that feed each other": FeedingEachOther,
    "masked": Masked,
    "skipping": Skipping,
    "two streams": TwoStreams,
    "delayed": Delayed,
    "filled in place": lambda: Started(lambda _, x: x.data.new(len(x), UNITS).zero_()),
    "a variable": lambda: Started(lambda _, x: Variable(torch.zeros(len(x), UNITS).to(x)).type_as(x)),
    "looked up": lambda: Started(lambda model, x: model.table(torch.zeros(len(x), dtype=torch.long))),
}


@pytest.fixture(params=MODELS)
def model(request) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[request.param]().double()


def gradients(model: nn.Module, out: Tensor) -> list[Tensor]:
    model.zero_grad()
    (out * torch.linspace(0.5, 1.5, out.numel(), dtype=out.dtype).reshape(out.shape)).sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=6, deadline=None)
@given(lengths=st.sampled_from([[6, 6], [3, 4, 5], [5, 4, 3], [4, 3, 3, 1, 1], [7, 1, 4]]), seed=st.integers(0, 99))
def test_pieces_are_the_whole_in_values_and_gradients(name, lengths, seed):
    torch.manual_seed(seed)
    model, x = MODELS[name]().double(), torch.randn(BATCH, STEPS, FEATURES, dtype=torch.float64)
    whole = model(x)
    expected = gradients(model, whole)
    if name == "delayed":  # where the second part is made is no one place
        lengths = [5, 4, 3]
    with hs.Carry(model, override=True, detach=False):
        out = torch.cat([model(piece) for piece in x.split(lengths, 1)], 1)
    torch.testing.assert_close(out, whole)
    torch.testing.assert_close(gradients(model, out), expected)


def test_rows_that_are_reset_are_separate_runs(model, x):
    whole, late = model(x), model(x[:, 8:])
    with hs.Carry(model, override=True) as carry:
        model(x[:, :5])
        model(x[:, 5:8])
        carry.reset([1])
        out = model(x[:, 8:])
    torch.testing.assert_close(out[1], late[1])
    torch.testing.assert_close(out[[0, 2]], whole[[0, 2], 8:])


def test_what_is_saved_goes_on_in_another_process(model, x):
    other = copy.deepcopy(model)
    with hs.Carry(model, override=True) as carry:
        model(x[:, :5])
        saved = copy.deepcopy(carry.state_dict())
        expected = model(x[:, 5:])
    with hs.Carry(other, override=True) as carry:
        carry.load_state_dict(saved)
        torch.testing.assert_close(other(x[:, 5:]), expected)


def test_the_model_is_as_it_was_once_the_carry_is_closed(model, x):
    with untouched(model), hs.Carry(model, override=True):
        model(x[:, :5])
        model(x[:, 5:])


def test_a_call_that_is_too_short_to_show_an_end_is_told_so(x):
    model = Delayed().double()
    with hs.Carry(model, override=True):
        model(x[:, :6])
        with pytest.raises(CarryError, match=r"too short to show what 'loop\d+'.*three steps or more"):
            model(x[:, 6:7])
