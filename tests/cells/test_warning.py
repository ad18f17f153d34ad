"""Warnings point at the user's own line."""

from __future__ import annotations

import inspect
import warnings

import torch
from torch import Tensor, nn

import hiddenstate as hs
from hiddenstate.cells import warn


class Loop(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros_like(x[:, 0])
        for frame in x.unbind(1):
            h = torch.tanh(0.5 * h + frame)
        return h


def test_a_warning_points_at_the_innermost_line_that_is_not_ours():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn("mind", UserWarning)
        line = inspect.currentframe().f_lineno - 1
    (only,) = caught
    assert (only.filename, only.lineno) == (__file__, line)


def test_what_is_not_carried_is_said_at_the_call_of_the_model():
    model = Loop()
    with warnings.catch_warnings(record=True) as caught, hs.Carry(model):
        warnings.simplefilter("always")
        model(torch.randn(2, 6, 3))
    assert {each.filename for each in caught} == {__file__}


def test_what_is_not_recorded_is_said_at_the_call_or_the_end_of_the_block():
    class Scan(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.logcumsumexp(x, dim=1)

    model = Scan()
    with warnings.catch_warnings(record=True) as caught, hs.record(model):
        warnings.simplefilter("always")
        model(torch.randn(2, 6, 3))
    assert {each.filename for each in caught} == {__file__}
