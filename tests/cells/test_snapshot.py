"""All that a call may change is put back."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from hiddenstate.cells import Snapshot, random_streams_kept, seed, untouched


class Box:
    def __init__(self):
        self.state = torch.zeros(2)


class Messy(nn.Module):
    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm1d(2)
        self.plain = torch.zeros(2)
        self.list, self.dict, self.set = [1], {"a": [torch.zeros(2)]}, {1}
        self.box = Box()
        self.count = 0

    def forward(self, x, seen=[]):  # noqa: B006
        seen.append(1)
        self.bn(x)
        self.plain += 1
        self.list.append(2)
        self.dict["a"][0] += 1
        self.dict["b"] = 3
        self.set.add(2)
        self.box.state += 1
        self.count += 1
        self.new = torch.zeros(1)
        return len(seen)


def test_whatever_a_call_changed_is_put_back():
    model = Messy()
    plain, inner = model.plain, model.dict["a"][0]
    model.bn.weight.grad = torch.ones(2)
    snapshot = Snapshot(model)
    assert model(torch.randn(4, 2)) == 1
    model.bn.weight.grad = None
    model.eval()
    model.bn.register_forward_hook(lambda *_: None)
    snapshot.restore()
    assert model(torch.randn(4, 2)) == 1, "the list that is a default is as before, too"
    snapshot.restore()
    assert model.plain is plain
    assert model.dict["a"][0] is inner
    assert not plain.any()
    assert not inner.any()
    assert not model.box.state.any()
    assert (model.list, sorted(model.dict), model.set, model.count) == ([1], ["a"], {1}, 0)
    assert not hasattr(model, "new")
    assert not model.bn.running_mean.any()
    assert int(model.bn.num_batches_tracked) == 0
    assert model.training
    assert torch.equal(model.bn.weight.grad, torch.ones(2))
    assert not model.bn._forward_hooks


def test_weights_changed_in_place_are_put_back():
    model = nn.Linear(2, 2)
    before = model.weight.detach().clone()
    snapshot = Snapshot(model)
    with torch.no_grad():
        model.weight.mul_(2)
    model.requires_grad_(False)
    snapshot.restore()
    assert torch.equal(model.weight, before)
    assert model.weight.requires_grad


def draws():
    return torch.rand(1).item(), float(np.random.rand()), random.random()


def test_random_streams_go_on_as_if_nothing_had_been_drawn():
    seed(3)
    expected = draws()
    seed(3)

    def fail():
        with random_streams_kept():
            draws()
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        fail()
    assert draws() == expected


class Restless(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.BatchNorm1d(3)
        self.calls = []
        self.count = 0

    def forward(self, x):
        self.count += 1
        self.extra = nn.Linear(2, 2)
        self.calls = [*self.calls, x]
        self.eval()
        torch.rand(3)
        return self.inner.train()(x)


@pytest.mark.parametrize("fail", [False, True])
def test_buffers_attributes_modes_and_the_random_stream_are_put_back(fail):
    module = Restless().train()
    random, mean = torch.get_rng_state(), module.inner.running_mean.clone()
    try:
        with untouched(module):
            module(torch.randn(4, 3))
            assert module.count == 1
            if fail:
                raise RuntimeError("on purpose")
    except RuntimeError:
        assert fail
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(module.inner.running_mean, mean)
    assert (module.count, module.calls, module.training, module.inner.training) == (0, [], True, True)
    assert not hasattr(module, "extra")
