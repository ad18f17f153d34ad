"""Mistakes that articles about RNNs warn of, as they write them: each told by its code, with advice that runs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hiddenstate as hs


def told(model, *inputs, **options):
    return {finding.code: finding for finding in hs.diagnose(model, *inputs, **options)}


class Net(nn.Module):
    def __init__(self, kind=nn.GRU, **options):
        super().__init__()
        self.rnn = kind(3, 16, batch_first=True, **options)
        self.head = nn.Linear(16, 2)

    def forward(self, x):
        return self.head(self.rnn(x)[0][:, -1])


class Stepped(nn.Module):
    def __init__(self, every):
        super().__init__()
        self.cell, self.head, self.every = nn.GRUCell(3, 8), nn.Linear(8, 2), every

    def forward(self, x):
        h = x.new_zeros(len(x), 8)
        for t, x_t in enumerate(x.unbind(1)):
            h = self.cell(x_t, h.detach() if t and t % self.every == 0 else h)
        return self.head(h)


class Chunked(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.rnn, self.head = kind(3, 8, batch_first=True), nn.Linear(8, 2)

    def forward(self, x):
        state = None
        for chunk in x.split(10, dim=1):
            out, state = self.rnn(chunk, state)
            state = tuple(p.detach() for p in state) if isinstance(state, tuple) else state.detach()
        return self.head(out[:, -1])


@pytest.mark.parametrize("make", [lambda: Stepped(10), lambda: Chunked(nn.LSTM), lambda: Chunked(nn.RNN)])
def test_how_far_gradients_reach_where_forward_detaches_now_and_then(make):
    finding = told(make(), torch.randn(4, 60, 3))["HS105"]
    assert finding.severity == "note"
    assert "10 of 60 steps" in finding.evidence


class Squashed(nn.Module):
    def __init__(self, outer):
        super().__init__()
        self.input_size, self.hidden_size, self.outer = 3, 8, outer
        self.i2h, self.h2h = nn.Linear(3, 8), nn.Linear(8, 8)

    def forward(self, x, h):
        return self.outer(torch.tanh(self.i2h(x) + self.h2h(h)))


@pytest.mark.parametrize(
    ("outer", "name"),
    [(torch.relu, "relu"), (nn.functional.relu, "relu"), (nn.ReLU(), "relu"), (torch.sigmoid, "sigmoid")],
)
def test_relu_or_sigmoid_of_tanh_is_a_note(outer, name):
    finding = told(Squashed(outer))["HS301"]
    assert finding.severity == "note"
    assert f"`{name}` is applied to the result of `tanh`" in finding.evidence


def test_six_rows_of_eight_that_are_one_sequence_are_a_note():
    x = torch.cat([torch.randn(1, 10, 3).repeat(6, 1, 1), torch.randn(2, 10, 3)])
    finding = told(Net(), x)["HS404"]
    assert finding.severity == "note"
    assert "6 of 8 rows" in finding.evidence


def test_six_dead_units_of_sixteen_are_a_note():
    net = Net(nn.RNN, nonlinearity="relu")
    with torch.no_grad():
        net.rnn.bias_ih_l0.fill_(1.0)
        net.rnn.bias_ih_l0[:6] = -50.0
    finding = told(net, torch.randn(4, 10, 3))["HS403"]
    assert finding.severity == "note"
    assert "6 of 16 units" in finding.evidence


class Unnamed(nn.Module):
    """A healthy cell that names no sizes, and calls its state otherwise."""

    def __init__(self):
        super().__init__()
        self.W_x, self.W_s = nn.Linear(3, 8), nn.Linear(8, 8, bias=False)

    def forward(self, x, s):
        return torch.tanh(self.W_x(x) + self.W_s(s))


class OwnStart(nn.Module):
    def __init__(self):
        super().__init__()
        self.U, self.W = nn.Parameter(0.3 * torch.randn(3, 8)), nn.Parameter(0.3 * torch.randn(8, 8))

    def forward(self, u, r=None):
        r = u.new_zeros(len(u), 8) if r is None else r
        return torch.tanh(u @ self.U + r @ self.W.t())


@pytest.mark.parametrize("make", [Unnamed, OwnStart])
@pytest.mark.parametrize("state", [torch.zeros(4, 8), torch.randn(4, 8)], ids=["zeros", "random"])
def test_a_weight_that_meets_a_start_of_zeros_is_not_unused(make, state):
    try:
        assert "HS302" not in told(make(), torch.randn(4, 3), state)
    except hs.errors.NotRecurrent as error:
        assert "nothing recurrent was seen" in str(error)  # noqa: PT017


class Seq2Seq(nn.Module):
    def __init__(self, start, encoder=nn.LSTM):
        super().__init__()
        self.encoder = encoder(3, 8, batch_first=True)
        self.decoder = nn.LSTM(3, 8, batch_first=True)
        self.head, self.start = nn.Linear(8, 2), start

    def forward(self, source, target):
        _, state = self.encoder(source)
        return self.head(self.decoder(target, self.start(state))[0])


def zero_c(state):
    return state[0], torch.zeros_like(state[1])


def test_a_decoder_that_gets_h_and_a_zero_c_is_told():
    inputs = torch.randn(4, 6, 3), torch.randn(4, 5, 3)
    finding = told(Seq2Seq(zero_c), *inputs)["HS103"]
    assert finding.where == "decoder"
    assert "what encoder has in its c is lost" in finding.evidence
    assert told(Seq2Seq(lambda state: state), *inputs) == {}
    assert told(Seq2Seq(lambda h: (h, torch.zeros_like(h)), nn.GRU), *inputs) == {}  # there is no c to hand on


def each_part(take):
    return lambda state: tuple(map(take, state)) if isinstance(state, tuple) else take(state)


class Summarized(nn.Module):
    """A decoder that starts from what is taken of the final states of an encoder."""

    def __init__(self, kind, take, *, layers=1, both=True, onto=1, attend=False):
        super().__init__()
        self.encoder = kind(3, 8, layers, bidirectional=both, batch_first=True)
        self.decoder, self.head = kind(3, 8, onto, batch_first=True), nn.Linear(8, 2)
        self.take, self.keys = each_part(take), nn.Linear(16 if both else 8, 8) if attend else None

    def forward(self, source, target):
        seen, state = self.encoder(source)
        out, _ = self.decoder(target, self.take(state))
        if self.keys is not None:
            keys = self.keys(seen)
            out = out + (out @ keys.mT).softmax(-1) @ keys
        return self.head(out)


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"take": lambda h: h[-1:]}, "only the reverse one is used"),
        ({"take": lambda h: h[0].unsqueeze(0).contiguous()}, "only the forward one is used"),
        ({"take": lambda h: h[:2], "layers": 2, "onto": 2}, "the final state of layer 0 is the last"),
        ({"take": lambda h: h[:1], "layers": 2, "both": False}, "the final state of layer 0 is the last"),
        ({"take": lambda h: h[-1:], "layers": 2, "both": False}, ""),
        ({"take": lambda h: h[:1] + h[1:]}, ""),
        ({"take": lambda h: h[0::2] + h[1::2], "layers": 2, "onto": 2}, ""),
        ({"take": lambda h: h, "onto": 2}, ""),
        ({"take": lambda h: h[-1:], "attend": True}, ""),  # the rest arrives by another way
    ],
)
def test_a_decoder_that_gets_a_wrong_slice_of_the_final_states_is_told(options, said, kind):
    found = told(Summarized(kind, **options), torch.randn(4, 6, 3), torch.randn(4, 5, 3))
    assert list(found) == (["HS109"] if said else [])
    if said:
        assert found["HS109"].where == "encoder"
        assert said in found["HS109"].evidence
        assert "hs.Bridge(self.encoder, self.decoder)" in found["HS109"].advice


@pytest.mark.parametrize("encoder", [nn.LSTM, nn.GRU])
def test_an_encoder_whose_state_is_not_used_is_told_by_the_name_of_its_input(encoder):
    model = Seq2Seq(lambda state: None, encoder)
    found = told(model, torch.randn(4, 6, 3), torch.randn(4, 5, 3))
    assert list(found) == ["HS104"]
    assert found["HS104"].where == "source (input[0])"


def test_a_learned_start_outside_the_optimizer_is_told():
    model = nn.GRU(3, 8, batch_first=True)
    learned = hs.Learned(model)
    without = torch.optim.Adam(model.parameters())
    with_it = torch.optim.Adam([*model.parameters(), *learned.parameters()])
    with hs.Carry(model, init=learned):
        found = told(model, torch.randn(4, 6, 3), optimizer=without)
        assert "parameters are in 0 of the optimizer's groups" in found["HS206"].evidence
        assert "HS206" not in told(model, torch.randn(4, 6, 3), optimizer=with_it)
        for optimizer, codes in ((without, ["HS206"]), (with_it, [])):
            unseen = pytest.warns(hs.errors.HiddenStateWarning, match="saw not a single training call")
            with unseen, hs.Monitor(model, optimizer) as monitor:
                assert [episode.finding.code for episode in monitor.findings] == codes
    names = {"torch": torch, "model": model, "learned": learned}
    exec(found["HS206"].advice, names)
    assert len(names["optimizer"].param_groups[0]["params"]) == 5


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_the_advice_of_a_vanishing_gradient_fits_the_layer_and_helps(kind):
    net, x = Net(kind), 0.1 * torch.randn(4, 30, 3)
    with torch.no_grad():
        net.rnn.weight_hh_l0.mul_(0.01)
        if kind is not nn.RNN:
            net.rnn.bias_hh_l0[16:32] = -5.0
    before = told(net, x)["HS501"]
    exec(before.advice, {"torch": torch, "model": net})
    after = told(net, x).get("HS501")
    assert after is None or after.numbers["per_step"] > 2 * before.numbers["per_step"]


def test_the_advice_of_a_nan_input_mends_the_input():
    x = torch.randn(4, 10, 3)
    x[1, 2] = float("nan")
    names = {"torch": torch, "x": x}
    exec(told(net := Net(), x)["HS401"].advice, names)
    assert "HS401" not in told(net, names["x"])


def test_the_advice_of_a_parameter_without_gradient_freezes_it():
    net = Net()
    net.old = nn.Linear(3, 3)
    exec(told(net, torch.randn(4, 10, 3))["HS503"].advice, {"model": net})
    assert told(net, torch.randn(4, 10, 3)) == {}


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_the_advice_of_a_graph_that_grows_fits_the_layer(kind):
    class Keeping(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.hidden = kind(3, 8, batch_first=True), None

        def forward(self, x):
            out, self.hidden = self.rnn(x, self.hidden)
            return out

    model, x = Keeping(), torch.randn(4, 10, 3)
    advice = told(model, x)["HS203"].advice
    model(x)
    exec(advice, {"self": model, "hs": hs})
    model(x).sum().backward()
    exec(advice, {"self": model, "hs": hs})
    model(x).sum().backward()
    assert model.rnn.weight_hh_l0.grad is not None
