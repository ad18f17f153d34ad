"""HS203 on plain training loops: counted by the nodes that calls share, not by how large their graphs are."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

import hiddenstate as hs
from hiddenstate.diagnosis.graphs import GraphWatch, count_nodes


class Keeping(nn.Module):
    def __init__(self, kind=nn.LSTM):
        super().__init__()
        self.rnn = kind(3, 4, batch_first=True)
        self.hidden = None

    def forward(self, x):
        out, self.hidden = self.rnn(x, self.hidden)
        return out


class CharRNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden_size = 4
        self.i2h, self.out = nn.Linear(3 + 4, 4), nn.Linear(4, 2)

    def forward(self, x, hidden):
        hidden = torch.tanh(self.i2h(torch.cat([x, hidden], 1)))
        return self.out(hidden), hidden


def codes(monitor):
    return [episode.finding.code for episode in monitor.findings]


@pytest.mark.parametrize("every", [1, 50])
@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_it_is_told_at_the_second_call_before_torch_raises_and_the_advice_mends_it(kind, every):
    model = Keeping(kind)
    monitor = hs.Monitor(model, every=every)
    model(torch.randn(2, 5, 3)).sum().backward()
    loss = model(torch.randn(2, 5, 3)).sum()
    assert codes(monitor) == ["HS203"]
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    (episode,) = monitor.findings
    assert (episode.began, episode.ended) == (1, None)
    assert episode.finding.where.startswith("hidden")
    model.hidden = None
    model(torch.randn(2, 5, 3)).sum().backward()
    exec(episode.finding.advice, {"self": model, "hs": hs})
    model(torch.randn(2, 5, 3)).sum().backward()  # fits the kind of layer, and the next backward works
    monitor.close()


def test_it_lasts_as_long_as_the_graph_grows_and_ends_when_it_does():
    model = Keeping()
    with hs.Monitor(model, every=1) as monitor:
        for _ in range(12):
            model(torch.randn(2, 5, 3)).sum().backward(retain_graph=True)
        (episode,) = monitor.findings
        assert (episode.began, episode.ended) == (1, None)
        for _ in range(4):
            model.hidden = tuple(part.detach() for part in model.hidden)
            model(torch.randn(2, 5, 3)).sum().backward()
        assert episode.ended is not None
    assert codes(monitor) == ["HS203"]


@pytest.mark.parametrize("steps", [12, 35])
@pytest.mark.parametrize("every", [1, 3])
def test_a_healthy_loop_that_steps_a_cell_is_told_nothing(steps, every):
    cell = nn.GRUCell(3, 4)
    optimizer = torch.optim.SGD(cell.parameters(), 0.01)
    with hs.Monitor(cell, optimizer, every=every) as monitor:
        for _ in range(4):
            h, loss = torch.zeros(2, 4), 0.0
            for x in torch.randn(steps, 2, 3):
                h = cell(x, h)
                loss = loss + h.square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert "HS203" not in codes(monitor)


@pytest.mark.parametrize("make", [lambda: nn.GRUCell(3, 4), CharRNN])
def test_a_loop_that_keeps_the_state_of_the_last_sequence_with_its_graph_is_told(make):
    cell, h = make(), torch.zeros(2, 4)
    with hs.Monitor(cell, every=1) as monitor:
        for _ in range(2):
            for x in torch.randn(12, 2, 3):
                out = cell(x, h)
                h = out[1] if isinstance(out, tuple) else out
            h.sum().backward(retain_graph=True)
    assert codes(monitor) == ["HS203"]
    assert monitor.findings[0].finding.advice.startswith("hidden = hidden.detach()  #")
    assert monitor.findings[0].began == 12


def test_truncation_with_detach_is_told_nothing():
    lstm, state = nn.LSTM(3, 4, batch_first=True), None
    with hs.Monitor(lstm, every=1) as monitor:
        for chunk in torch.randn(2, 40, 3).split(5, dim=1):
            out, state = lstm(chunk, state)
            out.sum().backward()
            state = tuple(part.detach() for part in state)
    assert codes(monitor) == []


def test_a_decoder_that_is_fed_the_encoder_s_state_with_its_graph_is_told_nothing():
    model = nn.ModuleDict({"encoder": nn.GRU(3, 4, batch_first=True), "decoder": nn.GRUCell(3, 4)})
    with hs.Monitor(model, every=1) as whole, hs.Monitor(model["decoder"], every=1) as decoder:
        for _ in range(4):
            _, h = model["encoder"](torch.randn(2, 6, 3))
            h, loss = h[0], 0.0
            for x in torch.randn(5, 2, 3):
                h = model["decoder"](x, h)
                loss = loss + h.sum()
            loss.backward()
    assert codes(whole) == codes(decoder) == []


def test_what_the_user_made_outside_may_be_used_again():
    gru, table = nn.GRU(3, 4, batch_first=True), nn.Linear(3, 3)
    x = table(torch.randn(2, 5, 3))
    with hs.Monitor(gru, every=1) as monitor:
        for _ in range(3):
            gru(x)[0].sum().backward(retain_graph=True)
    assert codes(monitor) == []


def test_it_keeps_no_graph_alive_and_changes_no_gradient():
    x, model = torch.randn(2, 5, 3), Keeping(nn.GRU)
    out = model(x)
    plain = torch.autograd.grad(out.sum(), list(model.parameters()))
    model.hidden = None
    with hs.Monitor(model, every=1):
        out = model(x)
        watched = torch.autograd.grad(out.sum(), list(model.parameters()))
        model.hidden, alive = None, weakref.ref(out)
        del out
        gc.collect()
        assert alive() is None
    torch.testing.assert_close(watched, plain)


def test_shared_nodes_are_counted_one_by_one():
    watch, w = GraphWatch(), torch.ones(3, requires_grad=True)
    first = (w * 2).tanh()
    assert watch.call((), first) == 0
    first.sum().backward(retain_graph=True)
    assert watch.spent
    assert watch.call(first, first * 3) == 2  # tanh and the product
    assert count_nodes(first * 3) == 4


class WarmedUp(nn.Module):
    """The first steps run without a graph, as a burn-in does."""

    def __init__(self, warmup):
        super().__init__()
        self.cell, self.head, self.warmup = nn.GRUCell(3, 6), nn.Linear(6, 2), warmup

    def forward(self, x):
        h = x.new_zeros(len(x), 6)
        for t, x_t in enumerate(x.unbind(1)):
            with torch.set_grad_enabled(torch.is_grad_enabled() and t >= self.warmup):
                h = self.cell(x_t, h)
        return self.head(h)


def test_steps_before_the_first_one_with_a_graph_are_out_of_reach():
    report = hs.diagnose(WarmedUp(8), torch.randn(3, 12, 3))
    (finding,) = report.findings
    assert (finding.code, finding.severity) == ("HS105", "note")
    assert "reach back 4 of 12 steps" in finding.evidence
    assert hs.diagnose(WarmedUp(0), torch.randn(3, 12, 3)).ok
    assert "HS105" not in hs.diagnose(WarmedUp(0).requires_grad_(False), torch.randn(3, 12, 3)).codes
