"""Trials of a module: what they teach is so, and whoever was tried notices nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import hiddenstate as hs
from hiddenstate.cells import invented_inputs
from hiddenstate.cells.first_states import ROWS, call_initial_state, guesses
from hiddenstate.cells.trials import learn, read_form, starts_by_number, try_out
from tests.support.cells import OutputLast, PairCell, TanhCell, TokenCell


@given(shape=st.lists(st.integers(1, 3), min_size=1, max_size=2), size=st.integers(1, 5))
def test_inputs_are_made_up_in_the_sizes_that_a_module_says_it_takes(shape, size):
    x = next(invented_inputs(TanhCell(size, 4), *shape))
    assert (x.shape, x.dtype) == ((*shape, size), torch.float32)
    assert next(invented_inputs(TanhCell(size, 4).double(), *shape)).dtype == torch.float64


def test_inputs_are_the_same_every_time_and_leave_the_random_stream_alone():
    module = nn.GRU(3, 4)
    before = torch.get_rng_state()
    one, other = (list(invented_inputs(module, 2, 5)) for _ in range(2))
    torch.testing.assert_close(one, other)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_module_with_a_vocabulary_is_offered_tokens_of_it():
    x = next(invented_inputs(nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, 2)), 50))
    assert x.shape == (50,)
    assert not x.is_floating_point()
    assert 0 <= int(x.min()) <= int(x.max()) < 7


def test_no_size_is_offered_twice():
    sizes = [tuple(x.shape) for x in invented_inputs(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3)), 2)]
    assert len(sizes) == len(set(sizes))
    assert sizes[-1] == (2,)  # tokens, at last


TRIED = {
    "one tensor": (TanhCell(), "h", {"h": 0}),
    "two tensors": (PairCell(), ("h", "c"), {"h": 0, "c": 0}),
    "tokens": (TokenCell(), "h", {"h": 0}),
}


@pytest.mark.parametrize(("cell", "form", "axes"), TRIED.values(), ids=TRIED)
def test_a_trial_tells_form_axes_and_what_a_call_takes(cell, form, axes):
    found = try_out(cell, guesses(cell, cell.hidden_size))
    assert found is not None
    assert (found.form, found.axes, found.takes, found.sure) == (form, axes, "step", True)


@pytest.mark.parametrize(("batch_first", "takes"), [(True, "batch first"), (False, "time first")])
def test_a_layer_that_takes_sequences_is_told_from_a_cell(batch_first, takes):
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden_size, self.input_size = 4, 3
            self.rnn = nn.GRU(3, 4, batch_first=batch_first)

        def forward(self, x, h):
            if x.dim() != 3:
                raise ValueError("a sequence is needed")
            return self.rnn(x, h)

    found = try_out(Wrapped(), guesses(Wrapped(), 4))
    assert found is not None
    assert (found.takes, found.axes) == (takes, {"h": 1})


def test_a_module_whose_rows_reach_each_other_is_no_cell_that_we_know():
    class Mixing(TanhCell):
        def forward(self, x, h):
            return super().forward(x, h).mean(0, keepdim=True).expand(len(x), -1)

    assert try_out(Mixing(), guesses(Mixing(), 4)) is None


def test_nobody_notices_a_trial():
    seen = []

    class Counting(TanhCell):
        calls = 0

        def forward(self, x, h):
            self.calls += 1
            return super().forward(x, h)

    cell = Counting()
    cell.register_forward_hook(lambda *_: seen.append(1))
    sample, before = torch.randn(1, 3), torch.get_rng_state()
    assert try_out(cell, guesses(cell, 4), sample) is not None
    assert (cell.calls, seen, cell.training, len(cell._forward_hooks)) == (0, [], True, 1)
    assert torch.equal(torch.get_rng_state(), before)


def test_guesses_have_as_many_rows_as_can_be_told_from_a_pair_or_one():
    for native, axes in guesses(nn.LSTM(3, 4, num_layers=2), 4):
        parts = native if isinstance(native, tuple) else (native,)
        assert [part.shape[axis] for part, axis in zip(parts, axes.values(), strict=True)] == [ROWS] * len(parts)


def test_a_pair_is_read_out_of_the_source_of_a_cell_that_cannot_be_tried():
    assert read_form(PairCell()) == ("h", "c")
    assert read_form(TanhCell()) is None


class Starting(nn.Module):
    def initial_state(self, batch, *, device, dtype):
        return torch.zeros(batch, 2, device=device, dtype=dtype)


class StartingByInput(Starting):
    def initial_state(self, x):
        return x.new_zeros(len(x), 2)


def test_an_initial_state_is_asked_for_by_number_with_what_else_it_insists_on():
    cell = Starting()
    cell.weight = nn.Parameter(torch.ones(1, dtype=torch.float64))
    assert (call_initial_state(cell, 3).shape, call_initial_state(cell, 3).dtype) == ((3, 2), torch.float64)
    assert starts_by_number(cell)
    assert not starts_by_number(StartingByInput())


class WholeSequences(nn.Module):
    """Takes whole sequences with a first state, as a layer does."""

    def __init__(self, time_first=False):
        super().__init__()
        self.a, self.b, self.time_first = nn.Linear(3, 6), nn.Linear(6, 6), time_first

    def forward(self, x, h):
        for x_t in x if self.time_first else x.unbind(1):
            h = torch.tanh(self.a(x_t) + self.b(h))
        return h


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Linear(6, 6)

    def forward(self, x, memory):
        return torch.softmax(self.query(x) @ memory.T, -1) @ memory


class PassedThrough(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(3, 6)

    def forward(self, x, state):
        return self.net(x), state


NO_CELLS = [
    WholeSequences(),
    WholeSequences(time_first=True),
    Attending(),
    PassedThrough(),
    OutputLast(),
]


@pytest.mark.parametrize("module", NO_CELLS)
@pytest.mark.parametrize(
    "sample",
    [None, torch.randn(4, 3), torch.randn(4, 6), torch.randn(4, 5, 3)],
    ids=lambda x: "" if x is None else str(tuple(x.shape)),
)
def test_what_does_not_make_a_new_state_of_its_own_rows_is_not_learned_as_a_cell(module, sample):
    assert learn(module, sample) is None
    assert len(hs.layers(module)) == 0


def test_two_arguments_alone_make_no_cell():
    class Masked(nn.Module):
        def forward(self, x, mask):
            return x * mask

    assert len(hs.layers(Masked())) == len(hs.layers(nn.Bilinear(3, 3, 3))) == 0


def test_a_state_that_a_call_was_handed_shows_what_no_size_does():
    class Frames(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3 + 5, 5, 3, padding=1)

        def forward(self, x, h):
            return torch.tanh(self.conv(torch.cat([x, h], 1)))

    cell, x, h = Frames(), torch.randn(4, 6, 3, 8, 8), torch.zeros(4, 5, 8, 8)
    assert len(hs.layers(cell)) == 0
    with hs.record(cell) as rec:
        for t in range(6):
            h = cell(x[:, t], h)
    assert rec["l0"].h.shape == (4, 6, 5 * 8 * 8)
    torch.testing.assert_close(rec["l0"].h[:, -1], h.flatten(1))
