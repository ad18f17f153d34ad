"""A step that was read runs on any tensors, with its numbers as constants or among the tensors."""

import pytest
import torch
from torch import nn

from hiddenstate.errors import Untraceable
from hiddenstate.unrolling.reading import StepReader


class Scaled(nn.Module):
    """A number beside a weight."""

    scale = 0.5

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 4)

    def forward(self, x, h):
        return torch.tanh(self.inner(x) + h).view(x.shape[0], 2, 2).flatten(1) * self.scale


def read(cell, rows):
    x, h = torch.randn(rows, 3), torch.randn(rows, 4)
    return StepReader().read(cell, x, h, [h]), x, h


def test_numbers_may_stand_among_the_tensors():
    cell = Scaled()
    reading, x, h = read(cell, 5)
    assert reading.constants() == (0.5,)  # the number of rows is none of them
    fluid = reading.made_fluid()
    assert fluid.constants() == ()
    for one in (reading, fluid):
        torch.testing.assert_close(one.run(one.weights, [x, h]), [cell(x, h)])
    other = [*fluid.weights[:-1], torch.tensor(2.0, dtype=torch.float64)]
    cell.scale = 2.0
    torch.testing.assert_close(fluid.run(other, [x, h]), [cell(x, h)])


def test_numbers_are_fluid_from_their_second_value_on():
    graph = read(Scaled(), 5)[0].graph
    assert [graph.is_fluid(value) for value in ("1.0", "1.0", "2.0", "2.0", "1.0")] == [False, False, True, True, True]
    graph.rigid = True
    assert not graph.is_fluid("3.0")


def test_a_step_that_computes_with_the_number_of_rows_is_told_from_one_that_shapes_by_it():
    counting = type("Counting", (Scaled,), {"forward": lambda self, x, h: self.inner(x) / x.shape[0] + h})()
    assert read(counting, 5)[0].graph.counts
    assert not read(Scaled(), 5)[0].graph.counts


def test_a_step_that_writes_is_refused_and_writes_nothing():
    writing = type("Writing", (Scaled,), {"forward": lambda self, x, h: self.inner(x) + h.mul_(2)})()
    reading, x, h = read(writing, 5)
    before = h.clone()
    with pytest.raises(Untraceable, match="writes into a tensor that it was given"):
        reading.run_watched([x, h])
    assert torch.equal(h, before)


def test_a_step_that_computes_with_other_sizes_does_not_count_rows():
    scaled = type("Scaled", (Scaled,), {"forward": lambda self, x, h: (x.sum(1, keepdim=True) + h) / h.shape[1] ** 0.5})
    assert not read(scaled(), 5)[0].graph.counts
    folded = type("Folded", (Scaled,), {"forward": lambda self, x, h: h.view(x.shape[0] * 2, 2).tanh().view(-1, 4)})
    assert not read(folded(), 5)[0].graph.counts
