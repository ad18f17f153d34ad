import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hiddenstate.errors import BadInput
from hiddenstate.pool import Attention, Mean, MultiHead

H, LENGTHS = torch.randn(3, 7, 6, generator=torch.Generator().manual_seed(0)), torch.tensor([4, 7, 1])


@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4))
@pytest.mark.parametrize("pool", [Attention(6), MultiHead(6, 2)])
def test_weights_are_shares_of_the_real_steps(pool, lengths):
    h = torch.randn(len(lengths), 6, 6)
    for row, length in zip(h, lengths, strict=True):
        row[length:] = math.nan
    weights = pool.weights(h, lengths)
    assert weights.shape == ((len(lengths), 6) if isinstance(pool, Attention) else (len(lengths), 2, 6))
    assert torch.allclose(weights.sum(-1), torch.ones(()))
    for row, length in zip(weights, lengths, strict=True):
        assert (row[..., length:] == 0).all()


def test_the_weights_are_those_it_pools_with():
    pool = Attention(6)
    by_hand = (pool.weights(H, LENGTHS).unsqueeze(-1) * H).sum(1)
    assert torch.allclose(pool(H, LENGTHS), by_hand, atol=1e-6)
    assert torch.allclose(pool(H), (pool.weights(H).unsqueeze(-1) * H).sum(1), atol=1e-6)


def test_the_scores_are_a_softmax_over_the_row():
    pool = Attention(6)
    scores = H[0, :4] @ pool.score.weight[0]
    assert torch.allclose(pool.weights(H, LENGTHS)[0, :4], scores.softmax(0), atol=1e-6)


def test_scores_that_find_nothing_give_the_mean():
    pool = Attention(6)
    torch.nn.init.zeros_(pool.score.weight)
    assert torch.allclose(pool(H, LENGTHS), Mean()(H, LENGTHS), atol=1e-6)


def test_projecting_after_the_mean_is_projecting_every_step_before_it():
    pool = MultiHead(6, 3)
    values = torch.einsum("btu,huv->bhtv", H, pool.value)  # what is never made
    wanted = pool.out(torch.einsum("bht,bhtv->bhv", pool.weights(H, LENGTHS), values).flatten(1))
    assert torch.allclose(pool(H, LENGTHS), wanted, atol=1e-6)


def test_one_head_with_the_identity_for_values_is_plain_attention():
    pool, plain = MultiHead(6, 1), Attention(6)
    with torch.no_grad():
        pool.value[0] = torch.eye(6)
        pool.out.weight.copy_(torch.eye(6))
        pool.out.bias.zero_()
        plain.score.weight.copy_(pool.score.weight)
    assert torch.allclose(pool(H, LENGTHS), plain(H, LENGTHS), atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_weights_have_the_dtype_of_the_states(dtype):
    assert Attention(6).to(dtype).weights(H.to(dtype), LENGTHS).dtype == dtype


def test_huge_finite_padding_does_not_reach_the_weights_gradient():
    pool, h = Attention(6), H.clone()
    h[0, 4:] = 3e38
    (pool(h, LENGTHS) * 100).sum().backward()
    assert pool.score.weight.grad.isfinite().all()


@pytest.mark.parametrize("pool", [Attention(8), MultiHead(8, 2)])
def test_states_of_another_width_are_refused(pool):
    for call in (pool, pool.weights):
        with pytest.raises(BadInput, match=r"made for 8 units, but the states have 6.*twice its hidden_size"):
            call(H)


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: Attention(0), "units is a whole number from 1, but this is 0"),
        (lambda: Attention(2.5), "units is a whole number from 1, but this is 2.5"),
        (lambda: MultiHead(6, 0), "heads is a whole number from 1, but this is 0"),
        (lambda: MultiHead(6, 4), "6 units cannot be shared by 4 heads"),
    ],
)
def test_sizes_that_cannot_be_are_refused(make, complaint):
    with pytest.raises(BadInput, match=complaint):
        make()


def test_they_show_their_sizes():
    assert "units=6" in repr(Attention(6))
    assert "units=6, heads=3" in repr(MultiHead(6, 3))
