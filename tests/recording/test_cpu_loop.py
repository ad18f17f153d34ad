"""Torch's loop in Python: the bits of the fused call, and the gates that made them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_padded_sequence

from hiddenstate.recording import cpu_loop
from hiddenstate.recording.frames import TrackWeights
from tests.support.recorded import KINDS, track_of

# In float64 no LSTM goes to oneDNN: all of them are torch's own loop.
LOOPS = ["lstm", "projected", "gru"]


def layer_of(kind):
    """A layer, its weights, and what the loop calls it."""
    layer = KINDS[kind](3, 5, batch_first=True, dtype=torch.float64)
    return layer, TrackWeights.of(list(layer.parameters()), bias=True), layer.mode.lower()


def first_state(layer, rows):
    sizes = [layer.proj_size or layer.hidden_size, layer.hidden_size]
    return [torch.randn(rows, size, dtype=torch.float64) for size in sizes[: 2 if layer.mode == "LSTM" else 1]]


def native(layer, state):
    parts = tuple(part.unsqueeze(0) for part in state)
    return parts if layer.mode == "LSTM" else parts[0]


@pytest.mark.parametrize("kind", LOOPS)
@given(rows=st.integers(1, 4), time=st.integers(1, 6))
def test_a_sequence_gives_the_bits_of_the_fused_call(kind, rows, time):
    layer, weights, name = layer_of(kind)
    x, state = torch.randn(rows, time, 3, dtype=torch.float64), first_state(layer, rows)
    plain, _ = layer(x, native(layer, state))
    out, end, _ = cpu_loop.sequence(name, x.transpose(0, 1), tuple(state), weights, reverse=False)
    assert torch.equal(out.transpose(0, 1), plain)
    assert torch.equal(end[0], plain[:, -1])


@pytest.mark.parametrize("kind", LOOPS)
@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4))
def test_packed_rows_give_the_bits_of_the_fused_call(kind, lengths):
    layer, weights, name = layer_of(kind)
    lengths = sorted(lengths, reverse=True)
    x, state = torch.randn(len(lengths), lengths[0], 3, dtype=torch.float64), first_state(layer, len(lengths))
    packed = pack_padded_sequence(x, torch.tensor(lengths), batch_first=True)
    plain, after = layer(packed, native(layer, state))
    sizes = packed.batch_sizes.tolist()
    out, end, buffer = cpu_loop.packed(name, packed.data, sizes, tuple(state), weights, reverse=False)
    assert torch.equal(out, plain.data)
    assert torch.equal(end[0], (after[0] if isinstance(after, tuple) else after)[0])
    assert [len(gates) for gates in buffer.gates] == sizes


@pytest.mark.parametrize("kind", LOOPS)
@pytest.mark.parametrize("lengths", [None, [6, 4, 1]], ids=["even", "packed"])
@pytest.mark.parametrize("reverse", [False, True])
def test_the_buffer_holds_the_gates_and_cells_of_every_position(kind, lengths, reverse):
    layer, weights, name = layer_of(kind)
    x, state = torch.randn(3, 6, 3, dtype=torch.float64), first_state(layer, 3)
    if reverse:  # the oracle reads the weights of the other direction by their own names
        for parameter, weight in list(layer.named_parameters()):
            setattr(layer, f"{parameter}_reverse", weight)
    expected = track_of(layer, 0, reverse, x, state, lengths or [6, 6, 6])
    if lengths is None:
        _, _, buffer = cpu_loop.sequence(name, x.transpose(0, 1), tuple(state), weights, reverse=reverse)
        places = [(t, row) for t in range(6) for row in range(3)]
        gates, cells = (None if found is None else found.flatten(0, 1) for found in buffer.join(packed=False))
    else:
        packed = pack_padded_sequence(x, torch.tensor(lengths), batch_first=True)
        sizes = packed.batch_sizes.tolist()
        _, _, buffer = cpu_loop.packed(name, packed.data, sizes, tuple(state), weights, reverse=reverse)
        places = [(t, row) for t, size in enumerate(sizes) for row in range(size)]
        gates, cells = buffer.join(packed=True)
    steps, rows = (list(each) for each in zip(*places, strict=True))
    wanted = torch.cat([gate[rows, steps] for gate in expected.gates.values()], -1)
    torch.testing.assert_close(gates, wanted)
    if layer.mode == "LSTM":
        torch.testing.assert_close(cells, expected.c[rows, steps])
    else:
        assert cells is None


@pytest.mark.parametrize("kind", LOOPS)
def test_gradients_are_those_of_the_fused_call(kind):
    layer, weights, name = layer_of(kind)
    x, state = torch.randn(2, 5, 3, dtype=torch.float64), first_state(layer, 2)
    plain = torch.autograd.grad(layer(x, native(layer, state))[0].square().sum(), list(layer.parameters()))
    out, _, buffer = cpu_loop.sequence(name, x.transpose(0, 1), tuple(state), weights, reverse=False)
    buffer.join(packed=False)  # which must leave alone what the backward pass needs
    ours = torch.autograd.grad(out.square().sum(), list(layer.parameters()))
    assert all(map(torch.equal, ours, plain))
