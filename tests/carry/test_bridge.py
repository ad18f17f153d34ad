"""From any encoder's last state to any decoder's first."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from hiddenstate.carry import Bridge, Carry
from hiddenstate.cells import layers
from hiddenstate.errors import StateMismatch
from tests.support.cells import CELLS
from tests.support.models import Deep, OwnLayer, OwnTimeFirstLayer

LAYERS = {
    "lstm": lambda: nn.LSTM(3, 4, batch_first=True),
    "deep lstm both ways": lambda: nn.LSTM(3, 5, 2, bidirectional=True, batch_first=True),
    "projected": lambda: nn.LSTM(3, 6, 2, proj_size=2, batch_first=True),
    "gru": lambda: nn.GRU(3, 4, 3, batch_first=True),
    "rnn both ways": lambda: nn.RNN(3, 7, bidirectional=True, batch_first=True),
    "cell": lambda: nn.LSTMCell(3, 4),
    "own layer": OwnLayer,
    "own stack": OwnTimeFirstLayer,
    "own": lambda: CELLS["dict"].cell() if "dict" in CELLS else next(iter(CELLS.values())).cell(),
}
PAIRS = list(itertools.product(LAYERS, LAYERS))


def last_state(layer, batch=3):
    return layer.initial(batch).map(torch.randn_like)


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_any_encoder_leads_to_any_decoder_with_gradient(source, target):
    encoder, decoder = LAYERS[source](), LAYERS[target]()
    state = last_state(layers(encoder)[0]).map(lambda part: part.requires_grad_())
    bridge = Bridge(encoder, decoder)
    first = bridge(state)
    expected = layers(decoder)[0].initial(3)
    assert {name: part.shape for name, part in first.items()} == {name: part.shape for name, part in expected.items()}
    assert dict(first.batch_axis) == dict(expected.batch_axis)
    layers(decoder)[0].to_native(first)
    sum(part.square().sum() for part in first.values()).backward()
    assert state["h"].grad is not None if "h" in state else True
    assert all(parameter.grad is not None for parameter in bridge.parameters())


@pytest.mark.parametrize("name", LAYERS)
def test_rows_stay_apart(name):
    encoder, decoder = LAYERS["deep lstm both ways"](), LAYERS[name]()
    bridge, state = Bridge(encoder, decoder), last_state(layers(encoder)[0])
    whole = bridge(state)
    for row in range(3):
        alone = bridge(state.select([row]))
        for part in whole:
            torch.testing.assert_close(whole.select([row])[part], alone[part])


@pytest.mark.parametrize("name", LAYERS)
def test_equal_layers_hand_the_state_over_as_it_is(name):
    encoder, decoder = LAYERS[name](), LAYERS[name]()
    bridge, state = Bridge(encoder, decoder), last_state(layers(encoder)[0])
    assert not list(bridge.parameters())
    assert "the states fit as they are" in repr(bridge)
    first = bridge(state)
    assert all(torch.equal(first[part], state[part]) for part in state)


def test_a_native_state_goes_in_and_comes_out():
    encoder, decoder = nn.LSTM(3, 4, 2, bidirectional=True), nn.LSTM(5, 6, batch_first=True)
    bridge = Bridge(encoder, decoder)
    _, last = encoder(torch.randn(7, 3, 3))
    out, _ = decoder(torch.randn(3, 2, 5), bridge.native(last))
    assert out.shape == (3, 2, 6)
    assert (bridge(last)["h"].abs() < 1).all()


def test_whole_models_are_bridged_and_carried():
    encoder, decoder = Deep(), Deep()
    bridge = Bridge(encoder, decoder)
    with Carry(encoder) as carry:
        encoder(torch.randn(2, 5, 3))
        state = carry.state
    x = torch.randn(2, 4, 3)
    with Carry(decoder) as carry:
        carry.state = bridge(state)
        out = decoder(x)
    expected, _ = decoder.encoder["lstm"](decoder.embed(x), (state["encoder.lstm.h"], state["encoder.lstm.c"]))
    torch.testing.assert_close(out, decoder.head(decoder.gru(expected, state["gru.h"])[0]))


def test_what_does_not_fit_is_refused():
    bridge = Bridge(Deep(), nn.GRU(3, 4))
    with pytest.raises(StateMismatch, match=r"encoder has 2 recurrent layers, and a native state does not say whose"):
        bridge(torch.zeros(1, 2, 4))
    bridge = Bridge(nn.GRU(3, 4), Deep())
    with pytest.raises(StateMismatch, match=r"decoder has 2 recurrent layers, so no single native state"):
        bridge.native(torch.zeros(1, 2, 4))
    with pytest.raises(StateMismatch, match=r"\(2, 2, 4\).*needs \(1, batch, 4\)"):
        bridge(torch.zeros(2, 2, 4))
