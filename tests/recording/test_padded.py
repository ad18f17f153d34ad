"""One track as rectangles: rows where the user has them, and gates from the states alone."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from hiddenstate.recording import padded as padded_file
from hiddenstate.recording.frames import GATES, TrackWeights
from hiddenstate.recording.layerwise import Pass
from hiddenstate.recording.padded import Layout, pad
from hiddenstate.recording.recording import Options
from tests.support.recorded import KINDS, track_of

lengths_of_rows = st.lists(st.integers(1, 6), min_size=1, max_size=5)


def pass_of(kind, lengths, *, reverse=False, packed=True):
    """A pass that left nothing but its states, its layout, and what it went through."""
    torch.manual_seed(0)
    layer = KINDS[kind](3, 5, batch_first=True, dtype=torch.float64)
    weights = TrackWeights.of(list(layer.parameters()), bias=True)
    if reverse:  # the oracle reads the weights of the other direction by their own names
        for name, weight in list(layer.named_parameters()):
            setattr(layer, f"{name}_reverse", weight)
    rows, sizes = len(lengths), [layer.proj_size or 5, 5]
    state = [torch.randn(rows, size, dtype=torch.float64) for size in sizes[: 2 if layer.mode == "LSTM" else 1]]
    x = torch.randn(rows, 6, 3, dtype=torch.float64)
    expected = track_of(layer, 0, reverse, x, state, lengths)
    if packed:
        own = pack_padded_sequence(x, torch.tensor(lengths), batch_first=True, enforce_sorted=False)
        h = pack_padded_sequence(expected.h, torch.tensor(lengths), batch_first=True, enforce_sorted=False).data
        layout = Layout.of(h, own.batch_sizes, own)
        given, fed = tuple(part[own.sorted_indices] for part in state), own.data
    else:
        h, fed, given = expected.h.transpose(0, 1), x.transpose(0, 1), tuple(state)
        layout = Layout.of(h, None, None)
    name = {"RNN_TANH": "rnn_tanh", "RNN_RELU": "rnn_relu"}.get(layer.mode, layer.mode.lower())
    return Pass(name, reverse, fed, h, given, weights), layout, expected, state


@given(lengths=lengths_of_rows)
def test_packed_rows_go_back_to_where_the_user_had_them(lengths):
    x = torch.randn(len(lengths), 6, 2)
    packed = pack_padded_sequence(x, torch.tensor(lengths), batch_first=True, enforce_sorted=False)
    layout = Layout.of(packed.data, packed.batch_sizes, packed)
    wanted, own_lengths = pad_packed_sequence(packed)
    assert torch.equal(layout.pad(packed.data), wanted)
    assert torch.equal(layout.lengths, own_lengths)
    assert torch.equal(layout.rows(x[packed.sorted_indices, 0]), x[:, 0])


def test_a_rectangle_stays_as_it_is():
    h = torch.randn(6, 3, 2)
    layout = Layout.of(h, None, None)
    assert layout.pad(h) is h
    assert layout.lengths.tolist() == [6, 6, 6]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reverse", [False, True])
@given(lengths=lengths_of_rows)
def test_gates_and_cells_follow_from_the_states_alone(kind, reverse, lengths):
    for packed in (True, False):
        lengths = lengths if packed else [6] * len(lengths)
        one, layout, expected, _ = pass_of(kind, lengths, reverse=reverse, packed=packed)
        padded = pad(one, layout, Options(gates=True))
        time = max(lengths)
        states, gates = padded.states(), padded.gates
        assert list(gates) == list(GATES[one.kind])
        torch.testing.assert_close(states["h"].transpose(0, 1), expected.h[:, :time])
        for name, gate in gates.items():
            torch.testing.assert_close(gate.transpose(0, 1), expected.gates[name][:, :time])
        if one.kind == "lstm":
            torch.testing.assert_close(states["c"].transpose(0, 1), expected.c[:, :time])


@pytest.mark.parametrize("kind", ["lstm", "gru"])
@pytest.mark.parametrize("bias", [False, True])
def test_gates_of_many_rows_are_those_of_torchs_own_products_by_whichever_library(monkeypatch, kind, bias):
    torch.manual_seed(0)
    layer = {"lstm": nn.LSTM, "gru": nn.GRU}[kind](7, 9, bias=bias)
    x, before = torch.randn(30, 11, 7), torch.randn(30, 11, 9)
    weights = TrackWeights.of(list(layer.parameters()), bias)
    by_onednn = padded_file.activated_gates(kind, x, before, weights)
    fine = padded_file.activated_gates(kind, x.double(), before.double(), weights.map(Tensor.double))
    torch.testing.assert_close(by_onednn, fine.float())
    monkeypatch.setattr(padded_file, "_onednn_linear", None)  # as where torch was built without it
    torch.testing.assert_close(padded_file.activated_gates(kind, x, before, weights), by_onednn)


@pytest.mark.parametrize("reverse", [False, True])
@given(lengths=lengths_of_rows)
def test_before_each_step_there_was_the_state_of_the_step_before(reverse, lengths):
    one, layout, expected, state = pass_of("gru", lengths, reverse=reverse)
    before = pad(one, layout, Options(gates=True)).before("h")
    for row, length in enumerate(lengths):
        steps = list(reversed(range(length)) if reverse else range(length))
        assert torch.equal(before[steps[0], row], state[0][row])
        for earlier, later in pairwise(steps):
            assert torch.equal(before[later, row], expected.h[row, earlier])


def test_what_the_user_changes_afterwards_does_not_show():
    one, layout, _, _ = pass_of("lstm", [6, 6], packed=False)
    padded, later = (pad(one, layout, Options(gates=True)) for _ in range(2))
    wanted = {**padded.states(), **padded.gates}
    with torch.no_grad():
        for tensor in (one.x, one.h, *one.initial, one.weights.ih, one.weights.hh):
            tensor.zero_()
    for name, values in {**later.states(), **later.gates}.items():
        assert torch.equal(values, wanted[name])


def test_without_gates_a_workspace_is_let_go_once_the_cells_are_known():
    one, layout, expected, _ = pass_of("lstm", [6, 6], packed=False)
    one.gates = torch.cat(list(expected.gates.values()), -1).transpose(0, 1).contiguous()
    padded = pad(one, layout, Options())
    torch.testing.assert_close(padded.states()["c"].transpose(0, 1), expected.c)
    assert padded.activated is None
    assert padded.gates == {}


class PlainKernels:
    """What the kernels for CUDA do, in torch's own operations."""

    def lstm_scan(self, pre, first, lengths, *, reverse):
        i, f, g, o = pre.clone().chunk(4, -1)
        pre.copy_(torch.cat([i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()], -1))
        c, cells = first, pre.new_zeros(*pre.shape[:2], first.shape[-1])
        for t in reversed(range(len(pre))) if reverse else range(len(pre)):
            alive = (t < lengths).unsqueeze(1)
            i, f, g, _ = pre[t].chunk(4, -1)
            c = torch.where(alive, f * c + i * g, c)
            cells[t] = c * alive
            pre[t] *= alive
        return cells


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_with_kernels_an_lstm_is_reconstructed_in_one_scan(monkeypatch, reverse, packed):
    lengths = [2, 6, 4] if packed else [6, 6, 6]
    one, layout, expected, _ = pass_of("lstm", lengths, reverse=reverse, packed=packed)
    monkeypatch.setattr(padded_file, "_kernels", lambda x: PlainKernels())
    padded = pad(one, layout, Options(gates=True))
    torch.testing.assert_close(padded.states()["c"].transpose(0, 1), expected.c)
    for name, gate in padded.gates.items():
        torch.testing.assert_close(gate.transpose(0, 1), expected.gates[name])
