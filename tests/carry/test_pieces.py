"""Whether pieces give the whole, as it is tried on any function from inputs to outputs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from hiddenstate.carry.pieces import compare_pieces, difference, tolerance_of, without_dropout
from hiddenstate.errors import CarryError

TIMES = (((0, 0), 1),)


class Summing:
    """A running sum along time, whose total goes on from piece to piece."""

    def __init__(self, *, forgets: bool = False, longest: int = 100) -> None:
        self.total: Tensor | float = 0.0
        self.forgets, self.longest, self.lengths = forgets, longest, []

    def __call__(self, inputs, *, on: bool):
        (x, *_), _ = inputs
        if x.shape[1] > self.longest:
            raise IndexError("too long")
        self.lengths.append(x.shape[1])
        out = x.cumsum(1) + (self.total if on and not self.forgets else 0.0)
        self.total = out[:, -1:]
        return out


@settings(max_examples=20, deadline=None)
@given(steps=st.integers(1, 20), rows=st.integers(1, 3))
def test_pieces_that_go_on_give_the_whole_and_others_do_not(steps, rows):
    x = torch.randn(rows, steps, 2, dtype=torch.float64) + 1
    assert compare_pieces(((x,), {}), TIMES, Summing()).holds
    assert not compare_pieces(((x,), {}), TIMES, Summing(forgets=True)).holds


def test_a_short_input_is_repeated_and_one_that_may_not_be_longer_is_cut_as_it_is():
    short, strict = Summing(), Summing(longest=5)
    assert compare_pieces(((torch.randn(2, 3, 1),), {}), TIMES, short).holds
    assert max(short.lengths) >= 8
    assert compare_pieces(((torch.randn(2, 5, 1),), {}), TIMES, strict).holds
    assert max(strict.lengths) == 5


def test_what_cannot_be_tried_says_why():
    x = torch.randn(2, 6, 1)
    assert "runs along time was not seen" in compare_pieces(((x,), {}), (), Summing()).why_not
    assert "IndexError: too long" in compare_pieces(((x,), {}), TIMES, Summing(longest=2)).why_not
    random = compare_pieces(((x,), {}), TIMES, lambda inputs, *, on: torch.randn_like(inputs[0][0]))
    assert not random.tried
    assert "random numbers" in random.why_not

    def refuses(inputs, *, on):
        raise CarryError("not this one")

    assert compare_pieces(((x,), {}), TIMES, refuses).refused


def test_other_inputs_along_time_are_cut_too():
    seen = []

    def run(inputs, *, on):
        (x, mask, table), named = inputs
        seen.append((x.shape[1], mask.shape[1], table.shape, named["weights"].shape[1]))
        return x * mask[..., None]

    x, mask, table = torch.randn(2, 8, 3), torch.ones(2, 8), torch.randn(5, 3)
    assert compare_pieces(((x, mask, table), {"weights": torch.ones(2, 8)}), TIMES, run).holds
    assert all(each[0] == each[1] == each[3] and each[2] == (5, 3) for each in seen)


def test_the_last_of_a_piece_is_compared_where_there_is_no_time():
    a, b = torch.zeros(2, 3), torch.ones(2, 3)
    assert difference(b, a, b) == 0.0
    assert difference(a, a, b) == 1.0
    assert difference(torch.zeros(2, 7), torch.zeros(2, 3), torch.zeros(2, 5)) is None


def test_the_tolerance_grows_with_the_numbers_and_shrinks_with_their_precision():
    coarse, fine = torch.ones(3), torch.ones(3, dtype=torch.float64)
    assert tolerance_of([100 * coarse]) == pytest.approx(100 * tolerance_of([coarse]))
    assert tolerance_of([fine]) < tolerance_of([coarse])


def test_only_what_drops_is_switched_off():
    model = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(3), nn.GRU(3, 3, 2, dropout=0.5), nn.GRU(3, 3))
    without_dropout(model)
    assert [module.training for module in model] == [False, True, False, True]


@pytest.mark.parametrize("rows", [1, 2, 6])
@pytest.mark.parametrize("tail", [(), (3,)])
def test_steps_row_after_row_on_one_axis_are_put_together_row_by_row(rows, tail):
    whole = torch.randn(rows, 10, *tail)
    pieces = [piece.flatten(0, 1) for piece in whole.split([4, 6], dim=1)]
    assert difference(whole.flatten(0, 1), *pieces) == 0
    assert difference(whole.flatten(0, 1), pieces[0], pieces[1] + 1) > 0.5
