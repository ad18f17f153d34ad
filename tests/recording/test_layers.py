"""Fused layers: what is recorded is what an explicit float64 loop goes through, and the run is the plain run to the bit."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import hiddenstate as hs
from tests.support.recorded import stack_of

KINDS = {
    "lstm": nn.LSTM,
    "projected": lambda *a, **k: nn.LSTM(*a, proj_size=3, **k),
    "gru": nn.GRU,
    "rnn": nn.RNN,
    "relu": lambda *a, **k: nn.RNN(*a, nonlinearity="relu", **k),
}
LENGTHS = {"even": [6, 6, 6], "sorted": [6, 4, 2], "any order": [2, 6, 4]}
ignore_onednn = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")


def tensors(result):
    """Every tensor that a layer returned."""
    if isinstance(result, PackedSequence):
        return [result.data]
    return [t for part in result for t in tensors(part)] if isinstance(result, tuple) else [result]


def same_bits(a, b):
    return all(
        p.dtype == q.dtype and p.stride() == q.stride() and torch.equal(p, q)
        for p, q in zip(tensors(a), tensors(b), strict=True)
    )


def sequence(packing, batch_first, dtype):
    x = torch.randn(3, 6, 4, dtype=dtype)
    given = x if batch_first else x.transpose(0, 1)
    if packing == "even":
        return x, given
    lengths = torch.tensor(LENGTHS[packing])
    return x, pack_padded_sequence(given, lengths, batch_first=batch_first, enforce_sorted=packing == "sorted")


def first_states(layer, dtype):
    deep = layer.num_layers * (2 if layer.bidirectional else 1)
    sizes = [layer.proj_size or layer.hidden_size, layer.hidden_size]
    return [torch.randn(deep, 3, size, dtype=dtype) for size in sizes[: 2 if layer.mode == "LSTM" else 1]]


def check(rec, layer, x, state, lengths, gates):
    tolerance = {"rtol": 1e-5, "atol": 2e-5} if x.dtype == torch.float32 else {"rtol": 1e-11, "atol": 1e-12}
    for track, expected in stack_of(layer, x, state, lengths).items():
        seen = rec[track]
        torch.testing.assert_close(seen.h.double(), expected.h, **tolerance)
        assert seen.lengths.tolist() == lengths
        if layer.mode == "LSTM":
            torch.testing.assert_close(seen.c.double(), expected.c, **tolerance)
        assert set(seen.gates) == (set(expected.gates) if gates else set())
        for name, gate in seen.gates.items():
            torch.testing.assert_close(gate.double(), expected.gates[name], **tolerance)
    for place, track in enumerate(rec):
        assert all(torch.equal(rec[track].initial[p], part[place]) for p, part in zip("hc", state, strict=False))


@ignore_onednn
@pytest.mark.parametrize("gates", [True, False], ids=["gates", "states"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("packing", LENGTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_configuration_is_recorded_exactly_and_left_alone(kind, packing, dtype, gates):
    for layers, both, batch_first, bias in itertools.product((1, 3), (False, True), (False, True), (False, True)):
        shape = {"num_layers": layers, "bidirectional": both, "batch_first": batch_first, "bias": bias}
        layer = KINDS[kind](4, 5, dtype=dtype, **shape)
        x, given_x = sequence(packing, batch_first, dtype)
        state = first_states(layer, dtype)
        native = tuple(state) if layer.mode == "LSTM" else state[0]
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                plain = layer(given_x, native)
                for _ in range(2):  # the second time, ways that have been seen to agree are taken
                    with hs.record(layer, gates) as rec:
                        recorded = layer(given_x, native)
                    assert same_bits(recorded, plain), shape
            check(rec, layer, x, state, LENGTHS[packing], gates)
