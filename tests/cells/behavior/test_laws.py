"""Laws: whatever a loop computes, what is found is what it carries on, with the values that it had."""

from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hiddenstate.cells.behavior import find
from tests.cells.behavior import models
from tests.cells.behavior.noting import noted


@st.composite
def programs(draw) -> tuple[int, list[list[int]], list[str]]:
    """How many variables a loop has, which of them each one's next value reads, and by what function."""
    count = draw(st.integers(1, 4))
    reads = [draw(st.lists(st.integers(0, count - 1), max_size=count, unique=True)) for _ in range(count)]
    functions = [draw(st.sampled_from(["tanh", "sin", "mul", "where"])) for _ in range(count)]
    return count, reads, functions


class Program(nn.Module):
    """A loop over time with several variables; all new values are made of the old ones."""

    def __init__(self, program: tuple[int, list[list[int]], list[str]], cuts: int) -> None:
        super().__init__()
        count, self.reads, self.functions = program
        self.cuts = cuts
        self.maps = nn.ModuleList([nn.Linear(4, 4) for _ in range(count)])

    def forward(self, x):
        state = [torch.full_like(x[:, 0], 0.1 * i) for i in range(len(self.maps))]
        outs = []
        for t in range(x.shape[1]):
            if self.cuts and t % self.cuts == 0:
                state = [part.detach() for part in state]
            state = [self.next(i, x[:, t], state) for i in range(len(state))]
            for i, part in enumerate(state):
                LOG.setdefault(i, []).append(part)
            outs.append(torch.stack(state).sum(0))
        return torch.stack(outs, 1)

    def next(self, i, x, state):
        z = self.maps[i](x)
        for j in self.reads[i]:
            z = z + self.maps[j](state[j])
        match self.functions[i]:
            case "tanh":
                return torch.tanh(z)
            case "sin":
                return torch.sin(z)
            case "mul":
                return 0.5 * z
            case _:
                return torch.where(x > 0, z.tanh(), x)


LOG: dict[int, list[torch.Tensor]] = {}


@settings(max_examples=40, deadline=None)
@given(
    program=programs(),
    rows=st.integers(1, 4),
    steps=st.integers(3, 8),
    cuts=st.integers(0, 3),
)
def test_what_is_found_is_what_a_loop_carries_on(program, rows, steps, cuts):
    torch.manual_seed(0)
    model, x = Program(program, cuts), torch.randn(rows, steps, 4)
    LOG.clear()
    model(x)
    own = {i: [part.detach().clone() for part in parts] for i, parts in LOG.items()}
    found = find(model, (x,))
    carried = {j for reads in program[1] for j in reads}
    if not carried:
        assert found.recurrences == ()
        return
    (loop,) = found.recurrences
    assert loop.kind == "loop"
    assert loop.steps == steps
    assert {part.name for part in loop.parts} == {f"state[{j}]" for j in carried}
    for part in loop.parts:
        number = int(part.name[6:-1])
        assert part.batch_axis == 0
        assert torch.equal(part.initial, torch.full_like(x[:, 0], 0.1 * number))
        assert all(torch.equal(a, b) for a, b in zip(part.values, own[number], strict=True))


@settings(max_examples=15, deadline=None)
@given(cut=st.integers(3, 7), seed=st.integers(0, 99))
def test_a_shorter_call_finds_the_beginning_of_a_longer_one(cut, seed):
    torch.manual_seed(seed)
    model, x = models.Dicts(), torch.randn(3, 8, 4)
    (whole,), (head,) = find(model, (x,)).recurrences, find(model, (x[:, :cut],)).recurrences
    noted()
    assert [part.name for part in whole.parts] == [part.name for part in head.parts]
    for long, short in zip(whole.parts, head.parts, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(long.values[:cut], short.values, strict=True))


@settings(max_examples=15, deadline=None)
@given(order=st.permutations(range(3)), seed=st.integers(0, 99))
def test_rows_in_another_order_give_the_same_rows_in_that_order(order, seed):
    torch.manual_seed(seed)
    model, x = models.Pair(), torch.randn(3, 5, 4)
    (one,), (other,) = find(model, (x,)).recurrences, find(model, (x[list(order)],)).recurrences
    noted()
    for a, b in zip(one.parts, other.parts, strict=True):
        for left, right in zip(a.values, b.values, strict=True):
            assert torch.allclose(left.index_select(a.batch_axis, torch.tensor(order)), right, atol=1e-6)


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize("make", [models.Elman, models.Pair, models.Buffered, models.InPlace, models.Stacked])
def test_two_thousand_steps_are_found_in_seconds(make):
    model, x = make(), torch.randn(4, 2048, 4)
    begin = time.process_time()
    found = find(model, (x,))
    spent = time.process_time() - begin
    noted()
    assert all(each.steps == 2048 for each in found.recurrences)
    assert found.recurrences
    assert spent < 5
