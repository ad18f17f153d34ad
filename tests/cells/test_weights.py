"""States match the weights of the module that makes them."""

import torch
from torch import nn

from hiddenstate.cells import weights_like


class Buffered(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.zeros(2, dtype=torch.complex64))


def test_the_first_weight_that_is_no_whole_number_tells():
    assert weights_like(nn.Sequential(nn.ReLU(), nn.GRUCell(3, 4).double())) == (torch.device("cpu"), torch.float64)
    assert weights_like(Buffered())[1] == torch.complex64


def test_a_parameter_comes_before_any_buffer_wherever_it_is():
    assert weights_like(nn.Sequential(nn.BatchNorm1d(3, affine=False), nn.Linear(3, 4).half()))[1] == torch.float16
    assert weights_like(nn.Sequential(Buffered(), nn.Linear(3, 4).double()))[1] == torch.float64


def test_modules_without_weights_that_hold_each_other_have_torchs_default():
    one, other = nn.Module(), nn.Module()
    one.other, other.one = other, one
    assert weights_like(one) == (torch.get_default_device(), torch.get_default_dtype())
