"""The cause that is told is the one that is there: one mistake made in several ways, and what is said of each."""

import re

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import hiddenstate as hs
from hiddenstate.diagnosis.advice import drawn_anew

LENGTHS = torch.tensor([9, 5, 3, 7])


class Model(nn.Module):
    """A layer, a cell and a head, and a forward that is given."""

    def __init__(self, forward, **layers):
        super().__init__()
        self.written = forward
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, *args):
        return self.written(self, *args)


def told(forward, *inputs, code, options=(), **layers):
    torch.manual_seed(0)
    layers = layers or {"gru": nn.GRU(3, 8, batch_first=True), "head": nn.Linear(8, 2)}
    report = hs.diagnose(Model(forward, **layers), *inputs, **dict(options))
    found = [finding for finding in report if finding.code == code]
    assert found, report.text()
    return found[0]


def stepped(cut):
    def forward(self, x):
        h = x.new_zeros(len(x), 8)
        for x_t in x.unbind(1):
            h = cut(self.cell(x_t, h))
        return self.head(h)

    return forward


CUTS = {
    "detach": (lambda h: h.detach(), r"detach\(\) on test_causes"),
    "data": (lambda h: h.data, r"\.data on test_causes"),
    "tensor": (lambda h: torch.tensor(h.tolist()), r"tolist\(\) on test_causes"),
}


@pytest.mark.parametrize("name", CUTS)
def test_what_cuts_the_graph_is_named(name):
    cut, cause = CUTS[name]
    found = told(stepped(cut), torch.randn(4, 9, 3), code="HS105", cell=nn.GRUCell(3, 8), head=nn.Linear(8, 2))
    assert re.search(cause, found.cause), found


def test_a_cut_that_nothing_makes_is_no_grad():
    def forward(self, x):
        h = x.new_zeros(len(x), 8)
        for x_t in x[:, :-1].unbind(1):
            with torch.no_grad():
                h = self.cell(x_t, h)
        return self.head(self.cell(x[:, -1], h))

    found = told(forward, torch.randn(4, 9, 3), code="HS105", cell=nn.GRUCell(3, 8), head=nn.Linear(8, 2))
    assert "torch.no_grad()" in found.cause, found


def lost_state(self, x, h):
    y, h = self.gru(x, h)
    y, _ = self.top(y)
    return self.head(y), h


def returned_as_given(self, x, h):
    y, _ = self.gru(x, h)
    return self.head(y), h


def positions(self, x, h):
    y, h = self.gru(x + 0.2 * torch.arange(x.size(1)).view(1, -1, 1), h)
    return self.head(y), h


def cell_state_dropped(self, x, h):
    y, (h, _) = self.lstm(x, (h, torch.zeros_like(h)))
    return self.head(y), h


PIECES = {
    "a layer's state": (lost_state, "the state in which top ends is not among what the model returns"),
    "the first state": (returned_as_given, "returns the very state that it was handed"),
    "positions": (positions, "something beside the state starts anew"),
    "the cell state": (cell_state_dropped, "its c in which lstm ends is not among what the model returns"),
}


@pytest.mark.parametrize("name", PIECES)
def test_what_is_lost_between_pieces_is_named(name):
    forward, cause = PIECES[name]
    layers = {"gru": nn.GRU(3, 8, batch_first=True), "head": nn.Linear(8, 2)}
    if forward is cell_state_dropped:
        layers = {"lstm": nn.LSTM(3, 8, batch_first=True), "head": nn.Linear(8, 2)}
    if forward is lost_state:
        layers["top"] = nn.GRU(8, 8, batch_first=True)
    found = told(forward, torch.randn(4, 8, 3), torch.zeros(1, 4, 8), code="HS108", **layers)
    assert cause in found.cause, found


def packed(self, x, lengths):
    out, _ = self.gru(pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False))
    return pad_packed_sequence(out, batch_first=True)[0]


def flipped_and_masked(self, x, lengths):
    out = self.gru(x.flip(1))[0].flip(1)
    mask = (torch.arange(x.size(1)) < lengths[:, None]).unsqueeze(-1)
    return self.head((out * mask).sum(1) / lengths[:, None])


