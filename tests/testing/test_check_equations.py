"""Cells as articles write them, checked against torch's equations; and the mistakes that are made in them."""

import pytest
import torch
from torch import nn

from hiddenstate.errors import BadInput, LawBroken, NotRecurrent
from hiddenstate.testing import check_equations
from tests.support.untouched import untouched

X, H = 3, 5


class Sized(nn.Module):
    input_size, hidden_size = X, H


class ArticleRNN(Sized):
    """Matrices of one's own, multiplied from the right."""

    activation = staticmethod(torch.tanh)

    def __init__(self):
        super().__init__()
        self.W_xh, self.W_hh = nn.Parameter(torch.randn(X, H)), nn.Parameter(torch.randn(H, H) * 0.5)
        self.b_h = nn.Parameter(torch.randn(H))

    def forward(self, x, h):
        h = self.activation(x @ self.W_xh + h @ self.W_hh + self.b_h)
        return h, h


class ConcatRNN(Sized):
    """The tutorial's: one Linear of input and state, the state alone returned."""

    def __init__(self):
        super().__init__()
        self.i2h = nn.Linear(X + H, H)

    def forward(self, x, hidden):
        return torch.tanh(self.i2h(torch.cat((x, hidden), dim=1)))


class GatedLSTM(Sized):
    """Four gates with layers of their own; methods that a mistake overrides."""

    def __init__(self):
        super().__init__()
        self.f, self.i, self.g, self.o = (nn.Linear(X + H, H) for _ in range(4))

    def forward(self, x, state):
        h, c = state
        both = torch.cat([x, h], dim=-1)
        f, i, o = (torch.sigmoid(gate(both)) for gate in (self.f, self.i, self.o))
        c_next = self.cell(f, i, self.candidate(self.g(both)), c)
        h = self.hidden(o, c_next, c)
        return h, (h, c_next)

    def candidate(self, g):
        return torch.tanh(g)

    def cell(self, f, i, g, c):
        return f * c + i * g

    def hidden(self, o, c, before):
        return o * torch.tanh(c)


class FusedLSTM(Sized):
    """All gates in one product, in another order, with a sigmoid of one's own."""

    def __init__(self):
        super().__init__()
        self.W = nn.Parameter(torch.randn(4 * H, X) * 0.5)
        self.U = nn.Parameter(torch.randn(4 * H, H) * 0.5)
        self.b = nn.Parameter(torch.randn(4 * H))

    def forward(self, x, state):
        h, c = state
        gates = x @ self.W.T + h @ self.U.T + self.b
        o, f, i = (1 / (1 + torch.exp(-gates[:, n * H : (n + 1) * H])) for n in range(3))
        c = f.mul(c).add(i.mul(gates[:, 3 * H :].tanh()))
        h = o.mul(c.tanh())
        return h, (h, c)


class OwnGRU(Sized):
    def __init__(self):
        super().__init__()
        self.x2h, self.h2h = nn.Linear(X, 3 * H), nn.Linear(H, 3 * H)

    def forward(self, x, h):
        rx, zx, nx = self.x2h(x).chunk(3, dim=1)
        rh, zh, nh = self.h2h(h).chunk(3, dim=1)
        r, z = torch.sigmoid(rx + rh), torch.sigmoid(zx + zh)
        h = self.mix(z, torch.tanh(self.inner(nx, r, nh, h)), h)
        return h, h

    def inner(self, nx, r, nh, h):
        return nx + r * nh

    def mix(self, z, n, h):
        return (1 - z) * n + z * h


class PaperGRU(Sized):
    """Cho et al. (2014): the reset gate acts before the product."""

    def __init__(self):
        super().__init__()
        self.z, self.r, self.n = (nn.Linear(X + H, H) for _ in range(3))

    def forward(self, x, h):
        both = torch.cat([x, h], dim=1)
        z, r = self.z(both).sigmoid(), self.r(both).sigmoid()
        n = self.n(torch.cat([x, r * h], dim=1)).tanh()
        h = (1 - z) * h + z * n
        return h, h


