import math

import pytest
import torch

from hiddenstate.pool import Mean


def test_halves_are_summed_in_full_precision():
    h = torch.full((1, 5000, 1), 60.0, dtype=torch.float16)  # the sum, 300000, is beyond the largest half
    assert Mean()(h, [4999]).item() == 60.0


def test_autocast_does_not_make_it_less_precise():
    h = torch.randn(4, 9, 5)
    with torch.autocast("cpu", torch.bfloat16):
        found = Mean()(h, [9, 8, 7, 6])
    assert found.dtype == torch.float32
    assert torch.equal(found, Mean()(h, [9, 8, 7, 6]))


@pytest.mark.parametrize("layout", ["batch first", "time first", "every second"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("grad", [False, True])
def test_every_way_to_compute_it_gives_the_same(layout, dtype, grad):
    h = torch.randn(3, 8, 5, dtype=dtype)
    h = h.transpose(0, 1).contiguous().transpose(0, 1) if layout == "time first" else h
    h = h[:, ::2] if layout == "every second" else h
    wanted = torch.stack([h[0, :3].mean(0), h[1, :4].mean(0), h[2, :1].mean(0)])
    h[0, 3:], h[2, 1:] = math.nan, math.inf
    found = Mean()(h.requires_grad_(grad), [3, 4, 1])
    assert torch.allclose(found, wanted)
    assert found.requires_grad == grad
