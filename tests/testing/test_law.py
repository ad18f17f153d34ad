"""Differences beyond rounding, in words."""

import pytest
import torch

from hiddenstate.testing.law import difference


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        ({"h": torch.zeros(2)}, {"h": torch.zeros(2)}, None),
        ({"h": torch.zeros(2)}, {"h": torch.full((2,), 1e-6)}, None),
        ({"h": torch.tensor([float("nan")])}, {"h": torch.tensor([float("nan")])}, None),
        ({"h": torch.zeros(2)}, {"h": torch.tensor([0.0, 0.5])}, "h differs by up to 0.5, where rounding explains"),
        ({"h": torch.zeros(2)}, {"c": torch.zeros(2)}, "Here are h, there c."),
        ({"h": torch.zeros(2)}, {"h": torch.zeros(3)}, "h is (2,) torch.float32 here, and (3,) torch.float32 there."),
        ({"h": torch.zeros(2).double()}, {"h": torch.full((2,), 1e-6).double()}, "differs by up to 1e-06"),
        ({"h": torch.ones(2).long()}, {"h": torch.full((2,), 3)}, "h differs by up to 2"),
    ],
)
def test_what_differs_is_said(one, other, said):
    seen = difference(one, other)
    assert (seen is None) if said is None else (said in seen)