def changed(kind, **methods):
    return type("Changed", (kind,), methods)()


def with_activation(function):
    return changed(ArticleRNN, activation=staticmethod(function))


RIGHT = [
    (nn.RNNCell(X, H), "rnn"),
    (nn.RNNCell(X, H, nonlinearity="relu"), "rnn_relu"),
    (nn.GRUCell(X, H), "gru"),
    (nn.GRUCell(X, H, bias=False), "gru"),
    (nn.LSTMCell(X, H), "lstm"),
    (ArticleRNN(), "rnn"),
    (with_activation(torch.relu), "rnn_relu"),
    (with_activation(lambda a: a.clamp(min=0)), "rnn_relu"),
    (with_activation(lambda a: (a.exp() - (-a).exp()) / (a.exp() + (-a).exp())), "rnn"),
    (ConcatRNN(), "rnn"),
    (GatedLSTM(), "lstm"),
    (FusedLSTM(), "lstm"),
    (OwnGRU(), "gru"),
    (changed(OwnGRU, mix=lambda self, z, n, h: n + z * (h - n)), "gru"),
]


@pytest.mark.parametrize(("cell", "kind"), RIGHT, ids=lambda one: one if isinstance(one, str) else type(one).__name__)
def test_the_equations_hold_however_they_are_written(cell, kind):
    check_equations(cell, kind)
    check_equations(cell, kind, torch.randn(4, 6, X))


WRONG = [
    (with_activation(torch.sigmoid), "rnn", r"h' = tanh\(W x \+ U h \+ b\). Here the activation is a sigmoid"),
    (with_activation(lambda a: a), "rnn", "Here there is no activation at all"),
    (with_activation(torch.relu), "rnn", "Here the activation is a relu"),
    (with_activation(torch.tanh), "rnn_relu", r"h' = relu\(.* Here the activation is a tanh"),
    (with_activation(lambda a: a.tanh().relu()), "rnn", "not linear in x and h, or the activation is another"),
    (changed(GatedLSTM, hidden=lambda self, o, c, b: o * c), "lstm", r"law of lstm: h' = o⊙tanh\(c'\). Here h' = o⊙c'"),
    (changed(GatedLSTM, hidden=lambda self, o, c, b: torch.tanh(c)), "lstm", r"Here h' = tanh\(c'\) instead"),
    (changed(GatedLSTM, hidden=lambda self, o, c, b: o * torch.tanh(b)), "lstm", r"Here h' = o⊙tanh\(c\) instead"),
    (changed(GatedLSTM, hidden=lambda self, o, c, b: o + torch.tanh(c)), "lstm", r"h' is off by [\d.e-]+ at best"),
    (changed(GatedLSTM, cell=lambda self, f, i, g, c: c + i * g), "lstm", r"c' = f⊙c \+ i⊙g. Here c' = c \+ i⊙g"),
    (changed(GatedLSTM, cell=lambda self, f, i, g, c: f * c + g), "lstm", r"Here c' = f⊙c \+ g instead"),
    (changed(GatedLSTM, cell=lambda self, f, i, g, c: f * c + (1 - f) * g), "lstm", r"Here c' = f⊙c \+ \(1 - f\)⊙g"),
    (changed(GatedLSTM, candidate=lambda self, g: g.sigmoid()), "lstm", "with g a tanh. Here g is a sigmoid instead"),
    (changed(GatedLSTM, candidate=lambda self, g: g), "lstm", "c' = f⊙c \\+ i⊙g"),
    (changed(OwnGRU, mix=lambda self, z, n, h: z * n + (1 - z) * h), "gru", r"Here h' = z⊙n \+ \(1 - z\)⊙h instead"),
    (changed(OwnGRU, inner=lambda self, nx, r, nh, h: nx + nh), "gru", r"tanh\(W x \+ U h \+ b\) instead: the reset"),
    (PaperGRU(), "gru", r"Here n = tanh\(W x \+ U \(r⊙h\) \+ b\) instead, as in Cho et al. \(2014\)"),
    (ConcatRNN(), "gru", r"h' = \(1 - z\)⊙n \+ z⊙h. No value in the step is a sigmoid"),
]


