"""The loops of a whole model: in submodules, in methods and functions that a forward calls; what is said of others."""

import torch
from torch import nn

import hiddenstate as hs


def scan(cell, xs, h):
    for x in xs:
        h = cell(x, h)
    return h


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(3, 4)

    def run(self, x):
        h = x.new_zeros(x.shape[0], 4)
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
        return h

    def forward(self, x):
        return self.run(x)


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.cell = Encoder(), nn.GRUCell(3, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])

    def forward(self, x):
        h = self.encoder(x)
        h = scan(self.cell, x.unbind(1), h)
        while h.norm() > 1e9:
            h = h / 2
        for block in self.blocks:
            h = block(h)
        return h


def test_every_loop_is_named_with_its_module_function_and_line():
    model, x = Whole(), torch.randn(2, 6, 3)
    expected = model(x)
    with hs.accelerate(model) as faster:
        assert torch.allclose(model(x), expected, atol=1e-6)
        lines = faster.explain().splitlines()
    assert any(line.startswith("encoder (Encoder), in run, loop of line ") for line in lines)
    assert any(line.startswith("the model itself (Whole), in scan, loop of line ") for line in lines)
    assert any("it is a while loop" in line for line in lines)
    assert any("it goes over modules, not over time" in line or "goes over a ModuleList" in line for line in lines)


def test_a_method_that_is_replaced_later_runs_as_it_is():
    model, x = Encoder(), torch.randn(2, 6, 3)
    with hs.accelerate(model):
        model(x)
        model.run = lambda given: given.sum()
        assert torch.equal(model(x), x.sum())


def test_a_forward_of_the_instances_own_is_let_be():
    model, x = Encoder(), torch.randn(2, 6, 3)
    model.forward = lambda given: given.mean()
    with hs.accelerate(model):
        assert torch.equal(model(x), x.mean())
