"""On CUDA: cuDNN's own run, its states and gates beside it."""

import contextlib

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import hiddenstate as hs
from tests.support.recorded import KINDS, stack_of

pytestmark = pytest.mark.cuda


@contextlib.contextmanager
def full_precision():
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


def first_states(layer, dtype):
    deep = layer.num_layers * (2 if layer.bidirectional else 1)
    sizes = [layer.proj_size or layer.hidden_size, layer.hidden_size]
    return [
        torch.randn(deep, 3, size, dtype=dtype, device="cuda") for size in sizes[: 2 if layer.mode == "LSTM" else 1]
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("lengths", [[6, 6, 6], [2, 6, 4]], ids=["even", "packed"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_configuration_agrees_with_the_explicit_loop(kind, lengths, dtype):
    tolerance = {"rtol": 1e-4, "atol": 2e-5} if dtype == torch.float32 else {"rtol": 1e-9, "atol": 1e-10}
    for layers, both, bias in ((1, False, True), (2, True, True), (3, False, False)):
        options = {"num_layers": layers, "bidirectional": both, "bias": bias, "batch_first": True}
        layer = KINDS[kind](4, 5, dtype=dtype, device="cuda", **options)
        x, state = torch.randn(3, 6, 4, dtype=dtype, device="cuda"), first_states(layer, dtype)
        native = tuple(state) if layer.mode == "LSTM" else state[0]
        packed = lengths != [6, 6, 6]
        fed = pack_padded_sequence(x, torch.tensor(lengths), True, enforce_sorted=False) if packed else x
        with full_precision(), torch.no_grad():
            plain, _ = layer(fed, native)
            with hs.record(layer, gates=True) as rec:
                out, _ = layer(fed, native)
            seen = {track: rec[track] for track in rec}
        torch.testing.assert_close(out.data, plain.data, **tolerance)
        expected = stack_of(layer.cpu(), x.cpu(), [part.cpu() for part in state], lengths)
        for track, values in expected.items():
            run = seen[track]
            assert run.h.is_cuda
            assert run.lengths.tolist() == lengths
            torch.testing.assert_close(run.h.cpu().double(), values.h, **tolerance)
            if layer.mode == "LSTM":
                torch.testing.assert_close(run.c.cpu().double(), values.c, **tolerance)
            assert set(run.gates) == set(values.gates)
            for name, gate in run.gates.items():
                torch.testing.assert_close(gate.cpu().double(), values.gates[name], **tolerance)


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_training_through_a_recording_learns_the_same(kind):
    layer = KINDS[kind](4, 8, num_layers=3, bidirectional=True, batch_first=True, device="cuda")
    x = torch.randn(3, 6, 4, device="cuda")

    def train(context):
        layer.zero_grad()
        with full_precision(), context:
            out, _ = layer(x)
            out.square().sum().backward()
        return [out, *(p.grad.clone() for p in layer.parameters())]

    plain = train(contextlib.nullcontext())
    rec = hs.record(layer, gates=True, grads=True)
    for a, b in zip(train(rec), plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(rec["l2"].grads["h"][:, -1], 2 * rec["l2"].h[:, -1], rtol=1e-4, atol=1e-5)


def test_dropout_between_layers_leaves_torchs_random_stream_alone():
    layer, x = nn.LSTM(4, 64, num_layers=2, dropout=0.5, device="cuda"), torch.randn(6, 3, 4, device="cuda")
    layer(x)
    before = torch.cuda.get_rng_state()
    with hs.record(layer, gates=True) as rec:
        out, _ = layer(x)
    assert torch.equal(torch.cuda.get_rng_state(), before)
    run = rec["l1"]
    assert torch.equal(run.h.transpose(0, 1), out.detach())
    remade = run.gates["output"] * run.c.tanh()
    torch.testing.assert_close(remade, run.h, rtol=1e-2, atol=1e-2)  # the gates of that very run


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_autocast_on_cuda(kind):
    layer, x = KINDS[kind](4, 8, num_layers=2, batch_first=True, device="cuda"), torch.randn(3, 6, 4, device="cuda")
    with torch.autocast("cuda", torch.float16), hs.record(layer, gates=True) as rec:
        out, _ = layer(x)
    assert torch.equal(rec["l1"].h, out.detach())
    zeros = [torch.zeros(2, 3, 8)] * (2 if kind == "lstm" else 1)
    for track, values in stack_of(layer.cpu(), x.cpu(), zeros, [6, 6, 6]).items():
        for name, gate in rec[track].gates.items():
            torch.testing.assert_close(gate.cpu().double(), values.gates[name], rtol=0.02, atol=0.02)


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell])
def test_cells_on_cuda(kind):
    cell, x = kind(3, 4, device="cuda"), torch.randn(2, 6, 3, device="cuda")
    with hs.record(cell, gates=True) as rec:
        state = None
        for t in range(6):
            state = cell(x[:, t], state)
    run = rec["l0"]
    if kind is nn.LSTMCell:
        torch.testing.assert_close(run.gates["output"] * run.c.tanh(), run.h, rtol=1e-3, atol=1e-4)
    else:
        before = torch.cat([run.initial["h"].unsqueeze(1), run.h[:, :-1]], 1)
        z, n = run.gates["update"], run.gates["candidate"]
        torch.testing.assert_close((1 - z) * n + z * before, run.h, rtol=1e-3, atol=1e-4)


def test_values_may_be_kept_on_the_cpu(tmp_path):
    layer, x = nn.LSTM(4, 8, device="cuda"), torch.randn(6, 3, 4, device="cuda")
    with hs.record(layer, gates=True, device="cpu") as rec, hs.record(layer, gates=True, to=tmp_path):
        layer(x)
    run = rec["l0"]
    assert {value.device.type for value in (run.h, run.c, *run.gates.values(), *run.initial.values())} == {"cpu"}
    assert torch.equal(hs.load_recording(tmp_path)["l0"].c, run.c)
