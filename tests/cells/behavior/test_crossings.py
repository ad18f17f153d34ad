"""The last turn of a loop may go another way: what it leaves is told by the variable that holds the state."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hiddenstate.cells.behavior import find


class Ends(nn.Module):
    """A loop whose last turn does only what `last` says."""

    def __init__(self, last: str, *, late: bool = True) -> None:
        super().__init__()
        self.mix, self.last, self.late, self.states = nn.Linear(7, 4), last, late, []

    def forward(self, x: Tensor) -> Tensor:
        self.states.clear()
        h, out = x.new_zeros(len(x), 4), []
        for t in range(x.shape[1]):
            final = t == x.shape[1] - 1
            y = torch.tanh(self.mix(torch.cat([x[:, t], h], 1)))
            if not final or self.last == "whole":
                h = y / 2
            elif self.last == "half":
                h = y
            elif self.last == "other":
                h = torch.sin(y)
            out.append(y)
            self.states.append(h.detach().clone())
        return torch.stack(out, 1) if self.late else h


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("last", ["whole", "half", "other", "nothing"])
def test_every_state_has_the_value_it_had(last, late):
    model, x = Ends(last, late=late), torch.randn(2, 6, 3)
    (loop,) = find(model, (x,)).recurrences
    model(x)
    (part,) = loop.parts
    assert part.name == "h"
    for value, true in zip(part.values, model.states, strict=True):
        torch.testing.assert_close(value, true)
