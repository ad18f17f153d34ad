"""HS306: the advice runs as it stands, for every kind of container."""

import copy

import pytest
import torch
from torch import nn

import hiddenstate as hs


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(4, 4, batch_first=True)

    def forward(self, x):
        return self.gru(x)[0]


class Stack(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        for layer in self.layers.values() if isinstance(self.layers, nn.ModuleDict) else self.layers:
            x = layer(x)
        return x


ONE = {
    "list": lambda layer: nn.ModuleList([layer] * 3),
    "sequential": lambda layer: nn.Sequential(*[layer] * 3),
    "dict": lambda layer: nn.ModuleDict({"a": layer, "b": layer, "c": layer}),
    "copies": lambda layer: nn.ModuleList([layer, copy.copy(layer), copy.deepcopy(layer)]),
    "three of one": lambda layer: nn.ModuleList([layer, copy.copy(layer), copy.copy(layer)]),
}


@pytest.mark.parametrize("kind", ONE)
def test_the_advice_gives_each_place_a_layer_of_its_own(kind):
    model = Stack(ONE[kind](Layer()))
    (finding,) = [each for each in hs.diagnose(model, torch.randn(4, 9, 4)) if each.code == "HS306"]
    exec(finding.advice.partition("  #")[0], {"torch": torch, "model": model})
    assert len({id(p) for p in model.parameters()}) == 3 * 4
    assert "HS306" not in hs.diagnose(model, torch.randn(4, 9, 4)).codes
