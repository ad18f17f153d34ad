"""A cell by itself, as it is handed in: with or without a state, under any name."""

import pytest
import torch
from torch import nn

import hiddenstate as hs


class Odd(nn.Module):
    """Does not call its state as others do; `sick` forgets the recurrent term."""

    def __init__(self, sick=False):
        super().__init__()
        self.input_size, self.hidden_size = 3, 4
        self.mix, self.sick = nn.Linear(7, 4), sick

    def forward(self, inp, mem):
        return torch.tanh(self.mix(torch.cat([inp, torch.zeros_like(mem) if self.sick else mem], 1)))


class Pair(nn.Module):
    def __init__(self, sick=False):
        super().__init__()
        self.input_size, self.hidden_size = 3, 4
        self.gates, self.sick = nn.Linear(7, 16), sick

    def forward(self, x, s):
        h, c = s
        i, f, g, o = self.gates(torch.cat([x, h], 1)).chunk(4, 1)
        new = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return o.sigmoid() * new.tanh(), c if self.sick else new


STATE = torch.zeros(5, 4)


@pytest.mark.parametrize(
    ("make", "inputs", "code"),
    [
        (Odd, (torch.randn(5, 9, 3),), "HS103"),
        (Odd, (torch.randn(5, 3), STATE), "HS103"),
        (Pair, (torch.randn(5, 3), (STATE, STATE)), "HS405"),
    ],
)
def test_a_cell_is_stepped_whatever_it_calls_its_state(make, inputs, code):
    report = hs.diagnose(make(), *inputs)
    assert report.ok, report.text()
    assert report.failed == {}
    assert hs.diagnose(make(sick=True), *inputs).codes[0] == code


def test_a_model_of_one_argument_is_called_as_it_is():
    report = hs.diagnose(nn.Sequential(nn.GRU(3, 4, batch_first=True)), torch.randn(5, 9, 3))
    assert report.ok
    assert not any("stepped" in note for note in report.assumed)
