"""Fused layers taken apart where their own kernels are slow: nothing changes but the time."""

import pytest
import torch
from torch import nn

import hiddenstate as hs
from hiddenstate.unrolling import opened
from hiddenstate.unrolling.checks import Task
from tests.support.equal import assert_same, inputs_of

LAYERS = {
    "rnn": lambda: nn.RNN(3, 4, num_layers=2, nonlinearity="relu"),
    "gru": lambda: nn.GRU(3, 4, bias=False),
    "lstm": lambda: nn.LSTM(3, 4, num_layers=2, bidirectional=True, batch_first=True),
    "projected": lambda: nn.LSTM(3, 4, proj_size=2),
}


@pytest.fixture(autouse=True)
def always_worth_it(monkeypatch):
    monkeypatch.setattr(opened, "_WORTH", 0)


def flat(result):
    return [result[0], *result[1].values()]


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", LAYERS)
def test_lengths_and_resets_are_those_of_the_layers_own_kernel(name):
    layer, x = LAYERS[name]().double(), torch.randn(3, 6, 3, dtype=torch.float64)
    resets = None if layer.bidirectional else torch.tensor([[0, 0, 1, 0, 0, 1], [1, 0, 0, 1, 1, 0], [0] * 6]).bool()
    state = hs.layers(layer)[0].initial(3).map(lambda part: torch.randn_like(part).requires_grad_())
    options = {"lengths": [3, 6, 2], "resets": resets}
    assert opened.run_opened(hs.layers(layer)[0], Task(x, state, torch.tensor([3, 6, 2]))) is not None
    assert_same(
        lambda: flat(hs.unroll(layer, x, state, time_axis=1, engine="loop", **options)),
        lambda: flat(hs.unroll(layer, x, state, time_axis=1, **options)),
        inputs_of(layer, x, *state.values()),
    )


def test_new_weights_are_seen():
    layer, x = nn.GRU(3, 4), torch.randn(2, 5, 3)
    hs.unroll(layer, x, time_axis=1, lengths=[2, 5])
    layer.weight_hh_l0 = nn.Parameter(torch.randn(12, 4))
    here = hs.unroll(layer, x, time_axis=1, lengths=[2, 5])[0]
    torch.testing.assert_close(here, hs.unroll(layer, x, time_axis=1, lengths=[2, 5], engine="loop")[0])


def test_a_layer_with_hooks_runs_in_its_own_kernel():
    layer, x, seen = nn.GRU(3, 4), torch.randn(2, 5, 3), []
    layer.register_forward_hook(lambda *_: seen.append(1))
    hs.unroll(layer, x, time_axis=1, lengths=[2, 5])
    assert seen == [1]


def test_dropout_between_layers_is_drawn_in_training_only():
    layer, x = nn.LSTM(3, 4, num_layers=2, dropout=0.5), torch.randn(2, 5, 3)
    one, two = (hs.unroll(layer, x, time_axis=1, lengths=[2, 5])[0] for _ in range(2))
    assert not torch.equal(one, two)
    layer.eval()
    one, two = (hs.unroll(layer, x, time_axis=1, lengths=[2, 5])[0] for _ in range(2))
    assert torch.equal(one, two)


def test_a_kernel_that_is_lent_other_weights_is_not_opened():
    layer, task = nn.GRU(3, 4), Task(torch.randn(2, 5, 3), lengths=torch.tensor([2, 5]))
    found = hs.layers(layer)[0]
    assert opened.run_opened(found, task) is not None
    layer._flat_weights = [weight.clone() for weight in layer._flat_weights]  # as WeightDrop lends them
    assert opened.run_opened(found, task) is None
