"""Rows that run apart are shared out among threads; rows that mix are not; both give what the loop gives."""

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn

import hiddenstate as hs
from hiddenstate.cells import as_layer
from hiddenstate.unrolling.building import build, compile_loops
from hiddenstate.unrolling.checks import Task
from hiddenstate.unrolling.fast import prepare
from hiddenstate.unrolling.native import CompiledRunner, products
from hiddenstate.unrolling.reading import StepReader
from tests.support.cells import CELLS, LayerNormLSTMCell, TanhCell
from tests.support.equal import assert_same, inputs_of

pytestmark = pytest.mark.skipif(not products.own_in_loops(), reason="no compiler, or not the processor for it")

every_cell = pytest.mark.parametrize("sample", CELLS.values(), ids=CELLS)


class Centered(TanhCell):
    """Subtracts what the rows have in common, so that they depend on each other."""

    def forward(self, x, state):
        """Return the next state."""
        return torch.tanh(self.inner(x) + self.recurrent(state - state.mean(0, keepdim=True)))


class Turned(nn.Module):
    """Keeps its weights the other way round, in every second column of a larger matrix."""

    def __init__(self, size):
        super().__init__()
        self.hidden_size = size
        self.weight = nn.Parameter(torch.randn(2 * size, size).t()[:, ::2] / size**0.5)

    def forward(self, x, h):
        """Return the next state."""
        return torch.tanh(x @ self.weight + h @ self.weight.t())


class Crowd(nn.Module):
    """Carries several vectors for each row, which meet in products of their own."""

    def __init__(self, size):
        super().__init__()
        self.hidden_size, self.mix = size, nn.Linear(size, size)

    def initial_state(self, batch):
        """Return vectors that differ."""
        first = torch.linspace(-1, 1, 3 * self.hidden_size, dtype=self.mix.weight.dtype).sin()
        return first.view(1, 3, self.hidden_size).repeat(batch, 1, 1)

    def forward(self, x, many):
        """Return a summary and the next vectors."""
        share = torch.softmax(many @ self.mix(x).unsqueeze(-1), 1)  # (batch, 3, 1)
        many = torch.tanh(self.mix(many) * share + many.flip(1))
        return many.mean(1), many


def with_threads(count, call):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        return call()
    finally:
        torch.set_num_threads(before)


def runners_of(cell, x):
    run = prepare(as_layer(cell, x[:, 0]), Task(x), StepReader())
    schedule, _ = build(run)
    compile_loops(schedule, run)
    assert schedule.plain_because == ""
    return [CompiledRunner(loop) for loop in schedule.loops()]


def check(cell, x, count, **options):
    def outcome(engine):
        out, state = hs.unroll(cell, x, engine=engine, **options)
        return [out, *state.values()]

    loose = {} if x.dtype == torch.float64 else {"atol": 1e-4, "rtol": 1e-3}
    ways = [lambda: outcome("loop"), lambda: outcome("fast")]
    with_threads(count, lambda: assert_same(*ways, inputs_of(cell, x), **loose))  # type: ignore[call-arg]


@pytest.mark.sample(3)
@every_cell
def test_threads_with_rows_of_their_own_give_what_the_loop_gives(sample):
    cell, x = sample.cell(), sample.x(batch=11, steps=5)
    check(cell, x, 2)
    check(cell, x, 2, lengths=[5, 3, 5, 1, 2, 4, 5, 5, 2, 3, 1])


@pytest.mark.long
@pytest.mark.parametrize("kind", [Centered, Turned, Crowd, nn.GRUCell, LayerNormLSTMCell])
@settings(max_examples=6, deadline=None, phases=[Phase.generate])  # every example is compiled: none to spare
@given(
    batch=st.integers(1, 17),
    size=st.integers(1, 40),
    count=st.integers(1, 3),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_any_size_and_number_of_threads_gives_what_the_loop_gives(kind, batch, size, count, dtype):
    two = kind not in (Turned, Crowd)
    cell = (kind(size, size) if two else kind(size)).to(dtype)
    check(cell, torch.randn(batch, 4, size, dtype=dtype, requires_grad=True), count)


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell, LayerNormLSTMCell])
def test_the_rows_of_usual_cells_run_apart_and_their_weights_are_packed_once(kind):
    forward, backward = runners_of(kind(6, 7), torch.randn(8, 4, 6, requires_grad=True))
    for runner in (forward, backward):
        assert runner._rows.apart
        assert runner.source.count("pack_float(") == 1
    assert any(backward._rows.sums)  # the gradient of a bias is a sum over rows
    assert with_threads(2, forward._parts) == 2
    assert with_threads(3, forward._parts) == 2  # four rows to a thread at least


def test_rows_that_meet_do_not_run_apart():
    forward, backward = runners_of(Centered(6, 7), torch.randn(8, 4, 6, requires_grad=True))
    assert not forward._rows.apart
    assert with_threads(2, forward._parts) == 1
    assert not backward._rows.apart
