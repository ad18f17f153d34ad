"""A layer and its calls, read alike whatever the layer's own layout and its caller's spelling."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import pack_sequence

import hiddenstate as hs
from hiddenstate.cells import Call, as_layer
from hiddenstate.errors import NotRecurrent, StateMismatch
from tests.support.cells import CELLS

KINDS = {"rnn": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}


def layer_of(kind: str, *, batch_first: bool):
    torch.manual_seed(0)
    return as_layer(KINDS[kind](3, 4, num_layers=2, batch_first=batch_first))


def called(layer, *args, **kwargs) -> Call:
    return Call(layer, args, kwargs).returned(layer.module(*args, **kwargs))


@given(kind=st.sampled_from(sorted(KINDS)), rows=st.integers(1, 3), steps=st.integers(1, 4))
def test_a_call_reads_the_same_in_both_layouts(kind, rows, steps):
    x = torch.randn(rows, steps, 3)
    first = called(layer_of(kind, batch_first=True), x)
    second = called(layer_of(kind, batch_first=False), x.transpose(0, 1))
    for call in (first, second):
        assert (call.rows, call.steps, call.batched, call.lengths, call.given) == (rows, steps, True, None, None)
        torch.testing.assert_close(call.x, x)
        assert call.output.shape == (rows, steps, 4)
    torch.testing.assert_close(first.output, second.output)
    torch.testing.assert_close(dict(first.state), dict(second.state))


@given(lengths=st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_a_packed_call_reads_as_its_sequences_padded(lengths):
    layer = layer_of("gru", batch_first=False)
    sequences = [torch.randn(length, 3) for length in lengths]
    call = called(layer, pack_sequence(sequences, enforce_sorted=False))
    assert (call.rows, call.steps, call.lengths.tolist()) == (len(lengths), max(lengths), lengths)
    for row, sequence in enumerate(sequences):
        torch.testing.assert_close(call.x[row, : len(sequence)], sequence)
        alone = called(layer, sequence)
        torch.testing.assert_close(call.output[row, : len(sequence)], alone.output[0])
        torch.testing.assert_close(call.state["h"][:, row], alone.state["h"][:, 0])
    assert not any(call.x[row, length:].any() for row, length in enumerate(lengths))


def test_a_call_without_rows_is_one_row():
    call = called(layer_of("lstm", batch_first=True), torch.randn(5, 3))
    assert (call.rows, call.steps, call.batched) == (1, 5, False)
    assert (call.x.shape, call.output.shape, call.state.batch) == ((1, 5, 3), (1, 5, 4), 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batched", [True, False])
def test_a_state_that_is_handed_in_is_found_there_and_counts(kind, batched):
    layer = layer_of(kind, batch_first=True)
    x = torch.randn(2, 5, 3) if batched else torch.randn(5, 3)
    state = layer.initial(2 if batched else 1).map(torch.randn_like)
    for call in (Call(layer, (x,)), Call(layer, (x, None)), Call(layer, (), {"input": x})):
        handed = call.handed(state)
        torch.testing.assert_close(dict(handed.given), dict(state))
        torch.testing.assert_close(handed.x, call.x)
        result = layer.module(*handed.args, **handed.kwargs)
        torch.testing.assert_close(result, layer.module(x, layer.to_native(state, batched=batched)))


def test_another_input_takes_the_place_of_the_one_that_was_there():
    layer = layer_of("gru", batch_first=True)
    x, other, h = torch.randn(2, 5, 3), torch.randn(2, 7, 3), torch.randn(2, 2, 4)
    for call in (Call(layer, (x, h)), Call(layer, (), {"hx": h, "input": x})):
        fed = call.fed(other)
        assert fed.input is other
        assert fed.given_native is h


@pytest.mark.parametrize("sample", CELLS.values(), ids=CELLS)
def test_what_split_takes_apart_join_puts_together_and_split_again(sample):
    cell, x = sample.cell(), sample.x(batch=3, steps=1)[:, 0]
    layer = as_layer(cell, x)
    output, native = layer.split(cell(x, layer.to_native(layer.initial(3))))
    again = layer.split(layer.join(output, native))
    torch.testing.assert_close(again[0], output)
    torch.testing.assert_close(dict(layer.to_state(again[1])), dict(layer.to_state(native)))


def test_a_first_argument_that_is_no_tensor_is_refused():
    with pytest.raises(NotRecurrent, match="GRU was called with list as its first argument, but a tensor"):
        _ = Call(layer_of("gru", batch_first=True), ([1, 2],)).input


def test_a_state_that_does_not_fit_is_refused_with_the_layers_name():
    (layer,) = hs.layers(nn.ModuleDict({"encoder": nn.GRU(3, 4)}))
    with pytest.raises(StateMismatch, match=r"at the layer 'encoder': the state of an RNN or a GRU is one tensor"):
        layer.to_state((torch.zeros(1, 2, 4), torch.zeros(1, 2, 4)))
    with pytest.raises(StateMismatch, match=r"at the layer 'encoder': part 'h' has shape"):
        layer.to_native(hs.State({"h": torch.zeros(1, 2, 5)}, 1))


def test_a_part_and_a_layer_have_names_in_the_model():
    (inner,) = hs.layers(nn.ModuleDict({"encoder": nn.LSTM(3, 4, bidirectional=True)}))
    assert (inner.part("h"), inner.label) == ("encoder.h", "encoder")
    assert inner.tracks == ("encoder.l0", "encoder.l0_reverse")
    (alone,) = hs.layers(nn.GRUCell(3, 4))
    assert (alone.part("h"), alone.label, alone.tracks) == ("h", "the model itself", ("l0",))
