"""Two ways agree up to rounding, and are told apart beyond it."""

import pytest
import torch

from hiddenstate.errors import Untraceable
from hiddenstate.unrolling.judging import agree as judged
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
