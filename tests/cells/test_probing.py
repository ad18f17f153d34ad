"""A trial call leaves nothing behind, also when it fails."""

import pytest
import torch
from torch import nn

from hiddenstate.cells import undisturbed


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
        with undisturbed(module):
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
