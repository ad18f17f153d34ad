"""What layers pass on to each other while a model trains: Monitor says what diagnose says."""

import pytest
import torch
from torch import nn

import hiddenstate as hs


class Seq2Seq(nn.Module):
    """An encoder and a decoder, and what the one is handed of the other."""

    def __init__(self, start, *, encoder=nn.LSTM, decoder=nn.LSTM, embedded=False):
        super().__init__()
        self.embed = nn.Embedding(9, 3) if embedded else None
        self.encoder = encoder(3, 8, batch_first=True)
        self.decoder = decoder(3, 8, batch_first=True)
        self.head, self.start = nn.Linear(8, 2), start

    def forward(self, source, target):
        _, state = self.encoder(source if self.embed is None else self.embed(source))
        return self.head(self.decoder(target, self.start(state))[0])


class SteppedDecoder(nn.Module):
    """A decoder that is a cell, stepped."""

    def __init__(self, start):
        super().__init__()
        self.encoder, self.cell, self.head = nn.LSTM(3, 8, batch_first=True), nn.LSTMCell(3, 8), nn.Linear(8, 2)
        self.start = start

    def forward(self, source, target):
        _, (h, c) = self.encoder(source)
        state, seen = self.start((h[0], c[0])), []
        for t in range(target.size(1)):
            state = self.cell(target[:, t], state)
            seen.append(state[0])
        return self.head(torch.stack(seen, 1))


def zero_c(state):
    return state[0], torch.zeros_like(state[1])


def unused(state):
    return None


def whole(state):
    return state


def detached(state):
    return tuple(part.detach() for part in state) if isinstance(state, tuple) else state.detach()


def monitored(model, *, source=None, steps=3):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with hs.Monitor(model, optimizer, every=1) as monitor:
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(4, 7, 3) if source is None else source, torch.randn(4, 5, 3)).square().mean().backward()
            optimizer.step()
    return {episode.finding.code: episode.finding for episode in monitor.findings}


@pytest.mark.parametrize("model", [Seq2Seq(zero_c), SteppedDecoder(zero_c)], ids=["fused", "stepped"])
def test_a_decoder_that_gets_a_zero_c_is_told_while_training(model):
    finding = monitored(model)["HS103"]
    assert finding.where == ("decoder" if isinstance(model, Seq2Seq) else "cell")
    assert "what encoder has in its c is lost" in finding.evidence
    codes = hs.diagnose(model, torch.randn(4, 7, 3), torch.randn(4, 5, 3)).codes
    assert "HS103" in codes


@pytest.mark.parametrize(
    "model",
    [
        Seq2Seq(whole),
        Seq2Seq(whole, encoder=nn.GRU, decoder=nn.GRU),
        Seq2Seq(lambda h: (h, torch.zeros_like(h)), encoder=nn.GRU),
        SteppedDecoder(whole),
    ],
    ids=["lstm", "gru", "no c to hand on", "stepped"],
)
def test_a_healthy_pair_is_told_nothing(model):
    assert monitored(model) == {}


@pytest.mark.parametrize("encoder", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("embedded", [False, True], ids=["numbers", "tokens"])
def test_an_unused_encoder_is_told_by_the_name_of_its_input(encoder, embedded):
    model = Seq2Seq(unused, encoder=encoder, embedded=embedded)
    found = monitored(model, source=torch.randint(9, (4, 7)) if embedded else None)
    assert found["HS104"].where == "source"
    assert "encoder ran, and no gradient came back to any of its 4 parameters" in found["HS104"].evidence
    assert "HS503" not in found or found["HS503"].where == "embed.weight"


def test_an_unused_encoder_in_a_module_of_its_own_explains_its_embedding_too():
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.rnn = nn.Embedding(9, 3), nn.GRU(3, 8, batch_first=True)

        def forward(self, tokens):
            return self.rnn(self.embed(tokens))

    class Model(Seq2Seq):
        def __init__(self):
            super().__init__(unused)
            self.encoder = Encoder()

    found = monitored(Model(), source=torch.randint(9, (4, 7)))
    assert list(found) == ["HS104"]


def test_a_state_that_is_handed_on_without_its_graph_is_no_unused_input():
    found = monitored(Seq2Seq(detached))
    assert list(found) == ["HS503"]
    assert found["HS503"].where.startswith("encoder.weight_ih_l0")


def test_a_layer_that_never_runs_is_as_it_was():
    class Spare(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.spare = nn.GRU(3, 8, batch_first=True), nn.GRU(3, 8, batch_first=True)

        def forward(self, source, target):
            return self.rnn(source)[0]

    assert list(monitored(Spare())) == ["HS503"]


def test_where_nothing_tells_the_argument_the_layer_is_named():
    class Mixed(Seq2Seq):
        def forward(self, source, target):
            self.encoder(torch.cat([source, target], 1))
            return self.head(self.decoder(target)[0])

    assert monitored(Mixed(unused))["HS104"].where == "encoder"