@pytest.mark.parametrize(("cell", "kind", "message"), WRONG)
def test_a_mistake_is_named_with_the_equation_that_stands_in_its_place(cell, kind, message):
    with pytest.raises(LawBroken, match=message):
        check_equations(cell, kind)


def test_weights_of_torch_in_a_cell_that_passes_give_what_torch_gives():
    own, torchs = OwnGRU(), nn.GRUCell(X, H)
    with torch.no_grad():
        own.x2h.weight.copy_(torchs.weight_ih), own.x2h.bias.copy_(torchs.bias_ih)
        own.h2h.weight.copy_(torchs.weight_hh), own.h2h.bias.copy_(torchs.bias_hh)
    x, h = torch.randn(2, X), torch.randn(2, H)
    check_equations(own, "gru")
    torch.testing.assert_close(own(x, h)[0], torchs(x, h))


def test_large_weights_do_not_hide_the_equations():
    cell = GatedLSTM()
    with torch.no_grad():
        for weight in cell.parameters():
            weight.mul_(8)
    check_equations(cell, "lstm")


def test_the_cell_comes_back_untouched():
    cell = GatedLSTM().train()
    with untouched(cell):
        check_equations(cell, "lstm")
        with pytest.raises(BadInput):
            check_equations(cell, "gru")


def test_a_cell_that_makes_tensors_of_its_own_dtype_is_checked_in_it():
    class Fixed(ConcatRNN):
        def forward(self, x, hidden):
            return super().forward(x, hidden + torch.zeros(H, dtype=torch.float32)).to(torch.float32)

    class Rounding(ConcatRNN):
        def forward(self, x, hidden):
            return super().forward(x, hidden).float().to(x)

    check_equations(Fixed(), "rnn")
    check_equations(Rounding(), "rnn")
    with pytest.raises(LawBroken, match="the activation is a tanh"):
        check_equations(Rounding(), "rnn_relu")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: check_equations(GatedLSTM(), "gru"), "the state of an gru is h alone, but this cell has"),
        (lambda: check_equations(OwnGRU(), "lstm"), "the state of an lstm is h and c of one size, but this cell has"),
        (lambda: check_equations(OwnGRU(), "mgu"), "one of rnn, rnn_relu, gru, lstm, but is 'mgu'"),
    ],
)
def test_what_cannot_be_checked_is_refused(call, message):
    with pytest.raises(BadInput, match=message):
        call()


class Unsized(nn.Module):
    """As in many an article: nothing says how many features it takes."""

    def __init__(self, inputs, hidden, candidate):
        super().__init__()
        self.hidden_size, self.gates, self.candidate = hidden, nn.Linear(inputs + hidden, 4 * hidden), candidate

    def forward(self, x, state):
        h, c = state
        i, f, g, o = self.gates(torch.cat([x, h], dim=1)).chunk(4, dim=1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * self.candidate(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        return h, (h, c)


def test_a_cell_that_names_no_input_size_is_tried_all_the_same():
    check_equations(Unsized(3, 4, torch.tanh), "lstm")
    with pytest.raises(LawBroken, match="Unsized breaks a law of lstm"):
        check_equations(Unsized(3, 4, torch.sigmoid), "lstm")


def test_a_cell_whose_state_has_no_known_size_is_told_what_is_missing():
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.recurrent = nn.Linear(3, 4), nn.Linear(4, 4)

        def forward(self, x, h):
            return torch.tanh(self.inner(x) + self.recurrent(h))

    class Rotated(Bare):
        def forward(self, x, h):
            return super().forward(x, h).T

    check_equations(Bare(), "rnn")  # a trial tells
    with pytest.raises(NotRecurrent, match=r"Rotated has neither initial_state.* nor hidden_size"):
        check_equations(Rotated(), "rnn")
