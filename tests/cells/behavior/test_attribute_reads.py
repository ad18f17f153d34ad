"""Whether a forward may go on from what an earlier call left, read off the code."""

from __future__ import annotations

import pytest
from torch import Tensor, nn

from hiddenstate.cells.behavior.attribute_reads import may_be_read, read_in_forward


class Kept(nn.Module):
    h: Tensor | None = None

    def begin(self, x: Tensor) -> None:
        self.h = x

    def begin_if(self, x: Tensor, reset: bool) -> None:
        if reset:
            self.h = x


class Checked(Kept):
    def forward(self, x, reset=False):
        if reset or self.h is None:
            self.h = x
        return self.h + x


class Told(Kept):
    """Only its caller says when it starts anew."""

    def forward(self, x, reset=False):
        if reset:
            self.h = x
        return self.h + x


class ToldByMethod(Kept):
    def forward(self, x, reset=False):
        self.begin_if(x, reset)
        return self.h + x


class Anew(Kept):
    def forward(self, x):
        self.h = x
        return self.h + x


class AnewByMethod(Kept):
    def forward(self, x):
        self.begin(x)
        return self.h + x


class Reported(Kept):
    """Read by a method that its forward does not call."""

    def last(self):
        return self.h

    def forward(self, x):
        self.h = x
        return x


@pytest.mark.parametrize("kind", [Checked, Told, ToldByMethod])
def test_what_a_forward_may_find_there_is_read(kind):
    assert read_in_forward(kind(), "h")
    assert may_be_read(kind(), "h")


@pytest.mark.parametrize("kind", [Anew, AnewByMethod, Reported])
def test_what_it_writes_first_is_not(kind):
    assert not read_in_forward(kind(), "h")


def test_what_another_method_reads_may_be_read():
    assert may_be_read(Reported(), "h")
    assert not may_be_read(Anew(), "h")
