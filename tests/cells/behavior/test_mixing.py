"""What a call takes of several steps at once beside what recurs, and what only looks like it."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import hiddenstate as hs
from hiddenstate.cells.behavior.mixing import BEHIND, POSITIONS, STATISTICS
from hiddenstate.errors import CarryWarning

FEATURES, UNITS, BATCH, STEPS = 5, 6, 3, 8


class Around(nn.Module):
    """A layer, and what stands around it."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(FEATURES, UNITS, batch_first=True)
        self.more()

    def more(self) -> None:
        self.places = nn.Parameter(torch.randn(64, FEATURES))

    def before(self, x: Tensor) -> Tensor:
        return x

    def behind(self, y: Tensor) -> Tensor:
        return y

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(self.rnn(self.before(x))[0])


class LearnedPlaces(Around):
    def before(self, x: Tensor) -> Tensor:
        return x + self.places[: x.shape[1]]


class PlacesBeside(Around):
    def behind(self, y: Tensor) -> Tensor:
        return torch.cat([y, torch.linspace(0, 1, y.shape[1]).expand(len(y), -1).unsqueeze(2)], 2)


class Attends(Around):
    def behind(self, y: Tensor) -> Tensor:
        return torch.softmax(y @ y.mT, -1) @ y


class Causal(Around):
    def behind(self, y: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(y, y, y, is_causal=True)


class Convolves(Around):
    def behind(self, y: Tensor) -> Tensor:
        return nn.functional.avg_pool1d(y.mT, 3, 1, 1).mT


class Averages(Around):
    def behind(self, y: Tensor) -> Tensor:
        return y.mean(1)


class Normalizes(Around):
    def more(self) -> None:
        self.norm = nn.BatchNorm1d(UNITS)

    def behind(self, y: Tensor) -> Tensor:
        return self.norm(y.mT).mT


class EachByItself(Around):
    def more(self) -> None:
        self.norm, self.gate = nn.LayerNorm(UNITS), nn.Linear(UNITS, UNITS)
        self.memory = nn.Parameter(torch.randn(4, UNITS))

    def before(self, x: Tensor) -> Tensor:
        return x + torch.zeros(x.shape[1], FEATURES) + 0.1 * torch.randn_like(x)

    def behind(self, y: Tensor) -> Tensor:
        y = self.norm(y) * torch.softmax(self.gate(y), -1)
        return (torch.softmax(y @ self.memory.T, -1) @ self.memory).flatten(0, 1).unflatten(0, y.shape[:2])


class LastStep(Around):
    def behind(self, y: Tensor) -> Tensor:
        return y[:, -1]


class AsManyUnitsAsSteps(Around):
    """The last step alone, as wide as the call is long."""

    def more(self) -> None:
        self.head = nn.Linear(UNITS, STEPS)

    def behind(self, y: Tensor) -> Tensor:
        return self.head(y[:, -1])


class Loss(Around):
    def behind(self, y: Tensor) -> Tensor:
        return (y[:, 1:] - y[:, :-1]).square().mean()


class KeepsItsPast(Around):
    """A convolution over time that is handed the last steps of the call before."""

    past: Tensor | None = None

    def behind(self, y: Tensor) -> Tensor:
        past = y.new_zeros(len(y), 2, UNITS) if self.past is None else self.past
        longer = torch.cat([past, y], 1)
        self.past = longer[:, -2:].detach()
        return nn.functional.avg_pool1d(longer.mT, 3, 1).mT


class CountsOn(Around):
    at = 0

    def __init__(self) -> None:
        super().__init__()
        self.at = 0

    def before(self, x: Tensor) -> Tensor:
        self.at += x.shape[1]
        return x + self.places[self.at - x.shape[1] : self.at]


def called(kind: type[Around]) -> None:
    torch.manual_seed(0)
    model, x = kind(), torch.randn(BATCH, STEPS, FEATURES)
    with hs.Carry(model):
        model(x)


@pytest.mark.parametrize(
    ("kind", "why", "line"),
    [
        (LearnedPlaces, POSITIONS, LearnedPlaces.before),
        (PlacesBeside, POSITIONS, PlacesBeside.behind),
        (Attends, BEHIND, Attends.behind),
        (Causal, BEHIND, Causal.behind),
        (Convolves, BEHIND, Convolves.behind),
        (Averages, BEHIND, Averages.behind),
        (Normalizes, STATISTICS, Normalizes.behind),
    ],
)
def test_what_mixes_the_steps_of_a_call_beside_a_layer_is_told_with_its_line(kind, why, line):
    with pytest.warns(CarryWarning, match="carried, but pieces do not give what the whole gives") as told:
        called(kind)
    (said,) = [str(each.message) for each in told]
    assert f"test_mixing.py:{line.__code__.co_firstlineno + 1}: {why}" in said


@pytest.mark.parametrize("kind", [EachByItself, LastStep, AsManyUnitsAsSteps, Loss, KeepsItsPast, CountsOn])
def test_nothing_is_told_of_steps_that_stay_apart_or_that_the_model_itself_brings_along(kind):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        called(kind)
    assert [str(each.message) for each in told] == []


def test_batch_statistics_that_are_kept_are_no_matter_of_steps():
    torch.manual_seed(0)
    model = Normalizes().eval()
    with hs.Carry(model), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model(torch.randn(BATCH, STEPS, FEATURES))
    assert [str(each.message) for each in told] == []


def test_looking_for_it_leaves_what_is_carried_as_it_was():
    torch.manual_seed(0)
    model, x = Attends(), torch.randn(BATCH, STEPS, FEATURES)
    with torch.no_grad(), hs.Carry(model) as carry:
        with pytest.warns(CarryWarning, match="several steps of a call at once"):
            model(x)
        torch.testing.assert_close(carry.state["rnn.h"], model.rnn(x, torch.zeros(1, BATCH, UNITS))[1])


class StepsACell(nn.Module):
    """A cell that the model steps, with a head on every state or on the last one."""

    def __init__(self, features: int, units: int, *, last: bool) -> None:
        super().__init__()
        self.cell, self.head, self.last = nn.GRUCell(features, units), nn.Linear(units, units), last

    def forward(self, x, h=None):
        told = []
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
            told.append(self.head(h))
        return (told[-1] if self.last else torch.stack(told, 1)), h


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("rows", [4, 5])
@pytest.mark.parametrize("features", [4, 3])
@pytest.mark.parametrize("units", [4, 6])
def test_an_axis_that_is_as_long_as_time_by_chance_is_not_taken_for_it(last, rows, features, units):
    torch.manual_seed(0)
    model = StepsACell(features, units, last=last)
    with hs.Carry(model), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model(torch.randn(rows, 4, features))
    assert [str(each.message) for each in told] == []
