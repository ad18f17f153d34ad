"""A served model: however its layers are called, a session in pieces is the whole."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import hiddenstate as hs
from hiddenstate.cells import Adapter, Spec
from hiddenstate.serve import Engine
from tests.support.calling import WAYS, Calling


class Decaying(nn.Module):
    """A fused layer of the user's own, its arguments named in its own way."""

    axis = 1  # of time

    def __init__(self):
        super().__init__()
        self.drive = nn.Linear(3, 4)

    def forward(self, sequence, memory=None):
        memory = sequence.new_zeros(1, sequence.shape[1 - self.axis], 4) if memory is None else memory
        outputs = []
        for step in sequence.unbind(self.axis):
            memory = 0.5 * memory + torch.tanh(self.drive(step))
            outputs.append(memory[0])
        return torch.stack(outputs, dim=self.axis), memory


class DecayingTimeFirst(Decaying):
    axis = 0


class DecayingAdapter(Adapter):
    kind, fused = "decaying", True

    def spec(self, module):
        return Spec(("m",), {"m": 4}, input_size=3, batch_first=module.axis == 1)

    def initial(self, module, batch):
        return hs.State({"m": torch.zeros(1, batch, 4)}, 1)

    def to_state(self, module, native, *, batch=None):
        return hs.State({"m": native}, 1)

    def to_native(self, module, state, *, batched=True):
        return state["m"]

    def split(self, module, result):
        return result


class TimeFirstAdapter(DecayingAdapter):
    def rows(self, module, args, kwargs):
        x = args[0] if args else kwargs["sequence"]
        return x.shape[1], True


class WithDecay(nn.Module):
    def __init__(self, kind, way):
        super().__init__()
        self.inner, self.read, self.way = kind(), nn.Linear(4, 2), way

    def forward(self, x):
        x = x.transpose(0, 1 - self.inner.axis)
        return self.read(self.way(self.inner, x)[0].transpose(0, 1 - self.inner.axis))


OWN_WAYS = {
    "by position": lambda layer, x: layer(x),
    "by name": lambda layer, x: layer(memory=None, sequence=x),
    "by forward": lambda layer, x: layer.forward(sequence=x),
}


@pytest.fixture
def registered():
    hs.register(Decaying, DecayingAdapter())
    hs.register(DecayingTimeFirst, TimeFirstAdapter())


def pieces_equal_the_whole(model, x, cuts):
    """Feed a session in pieces and compare what it is answered with one call."""
    wanted = model.eval()(x.unsqueeze(0))
    wanted = (wanted[0] if isinstance(wanted, tuple) else wanted)[0].detach()
    with Engine(model) as engine:
        for session in ("one", "other"):
            engine.open(session)
        given = [engine.push("one", piece) for piece in x.split(cuts)]
        engine.push("other", x[:1])
    torch.testing.assert_close(torch.cat(given), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", OWN_WAYS)
@pytest.mark.parametrize("kind", [Decaying, DecayingTimeFirst])
@pytest.mark.usefixtures("registered")
def test_a_registered_fused_layer_is_served(kind, way):
    pieces_equal_the_whole(WithDecay(kind, OWN_WAYS[way]), torch.randn(7, 3), [3, 1, 2, 1])


@pytest.mark.parametrize("way", OWN_WAYS)
@pytest.mark.parametrize("kind", [Decaying, DecayingTimeFirst])
@pytest.mark.usefixtures("registered")
def test_a_registered_fused_layer_is_carried(kind, way):
    model, x = WithDecay(kind, OWN_WAYS[way]), torch.randn(2, 7, 3)
    whole, (_, ended) = model(x), model.inner(x[1:, :4].transpose(0, 1 - model.inner.axis))
    with hs.Carry(model) as carry:
        pieces = [model(piece) for piece in x.split([3, 1, 3], dim=1)]
        torch.testing.assert_close(torch.cat(pieces, dim=1), whole)
        assert list(carry.state) == ["inner.m"]
    with hs.Carry(model) as carry:
        carry.mark(lengths=torch.tensor([7, 4]))
        model(x)
        torch.testing.assert_close(carry.state["inner.m"][0, 1], ended[0, 0])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # torch's, of checkpoints without gradients
@settings(max_examples=5)
@given(kind=st.sampled_from([nn.RNN, nn.LSTM, nn.GRU]), cuts=st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_however_a_layer_is_called_a_session_in_pieces_is_the_whole(way, kind, cuts):
    pieces_equal_the_whole(Calling(kind(3, 4, batch_first=True), way), torch.randn(sum(cuts), 3), cuts)
