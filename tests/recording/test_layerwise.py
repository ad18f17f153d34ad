"""Fused layers: recorded is what an explicit float64 loop goes through, and the run is the plain run to the bit."""

import contextlib
import copy
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import hiddenstate as hs
from hiddenstate.recording import layerwise
from tests.support.recorded import KINDS, stack_of

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
    laid = x if batch_first else x.transpose(0, 1)
    if packing == "even":
        return x, laid
    lengths = torch.tensor(LENGTHS[packing])
    return x, pack_padded_sequence(laid, lengths, batch_first=batch_first, enforce_sorted=packing == "sorted")


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


@pytest.mark.sample(20)
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


@ignore_onednn
@pytest.mark.parametrize("gates", [True, False], ids=["gates", "states"])
@pytest.mark.parametrize("packing", ["even", "any order"])
@pytest.mark.parametrize("kind", KINDS)
def test_training_with_dropout_draws_and_learns_as_if_nobody_watched(kind, packing, gates):
    for both, dtype in itertools.product((False, True), (torch.float32, torch.float64)):
        layer = KINDS[kind](4, 5, num_layers=3, bidirectional=both, dropout=0.4, batch_first=True, dtype=dtype)
        x, _ = sequence("even", True, dtype)

        def train(watch, layer=layer, x=x):
            torch.manual_seed(7)
            layer.zero_grad()
            leaf = x.clone().requires_grad_()
            state = [part.requires_grad_() for part in first_states(layer, x.dtype)]
            native = tuple(state) if layer.mode == "LSTM" else state[0]
            fed = leaf
            if packing != "even":
                fed = pack_padded_sequence(leaf, torch.tensor(LENGTHS[packing]), True, enforce_sorted=False)
            with hs.record(layer, gates) if watch else contextlib.nullcontext() as rec:
                result = layer(fed, native)
                sum((t.sin() * 3).sum() for t in tensors(result)).backward()
            grads = [leaf.grad, *(part.grad for part in state), *(p.grad.clone() for p in layer.parameters())]
            return result, grads, torch.random.get_rng_state(), rec

        plain, plain_grads, plain_random, _ = train(False)
        for _ in range(2):
            recorded, grads, random, rec = train(True)
            assert same_bits(recorded, plain)
            assert all(torch.equal(a, b) for a, b in zip(grads, plain_grads, strict=True))
            assert torch.equal(random, plain_random)
            top = [rec[track].h for track in rec][-(2 if both else 1) :]
            expected = recorded[0]
            if packing != "even":
                expected, _ = pad_packed_sequence(expected, batch_first=True)
            assert torch.equal(torch.cat(top, -1), expected)


@ignore_onednn
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", ["lstm", "projected", "gru"])
def test_with_dropout_the_gates_are_those_of_that_very_run(kind, dtype):
    layer = KINDS[kind](4, 5, num_layers=2, dropout=0.5, batch_first=True, dtype=dtype)
    for grad in (True, False):
        with torch.set_grad_enabled(grad), hs.record(layer, gates=True) as rec:
            layer(torch.randn(3, 6, 4, dtype=dtype))
        for track in ("l0", "l1"):
            seen = rec[track]
            gates = seen.gates
            if kind == "gru":
                before = torch.cat([seen.initial["h"].unsqueeze(1), seen.h[:, :-1]], 1)
                after = (1 - gates["update"]) * gates["candidate"] + gates["update"] * before
                torch.testing.assert_close(after, seen.h)
                continue
            before = torch.cat([seen.initial["c"].unsqueeze(1), seen.c[:, :-1]], 1)
            cells = gates["forget"] * before + gates["input"] * gates["candidate"]
            torch.testing.assert_close(cells, seen.c)
            hidden = gates["output"] * seen.c.tanh()
            if kind == "projected":
                hidden = hidden @ getattr(layer, f"weight_hr_{track}").T
            torch.testing.assert_close(hidden.detach(), seen.h)


@pytest.mark.parametrize("kind", ["lstm", "gru", "rnn", "relu"])
def test_a_sequence_without_rows_is_a_batch_of_one(kind):
    layer, x = KINDS[kind](4, 5, num_layers=2, bidirectional=True), torch.randn(6, 4)
    state = [torch.randn(4, 5) for _ in range(2 if kind == "lstm" else 1)]
    native = tuple(state) if kind == "lstm" else state[0]
    plain = layer(x, native)
    with hs.record(layer, gates=True) as rec:
        assert same_bits(layer(x, native), plain)
    check(rec, layer, x.unsqueeze(0), [part.unsqueeze(1) for part in state], [6], gates=True)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@ignore_onednn
def test_autocast_is_recorded_in_its_own_precision(kind, grad):
    layer, x = KINDS[kind](4, 16, num_layers=2, batch_first=True), torch.randn(3, 6, 4)
    with torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(grad):
        plain = layer(x)
        for _ in range(2):
            with hs.record(layer, gates=True) as rec:
                assert same_bits(layer(x), plain)
            assert torch.equal(rec["l1"].h, plain[0])
    zeros = [torch.zeros(2, 3, s) for s in (layer.proj_size or 16, 16)][: 2 if layer.mode == "LSTM" else 1]
    for track, expected in stack_of(layer, x, zeros, [6, 6, 6]).items():
        assert rec[track].h.dtype == plain[0].dtype
        torch.testing.assert_close(rec[track].h.double(), expected.h, rtol=0.05, atol=0.05)
        for name, gate in rec[track].gates.items():
            torch.testing.assert_close(gate.double(), expected.gates[name], rtol=0.05, atol=0.05)


