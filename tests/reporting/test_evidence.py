"""What a report is made of: the numbers are those of the measures, and what fails takes nothing else along."""

import pytest
import torch
from torch import nn

import hiddenstate as hs
from hiddenstate.errors import BadInput
from hiddenstate.reporting.evidence import Unmeasured, gather
from tests.reporting.conftest import Tagger
from tests.support.calling import Calling, plain_call


def gathered(model, *inputs, **options):
    plain = {"tokens": None, "labels": None, "lengths": None, "batch_axis": 0, "doctor": {}, "tell": lambda _: None}
    return gather(plain_call(model, *inputs), **{**plain, **options})


@pytest.mark.parametrize("way", ["layer.forward(x, h)", "layer(hx=h, input=x)"])
def test_however_a_layer_is_called_the_same_is_measured(way):
    model, x = Calling(nn.GRU(3, 4, batch_first=True), way), torch.randn(2, 6, 3)
    plain = Calling(model.rnn, "layer(x)")
    plain.read = model.read
    one, other = (gathered(each, x) for each in (model, plain))
    torch.testing.assert_close(one.jacobians["rnn"].values, other.jacobians["rnn"].values)
    torch.testing.assert_close(one.memory.curve, other.memory.curve)
    torch.testing.assert_close(one.comparison.distances, other.comparison.distances)
    assert [finding.code for finding in one.findings] == [finding.code for finding in other.findings]


def test_the_numbers_are_those_of_the_measures(tokens):
    model = Tagger().eval()
    found = gathered(model, tokens)
    with hs.record(model, gates=True) as recording, torch.no_grad():
        model(tokens)
    assert [track.name for track in found.tracks] == ["lstm.l0", "lstm.l1"]
    assert [track.runs for track in found.tracks] == [1, 1]
    for track in found.tracks:
        torch.testing.assert_close(track.traj.h, recording[track.name].h)
        assert track.saturation.share == hs.measure.saturation(recording[track.name]).share
    torch.testing.assert_close(found.memory.curve, hs.measure.memory(model, tokens).curve)
    torch.testing.assert_close(found.comparison.distances, hs.measure.compare(recording["lstm.l1"]).distances)
    assert (found.model, found.inputs) == ("Tagger", (f"{tuple(tokens.shape)} int64",))
    assert found.parameters == sum(weight.numel() for weight in model.parameters())


@pytest.mark.parametrize("make", [nn.RNN, nn.GRU, nn.LSTM])
def test_jacobians_of_the_first_row_are_those_of_its_whole_run(make):
    layer, x = make(3, 4, num_layers=2, batch_first=True), torch.randn(2, 6, 3)
    found = gathered(layer, x).jacobians[""]  # each step is a row of its own, (step, 1, S, S)
    expected = hs.measure.jacobians(layer, x[:1]).values[0]
    torch.testing.assert_close(found.values[:, 0], expected)


def test_what_is_being_done_is_told_in_order(tokens):
    told = []
    gathered(Tagger(), tokens, tell=told.append)
    assert told == [
        "running the model",
        "asking the doctor",
        "measuring states",
        "measuring memory",
        "comparing rows",
        "measuring Jacobians",
        "measuring Lyapunov exponents",
    ]


def test_what_cannot_be_measured_says_why_and_the_rest_is_there():
    found = gathered(nn.LSTM(3, 4, bidirectional=True, batch_first=True), torch.randn(1, 6, 3))
    assert found.jacobians[""] == Unmeasured("it runs in both directions: there is no single next state.")
    assert found.comparison == Unmeasured("the input has one row: there is nothing to compare it with.")
    assert found.memory.curve.shape == (6,)


def test_nan_in_a_layer_leaves_the_others_measured():
    x = torch.randn(1, 6, 3)
    x[0, 3] = torch.nan
    found = gathered(nn.GRU(3, 4, batch_first=True), x)
    assert isinstance(found.tracks[0].saturation, Unmeasured)
    assert found.tracks[0].saturation.reason.startswith("h has nan at step 3 of row 0")
    assert isinstance(found.memory, Unmeasured)


