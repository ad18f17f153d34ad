"""What a report runs: every state, and what each layer was given, however the model calls it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import hiddenstate as hs
from hiddenstate.errors import BadInput, NotRecurrent
from hiddenstate.reporting import misfit
from hiddenstate.reporting.model_run import describe, run_model
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
        ran = run_model(model, (x, state))
    (track,) = ran.recording.runs("rnn.l0")
    torch.testing.assert_close(track.h, model.rnn(x)[0].detach())
    assert torch.equal(ran.inputs["rnn"], x)


def test_packed_and_time_first_inputs_are_kept_rows_first():
    x, lengths = torch.randn(2, 5, 3), [5, 3]
    packed = run_model(nn.GRU(3, 4), (pack_padded_sequence(x, lengths, batch_first=True),)).inputs[""]
    assert torch.equal(packed[0], x[0])
    assert torch.equal(packed[1, :3], x[1, :3])
    assert torch.equal(run_model(nn.GRU(3, 4), (x.transpose(0, 1),)).inputs[""], x)
    assert torch.equal(run_model(nn.GRU(3, 4), (x[0],)).inputs[""], x[:1])


def test_of_calls_with_other_rows_the_first_ones_are_kept():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru = nn.GRU(3, 4, batch_first=True)

        def forward(self, x):
            return self.gru(x)[0], self.gru(x[:1])[0]

    x = torch.randn(2, 5, 3)
    assert torch.equal(run_model(Twice(), (x,)).inputs["gru"], x)


def test_a_carried_model_is_run_from_a_fresh_state_and_carries_on_as_before():
    model, x = nn.GRU(3, 4, batch_first=True), torch.randn(2, 5, 3)
    expected = model(x)[0]
    with hs.Carry(model) as carry:
        model(x)
        before = carry.state
        torch.testing.assert_close(run_model(model, (x,)).recording["l0"].h, expected.detach())
        assert torch.equal(carry.state["h"], before["h"])


def test_gates_are_seen_too_and_the_model_comes_back_untouched_also_where_it_fails():
    model, x = nn.Sequential(nn.LSTM(3, 4, batch_first=True)).train(), torch.randn(2, 5, 3)
    with untouched(model):
        ran = run_model(model, (x,))
        with pytest.raises(BadInput, match=r"Sequential cannot be called with \(2, 5, 4\) float32"):
            run_model(model, (torch.zeros(2, 5, 4),))
    assert list(ran.recording["0"].gates) == ["input", "forget", "candidate", "output"]
    assert [layer.name for layer in ran.layers] == ["0"]


def test_a_model_without_recurrence_or_without_inputs_is_refused():
    with pytest.raises(NotRecurrent, match=r"Linear has no recurrent layer.*hs.layers\(model, \*inputs\).explain"):
        run_model(nn.Linear(2, 2), (torch.randn(1, 2),))
    with pytest.raises(BadInput, match=r"the layer itself and those before it want it \(time, batch, 3\)"):
        run_model(nn.GRU(3, 4), ())


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.zeros(2, 3, dtype=torch.int64), "(2, 3) int64"),
        (pack_padded_sequence(torch.zeros(3, 2, 1), [3, 2]), "a PackedSequence of 2 rows"),
        ({"x": 1}, "dict"),
    ],
)
def test_an_input_is_described_in_a_few_words(value, words):
    assert describe(value) == words


@pytest.mark.parametrize(
    ("model", "wanted"),
    [
        (nn.GRU(3, 4), "Its first recurrent layer, the model itself, takes (time, batch, 3)."),
        (nn.GRU(3, 4, batch_first=True), "Its first recurrent layer, the model itself, takes (batch, time, 3)."),
        (nn.GRUCell(3, 4), "Its first recurrent layer, the model itself, takes (batch, 3) at each step."),
        (nn.Linear(3, 4), "no such shape."),
    ],
)
def test_a_misfit_is_one_line_with_the_shape_that_is_wanted(model, wanted):
    said = misfit(model, (torch.zeros(2, 5),), "RuntimeError: no\n  such shape.")
    assert said.startswith(f"{type(model).__name__} cannot be called with (2, 5) float32: RuntimeError: no such shape.")
    assert said.endswith(wanted)