@pytest.mark.parametrize("gates", [True, False])
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_inference_mode_is_a_mode_like_any_other(kind, mode, gates):
    layer, x = KINDS[kind](4, 5, num_layers=2, batch_first=True).eval(), torch.randn(3, 6, 4)
    with mode():
        plain = layer(x)
        with hs.record(layer, gates) as rec:
            recorded = layer(x)
    assert same_bits(recorded, plain)
    assert recorded[0].is_inference() == plain[0].is_inference()
    zeros = [torch.zeros(2, 3, 5)] * (2 if kind == "lstm" else 1)
    check(rec, layer, x, zeros, [6, 6, 6], gates)


@settings(max_examples=25)
@given(
    steps=st.sampled_from([1, 2, 9, 40]),
    rows=st.integers(1, 20),
    features=st.integers(1, 40),
    units=st.sampled_from([1, 3, 8, 16, 20, 33, 64]),
    layers=st.integers(1, 2),
)
def test_gates_kept_without_grad_mode_change_no_bit_at_any_size(steps, rows, features, units, layers):
    """Kept by the kernel for training where that rounds as the one for inference does, else worked out later."""
    layer, state = nn.LSTM(features, units, layers), [torch.randn(layers, rows, units) for _ in "hc"]
    for _ in range(3):  # the first call of a size compares, later ones trust
        x = torch.randn(steps, rows, features)
        with torch.no_grad():
            plain = layer(x, tuple(state))
            with hs.record(layer, gates=True) as rec:
                recorded = layer(x, tuple(state))
        assert same_bits(recorded, plain)
        assert not any(tensor.requires_grad for tensor in tensors(recorded))
    check(rec, layer, x.transpose(0, 1), state, [steps] * rows, gates=True)


@pytest.mark.parametrize("gates", [True, False])
def test_without_onednn_the_same_is_recorded(gates):
    layer, x = nn.LSTM(4, 5, num_layers=2, batch_first=True), torch.randn(3, 6, 4)
    torch._C._set_mkldnn_enabled(False)  # torch.backends.mkldnn.flags warns of things on other machines
    try:
        plain = layer(x)
        with hs.record(layer, gates) as rec:
            assert same_bits(layer(x), plain)
    finally:
        torch._C._set_mkldnn_enabled(True)
    check(rec, layer, x, [torch.zeros(2, 3, 5)] * 2, [6, 6, 6], gates)


@pytest.mark.parametrize("packing", LENGTHS)
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_a_way_that_does_not_agree_is_never_taken(monkeypatch, kind, packing):
    monkeypatch.setattr(layerwise, "_verdicts", {})
    monkeypatch.setattr(layerwise, "same_bits", lambda ours, plain: False)
    layer = KINDS[kind](4, 5, num_layers=2, bidirectional=True, batch_first=True)
    x, fed = sequence(packing, True, torch.float32)
    state = first_states(layer, torch.float32)
    native = tuple(state) if kind == "lstm" else state[0]
    plain = layer(fed, native)
    for _ in range(2):
        with hs.record(layer, gates=True) as rec:
            assert same_bits(layer(fed, native), plain)
    assert {verdict for key, verdict in layerwise._verdicts.items() if key[0] != "workspace"} == {False}
    check(rec, layer, x, state, LENGTHS[packing], gates=True)


def test_what_was_recorded_stays_whatever_happens_afterwards():
    layer, x = nn.LSTM(4, 5, num_layers=2, batch_first=True), torch.randn(3, 6, 4)
    state = [torch.randn(2, 3, 5), torch.randn(2, 3, 5)]
    expected = stack_of(layer, x, [part.clone() for part in state], [6, 6, 6])
    for grad, gates in itertools.product((True, False), (True, False)):
        changed, fed, given = copy.deepcopy(layer), x.clone(), [part.clone() for part in state]
        with torch.set_grad_enabled(grad), hs.record(changed, gates) as rec:
            out, (h, c) = changed(fed, tuple(given))
        with torch.no_grad():
            for tensor in (*changed.parameters(), fed, *given, out.detach(), h.detach(), c.detach()):
                tensor.zero_()
        for track, values in expected.items():
            torch.testing.assert_close(rec[track].h.double(), values.h, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(rec[track].c.double(), values.c, rtol=1e-5, atol=1e-5)
        assert torch.equal(rec["l0"].initial["h"], state[0][0])


def test_empty_rows_are_torchs_own_business():
    layer = nn.GRU(4, 5, batch_first=True)
    for fed in (torch.randn(0, 6, 4),):
        plain = layer(fed)
        with hs.record(layer, gates=True) as rec:
            assert same_bits(layer(fed), plain)
        assert rec["l0"].h.shape == (0, 6, 5)
