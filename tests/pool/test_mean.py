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
