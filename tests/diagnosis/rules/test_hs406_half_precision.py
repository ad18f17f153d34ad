"""HS406: told of what is handed on in 16 bits, by its kind, and of nothing that is only stored so."""

import pytest
import torch
from torch import nn

import hiddenstate as hs


class Model(nn.Module):
    def __init__(self, dtype, *, stored):
        super().__init__()
        self.cell, self.head, self.dtype, self.stored = nn.GRUCell(3, 8), nn.Linear(8, 2), dtype, stored

    def forward(self, x):
        h, outs = x.new_zeros(len(x), 8), []
        for x_t in x.unbind(1):
            h = self.cell(x_t, h)
            rounded = h.to(self.dtype)
            outs.append(rounded.float() if self.stored else h)
            h = h if self.stored else rounded.float()
        return self.head(torch.stack(outs, 1))


@pytest.mark.parametrize(("dtype", "bits"), [(torch.float16, 11), (torch.bfloat16, 8)])
def test_the_bits_that_are_left_are_counted(dtype, bits):
    (finding,) = hs.diagnose(Model(dtype, stored=False), torch.randn(4, 9, 3))
    assert (finding.code, finding.numbers["bits"], finding.numbers["needed"]) == ("HS406", bits, 24)
    assert str(dtype).removeprefix("torch.") in finding.cause
    assert hs.diagnose(Model(dtype, stored=True), torch.randn(4, 9, 3)).codes == ()


def test_a_cast_that_takes_nothing_away_is_no_finding():
    assert hs.diagnose(Model(torch.float32, stored=False), torch.randn(4, 9, 3)).codes == ()
