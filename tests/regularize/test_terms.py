import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_padded_sequence

from hiddenstate.errors import BadInput
from hiddenstate.recording import Trajectory
from hiddenstate.regularize import activity, norm_stabilizer, temporal

TERMS = {"activity": activity, "temporal": temporal, "norm_stabilizer": norm_stabilizer}
each_term = pytest.mark.parametrize("name", TERMS)


def slowly(name, h, lengths):
    """The formula, number by number."""
    found = []
    for row, length in zip(h.tolist(), lengths, strict=True):
        norms = [math.hypot(*state) for state in row]
        for t in range(length):
            if name == "activity":
                found += [value**2 for value in row[t]]
            elif t and name == "temporal":
                found += [(a - b) ** 2 for a, b in zip(row[t], row[t - 1], strict=True)]
            elif t:
                found.append((norms[t] - norms[t - 1]) ** 2)
    return sum(found) / len(found)


@st.composite
def batches(draw):
    lengths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=4).filter(lambda found: max(found) > 1))
    h = torch.randn(len(lengths), max(lengths) + draw(st.integers(0, 2)), 3, dtype=torch.float64)
    return h, lengths


@each_term
@given(batch=batches())
def test_it_is_the_formula_over_real_steps(name, batch):
    h, lengths = batch
    assert math.isclose(TERMS[name](h, lengths).item(), slowly(name, h, lengths), rel_tol=1e-9)


@each_term
@given(batch=batches(), rubbish=st.sampled_from([math.nan, math.inf, 1e300]))
def test_rubbish_in_the_padding_reaches_neither_the_value_nor_a_gradient(name, batch, rubbish):
    h, lengths = batch
    clean = h.clone().requires_grad_()
    for row, length in zip(h, lengths, strict=True):
        row[length:] = rubbish
    h.requires_grad_()
    wanted, found = TERMS[name](clean, lengths), TERMS[name](h, lengths)
    (wanted + found).backward()
    assert torch.equal(found, wanted)
    assert torch.equal(h.grad, clean.grad)
    padding = torch.arange(h.shape[1]) >= torch.tensor(lengths)[:, None]
    assert (h.grad[padding] == 0).all()


@each_term
def test_without_lengths_all_steps_count(name):
    h = torch.randn(3, 5, 4, dtype=torch.float64)
    assert torch.allclose(TERMS[name](h), TERMS[name](h, [5, 5, 5]))


@each_term
def test_packed_sequences_and_trajectories_know_their_lengths(name):
    h, lengths = torch.randn(3, 5, 4), torch.tensor([2, 5, 3])
    wanted = TERMS[name](h, lengths)
    packed = pack_padded_sequence(h, lengths, batch_first=True, enforce_sorted=False)
    assert torch.allclose(TERMS[name](packed), wanted)
    assert torch.allclose(TERMS[name](Trajectory(h, lengths)), wanted)
    for source in (packed, Trajectory(h, lengths)):
        with pytest.raises(BadInput, match="which knows its own"):
            TERMS[name](source, lengths)


@each_term
def test_what_is_wrong_in_a_real_step_is_passed_on(name):
    h = torch.randn(2, 5, 4)
    h[0, 1, 2] = math.nan
    assert TERMS[name](h, [3, 5]).isnan()


@each_term
def test_its_gradients_are_right(name):
    h = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: TERMS[name](x, [4, 3]), h)


@each_term
def test_states_of_zeros_cost_nothing_and_have_a_gradient(name):
    h = torch.zeros(2, 4, 3, requires_grad=True)
    TERMS[name](h, [4, 2]).backward()
    assert (h.grad == 0).all()


@each_term
def test_halves_do_not_overflow(name):
    h = torch.full((1, 4, 3), 500.0, dtype=torch.float16)
    h[:, ::2] = 0
    assert TERMS[name](h).isfinite()


@each_term
def test_one_graph_holds_it(name):
    torch._dynamo.reset()
    h, lengths = torch.randn(3, 5, 4), torch.tensor([2, 5, 3])
    compiled = torch.compile(TERMS[name], fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(h, lengths), TERMS[name](h, lengths))


def test_states_that_stand_still_have_no_temporal_cost():
    h = torch.randn(2, 1, 4).expand(2, 5, 4)
    assert temporal(h) == 0
    assert norm_stabilizer(h) == 0
    assert activity(h) > 0


def test_turning_a_state_costs_change_but_not_norm():
    angle = torch.linspace(0, 3, 6, dtype=torch.float64)
    h = torch.stack([angle.cos(), angle.sin()], dim=-1).unsqueeze(0)
    assert temporal(h) > 0.01
    assert norm_stabilizer(h) < 1e-20


@pytest.mark.parametrize("lengths", [[0, 0], None])
def test_a_mean_over_no_step_is_refused(lengths):
    with pytest.raises(BadInput, match=r"no step counts.*every row is empty.*how the lengths were made"):
        activity(torch.randn(2, 0 if lengths is None else 3, 4), lengths)


@pytest.mark.parametrize("term", [temporal, norm_stabilizer])
@pytest.mark.parametrize("lengths", [[1, 0], [1, 1], [0, 0], None])
def test_where_no_two_steps_are_neighbors_nothing_changes(term, lengths):
    h = torch.randn(2, 1 if lengths is None else 3, 4, requires_grad=True)
    cost = term(h, lengths)
    cost.backward()
    assert cost.item() == 0
    assert not h.grad.any()


WRONG = {
    "too long": (torch.randn(2, 3, 4), [3, 4], r"from 3 to 4, but there are 3 steps.*batch_first=False"),
    "negative": (torch.randn(2, 3, 4), [3, -1], "from -1 to 3"),
    "too few": (torch.randn(2, 3, 4), [3], r"shape \(1,\), but the states have 2 rows"),
    "fractions": (torch.randn(2, 3, 4), [1.0, 2.0], "float32, but whole numbers are needed"),
    "a mask": (torch.randn(2, 3, 4), torch.ones(2, 3).bool(), r"bool.*mask.sum\("),
    "another device": (torch.randn(2, 3, 4), torch.ones(2, device="meta").long(), "on meta, but the states are on cpu"),
    "no batch": (torch.randn(3, 4), None, r"shape \(3, 4\).*h.unsqueeze\(0\)"),
    "whole numbers": (torch.ones(2, 3, 4).long(), None, "floating point numbers.*torch.int64"),
    "an answer": ((torch.randn(2, 3, 4), None), None, r"this is tuple.*give its output"),
}


@each_term
@pytest.mark.parametrize(("h", "lengths", "complaint"), WRONG.values(), ids=WRONG)
def test_what_cannot_be_is_refused(name, h, lengths, complaint):
    with pytest.raises(BadInput, match=complaint):
        TERMS[name](h, lengths)


@each_term
@given(batch=batches())
def test_time_may_come_first_as_in_torchs_layers(name, batch):
    h, lengths = batch
    turned = TERMS[name](h.transpose(0, 1), lengths, batch_first=False)
    torch.testing.assert_close(turned, TERMS[name](h, lengths))
    torch.testing.assert_close(TERMS[name](h.transpose(0, 1), batch_first=False), TERMS[name](h))
