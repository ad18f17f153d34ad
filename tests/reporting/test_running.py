"""What a report runs: every state, and what each layer was given, however the model calls it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import hiddenstate as hs
from hiddenstate.reporting.gathering import gather
from hiddenstate.reporting.running import run
from tests.support.calling import WAYS, Calling
from tests.support.untouched import untouched


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # torch's, of checkpoints without gradients
@given(
    kind=st.sampled_from([nn.RNN, nn.LSTM, nn.GRU]),
    given_state=st.booleans(),
    rows=st.integers(1, 3),
    steps=st.integers(1, 6),
    chunk=st.none() | st.integers(1, 4),
)
def test_however_a_layer_is_called_the_same_is_seen(way, kind, given_state, rows, steps, chunk):
    model, x = Calling(kind(3, 4, batch_first=True), way, chunk), torch.randn(rows, steps, 3)
    layer = hs.cells.as_layer(model.rnn)
    state = layer.to_native(layer.initial(rows)) if given_state else None
    with untouched(model):
        ran = run(model, (x, state))
    (track,) = ran.recording.runs("rnn.l0")
    torch.testing.assert_close(track.h, model.rnn(x)[0].detach())
    assert torch.equal(ran.inputs["rnn"], x)


@pytest.mark.parametrize("way", ["layer.forward(x, h)", "layer(hx=h, input=x)"])
def test_however_a_layer_is_called_the_same_is_measured(way):
    model, x = Calling(nn.GRU(3, 4, batch_first=True), way), torch.randn(2, 6, 3)
    plain = Calling(model.rnn, "layer(x)")
    plain.read = model.read
    options = {"tokens": None, "labels": None, "lengths": None, "batch_axis": 0, "doctor": {}, "tell": lambda _: None}
    one, other = (gather(each, (x,), **options) for each in (model, plain))
    torch.testing.assert_close(one.jacobians["rnn"].values, other.jacobians["rnn"].values)
    torch.testing.assert_close(one.memory.curve, other.memory.curve)
    torch.testing.assert_close(one.comparison.distances, other.comparison.distances)
    assert [finding.code for finding in one.findings] == [finding.code for finding in other.findings]


def test_packed_and_time_first_inputs_are_kept_rows_first():
    x, lengths = torch.randn(2, 5, 3), [5, 3]
    packed = run(nn.GRU(3, 4), (pack_padded_sequence(x, lengths, batch_first=True),)).inputs[""]
    assert torch.equal(packed[0], x[0])
    assert torch.equal(packed[1, :3], x[1, :3])
    assert torch.equal(run(nn.GRU(3, 4), (x.transpose(0, 1),)).inputs[""], x)
    assert torch.equal(run(nn.GRU(3, 4), (x[0],)).inputs[""], x[:1])


def test_of_calls_with_other_rows_the_first_ones_are_kept():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru = nn.GRU(3, 4, batch_first=True)

        def forward(self, x):
            return self.gru(x)[0], self.gru(x[:1])[0]

    x = torch.randn(2, 5, 3)
    assert torch.equal(run(Twice(), (x,)).inputs["gru"], x)


def test_a_carried_model_is_run_from_a_fresh_state_and_carries_on_as_before():
    model, x = nn.GRU(3, 4, batch_first=True), torch.randn(2, 5, 3)
    expected = model(x)[0]
    with hs.Carry(model) as carry:
        model(x)
        before = carry.state
        torch.testing.assert_close(run(model, (x,)).recording["l0"].h, expected.detach())
        assert torch.equal(carry.state["h"], before["h"])
