import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from hiddenstate.errors import BadInput
from hiddenstate.regularize import VariationalDropout


@given(p=st.floats(0.1, 0.9), batch_first=st.booleans())
def test_one_choice_holds_for_all_steps_of_a_sequence(p, batch_first):
    x = VariationalDropout(p, batch_first=batch_first)(torch.ones(4, 5, 6))
    time = 1 if batch_first else 0
    assert torch.equal(x, x.narrow(time, 0, 1).expand_as(x))
    assert ((x == 0) | torch.isclose(x, torch.tensor(1 / (1 - p)))).all()


def test_sequences_and_calls_choose_for_themselves():
    drop, x = VariationalDropout(0.5), torch.ones(2, 3, 64)
    once = drop(x)
    assert not torch.equal(once[0], once[1])
    assert not torch.equal(drop(x), once)


def test_the_mean_is_kept():
    x = VariationalDropout(0.3)(torch.ones(200, 1, 200))
    assert abs(x.mean().item() - 1) < 0.02


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_in_evaluation_nothing_is_done(p):
    x = torch.randn(2, 3, 4)
    assert VariationalDropout(p).eval()(x) is x


def test_zero_drops_nothing_and_one_drops_all():
    x = torch.randn(2, 3, 4)
    assert VariationalDropout(0)(x) is x
    assert (VariationalDropout(1)(x) == 0).all()


def test_a_packed_sequence_stays_packed():
    lengths = torch.tensor([2, 5, 3])
    packed = pack_padded_sequence(torch.ones(3, 5, 16), lengths, batch_first=True, enforce_sorted=False)
    dropped = VariationalDropout(0.5)(packed)
    assert torch.equal(dropped.batch_sizes, packed.batch_sizes)
    padded, found = pad_packed_sequence(dropped, batch_first=True)
    assert torch.equal(found, lengths)
    for row, length in zip(padded, lengths, strict=True):
        assert torch.equal(row[:length], row[:1].expand(length, -1))
    assert not torch.equal(padded[0, 0], padded[1, 0])


def test_one_sequence_without_a_batch_axis_is_one_sequence():
    x = VariationalDropout(0.5)(torch.ones(5, 32))
    assert torch.equal(x, x[:1].expand(5, 32))


def test_gradient_goes_where_values_went():
    x = torch.randn(2, 3, 8, requires_grad=True)
    out = VariationalDropout(0.5)(x)
    out.sum().backward()
    assert torch.equal(x.grad == 0, out == 0)
    assert (x.grad != 0).any()


@pytest.mark.parametrize("p", [-0.1, 1.5, float("nan"), True, "half"])
def test_what_is_no_probability_is_refused(p):
    with pytest.raises(BadInput, match="p is a probability from 0 to 1, but this is"):
        VariationalDropout(p)


def test_other_shapes_are_refused():
    with pytest.raises(BadInput, match=r"\(batch, time, unit\).*shape \(2, 3, 4, 5\)"):
        VariationalDropout(0.5)(torch.ones(2, 3, 4, 5))


def test_it_shows_what_it_does():
    assert repr(VariationalDropout(0.2, batch_first=False)) == "VariationalDropout(p=0.2, batch_first=False)"
