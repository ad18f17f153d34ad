"""What a bench says: ratios of rivals that took turns, round by round."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hiddenstate.cli import bench as module
from hiddenstate.cli.bench import bench

NAMES = ["plain forward", "record states", "record gates", "carry"]


class Clockwork(nn.Module):
    """A model whose calls move a clock: in the first counted round by 1, 2, 3 and 4 seconds, twice that in the next.

    The first call within a block takes seven seconds more than the second.
    """

    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(2, 3, batch_first=True)
        self.now, self.calls = 0, []

    def forward(self, x):
        place, later = divmod(len(self.calls), 2)
        turn, rival = divmod(place, len(NAMES))
        self.now += (turn or 100) * (rival + 1) + (0 if later else 7)
        self.calls.append((self.training, torch.is_grad_enabled()))
        return self.gru(x)


@pytest.fixture
def clockwork(monkeypatch):
    model = Clockwork()
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: model.now))
    return model


def test_each_round_is_compared_with_itself_and_the_first_only_warms_up(clockwork):
    costs = bench(clockwork, (torch.zeros(1, 4, 2),), 3)
    assert [cost.name for cost in costs] == NAMES
    for cost, ratio in zip(costs, (1, 2, 3, 4), strict=True):
        assert (cost.ratio, cost.low, cost.high) == (ratio, ratio, ratio)
        assert cost.milliseconds == 2000 * ratio
        assert cost.first == (None if cost.name == "plain forward" else cost.milliseconds + 7000)


def test_every_rival_is_called_in_eval_mode_without_gradients(clockwork):
    bench(clockwork, (torch.zeros(1, 4, 2),), 2)
    assert clockwork.calls == [(False, False)] * (2 * len(NAMES) * 3)


@given(times=st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)), min_size=1, max_size=9))
def test_the_middle_half_lies_around_the_median(times):
    own, plain = (list(column) for column in zip(*times, strict=True))
    cost = module._cost("mine", own, plain)
    ratios = [mine / other for mine, other in times]
    assert min(ratios) <= cost.low <= cost.ratio <= cost.high <= max(ratios)
