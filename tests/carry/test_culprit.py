"""The first place in the code that gives something else for pieces than for the whole."""

from __future__ import annotations

import torch
from torch import Tensor

from hiddenstate.carry.culprit import first_difference, made_by


def apart(whole: Tensor, first: Tensor, second: Tensor) -> bool:
    same = whole.shape == first.shape
    return not torch.equal(whole, second if same else torch.cat([first, second]))


def doubled(x: Tensor) -> Tensor:
    twice = x * 2
    return twice - twice.mean()


def stepped(x: Tensor) -> list[Tensor]:
    return [step[None] + 1 for step in x]


def difference(run, x: Tensor, cut: int) -> str:
    whole, first, second = (made_by(lambda part=part: run(part)) for part in (x, x[:cut], x[cut:]))
    return first_difference(whole, (first, second), apart)


def test_the_first_line_that_differs_is_named():
    line = doubled.__code__.co_firstlineno + 2
    assert difference(doubled, torch.arange(6.0), 2) == f"test_culprit.py:{line}"


def test_what_every_step_makes_is_compared_step_by_step():
    assert difference(stepped, torch.arange(6.0), 4) == ""
