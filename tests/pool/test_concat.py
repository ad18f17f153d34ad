import pytest
import torch
from torch import nn

from hiddenstate.errors import BadInput
from hiddenstate.pool import Concat, Last, Max, Mean, Taps

H, LENGTHS = torch.randn(3, 7, 6, generator=torch.Generator().manual_seed(0)), torch.tensor([4, 7, 3])


def test_it_is_its_pools_one_after_another():
    wanted = torch.cat([Last()(H, LENGTHS), Max()(H, LENGTHS)], dim=-1)
    assert torch.equal(Concat(Last(), Max())(H, LENGTHS), wanted)


def test_taps_are_laid_out_and_concats_nest():
    pool = Concat(Taps([0, -1]), Concat(Mean()))
    assert torch.equal(pool(H, LENGTHS), torch.cat([H[:, 0], Last()(H, LENGTHS), Mean()(H, LENGTHS)], dim=-1))


def test_any_module_that_takes_states_and_lengths_is_a_pool():
    class Theirs(nn.Module):
        def forward(self, h, lengths=None):
            return h[:, 0] * lengths[:, None]

    assert torch.equal(Concat(Theirs())(H, LENGTHS), H[:, 0] * LENGTHS[:, None])


def test_its_pools_are_its_children():
    assert len(list(Concat(Mean(), Max()).pools)) == 2


@pytest.mark.parametrize(
    ("pools", "complaint"),
    [
        ((), "needs one pool or more"),
        (([Last(), Mean()],), r"takes pools one by one, as in Concat\(Last\(\), Mean\(\)\)"),
        ((Mean,), r"Make one of it: Mean\(\)"),
    ],
)
def test_what_is_no_pool_is_refused(pools, complaint):
    with pytest.raises(BadInput, match=complaint):
        Concat(*pools)
