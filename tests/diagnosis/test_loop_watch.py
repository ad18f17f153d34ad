"""A Monitor looks at what recurs in code of the user's own, and names what it does not see."""

import copy

import pytest
import torch
from torch import nn

import hiddenstate as hs
from hiddenstate.errors import HiddenStateWarning


class Loop(nn.Module):
    """Written out, with no module that is the step."""

    def __init__(self, scale=1.0):
        super().__init__()
        self.w, self.u, self.v, self.scale = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 1), scale

    def forward(self, x):
        h = x.new_zeros(len(x), 8)
        for t in range(x.size(1)):
            h = torch.tanh(self.scale * self.w(x[:, t]) + self.u(h))
        return self.v(h)


class TimeFirst(Loop):
    def forward(self, x):
        h = x.new_zeros(x.shape[1], 8)
        for step in x:
            h = torch.tanh(self.scale * self.w(step) + self.u(h))
        return self.v(h)


class Beside(Loop):
    """A loop beside a layer that is heard."""

    def __init__(self, scale=1.0):
        super().__init__(scale)
        self.rnn = nn.GRU(4, 4, batch_first=True)

    def forward(self, x):
        return super().forward(self.rnn(x)[0])


class Gate(nn.Module):
    """A step by what it does alone: nothing in its names says that it is a cell."""

    def __init__(self, scale):
        super().__init__()
        self.mix, self.scale = nn.Linear(12, 8), scale

    def forward(self, given, before):
        return torch.tanh(self.scale * self.mix(torch.cat([given, before], -1)))


class Stepped(Loop):
    def __init__(self, scale=1.0):
        super().__init__()
        self.gate = Gate(scale)

    def forward(self, x):
        h = x.new_zeros(len(x), 8)
        for t in range(x.size(1)):
            h = self.gate(x[:, t], h)
        return self.v(h)


def train(model, calls=4, x=None, every=1):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    with hs.Monitor(model, optimizer, every=every) as monitor:
        for _ in range(calls):
            model(torch.randn(5, 9, 4) if x is None else x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return monitor


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [Loop, TimeFirst, Beside, Stepped])
def test_a_saturated_loop_is_told_as_the_doctor_tells_it(kind):
    torch.manual_seed(0)
    sick, healthy = train(kind(500.0)), train(kind())
    assert "HS402" in {each.finding.code for each in sick.findings}
    assert "HS402" not in {each.finding.code for each in healthy.findings}
    assert any(name.endswith(".saturated") for name in healthy.history)


def test_the_gradients_of_a_loop_are_measured():
    model, x = Loop(), torch.randn(5, 9, 4)
    history = train(model, x=x).history
    (first,) = [name for name in history if name.endswith("gradient_first")]
    assert (history[first] > 0).all()


@pytest.mark.parametrize("kind", [Loop, Beside, Stepped])
def test_watching_a_loop_changes_nothing(kind):
    torch.manual_seed(0)
    model = kind()
    twin, data = copy.deepcopy(model), torch.randn(3, 5, 9, 4)
    plain, before = torch.optim.SGD(twin.parameters(), lr=0.1), [sorted(vars(module)) for module in model.modules()]
    for x in data:
        twin(x).square().mean().backward()
        plain.step()
        plain.zero_grad()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hs.Monitor(model, optimizer, every=1):
        for x in data:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    assert [sorted(vars(module)) for module in model.modules()] == before


class Apart(nn.Module):
    """An encoder with a loop, and a decoder with a layer, which the training step calls one after the other."""

    def __init__(self, scale):
        super().__init__()
        self.encoder, self.decoder = Loop(scale), nn.GRU(1, 4, batch_first=True)


@pytest.mark.parametrize("scale", [1.0, 500.0])
def test_a_loop_in_a_part_that_is_called_by_itself_is_looked_at(scale):
    torch.manual_seed(0)
    model = Apart(scale)
    with hs.Monitor(model, every=1) as monitor:
        for _ in range(4):
            model.decoder(model.encoder(torch.randn(5, 9, 4)).unsqueeze(1))[0].square().mean().backward()
    told = {each.finding.where for each in monitor.findings if each.finding.code == "HS402"}
    assert [where.startswith("encoder.loop") for where in told] == ([True] if scale > 1 else [])
    assert monitor.step == 4
    assert not vars(model.encoder).get("forward")


class Unheard(nn.Module):
    """Uses the weights of its layer without calling it."""

    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.RNN(4, 8, batch_first=True), nn.GRU(8, 2, batch_first=True)

    def forward(self, x):
        return self.head(x @ self.rnn.weight_ih_l0.T)[0]


def test_a_layer_that_is_trained_and_never_called_is_named():
    with pytest.warns(HiddenStateWarning, match=r"Monitor\(Unheard\) does not look at: rnn, which gets gradients"):
        monitor = train(Unheard())
    assert "not looked at: rnn, which gets gradients and was never called" in str(monitor)


class Kept(nn.Module):
    """Keeps a state from call to call, by itself."""

    def __init__(self):
        super().__init__()
        self.w, self.memory = nn.Linear(4, 8), None

    def forward(self, x):
        before = torch.zeros(len(x), 8) if self.memory is None else self.memory
        now = torch.tanh(self.w(x.mean(1)) + before)
        self.memory = now.detach()
        return now


def test_a_state_that_is_kept_from_call_to_call_is_named():
    with pytest.warns(HiddenStateWarning, match=r"Monitor\(Kept\) does not look at: .*memory"):
        monitor = train(Kept())
    assert monitor.unseen


def test_a_model_in_which_nothing_recurs_is_a_warning():
    with pytest.warns(HiddenStateWarning, match=r"heard no recurrent layer in 4 training calls, and saw nothing recur"):
        train(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1)))


class OneSentence(nn.Module):
    """As tutorials have it: a sentence without rows, and what the layer gave kept as an attribute."""

    def __init__(self, kind, keep):
        super().__init__()
        self.embed, self.rnn, self.tag, self.keep = nn.Embedding(9, 4), kind(4, 8), nn.Linear(8, 3), keep
        self.hidden = self.begin()

    def begin(self):
        zeros = torch.zeros(1, 1, 8)
        return (zeros, zeros) if isinstance(self.rnn, nn.LSTM) and self.keep != "output" else zeros

    def forward(self, sentence):
        x = self.embed(sentence).view(len(sentence), 1, -1)
        if self.keep == "output":  # which is no state of the layer's
            out, _ = self.rnn(x + self.hidden[0].mean())
            self.hidden = out
        else:
            out, hidden = self.rnn(x, self.hidden)
            self.hidden = hs.State.detached(hidden) if self.keep == "detached" else hidden
        return self.tag(out.view(len(sentence), -1))


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
@pytest.mark.parametrize("keep", ["state", "detached", "output"])
def test_an_attribute_that_holds_what_a_heard_layer_gave_is_not_named_as_unseen(keep, kind, recwarn):
    model = OneSentence(kind, keep)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with hs.Monitor(model, optimizer, every=1) as monitor, hs.record(model) as recording:
        for steps in (5, 7, 5):
            optimizer.zero_grad()
            model.hidden = model.begin()
            model(torch.randint(9, (steps,))).square().mean().backward()
            optimizer.step()
    assert len(recording.runs("rnn")) == 3
    said = [str(warning.message) for warning in recwarn]
    assert bool(monitor.unseen) == any("not recorded" in each for each in said) == (keep == "output")
