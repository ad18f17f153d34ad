"""Two ways agree up to rounding, and are told apart beyond it."""

import pytest
import torch

from hiddenstate.errors import Untraceable
from hiddenstate.unrolling.building import _agree

LARGE = torch.linspace(-1, 1, 50)


def agree(one, other):
    _agree([LARGE, one], [LARGE, other], 1e-3)


def test_rounding_is_no_difference():
    agree(LARGE * (1 + 1e-5), LARGE)


def test_what_is_zero_but_for_rounding_is_judged_by_the_size_of_the_others():
    agree(torch.full((5,), 1e-8), torch.full((5,), -2e-8))


@pytest.mark.parametrize("size", [1.0, 1e-3, 1e-4])
def test_a_small_gradient_that_is_missing_is_found(size):
    with pytest.raises(Untraceable, match="other numbers than the plain loop"):
        agree(torch.zeros(5), torch.full((5,), size))


def test_infinity_and_nan_may_be_right_where_both_have_them():
    odd = torch.tensor([1.0, float("nan"), float("inf"), -float("inf")])
    agree(odd, odd.clone())
    with pytest.raises(Untraceable, match="other numbers"):
        agree(odd.nan_to_num(), odd)
    with pytest.raises(Untraceable, match="other numbers"):
        agree(-odd, odd)


def test_other_dtypes_and_whole_numbers_are_differences():
    with pytest.raises(Untraceable, match=r"torch.float64 \(50,\), not torch.float32 \(50,\)"):
        agree(LARGE.double(), LARGE)
    with pytest.raises(Untraceable, match="other numbers"):
        agree(torch.tensor([1, 2]), torch.tensor([1, 3]))
