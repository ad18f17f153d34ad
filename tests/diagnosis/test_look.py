"""One look at a training call: its numbers are those that one would measure by hand; what is wrong is told."""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import hiddenstate as hs
from tests.support.training_loop import Model, batches, train


def test_history_holds_arrays_of_every_look():
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    monitor = hs.Monitor(model, optimizer, every=3)
    train(model, optimizer, batches(8))
    model.eval()
    model(torch.randn(2, 5, 3))
    monitor.close()
    history = monitor.history
    assert history["step"].tolist() == [0, 3, 6]
    assert monitor.step == 8
    for name in ("lstm.norm", "lstm.saturated", "lstm.dead", "lstm.gradient_first", "cell.gradient_last", "gradient"):
        assert history[name].shape == (3,), name
        assert (history[name] >= 0).all()
    assert monitor.findings == []


def test_the_gradients_are_those_that_backward_finds():
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x = torch.randn(4, 6, 3)
    with hs.Monitor(model, optimizer, every=1) as monitor:
        train(model, optimizer, [x])
    leaf = x.clone().requires_grad_()
    model(leaf).square().mean().backward()
    sizes = leaf.grad.transpose(0, 1).flatten(1).norm(dim=1)
    torch.testing.assert_close(torch.tensor(monitor.history["lstm.gradient_first"][0]).float(), sizes[0])
    torch.testing.assert_close(torch.tensor(monitor.history["lstm.gradient_last"][0]).float(), sizes[-1])


def test_dead_units_and_gradients_through_time_are_found():
    rnn = nn.RNN(3, 8, nonlinearity="relu", batch_first=True)
    nn.init.constant_(rnn.bias_ih_l0, -50.0)
    with hs.Monitor(rnn, every=1) as monitor:
        rnn(torch.randn(4, 6, 3))[0].sum().backward()
    assert [e.finding.code for e in monitor.findings] == ["HS403"]
    for factor, code in ((0.05, "HS501"), (3.0, "HS502")):
        rnn = nn.RNN(3, 8, nonlinearity="relu", batch_first=True)
        with torch.no_grad():
            rnn.weight_hh_l0.copy_(factor * torch.eye(8))
        with hs.Monitor(rnn, every=1) as monitor:
            rnn(torch.randn(4, 12, 3))[0][:, -1].sum().backward()
        assert code in [e.finding.code for e in monitor.findings]


