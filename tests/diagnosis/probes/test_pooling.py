"""Which operations over the steps let padding in, told by what they are given."""

import pytest
import torch
from torch import nn

from hiddenstate.diagnosis.admission import admit
from hiddenstate.diagnosis.probes.pooling import PooledSteps
from hiddenstate.diagnosis.thresholds import Thresholds

LENGTHS = torch.tensor([6, 4, 2, 3])
PAD = torch.arange(6) >= LENGTHS[:, None]


class Model(nn.Module):
    """A layer whose steps are made one value."""

    def __init__(self, pool):
        super().__init__()
        self.gru, self.pool = nn.GRU(3, 5, batch_first=True), pool

    def forward(self, x, lengths):
        out, _ = self.gru(x)
        return self.pool(out, torch.arange(x.size(1)) >= lengths[:, None])


def pools(pool):
    model = Model(pool)
    patient = admit(model, (torch.randn(4, 6, 3), LENGTHS), lengths=None, axes=(None, None), thresholds=Thresholds())
    with patient.undisturbed():
        patient.look()
        return {each.name: each for each in patient[PooledSteps]}


POOLS = {
    "sum": (lambda out, pad: out.sum(1), lambda out, pad: (out * ~pad[..., None]).sum(1)),
    "amax": (lambda out, pad: out.amax(1), lambda out, pad: out.masked_fill(pad[..., None], -torch.inf).amax(1)),
    "max": (lambda out, pad: out.max(1)[0], lambda out, pad: out.masked_fill(pad[..., None], -9).max(dim=1)[0]),
    "softmax": (
        lambda out, pad: (out[..., 0].softmax(1).unsqueeze(-1) * out).sum(1),
        lambda out, pad: (out[..., 0].masked_fill(pad, -torch.inf).softmax(1).unsqueeze(-1) * out).sum(1),
    ),
}


@pytest.mark.parametrize("name", POOLS)
def test_padding_counts_where_it_is_not_masked(name):
    plain, masked = POOLS[name]
    assert pools(plain)[name].counts
    assert not any(pool.counts for pool in pools(masked).values())


def test_a_mean_over_all_steps_counts_them():
    assert pools(lambda out, pad: out.mean(dim=1))["mean"].counts


def test_the_axes_are_those_of_what_it_is_applied_to():
    pool = pools(lambda out, pad: out.transpose(1, 2).sum(-1))["sum"]
    assert (pool.rows, pool.time) == (0, 2)


def test_what_runs_over_units_is_no_pool():
    assert pools(lambda out, pad: out.sum(-1)) == {}