def attended(self, x, lengths):
    out = packed(self, x, lengths)
    return self.head((torch.softmax(self.head(out)[..., :1], 1) * out).sum(1))


POOLS = {
    "mean": (lambda self, x, n: self.head(packed(self, x, n).mean(1)), "`mean` runs over padded steps too"),
    "divided": (
        lambda self, x, n: self.head(packed(self, x, n).sum(1) / x.size(1)),
        "divided by the number of all steps",
    ),
    "softmax": (attended, "`softmax` runs over padded steps too"),
    "flip": (flipped_and_masked, "the reverse direction begins in the padding"),
    "column": (lambda self, x, n: self.head(self.gru(x)[0][:, -1]), "the last column is taken for the last step"),
}


@pytest.mark.parametrize("name", POOLS)
def test_how_padding_gets_in_is_told_and_what_leaves_it_out_is_not_blamed(name):
    forward, cause = POOLS[name]
    found = told(forward, torch.randn(4, 9, 3), LENGTHS, code="HS106", options={"lengths": LENGTHS})
    assert found.cause.endswith(cause), found


def test_advice_for_a_softmax_fits_the_axes_of_its_scores():
    advice = told(attended, torch.randn(4, 9, 3), LENGTHS, code="HS106", options={"lengths": LENGTHS}).advice
    names = {"torch": torch, "scores": torch.randn(4, 9, 1), "lengths": LENGTHS}
    masked = eval(advice.partition(" before")[0], names)
    assert torch.equal(masked.isinf()[..., 0], torch.arange(9) >= LENGTHS[:, None])


def test_a_choice_that_is_the_same_for_all_rows_is_a_note_that_says_so():
    def forward(self, x):
        tokens = (0.01 * self.first(x)[0] + torch.eye(8)[3]).argmax(-1)
        return self.head(self.gru(self.embed(tokens))[0]) + x.mean(-1, keepdim=True)

    layers = {
        "first": nn.GRU(3, 8, batch_first=True),
        "embed": nn.Embedding(8, 3),
        "gru": nn.GRU(3, 8, batch_first=True),
        "head": nn.Linear(8, 2),
    }
    found = told(forward, torch.randn(4, 9, 3), code="HS404", **layers)
    assert found.severity == "note"
    assert "`argmax`" in found.cause


def test_input_weights_of_zero_are_told_as_such():
    def forward(self, x):
        return self.head(self.gru(x)[0]) + x.mean(-1, keepdim=True)

    gru = nn.GRU(3, 8, batch_first=True)
    nn.init.zeros_(gru.weight_ih_l0)
    found = told(forward, torch.randn(4, 9, 3), code="HS404", gru=gru, head=nn.Linear(8, 2))
    assert "its weights for the input are zero" in found.cause
    assert found.advice == "model.gru.reset_parameters()"


@pytest.mark.parametrize("scale", [1, 300])
def test_saturation_blames_inputs_weights_or_both_by_trying(scale):
    def forward(self, x):
        return self.head(self.rnn(x)[0])

    rnn = nn.RNN(3, 8, batch_first=True)
    with torch.no_grad():
        [p.mul_(50) for p in rnn.parameters()]
    found = told(forward, scale * torch.randn(4, 9, 3), code="HS402", rnn=rnn, head=nn.Linear(8, 2))
    assert ("weights or biases are too large" if scale == 1 else "and so are its weights") in found.cause
    found = told(
        forward, 300 * torch.randn(4, 9, 3), code="HS402", rnn=nn.RNN(3, 8, batch_first=True), head=nn.Linear(8, 2)
    )
    assert "what enters the layer is too large" in found.cause
    assert "weights" not in found.cause


def test_a_shut_gate_is_named():
    gru = nn.GRU(3, 8, batch_first=True)
    with torch.no_grad():
        gru.bias_ih_l0[8:16] = 60.0
    (finding,) = [f for f in hs.diagnose(gru, torch.randn(4, 9, 3)) if f.code == "HS403"]
    assert "the update gate keeps the old state" in finding.cause