def test_a_model_that_calls_none_of_its_layers_is_refused():
    class Idle(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru = nn.GRU(3, 4)

        def forward(self, x):
            return x

    with pytest.raises(BadInput, match=r"none of its recurrent layers \(gru\) was: nothing to report on"):
        gathered(Idle(), torch.randn(2, 5, 3))


LAYER = nn.GRU(3, 4, batch_first=True)


@pytest.mark.parametrize(
    ("tokens", "shown"),
    [
        (None, []),
        ("abc", [["a", "b", "c"]]),
        (["a", " ", "c"], [["a", "␣", "c"]]),
        (["abc", "def"], [["a", "b", "c"], ["d", "e", "f"]]),
        ([["a", "b", "\n"]], [["a", "b", "↵"]]),
        ([["x"] * 3, ["y"] * 3], [["x"] * 3, ["y"] * 3]),
    ],
)
def test_tokens_are_of_the_first_row_or_of_several(tokens, shown):
    found = gathered(LAYER, torch.randn(2, 3, 3), tokens=tokens)
    assert found.tokens == shown
    assert found.tokens_of(found.tracks[0].traj) == shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": ["a"]}, "1 tokens for row 0, but it has 3 steps.*Special tokens .* count too"),
        ({"tokens": [["a"] * 3, ["b"] * 2]}, "2 tokens for row 1, but it has 3 steps"),
        ({"tokens": [["a"] * 3] * 3}, "tokens for 3 rows, but the input has 2"),
        ({"labels": "ab"}, "there are 1 labels, but 2 rows"),
        ({"labels": ["a"]}, "there are 1 labels, but 2 rows"),
    ],
)
def test_a_wrong_count_of_names_is_refused_before_anything_takes_long(options, message):
    told = []
    with pytest.raises(BadInput, match=message):
        gathered(LAYER, torch.randn(2, 3, 3), tell=told.append, **options)
    assert told == ["running the model"]


def test_rows_without_labels_are_numbered():
    found = gathered(LAYER, torch.randn(2, 3, 3))
    assert found.rows_of(found.tracks[0].traj) == found.labels == ["row 0", "row 1"]


def test_a_layer_that_takes_the_batch_for_time_has_rows_and_no_tokens_of_its_own():
    found = gathered(nn.GRU(3, 4), torch.randn(2, 5, 3), tokens=list("abcde"), labels=["x", "y"])
    traj = found.tracks[0].traj  # 5 rows of 2 steps, as the layer saw them
    assert found.rows_of(traj) == [f"row {number}" for number in range(5)]
    assert found.tokens_of(traj) == []
    assert found.comparison == Unmeasured("the layer has 5 rows, but the input has 2.")


def test_labels_that_rows_share_are_compared_with_their_neighbors():
    x = torch.randn(3, 5, 3)
    assert gathered(LAYER, x, labels=["a", "a", "b"]).comparison.agreement is not None
    assert gathered(LAYER, x, labels=["a", "b", "c"]).comparison.agreement is None


class Insisting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = torch.nn.GRU(3, 5), torch.nn.Linear(5, 2)

    def forward(self, x, hidden):
        return self.head(self.rnn(x, hidden)[0])


def test_memory_of_a_time_first_model_is_measured_along_its_time_and_a_state_is_handed_in():
    x = torch.randn(12, 4, 3)
    plain = {"tokens": None, "labels": None, "lengths": None, "doctor": {}, "tell": lambda _: None}
    for axis in (None, 1):
        found = gather(plain_call(Insisting(), x), batch_axis=axis, **plain)
        assert found.memory.rows.shape == (4, 12)
        assert len(found.labels) == 4


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("told", ["lengths", "mask"])
def test_padding_that_an_input_tells_counts_in_nothing(told, batch_first):
    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru, self.out = nn.GRU(3, 8, batch_first=batch_first), nn.Linear(8, 2)

        def forward(self, x, lengths=None, mask=None):
            states = self.gru(x)[0] if batch_first else self.gru(x)[0].transpose(0, 1)
            lengths = lengths if mask is None else mask.sum(1 if batch_first else 0)
            return self.out(states[torch.arange(len(states)), lengths - 1])

    lengths, x = torch.tensor([7, 3, 5]), torch.randn(3, 7, 3)
    real = torch.arange(7) < lengths[:, None]
    x, real = (x, real) if batch_first else (x.transpose(0, 1), real.T)
    inputs = (x, lengths) if told == "lengths" else (x, None, real.long())
    tokens = [["a"] * 7, ["b"] * 3, ["c"] * 5]
    found = gathered(Reader(), *inputs, batch_axis=None if batch_first else 1, tokens=tokens)
    assert found.tracks[0].traj.lengths.tolist() == [7, 3, 5]
    assert not found.tracks[0].traj.h[1, 3:].any()
    assert list(map(len, found.tokens)) == [7, 3, 5]
