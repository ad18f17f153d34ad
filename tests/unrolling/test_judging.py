"""Two ways agree up to rounding, and are told apart beyond it."""

import pytest
import torch
from torch import nn

import hiddenstate as hs
from hiddenstate.errors import Untraceable
from hiddenstate.unrolling.judging import agree as judged
from hiddenstate.unrolling.native import operations, products
from tests.support.changes import SIZE, Plain
from tests.support.random_cells import difference, random_case, with_other_rows

LARGE = torch.linspace(-1, 1, 50)


def agree(one, other):
    return judged([LARGE, one], [LARGE, other], 1e-3) is None  # raises where they do not


def test_rounding_is_no_difference():
    assert agree(LARGE * (1 + 1e-5), LARGE)


def test_what_is_zero_but_for_rounding_is_judged_by_the_size_of_the_others():
    assert agree(torch.full((5,), 1e-8), torch.full((5,), -2e-8))


@pytest.mark.parametrize("size", [1.0, 1e-3, 1e-4])
def test_a_small_gradient_that_is_missing_is_found(size):
    with pytest.raises(Untraceable, match="other numbers than the plain loop"):
        agree(torch.zeros(5), torch.full((5,), size))


def test_infinity_and_nan_may_be_right_where_both_have_them():
    odd = torch.tensor([1.0, float("nan"), float("inf"), -float("inf")])
    assert agree(odd, odd.clone())
    with pytest.raises(Untraceable, match="other numbers"):
        agree(odd.nan_to_num(), odd)
    with pytest.raises(Untraceable, match="other numbers"):
        agree(-odd, odd)


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("number", [0.0, 1.0, -1.0, 3.4e38, -3.4e38])
def test_no_number_passes_for_infinity_or_for_what_is_none(number, odd):
    with pytest.raises(Untraceable, match="other numbers"):
        agree(torch.full((5,), number), torch.full((5,), odd))
    with pytest.raises(Untraceable, match="other numbers"):
        agree(torch.full((5,), odd), torch.full((5,), number))


WRONG = {  # at one kind of number alone: what is none, what has no end, and what is almost so
    "what is no number": "({0} > 0 ? {0} : 0)",
    "infinity": "({0} > 3e38 ? 7 : {0} < 0 ? 0 : {0})",
    "large numbers": "({0} > 1e20 ? 1e20 : {0} < 0 ? 0 : {0})",
}


@pytest.mark.skipif(not products.addresses(), reason="there is no C compiler")
@pytest.mark.parametrize("name", WRONG)
def test_code_that_is_wrong_at_an_edge_of_its_numbers_alone_is_not_run(monkeypatch, name):
    monkeypatch.setitem(operations.POINTWISE, torch.ops.aten.relu.default, lambda t, a: WRONG[name].format(a))
    cell = type("Cell", (Plain,), {"forward": lambda self, x, h: torch.relu(self.inner(x) + self.recurrent(h))})()
    told = hs.explain(cell, torch.randn(3, 5, SIZE, dtype=torch.float64))
    assert told.fast
    assert "because its schedule gives other numbers than the plain loop" in told.compiled


def test_a_gradient_that_one_output_alone_does_not_reach_is_judged_by_that_output():
    class Signs(nn.Module):
        hidden_size = SIZE

        def __init__(self):
            super().__init__()
            self.inner, self.start = nn.Linear(SIZE, SIZE), nn.Parameter(torch.randn(SIZE))

        def initial_state(self, batch):
            return self.start.expand(batch, -1), self.start.expand(batch, -1)

        def forward(self, x, state):
            h, c = state
            h = torch.tanh(self.inner(x) + torch.sgn(c))  # whose slope torch gives as zeros
            return h, (h, torch.tanh(c + h))

    with pytest.raises(Untraceable, match="its schedule reaches other tensors by a gradient than the plain loop"):
        hs.unroll(Signs(), torch.randn(3, 5, SIZE), engine="fast")


def test_other_dtypes_and_whole_numbers_are_differences():
    with pytest.raises(Untraceable, match=r"torch.float64 \(50,\), not torch.float32 \(50,\)"):
        agree(LARGE.double(), LARGE)
    with pytest.raises(Untraceable, match="other numbers"):
        agree(torch.tensor([1, 2]), torch.tensor([1, 3]))


# Cells that nobody wrote


@pytest.mark.parametrize("seed", range(3))
def test_a_random_cell_gives_what_the_loop_gives(seed):
    case = random_case(seed)
    assert difference(case) == ""
    assert difference(with_other_rows(case)) == ""


@pytest.mark.long
@pytest.mark.parametrize("first", range(100, 400, 20))
def test_many_random_cells_give_what_the_loop_gives(first):
    refused = 0
    for seed in range(first, first + 20):
        case = random_case(seed, torch.float32 if seed % 4 == 0 else torch.float64)
        try:
            assert difference(case) == "", str(case)
            assert difference(with_other_rows(case)) == "", str(case)
        except Untraceable:
            refused += 1
    assert refused <= 4  # it is no way out to refuse