def test_a_graph_that_grows_is_found():
    class Keeping(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(3, 4, batch_first=True)
            self.hidden = None

        def forward(self, x):
            out, self.hidden = self.lstm(x, self.hidden)
            return out

    model = Keeping()
    with hs.Monitor(model, every=1) as monitor:
        for _ in range(4):
            model(torch.randn(2, 5, 3)).sum().backward(retain_graph=True)
    assert [e.finding.code for e in monitor.findings] == ["HS203"]


def test_packed_input_is_watched_without_its_padding():
    gru = nn.GRU(3, 8, batch_first=True)
    packed = pack_padded_sequence(torch.randn(3, 6, 3), torch.tensor([6, 4, 1]), batch_first=True)
    with hs.Monitor(gru, every=1) as monitor:
        gru(packed)[1].sum().backward()
    assert monitor.findings == []
    assert monitor.history["model.gradient_first"][0] > 0


@pytest.mark.parametrize("factor", [0.05, 3.0])
def test_gradients_through_time_are_found_whatever_the_order_of_the_arguments(factor):
    rnn = nn.RNN(3, 8, nonlinearity="relu", batch_first=True)
    with torch.no_grad():
        rnn.weight_hh_l0.copy_(factor * torch.eye(8))
    with hs.Monitor(rnn, every=1) as monitor:
        rnn(hx=torch.zeros(1, 4, 8), input=torch.randn(4, 12, 3))[0][:, -1].sum().backward()
    assert {"HS501", "HS502"} & {e.finding.code for e in monitor.findings}


def test_packed_sequences_of_two_calls_are_looked_at_together():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru = nn.GRU(3, 8, batch_first=True)

        def forward(self, *packed):
            return sum(self.gru(one)[1].sum() for one in packed)

    packed = [pack_padded_sequence(torch.randn(3, n, 3), torch.tensor([n, 4, 1]), batch_first=True) for n in (6, 5)]
    model = Twice()
    with hs.Monitor(model, every=1) as monitor:
        model(*packed).backward()
    assert monitor.history["gru.norm"][0] > 0
    assert monitor.findings == []


class Truncated(nn.Module):
    """Detaches its state inside forward, every few steps."""

    def __init__(self, every, whole=True):
        super().__init__()
        self.cell, self.every, self.whole = nn.GRUCell(3, 8), every, whole

    def forward(self, x):
        h, outs = x.new_zeros(len(x), 8), []
        for t, x_t in enumerate(x.unbind(1)):
            h = self.cell(x_t, h.detach() if t and t % self.every == 0 else h)
            outs.append(h)
        return torch.stack(outs, 1) if self.whole else h


@pytest.mark.parametrize("whole", [True, False])
def test_how_far_gradients_reach_is_a_note(whole):
    model = Truncated(10, whole)
    with hs.Monitor(model, every=1) as monitor:
        model(torch.randn(4, 60, 3)).sum().backward()
    (finding,) = [episode.finding for episode in monitor.findings]
    assert (finding.code, finding.severity) == ("HS105", "note")
    assert "10 of 60 steps" in finding.evidence


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_chunks_of_a_fused_layer_that_are_cut_inside_forward_are_told_too(kind):
    class Chunks(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = kind(3, 8, batch_first=True)

        def forward(self, x):
            state, outs = None, []
            for chunk in x.split(10, dim=1):
                out, state = self.rnn(chunk, state)
                state = tuple(p.detach() for p in state) if isinstance(state, tuple) else state.detach()
                outs.append(out)
            return torch.cat(outs, 1)

    with hs.Monitor(model := Chunks(), every=1) as monitor:
        model(torch.randn(4, 30, 3)).sum().backward()
    assert ["10 of 30 steps" in e.finding.evidence for e in monitor.findings] == [True]


def test_a_nan_in_the_input_is_told_as_such_and_not_as_an_update():
    gru, x = nn.GRU(3, 8, batch_first=True), torch.randn(4, 6, 3)
    x[1, 2] = float("nan")
    with hs.Monitor(gru, every=1) as monitor:
        gru(x)[0].sum().backward()
    finding = next(e.finding for e in monitor.findings if e.finding.code == "HS401")
    assert "enters the layer" in finding.cause
    names = {"torch": torch, "x": x}
    exec(finding.advice, names)
    assert torch.isfinite(gru(names["x"])[0]).all()


def test_six_rows_that_are_one_are_a_note():
    gru = nn.GRU(3, 8, batch_first=True)
    x = torch.cat([torch.randn(1, 10, 3).expand(6, -1, -1), torch.randn(2, 10, 3)])
    with hs.Monitor(gru, every=1) as monitor:
        gru(x)[0].sum().backward()
    assert [(e.finding.code, e.finding.severity) for e in monitor.findings] == [("HS404", "note")]
    assert "6 of 8 rows" in monitor.findings[0].finding.evidence


def test_some_dead_units_are_a_note():
    rnn = nn.RNN(3, 16, nonlinearity="relu", batch_first=True)
    with torch.no_grad():
        rnn.bias_ih_l0.fill_(1.0)
        rnn.bias_ih_l0[:6] = -50.0
    with hs.Monitor(rnn, every=1) as monitor:
        rnn(torch.randn(4, 10, 3))[0].sum().backward()
    assert [(e.finding.code, e.finding.severity) for e in monitor.findings] == [("HS403", "note")]
    assert "6 of 16 units" in monitor.findings[0].finding.evidence


def test_a_loop_that_never_hands_its_state_on_is_told_while_training():
    cell, x = nn.GRUCell(3, 8), torch.randn(5, 4, 3)
    with hs.Monitor(cell, every=50) as monitor:
        h = torch.zeros(4, 8)
        loss = sum(cell(x_t, h).sum() for x_t in x)
        loss.backward()
    (finding,) = [e.finding for e in monitor.findings]
    assert finding.code == "HS103"
    assert "called 5 times with the same state" in finding.evidence


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_rows_that_go_on_from_their_mean_are_told_while_training(kind):
    layer, x = kind(3, 8, batch_first=True), torch.randn(4, 20, 3)
    with hs.Monitor(layer, every=50) as monitor:
        state = None
        for chunk in x.split(5, dim=1):
            out, state = layer(chunk, state)
            out.sum().backward()
            mean = [h.detach().mean(1, keepdim=True).repeat(1, 4, 1) for h in (state if kind is nn.LSTM else [state])]
            state = tuple(mean) if kind is nn.LSTM else mean[0]
    assert [e.finding.code for e in monitor.findings] == ["HS101"]
    assert "averaged over the rows" in monitor.findings[0].finding.cause
    assert monitor.findings[0].finding.advice in str(monitor)


def test_rows_that_share_a_state_at_the_next_call_are_told_while_training():
    gru, x = nn.GRU(3, 8, batch_first=True), torch.randn(4, 20, 3)
    with hs.Monitor(gru, every=50) as monitor:
        h = None
        for chunk in x.split(5, dim=1):
            out, h = gru(chunk, h)
            out.sum().backward()
            h = h.detach()[:, :1].expand(-1, 4, -1).contiguous()
    assert [e.finding.code for e in monitor.findings] == ["HS101"]
    assert "one state for all rows" in monitor.findings[0].finding.evidence
