"""What a model keeps and activation checkpointing reads again is known, whoever names it in the code."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hiddenstate.cells.behavior import find


class Kept(nn.Module):
    """A leaky sum that goes on from call to call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 4)
        self.register_buffer("h", torch.zeros(2, 4))

    @property
    def state(self) -> Tensor:
        return self.h

    def run(self, x: Tensor, h: Tensor) -> Tensor:
        for frame in x.unbind(1):
            h = 0.5 * h + self.inner(frame)
        return h


class Inside(Kept):
    def forward(self, x: Tensor) -> Tensor:
        self.h = checkpoint(lambda x: self.run(x, self.h), x, use_reentrant=False)
        return self.h


class ByProperty(Kept):
    def forward(self, x: Tensor) -> Tensor:
        self.h = checkpoint(lambda x: self.run(x, self.state), x, use_reentrant=False)
        return self.h


class ByText(Kept):
    def forward(self, x: Tensor) -> Tensor:
        self.h = checkpoint(lambda x: self.run(x, getattr(self, "h")), x, use_reentrant=False)  # noqa: B009
        return self.h


class AsArgument(Kept):
    def forward(self, x: Tensor) -> Tensor:
        self.h = checkpoint(self.run, x, self.h, use_reentrant=False)
        return self.h


class Nowhere(Kept):
    def forward(self, x: Tensor) -> Tensor:
        self.h = self.run(x, self.h)
        return self.h


@pytest.mark.parametrize(
    ("kind", "read"), [(Inside, True), (ByProperty, True), (ByText, True), (AsArgument, False), (Nowhere, False)]
)
def test_what_checkpointed_code_names_itself_is_read_again(kind, read):
    found = find(kind(), (torch.randn(2, 6, 3),))
    assert found.rerun == ({("", "h")} if read else set())
