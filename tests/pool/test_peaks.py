import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from hiddenstate.pool import LogSumExp, Max


@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4))
def test_the_soft_maximum_is_above_the_hard_one_by_at_most_log_length(lengths):
    h = torch.randn(len(lengths), 6, 3) * 5
    above = LogSumExp()(h, lengths) - Max()(h, lengths)
    assert (above > -1e-5).all()
    assert (above <= torch.tensor(lengths).log()[:, None] + 1e-5).all()


def test_a_maximum_below_zero_stays_below_zero():
    h = torch.full((1, 4, 2), -7.0)
    h[0, 2:] = 0.0
    assert Max()(h, [2]).tolist() == [[-7.0, -7.0]]


def test_of_equal_steps_one_gets_the_gradient():
    h = torch.zeros(1, 4, 1, requires_grad=True)
    Max()(h, [3]).sum().backward()
    assert sorted(h.grad.flatten().tolist()) == [0.0, 0.0, 0.0, 1.0]
    assert h.grad[0, 3] == 0


def test_minus_infinity_in_all_real_steps_is_passed_on_without_gradient_into_padding():
    for pool in (Max(), LogSumExp()):
        h = torch.full((2, 3, 1), -math.inf)
        h[1] = 0.0
        h.requires_grad_()
        result = pool(h, [1, 3])
        result.sum().backward()
        assert result[0] == -math.inf
        assert h.grad[0, 1:].tolist() == [[0.0], [0.0]]


@given(above=st.floats(0, 200))
def test_padding_far_above_costs_no_precision(above):
    h = torch.randn(2, 6, 3)
    h[0, 4:] += above
    assert torch.allclose(LogSumExp()(h, [4, 6])[0], h[0, :4].logsumexp(0), atol=1e-5)


def test_long_rows_give_the_same():
    h = torch.randn(2, 600, 100)
    wanted = torch.stack([h[0, :77].amax(0), h[1].amax(0)])
    h[0, 77:] = math.nan
    assert torch.equal(Max()(h, [77, 600]), wanted)
    assert torch.equal(Max()(h.requires_grad_(), [77, 600]), wanted)
