"""A turn as a module: values with slots for their tensors, and the one dtype that several are put together in."""

import pytest
import torch

from hiddenstate.unrolling.rolled.body import TensorKind, TensorSlot, packed_dtype, slotted
from hiddenstate.unrolling.rolled.index import LeftAlone


def kinds(*dtypes):
    return [TensorKind((2,), dtype) for dtype in dtypes]


def test_tensors_become_slots_and_the_rest_stays():
    one, two = torch.zeros(1), torch.ones(2)
    nested, found = slotted({"h": (one, None), "n": [two, 3]}, 5, 0)
    assert nested == {"h": (TensorSlot(5), None), "n": [TensorSlot(6), 3]}
    assert found[0] is one
    assert found[1] is two


def test_other_things_are_not_handed_on():
    with pytest.raises(LeftAlone, match="a Generator is handed on from turn to turn, or left behind"):
        slotted([torch.Generator()], 0, 0)


def test_one_dtype_holds_all_exactly():
    assert packed_dtype(kinds(torch.float32, torch.bool)) is torch.float32
    assert packed_dtype(kinds(torch.int64, torch.int64)) is torch.int64


@pytest.mark.parametrize(
    ("dtypes", "reason"),
    [
        ((torch.float32, torch.float64), "of several dtypes"),
        ((torch.complex64,), "of several dtypes"),
        ((torch.int64, torch.int32), "of several dtypes"),
        ((torch.float32, torch.int64), "of whole and of other numbers"),
    ],
)
def test_what_no_dtype_holds(dtypes, reason):
    with pytest.raises(LeftAlone, match=f"a turn takes pieces, or leaves values, {reason}"):
        packed_dtype(kinds(*dtypes))
