"""What is made of a look."""

import pytest
import torch
from torch import nn

import hiddenstate as hs


class Cell(nn.Module):
    """A cell of the user's own, by its names."""

    def __init__(self, scale, act):
        super().__init__()
        self.hidden_size, self.mix, self.scale, self.act = 8, nn.Linear(11, 8), scale, act

    def forward(self, x, state):
        state = self.act(self.scale * self.mix(torch.cat([x, state], -1)))
        return state, state


class Net(nn.Module):
    def __init__(self, scale=1.0, act=torch.tanh):
        super().__init__()
        self.cell = Cell(scale, act)

    def forward(self, x):
        h = x.new_zeros(len(x), 8)
        for step in x.unbind(1):
            _, h = self.cell(step, h)
        return h


@pytest.mark.parametrize(
    ("scale", "act", "told"), [(1.0, torch.tanh, False), (500.0, torch.tanh, True), (500.0, torch.relu, False)]
)
def test_a_cell_of_ones_own_is_saturated_by_its_values_and_its_zero_gradients_are_no_cut(scale, act, told):
    torch.manual_seed(0)
    model = Net(scale, act)
    with hs.Monitor(model, every=1, thresholds={"exploding": float("inf")}) as monitor:
        for _ in range(3):
            model(torch.randn(6, 9, 3)).square().mean().backward()
    codes = {each.finding.code for each in monitor.findings}
    assert ("HS402" in codes) == told
    assert "HS105" not in codes
