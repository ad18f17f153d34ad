"""Where each operand came from: views, writes through other tensors, what was not seen."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from .noting import run


class Model(nn.Module):
    """Runs a function of one tensor."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("table", torch.ones(3))

    def forward(self, x):
        return self.function(self, x)


def traced(function, x=None):
    with torch.no_grad():
        trace, result = run(Model(function), (torch.ones(2, 3) if x is None else x,), {})
    return trace, result


def sources(trace, op) -> set[str]:
    """The names of the operations, or the labels, that an operation's operands come from."""
    return {trace.ops[value.op].name if value.op >= 0 else value.origin for value in op.ins}


def last(trace, name):
    return [op for op in trace.ops if op.name == name][-1]


def test_operands_are_arguments_parameters_buffers_constants_or_made():
    outside = torch.ones(3)
    trace, _ = traced(lambda m, x: (x * m.weight + m.table).sub(outside))
    assert sources(trace, last(trace, "mul")) == {"argument", "parameter"}
    assert sources(trace, last(trace, "add")) == {"mul", "buffer"}
    assert sources(trace, last(trace, "sub")) == {"add", "outside"}


def test_a_write_in_place_makes_a_new_value():
    trace, _ = traced(lambda m, x: (x * 1).add_(1).exp())
    assert sources(trace, last(trace, "exp")) == {"add_"}


def test_a_write_to_a_tensor_reaches_its_views():
    def function(m, x):
        h = x * 1
        view = h[0]
        h.add_(1)
        return view.exp()

    trace, _ = traced(function)
    assert sources(trace, last(trace, "alias")) == {"add_"}
    assert sources(trace, last(trace, "exp")) == {"alias"}


def test_a_write_to_a_view_reaches_the_tensor():
    def function(m, x):
        h = x * 1
        h[0].mul_(2)
        return h.exp()

    trace, _ = traced(function)
    assert sources(trace, last(trace, "alias")) == {"mul_", "mul"}


def test_what_was_written_by_index_is_read_by_index_and_nothing_else():
    def function(m, x):
        store = torch.zeros(4, 2, 3)
        store[1] = x.exp()
        store[2] = x.log()
        return store[1].sin(), store[2].cos(), store[3].tan()

    trace, _ = traced(function)
    reads = [op for op in trace.ops if op.name == "__getitem__"]
    assert [sources(trace, op) for op in reads] == [{"__setitem__"}, {"__setitem__"}, {"zeros"}]
    written = [op for op in trace.ops if op.name == "__setitem__"]
    assert reads[0].ins == written[0].outs
    assert reads[1].ins == written[1].outs


def test_a_value_is_what_it_was_although_its_tensor_was_written_later():
    def function(m, x):
        h = x * 2
        y = h.exp()
        h.zero_()
        return y

    trace, _ = traced(function)
    (h,) = last(trace, "mul").outs
    assert torch.equal(h.data(), torch.full((2, 3), 2.0))


def test_what_is_written_whole_does_not_depend_on_what_was_there():
    trace, _ = traced(lambda m, x: (x * 1).copy_(m.table.expand(2, 3)))
    assert sources(trace, last(trace, "copy_")) == {"expand"}
    trace, _ = traced(lambda m, x: torch.add(x, 1, out=torch.empty(2, 3)).exp())
    assert sources(trace, last(trace, "add")) == {"argument"}
    assert sources(trace, last(trace, "exp")) == {"add"}


def test_a_write_that_nobody_saw_is_not_taken_for_what_was_there():
    with pytest.warns(DeprecationWarning, match="script"):
        hidden = torch.jit.script(_written_in_script)

    def function(m, x):
        h = x * 1
        hidden(h)
        return h.exp()

    trace, _ = traced(function)
    assert sources(trace, last(trace, "exp")) == {"unseen"}


def _written_in_script(x: torch.Tensor):
    x.add_(1)


def test_writes_are_seen_in_inference_mode_too():
    def function(m, x):
        with torch.inference_mode():
            h = x * 1
            h.add_(1)
            return h.exp()

    trace, _ = traced(function)
    assert sources(trace, last(trace, "exp")) == {"add_"}


def test_only_the_shape_of_a_tensor_is_not_its_content():
    trace, _ = traced(lambda m, x: (torch.zeros_like(x), x.new_ones(2), m.weight.expand_as(x)))
    assert last(trace, "zeros_like").ins == []
    assert last(trace, "new_ones").ins == []
    assert sources(trace, last(trace, "expand_as")) == {"parameter"}


def test_results_and_random_numbers_are_those_of_a_plain_call():
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
    x = torch.randn(2, 3)
    torch.manual_seed(0)
    plain = model(x)
    torch.manual_seed(0)
    _, result = run(model, (x,), {})
    assert torch.equal(plain, result)
    assert "forward" not in vars(model)
