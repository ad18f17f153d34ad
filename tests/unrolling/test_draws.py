"""Random numbers in a step: under one seed the loop's own, and the stream goes on where the loop would leave it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import hiddenstate as hs
from hiddenstate.errors import Untraceable

SIZE = 4


class Cell(nn.Module):
    """The step that others vary: `noisy` works on the new state."""

    hidden_size = SIZE

    def __init__(self):
        super().__init__()
        self.inner, self.recurrent = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.double()

    def forward(self, x, h):
        return self.noisy(torch.tanh(self.inner(x) + self.recurrent(h)), h)


def zoneout(self, new, h):
    kept = torch.bernoulli(torch.full_like(h, 0.3))
    return kept * h + (1 - kept) * new


def unused(self, new, h):
    torch.rand(3)
    F.dropout(new, 0.5)
    return new + torch.rand_like(new)


def in_order(self, new, h):
    return F.dropout(new, 0.2) * torch.rand_like(h) + F.dropout(new, 0.7) - torch.randn(len(h), 1).double()


NOISY = {
    "dropout": lambda self, new, h: F.dropout(new, 0.3),
    "zoneout": zoneout,
    "noise": lambda self, new, h: new + 0.1 * torch.randn_like(new),
    "noise for all rows": lambda self, new, h: new + torch.randn(SIZE).double(),
    "one number": lambda self, new, h: new * torch.rand(()).double(),
    "gumbel": lambda self, new, h: F.gumbel_softmax(new, tau=0.7),
    "sampled": lambda self, new, h: torch.distributions.Normal(new, 0.5 + h.abs()).rsample(),
    "uniform": lambda self, new, h: new + torch.empty_like(h).uniform_(-1, 1),
    "whole numbers": lambda self, new, h: new * torch.randint(0, 3, h.shape),
    "alpha dropout": lambda self, new, h: F.alpha_dropout(new, 0.2, training=True),
    "drawn and not used": unused,
    "several in order": in_order,
}


def cell_of(name):
    torch.manual_seed(0)
    return type("Noisy", (Cell,), {"noisy": NOISY[name]})()


def outcome(cell, x, engine, **options):
    """Values, gradients, and the next number of the stream."""
    torch.manual_seed(7)
    out, state = hs.unroll(cell, x, engine=engine, **options)
    after = torch.rand(())
    roots = [out.sin().sum(), *(part.cos().sum() for part in state.values())]
    return [out, *state.values(), *torch.autograd.grad(roots, [x, *cell.parameters()]), after]


def assert_loops(cell, x, **options):
    for ours, theirs in zip(outcome(cell, x, "fast", **options), outcome(cell, x, "loop", **options), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def some(rows=3, steps=5):
    return torch.randn(rows, steps, SIZE, dtype=torch.float64, requires_grad=True)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", NOISY)
def test_values_gradients_and_the_stream_are_the_loops(name):
    cell = cell_of(name)
    assert_loops(cell, some())
    assert_loops(cell, some(2, 1))  # a batch of another size takes no more than its own numbers
    assert_loops(cell, some(), resets=torch.rand(3, 5) < 0.4)
    with torch.no_grad():
        found = []
        for engine in ("fast", "loop"):
            torch.manual_seed(3)
            found.append(hs.unroll(cell, some().detach() * 0 + 1, engine=engine)[0])
    torch.testing.assert_close(*found)


SHORT = {name: cell_of(name) for name in ("dropout", "noise for all rows", "several in order")}


@settings(max_examples=15)
@given(name=st.sampled_from(sorted(SHORT)), lengths=st.lists(st.integers(1, 4), min_size=2, max_size=3))
def test_rows_that_have_ended_take_no_numbers(name, lengths):
    assert_loops(SHORT[name], some(len(lengths)), lengths=lengths)


def test_a_row_that_waits_takes_no_numbers():
    assert_loops(cell_of("dropout"), some(), lengths=[0, 5, 2])


def test_second_derivatives_are_of_what_was_drawn():
    cell, x, found = cell_of("dropout"), some(), []
    for engine in ("fast", "loop"):
        torch.manual_seed(7)
        out, _ = hs.unroll(cell, x, engine=engine)
        (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(slope.square().sum(), [x, *cell.parameters()]))
    torch.testing.assert_close(*found)
    out, _ = hs.unroll(cell, x, lengths=[1, 5, 2], engine="fast")
    with pytest.raises(Untraceable, match=r"cannot be drawn again.*engine='loop'"):
        torch.autograd.grad(out.square().sum(), x, create_graph=True)


def test_what_is_drawn_differs_from_call_to_call():
    cell, x = cell_of("dropout"), some()
    one, other = (hs.unroll(cell, x, engine="fast")[0] for _ in range(2))
    assert not torch.equal(one, other)


@pytest.mark.parametrize(
    ("noisy", "reason"),
    [
        (lambda self, new, h: new * torch.bernoulli(new.sigmoid()), "depend on what it is given"),
        (lambda self, new, h: new + torch.multinomial(new.softmax(-1), SIZE), "has to be seen at each"),
    ],
)
def test_draws_that_depend_on_the_state_are_refused_by_name(noisy, reason):
    cell = type("Noisy", (Cell,), {"noisy": noisy})()
    x, before = some(), torch.get_rng_state()
    with pytest.raises(Untraceable, match=f"draws random numbers in a step .*{reason}"):
        hs.unroll(cell, x, engine="fast")
    assert torch.equal(torch.get_rng_state(), before)
