"""What is carried after a call was watched, and what is said about the rest."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import hiddenstate as hs
from hiddenstate.carry.choice import Choice
from hiddenstate.cells import layers
from hiddenstate.errors import CarryWarning


class Turned(nn.Module):
    """Reads one layer forwards, and one from the end."""

    def __init__(self) -> None:
        super().__init__()
        self.forth, self.back = nn.GRU(3, 4, batch_first=True), nn.GRU(3, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.forth(x)[0], self.back(x.flip(1))[0].flip(1)], -1)


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.gru = nn.Conv1d(3, 3, 3, padding=1), nn.GRU(3, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(self.conv(x.mT).mT)[0]


def chosen(model: nn.Module, *, final: bool = True) -> Choice:
    return Choice.of(layers(model, torch.randn(2, 8, 3)), layers(model), final=final)


def test_what_reads_from_the_end_is_left_alone_and_said():
    choice = chosen(Turned())
    assert [layer.name for layer in choice.stays] == ["forth"]
    assert choice.left == ["back: it reads the call's input from the end: what it ends in belongs to the first step"]
    assert choice.uneven == []


def test_what_stands_behind_a_convolution_is_carried_and_said():
    choice = chosen(Convolved())
    assert [layer.name for layer in choice.stays] == ["gru"]
    (said,) = choice.uneven
    assert "looks across the cut" in said


def test_a_carry_does_as_it_is_chosen_and_says_both():
    x = torch.randn(2, 8, 3)
    with hs.Carry(model := Turned()) as carry, pytest.warns(CarryWarning, match="not carried: back: it reads"):
        model(x)
    assert list(carry.state) == ["forth.h"]
    with hs.Carry(model := Convolved()), pytest.warns(CarryWarning, match="carried, but pieces do not give.*'gru'"):
        model(x)


def test_of_a_loop_nothing_is_said_before_it_is_known_whether_it_goes_on():
    class Loop(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            h = torch.zeros_like(x[:, 0])
            for frame in x.unbind(1):
                h = torch.tanh(0.5 * h + frame)
            return h

    assert chosen(Loop(), final=False).left == []
    (left,) = chosen(Loop()).left
    assert "hs.Carry(model, override=True) puts the carried state there" in left
