import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hiddenstate.errors import BadInput
from hiddenstate.pool import Taps

H, LENGTHS = torch.randn(3, 7, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([4, 7, 3])


@given(st.data())
def test_taps_are_pythons_indices_into_each_row(data):
    lengths = data.draw(st.lists(st.integers(2, 6), min_size=1, max_size=3))
    shortest = min(lengths)
    steps = data.draw(st.lists(st.integers(-shortest, shortest - 1), min_size=1, max_size=4))
    h = torch.randn(len(lengths), 6, 4)
    found = Taps(steps)(h, lengths)
    for row, length, states in zip(found, lengths, h, strict=True):
        assert torch.equal(row, torch.stack([states[:length][step] for step in steps]))


@given(every=st.integers(1, 9))
def test_every_keeps_the_steps_that_a_recording_keeps(every):
    assert torch.equal(Taps(every=every)(H), H[:, ::every])


def test_one_head_serves_all_taps():
    head = nn.Linear(4, 2)
    assert torch.allclose(Taps([0, 2, -1], head)(H), head(H[:, [0, 2, -1]]))


def test_a_head_sees_rows_and_units_only():
    head = nn.BatchNorm1d(4)  # would take (batch, taps, unit) for (batch, channel, place)
    assert Taps([0, 1, 2], head)(H).shape == (3, 3, 4)


def test_own_heads_serve_one_tap_each():
    heads = [nn.Linear(4, 2), nn.Linear(4, 2)]
    wanted = torch.stack([heads[0](H[:, 1]), heads[1](H[:, -1])], dim=1)
    taps = Taps([1, -1], heads)
    assert torch.allclose(taps(H), wanted)
    assert len(list(taps.parameters())) == 4


def test_a_row_too_short_is_refused_with_two_ways_out():
    with pytest.raises(BadInput, match=r"tap 1 asks for step 5 of row 0, which has 4 steps, 0 to 3.*'last'.*'zero'"):
        Taps([0, 5])(H, LENGTHS)
    with pytest.raises(BadInput, match=r"tap 0 asks for step -1 of row 2, which has 3 steps"):
        Taps([-4])(H, LENGTHS)
    with pytest.raises(BadInput, match=r"tap 0 asks for step 7 of row 0, which has 7 steps"):
        Taps([7])(H)


def test_a_row_too_short_may_get_its_nearest_step():
    found = Taps([5, -4, 100], short="last")(H, LENGTHS)
    assert torch.equal(found[2], torch.stack([H[2, 2], H[2, 0], H[2, 2]]))
    assert torch.equal(found[1], torch.stack([H[1, 5], H[1, 3], H[1, 6]]))


def test_a_row_too_short_may_get_zeros_without_gradient():
    head, h = nn.Linear(4, 2), H.clone().requires_grad_()
    found = Taps([5], head, short="zero")(h, LENGTHS)
    found.sum().backward()
    assert (found[[0, 2]] == 0).all()
    assert torch.allclose(found[1, 0], head(H[1, 5]))
    assert (h.grad[[0, 2]] == 0).all()
    assert torch.equal(head.bias.grad, torch.ones(2))


def test_it_can_be_asked_which_taps_are_there():
    taps = Taps([0, 5, -4], short="zero")
    assert taps.present(H, LENGTHS).tolist() == [[True, False, True], [True, True, True], [True, False, False]]
    assert taps.present(H).all()


def test_a_compiled_tap_still_refuses_a_short_row():
    torch._dynamo.reset()
    compiled = torch.compile(Taps([5]), fullgraph=True, backend="aot_eager")
    with pytest.raises(RuntimeError, match="a row is too short for a tap"):
        compiled(H, LENGTHS)


WRONG = {
    "neither": (lambda: Taps(), r"either steps, for example Taps\(\[10, 20, -1\]\), or every"),
    "both": (lambda: Taps([1], every=2), "either steps"),
    "one number": (lambda: Taps(3), r"one number: Taps\(\[3\]\), or Taps\(every=3\)"),
    "no step": (lambda: Taps([]), "one or more whole numbers"),
    "fractions": (lambda: Taps([1.5]), r"one or more whole numbers, but these are \[1.5\]"),
    "every 0": (lambda: Taps(every=0), "every is a whole number from 1, but this is 0"),
    "a policy": (lambda: Taps([1], short="skip"), "short is 'error', 'last' or 'zero', but this is 'skip'"),
    "too few heads": (lambda: Taps([1, 2], [nn.Linear(4, 2)]), "1 heads for 2 taps: give one for each"),
    "words": (lambda: Taps([1], "own"), "heads are one module or a list of modules, but these are 'own'"),
}


@pytest.mark.parametrize(("make", "complaint"), WRONG.values(), ids=WRONG)
def test_what_cannot_be_tapped_is_refused(make, complaint):
    with pytest.raises(BadInput, match=complaint):
        make()


def test_own_heads_need_as_many_taps_as_there_are():
    with pytest.raises(BadInput, match=r"2 heads, but every=2 makes 4 taps.*give one head"):
        Taps(every=2, heads=[nn.Linear(4, 2), nn.Linear(4, 2)])(H)


def test_heads_of_different_widths_are_refused():
    with pytest.raises(BadInput, match=r"different shapes, \(3, 2\), \(3, 5\)"):
        Taps([0, 1], [nn.Linear(4, 2), nn.Linear(4, 5)])(H)


def test_it_shows_its_taps():
    assert "[0, -1]" in repr(Taps([0, -1]))
    assert "every=3" in repr(Taps(every=3))