class Bare(nn.Module):
    """Weights of its own, and no layer."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.full((4, 8), 9.0))


@pytest.mark.parametrize("make", [lambda: nn.GRU(4, 8), lambda: nn.LSTMCell(4, 8), Bare])
def test_weights_are_drawn_anew_whatever_holds_them(make):
    model = make()
    before = {name: p.clone() for name, p in model.named_parameters()}
    exec(drawn_anew(next(iter(hs.layers(model)), None)), {"torch": torch, "model": model})
    assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters())


def standardized(self, x):
    return self.head(self.gru((x - x.mean()) / x.std())[0][:, -1])


def last_states_viewed(self, x):
    states = self.gru(x)[1]
    return self.head(states.view(len(x), -1))


MIXTURES = {  # one number holds no rows, and a view leaves them apart until something takes them for features
    "a statistic of everything": (standardized, {}, 8, "`mean` runs over the rows of the batch"),
    "a view of as many layers as rows": (last_states_viewed, {"num_layers": 4}, 32, "`view` joins rows"),
    "a view of fewer layers than rows": (last_states_viewed, {"num_layers": 2}, 16, "`view` joins rows"),
}


@pytest.mark.parametrize("name", MIXTURES)
def test_what_lets_rows_meet_is_blamed_and_not_what_comes_next(name):
    forward, options, width, cause = MIXTURES[name]
    layers = {"gru": nn.GRU(3, 8, batch_first=True, **options), "head": nn.Linear(width, 2)}
    found = told(forward, torch.randn(4, 9, 3), code="HS101", **layers)
    assert found.cause.startswith(cause), found


def test_rows_and_steps_on_one_axis_are_named():
    def forward(self, x):
        return self.head(self.gru(x.reshape(-1, 1, 3))[0].view(len(x), -1, 8)[:, -1])

    found = told(forward, torch.randn(4, 9, 3), code="HS103")
    assert "36 sequences of one step, where the input has 4 of 9" in found.cause


def test_an_input_that_shut_gates_keep_out_is_not_said_to_be_dropped():
    def forward(self, x):
        return self.head(self.gru(x, torch.linspace(-1, 1, 8).repeat(1, len(x), 1))[0])

    gru = nn.GRU(3, 8, batch_first=True)
    with torch.no_grad():
        gru.bias_ih_l0[8:16] = 60.0
    found = told(forward, torch.randn(4, 9, 3), code="HS104", gru=gru, head=nn.Linear(8, 2))
    assert found.where.startswith("gru")
    assert "its gates shut" in found.cause
    assert found.advice == "model.gru.reset_parameters()"


LOSSES = {
    "detached": (lambda out: out.detach(), r"lost its graph on the way: detach\(\) on test_causes"),
    "through numpy": (lambda out: torch.from_numpy(out.detach().numpy().copy()), r"detach\(\) on test_causes"),
    "dropped": (lambda out: torch.zeros_like(out), "dropped or overwritten before the output"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_parameters_without_gradient_are_told_apart_by_whether_the_output_follows_them(name):
    lose, cause = LOSSES[name]

    def forward(self, x):
        out, _ = self.gru(x)
        return self.head(self.top(lose(out) + self.embed(x))[0][:, -1])

    layers = {"gru": nn.GRU(3, 8, batch_first=True), "top": nn.GRU(8, 8, batch_first=True)}
    found = told(forward, torch.randn(4, 9, 3), code="HS503", embed=nn.Linear(3, 8), head=nn.Linear(8, 2), **layers)
    assert re.search(cause, found.cause), found
    assert found.where.startswith("gru.")


def test_all_first_states_that_want_to_be_learned_are_named_at_once():
    class Learned(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(3, 8, batch_first=True)
            self.h0, self.c0 = (torch.zeros(1, 1, 8, requires_grad=True) for _ in range(2))

        def forward(self, x):
            return self.lstm(x, tuple(part.expand(-1, len(x), -1).contiguous() for part in (self.h0, self.c0)))[0]

    model, x = Learned(), torch.randn(4, 9, 3)
    (finding,) = [each for each in hs.diagnose(model, x) if each.code == "HS206"]
    assert finding.where == "h0, c0"
    del model.h0, model.c0
    exec(finding.advice, {"self": model, "nn": nn, "torch": torch})
    assert "HS206" not in hs.diagnose(model, x).codes
