"""One schedule serves all batch sizes, and all values of a number; what it gives is the loop's."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import hiddenstate as hs
from hiddenstate.unrolling.cache import cell_known
from hiddenstate.unrolling.deciding import LoopTime
from hiddenstate.unrolling.resized import best_size, share_used
from tests.support.cells import CELLS
from tests.support.equal import assert_same, inputs_of


def schedules(cell):
    return [known for known in cell_known(cell).made.values() if known.schedule is not None]


def assert_loops(cell, x, **options):
    """The fast engine gives what the loop gives."""

    def run(engine):
        out, state = hs.unroll(cell, x, engine=engine, **options)
        return [out, *(part for part in state.values() if part.is_floating_point())]

    assert_same(lambda: run("fast"), lambda: run("loop"), inputs_of(cell, x))


@given(rows=st.integers(1, 500), sizes=st.lists(st.integers(2, 300), min_size=1, unique=True))
def test_the_size_that_is_taken_is_no_worse_than_others(rows, sizes):
    size = best_size(rows, sizes)
    assert size in sizes
    assert 0 < share_used(rows, size) <= 1
    calls = {each: -(-rows // each) for each in sizes}
    assert not any(calls[each] < calls[size] and calls[each] * each < calls[size] * size for each in sizes)


@settings(max_examples=25)
@given(data=st.data())
def test_batches_of_any_size_run_by_one_schedule(data):
    cell = BATCHED
    rows, steps = data.draw(st.integers(1, 11)), data.draw(st.integers(1, 5))
    options = {}
    if data.draw(st.booleans()):
        options["lengths"] = data.draw(st.lists(st.integers(1, steps), min_size=rows, max_size=rows))
    if data.draw(st.booleans()):
        options["resets"] = torch.rand(rows, steps) < 0.3
    assert_loops(cell, torch.randn(rows, steps, 3, dtype=torch.float64), **options)


BATCHED = nn.LSTMCell(3, 4).double()


def test_odd_batches_need_no_schedule_of_their_own(monkeypatch):
    monkeypatch.setattr(LoopTime, "is_due", lambda *_: False)
    cell = nn.GRUCell(3, 4).double()
    for rows in (4, 3, 7, 1, 12, 5, 2, 8, 9):
        assert_loops(cell, torch.randn(rows, 6, 3, dtype=torch.float64))
    assert [known.rows for known in schedules(cell)] == [4]


@pytest.mark.parametrize("sample", [CELLS[name] for name in CELLS], ids=list(CELLS))
def test_every_cell_gives_the_same_in_batches_of_another_size(sample):
    cell = sample.cell().double()
    for rows in (3, 2, 5):
        x = sample.x(batch=rows, steps=4)
        assert_loops(cell, x.double() if x.is_floating_point() else x)


class Mixing(nn.Module):
    """Rows that meet."""

    hidden_size = 4

    def __init__(self):
        super().__init__()
        self.inner, self.recurrent = nn.Linear(3, 4), nn.Linear(4, 4)

    def forward(self, x, h):
        return torch.tanh(self.inner(x) + self.recurrent(h) - 1e-4 * h.mean(0, keepdim=True))


class Counting(Mixing):
    """A step that knows how many rows there are."""

    def forward(self, x, h):
        return torch.tanh(self.inner(x) + self.recurrent(h)) / (1 + 1e-9 * x.shape[0])


@pytest.mark.parametrize("kind", [Mixing, Counting])
def test_rows_that_meet_or_are_counted_get_a_schedule_for_each_size(kind):
    cell = kind().double()
    for rows in (3, 2, 5):
        assert_loops(cell, torch.randn(rows, 6, 3, dtype=torch.float64))
    assert [known.rows for known in schedules(cell)] == [3, 2, 5]


def test_an_own_schedule_is_made_once_the_rows_that_filled_up_have_cost_as_much():
    cell = nn.GRUCell(3, 4).double()
    for rows in (8, 3):
        assert_loops(cell, torch.randn(rows, 6, 3, dtype=torch.float64))
    own = next(known for known in cell_known(cell).made.values() if known.rows == 3)
    assert own.resized.calls > 0
    own.resized.seconds = 1e9
    assert_loops(cell, torch.randn(3, 6, 3, dtype=torch.float64))
    assert sorted(known.rows for known in schedules(cell)) == [3, 8]


def test_rows_that_fill_up_are_shown_to_nobody():
    cell, x = nn.GRUCell(3, 4), torch.randn(3, 6, 3)
    hs.unroll(cell, torch.randn(8, 6, 3), engine="fast")
    with hs.record(cell) as rec:
        out, _ = hs.unroll(cell, x, engine="fast")
    (seen,) = rec.values()
    assert seen.h.shape == (3, 6, 4)
    torch.testing.assert_close(seen.h, out.detach())


class Annealed(Mixing):
    """A number that is another one at each call."""

    share, slope = 0.5, 0.1

    def forward(self, x, h):
        return h * self.share + (1 - self.share) * torch.tanh(self.inner(x) + self.recurrent(h))


class Sloped(Annealed):
    """A number that has to be one of Python's."""

    def forward(self, x, h):
        return F.leaky_relu(self.inner(x) + self.recurrent(h), self.slope) * self.share


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_number_that_changes_at_every_call_needs_two_schedules(dtype):
    cell = Annealed().to(dtype)
    for share in (0.5, 0.4, 0.3, 0.0, -0.0, float("inf"), 1e-30):
        cell.share = share
        x = torch.randn(3, 6, 3, dtype=dtype)
        ours, theirs = (hs.unroll(cell, x, engine=engine)[0] for engine in ("fast", "loop"))
        torch.testing.assert_close(ours, theirs, equal_nan=True)
    assert len(schedules(cell)) == 2


def test_numbers_that_have_to_be_constants_stay_constants():
    cell = Sloped().double()
    for slope in (0.1, 0.2, 0.3):
        cell.slope = slope
        assert_loops(cell, torch.randn(3, 6, 3, dtype=torch.float64))


def test_a_number_beside_whole_numbers_is_what_python_makes_of_it():
    class Counted(Annealed):
        def forward(self, x, h):
            return torch.tanh(self.inner(x) + self.recurrent(h)) * ((x[:, :1] > 0).long() * self.share)

    cell = Counted()
    for share in (0.5, 0.4, 0.3):
        cell.share = share
        x = torch.randn(3, 6, 3)
        torch.testing.assert_close(hs.unroll(cell, x, engine="fast")[0], hs.unroll(cell, x, engine="loop")[0])
