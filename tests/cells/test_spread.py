"""Cells whose state comes in several arguments, as articles write an LSTM from its equations."""

import pytest
import torch
from torch import nn

import hiddenstate as hs
from hiddenstate.cells import as_layer
from hiddenstate.errors import NotRecurrent, StateMismatch
from hiddenstate.testing import check_cell, check_equations
from tests.support.untouched import untouched


class Cell(nn.Module):
    """forward(x, h, c) -> h, c."""

    def __init__(self, input_size=3, hidden_size=4):
        super().__init__()
        self.hidden_size, self.gates = hidden_size, nn.Linear(input_size + hidden_size, 4 * hidden_size)

    def forward(self, x, h, c):
        i, f, g, o = self.gates(torch.cat([x, h], dim=1)).chunk(4, dim=1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        return h, c


class Previous(Cell):
    """Other names, and an output before the state."""

    def forward(self, x_t, h_prev, c_prev):
        h, c = super().forward(x_t, h_prev, c_prev)
        return 2 * h, h, c


class Paired(Cell):
    """The next state as a pair."""

    def forward(self, input, hidden, cell):
        h, c = super().forward(input, hidden, cell)
        return h, (h, c)


CELLS = [Cell, Previous, Paired]


def state_of(result):
    return result[-1] if isinstance(result[-1], tuple) else result[-2:]


def stepped(cell, x):
    h, c, states = torch.zeros(len(x), 4), torch.zeros(len(x), 4), []
    for step in x.unbind(1):
        h, c = state_of(cell(step, h, c))
        states.append(h)
    return torch.stack(states, dim=1), c


@pytest.mark.parametrize("kind", CELLS)
def test_it_is_unrolled_as_the_loop_would_do_with_the_same_gradients(kind):
    cell, x = kind(), torch.randn(2, 7, 3)
    states, c = stepped(cell, x)
    out, state = hs.unroll(cell, x)
    torch.testing.assert_close(out, 2 * states if kind is Previous else states)
    torch.testing.assert_close(state["c"], c)
    expected = torch.autograd.grad(states.sum() + c.sum(), list(cell.parameters()))
    found = torch.autograd.grad(state["h"].sum() * 0 + out.sum() / (2 if kind is Previous else 1) + state["c"].sum(),
                                list(cell.parameters()))  # fmt: skip
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("kind", CELLS)
def test_everything_that_takes_a_cell_takes_it(kind):
    cell, other, x = kind(), kind(), torch.randn(4, 9, 3)
    with untouched(cell):
        assert hs.diagnose(cell, x).ok
        assert hs.diagnose(cell, x[:, 0], torch.zeros(4, 4), torch.zeros(4, 4)).ok
        assert hs.diagnose(other).ok
        assert hs.measure.jacobians(cell, x).values.shape == (4, 9, 8, 8)
        assert hs.measure.memory(cell, x).length > 1
        assert hs.check_split(cell, x)
        check_cell(cell)
    layer = hs.Recurrent(kind, 3, 4, num_layers=2)
    assert layer(x)[0].shape == (4, 9, 4)
    if kind is not Previous:
        check_equations(cell, "lstm")


@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize("by_name", [True, False])
def test_a_loop_in_a_script_is_one_run(kind, by_name):
    cell, x = kind(), torch.randn(2, 7, 3)
    first, *parts = ("x_t", "h_prev", "c_prev") if kind is Previous else ("input", "hidden", "cell")
    first, parts = ("x", ["h", "c"]) if kind is Cell else (first, parts)
    state = torch.zeros(2, 4), torch.zeros(2, 4)
    with hs.record(cell) as rec:
        for step in x.unbind(1):
            named = {first: step, **dict(zip(parts, state, strict=True))}
            state = state_of(cell(**named) if by_name else cell(step, *state))
    states, c = stepped(cell, x)
    torch.testing.assert_close(rec["l0"].h, states)
    torch.testing.assert_close(rec["l0"].c[:, -1], c)


def test_a_loop_that_drops_the_new_state_is_told():
    cell, h, c = Cell(), torch.zeros(2, 4), torch.zeros(2, 4)

    def loop():
        with hs.record(cell):
            for _ in range(5):
                cell(torch.randn(2, 3), h, c)

    with pytest.warns(hs.errors.RecordingWarning, match="called 5 times with the same state"):
        loop()


def test_its_mistakes_are_found():
    class Cut(Cell):
        def forward(self, x, h, c):
            return super().forward(x, h.detach(), c.detach())

    class Forgetful(Cell):
        def forward(self, x, h, c):
            return super().forward(x, torch.zeros_like(h), torch.zeros_like(c))

    assert "HS105" in hs.diagnose(Cut()).codes
    assert "HS103" in hs.diagnose(Forgetful()).codes


def test_a_first_state_of_its_own_and_three_parts_keep_their_names():
    class Three(nn.Module):
        input_size, hidden_size = 2, 3

        def initial_state(self, batch):
            return torch.ones(batch, 3), torch.zeros(batch, 3), torch.zeros(batch, 1)

        def forward(self, x, hidden, cell, n):
            return hidden * 0.5 + x.sum(1, keepdim=True), cell + hidden, n + 1

    (layer,) = hs.layers(Three())
    assert layer.spec.parts == ("hidden", "cell", "n")
    assert layer.initial(2)["hidden"].tolist() == [[1.0] * 3] * 2
    _, state = hs.unroll(Three(), torch.zeros(2, 4, 2))
    assert [part.flatten()[0].item() for part in state.values()] == [0.0625, 1.875, 4.0]
    with pytest.raises(StateMismatch, match="the state has the parts h, but Three needs hidden, cell, n"):
        layer.to_native(hs.State({"h": torch.zeros(1, 3)}))


def test_a_decoder_around_a_known_layer_is_none():
    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.hidden_size, self.lstm = 4, nn.LSTM(3, 4)

        def forward(self, x, hidden, cell):
            out, (hidden, cell) = self.lstm(x, (hidden, cell))
            return out, hidden, cell

    assert [layer.kind for layer in hs.layers(Decoder())] == ["lstm"]


def test_a_cell_that_returns_something_else_is_told_what_is_needed():
    class Half(Cell):
        def forward(self, x, h, c):
            return super().forward(x, h, c)[0]

    with pytest.raises(NotRecurrent, match="Half takes its state as h, c, but returned neither as many tensors nor"):
        as_layer(Half()).module(torch.randn(1, 3), (torch.zeros(1, 4), torch.zeros(1, 4)))
