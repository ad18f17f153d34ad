"""Torch's own layers, unrolled: what torch itself computes, in one fused call."""

import itertools
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import hiddenstate as hs
from hiddenstate.cells import Adapter, Spec
from hiddenstate.errors import NotRecurrent
from tests.support.equal import assert_same, inputs_of

unroll = partial(hs.unroll, time_axis=1)  # rows first, also for layers whose own layout is another

KINDS = {
    "tanh": lambda **settings: nn.RNN(3, 4, **settings),
    "relu": lambda **settings: nn.RNN(3, 4, nonlinearity="relu", **settings),
    "gru": lambda **settings: nn.GRU(3, 4, **settings),
    "lstm": lambda **settings: nn.LSTM(3, 4, **settings),
    "projected": lambda **settings: nn.LSTM(3, 4, proj_size=2, **settings),
}
SETTINGS = [
    {"num_layers": layers, "bidirectional": both, "bias": bias, "batch_first": first}
    for layers, both, bias, first in itertools.product((1, 2), (False, True), (True, False), (True, False))
]


def parts(native):
    return list(native) if isinstance(native, tuple) else [native]


@pytest.mark.parametrize("lengths", [None, [2, 5, 3]], ids=["whole", "lengths"])
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: "-".join(str(int(v)) for v in s.values()))
@pytest.mark.parametrize("kind", KINDS)
def test_a_torch_layer_gives_what_torch_gives(kind, settings, lengths):
    layer = KINDS[kind](**settings).double()
    x = torch.randn(3, 5, 3, dtype=torch.float64)
    first = hs.layers(layer)[0].initial(3).map(torch.randn_like)
    wanted = inputs_of(layer, x, *first.values())
    native = tuple(first.values()) if len(first) == 2 else first["h"]

    def theirs():
        turned = x if layer.batch_first else x.transpose(0, 1)
        if lengths is None:
            out, state = layer(turned, native)
            return [out if layer.batch_first else out.transpose(0, 1), *parts(state)]
        packed = pack_padded_sequence(turned, torch.tensor(lengths), layer.batch_first, enforce_sorted=False)
        out, state = layer(packed, native)
        return [pad_packed_sequence(out, batch_first=True)[0], *parts(state)]

    def ours():
        out, state = unroll(layer, x, first, lengths=lengths)
        return [out, *state.values()]

    assert_same(theirs, ours, wanted)


def test_resets_are_one_call_of_the_layer():
    layer, calls = nn.LSTM(3, 4, num_layers=2), []
    layer.register_forward_hook(lambda module, args, result: calls.append(args[0].data.shape))
    resets = torch.rand(4, 10) < 0.3
    unroll(layer, torch.randn(4, 10, 3), resets=resets, lengths=[10, 3, 7, 1])
    assert calls == [(21, 3)]  # as many steps as the rows have, none of them padding


def test_without_a_state_none_is_given_to_the_layer():
    layer, seen = nn.GRU(3, 4), []
    layer.register_forward_pre_hook(lambda module, args: seen.append(len(args)))
    unroll(layer, torch.randn(2, 3, 3))
    unroll(layer, torch.randn(2, 3, 3), lengths=[1, 3])
    assert seen == [1, 1]


def test_dropout_between_layers_is_torchs_own():
    layer, x = nn.LSTM(3, 4, num_layers=2, dropout=0.5, batch_first=True), torch.randn(2, 6, 3)
    torch.manual_seed(1)
    theirs = layer(x)[0]
    torch.manual_seed(1)
    assert torch.equal(unroll(layer, x)[0], theirs)
    layer.eval()
    assert torch.equal(unroll(layer, x)[0], layer(x)[0])


def test_one_step_is_a_sequence_too():
    layer, x = nn.LSTM(3, 4), torch.randn(2, 1, 3)
    resets = torch.tensor([[True], [False]])
    state = hs.layers(layer)[0].initial(2).map(torch.ones_like)
    out, _ = unroll(layer, x, state, resets=resets)
    torch.testing.assert_close(out[:1], unroll(layer, x[:1])[0])


def test_autocast_gives_what_the_layer_gives_under_it():
    layer, x = nn.GRU(3, 4, batch_first=True), torch.randn(2, 5, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        theirs, last = layer(x)
        out, state = unroll(layer, x)
        assert torch.equal(out, theirs)
        assert torch.equal(unroll(layer, x, state)[0], layer(x, last)[0])
        unroll(layer, x, state, resets=torch.rand(2, 5) < 0.5, lengths=[2, 5])


class Leaky(nn.Module):
    """A layer of the user's own that runs whole sequences, time first."""

    def __init__(self, both=False):
        super().__init__()
        self.inner = nn.Linear(3, 4)
        self.both = both

    def forward(self, x, state=None):
        state = x.new_zeros(1, x.shape[1], 4) if state is None else state
        outputs = []
        for step in x:
            state = 0.5 * state + self.inner(step)
            outputs.append(state[0])
        return torch.stack(outputs), state


class LeakyAdapter(Adapter):
    kind, fused = "leaky", True

    def spec(self, module):
        return Spec(("h",), {"h": 4}, directions=2 if module.both else 1, batch_first=False)

    def initial(self, module, batch):
        return hs.State({"h": torch.zeros(1, batch, 4)}, 1)

    def to_state(self, module, native, *, batch=None):
        return hs.State({"h": native}, 1)

    def to_native(self, module, state, *, batched=True):
        return state["h"]

    def split(self, module, result):
        return result


hs.register(Leaky, LeakyAdapter())


def test_a_registered_layer_keeps_lengths_and_resets_by_steps():
    layer, x = Leaky(), torch.randn(3, 5, 3)
    whole, _ = unroll(layer, x)
    torch.testing.assert_close(whole.transpose(0, 1), layer(x.transpose(0, 1))[0])
    out, final = unroll(layer, x, lengths=[5, 2, 3])
    torch.testing.assert_close(out[1, :2], whole[1, :2])
    torch.testing.assert_close(final["h"][0, 2], whole[2, 2])
    resets = torch.zeros(3, 5, dtype=torch.bool)
    resets[0, 2] = True
    torch.testing.assert_close(unroll(layer, x, resets=resets)[0][0, 2:], unroll(layer, x[:1, 2:])[0][0])


def test_lengths_of_a_registered_layer_that_runs_both_ways_are_refused():
    with pytest.raises(NotRecurrent, match=r"Leaky runs in both directions.*hs\.Recurrent"):
        unroll(Leaky(both=True), torch.randn(3, 5, 3), lengths=[5, 2, 3])


@pytest.mark.cuda
def test_resets_and_lengths_on_cuda_equal_those_on_cpu():
    layer, x = nn.LSTM(3, 4, num_layers=2).double(), torch.randn(3, 5, 3, dtype=torch.float64)
    resets, lengths = torch.rand(3, 5) < 0.3, torch.tensor([2, 5, 3])
    here, state = unroll(layer, x, resets=resets, lengths=lengths)
    there, final = unroll(layer.cuda(), x.cuda(), resets=resets.cuda(), lengths=lengths.cuda())
    torch.testing.assert_close(there.cpu(), here)
    torch.testing.assert_close(final["c"].cpu(), state["c"])
