import weakref

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, TensorDataset

import hiddenstate as hs
from hiddenstate.errors import BadInput
from tests.support.untouched import untouched


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.low, self.high = nn.GRU(3, 4, batch_first=True), nn.LSTM(4, 5, batch_first=True)
        self.drop = nn.Dropout(0.5)

    def forward(self, x, mask=None):
        return self.high(self.drop(self.low(x)[0]))[0]


X, Y = torch.randn(10, 6, 3), torch.arange(10)
LOADERS = {
    "tensors and labels": DataLoader(TensorDataset(X, Y), batch_size=4, generator=torch.Generator()),
    "tensors": [X[:4], X[4:8], X[8:]],
    "mappings": [{"x": X[:5]}, {"x": X[5:], "mask": None}],
    "a generator": None,
}


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("measure", [hs.measure.statistics, hs.measure.saturation, hs.measure.dead_units])
def test_a_data_set_in_batches_is_measured_as_a_whole(kind, measure):
    model = Tagger().train()
    loader = LOADERS[kind] or (X[row : row + 1] for row in range(10))
    with torch.no_grad():
        whole = model.eval()(X)
    model.train()
    with untouched(model):
        found = measure(hs.measure.runs_of(model, loader))
    assert str(found) == str(measure(whole))


def test_batches_of_unequal_length_and_packed_ones_count_their_real_steps():
    model = nn.GRU(3, 4, batch_first=True)
    batches = [torch.randn(2, 5, 3), torch.randn(3, 9, 3), pack_sequence([torch.randn(4, 3), torch.randn(1, 3)])]
    assert hs.measure.statistics(hs.measure.runs_of(model, batches)).count == 10 + 27 + 5


def test_a_track_may_be_named_and_the_call_be_ones_own():
    model = Tagger()
    shapes = [run.h.shape for run in hs.measure.runs_of(model, [(Y[:2], X[:2])], "low", call=lambda m, b: m(b[1]))]
    assert shapes == [(2, 6, 4)]


def test_no_more_than_a_batch_is_held():
    model, alive = nn.GRU(3, 4, batch_first=True), []
    for run in hs.measure.runs_of(model, [X] * 5):
        alive.append(weakref.ref(run.h))
        del run
        assert sum(one() is not None for one in alive) <= 2


def test_a_loader_stopped_half_way_leaves_the_model_as_it_was():
    model = Tagger().train()
    with untouched(model):
        runs = hs.measure.runs_of(model, [X, X, X])
        next(runs)
        runs.close()


@pytest.mark.parametrize(
    ("model", "batches", "message"),
    [
        (Tagger(), X, r"a DataLoader or a list of batches, but this is Tensor: \[batch\]"),
        (Tagger(), {"x": X}, "but this is dict"),
    ],
)
def test_what_are_no_batches_is_refused(model, batches, message):
    with pytest.raises(BadInput, match=message):
        next(hs.measure.runs_of(model, batches))


@pytest.mark.filterwarnings("ignore")
def test_a_layer_that_is_never_called_has_no_states():
    class Idle(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru, self.out = nn.GRU(3, 4), nn.Linear(3, 2)

        def forward(self, x):
            return self.out(x)

    with pytest.raises(BadInput, match="no recurrent layer of Idle was called with batch 0"):
        next(hs.measure.runs_of(Idle(), [X]))


def padded_batches():
    for lengths in ([5, 2, 3], [4, 4]):
        rows = [torch.randn(n, 3) for n in lengths]
        yield torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), torch.tensor(lengths), torch.zeros(len(rows))


def test_padding_does_not_count_though_the_model_is_not_told_of_it():
    found = hs.measure.statistics(hs.measure.runs_of(nn.GRU(3, 4, batch_first=True), padded_batches()))
    assert found.count == 5 + 2 + 3 + 4 + 4


def test_gates_come_along_where_they_are_wanted():
    (run,) = hs.measure.runs_of(nn.LSTM(3, 4, batch_first=True), [X], gates=True)
    assert set(run.gates) == {"input", "forget", "candidate", "output"}


def test_a_batch_that_the_model_does_not_take_is_named_with_the_way_out():
    with pytest.raises(
        BadInput, match=r"Tagger cannot be called with batch 1 of the data set: RuntimeError.*call=lambda"
    ):
        list(hs.measure.runs_of(Tagger(), [X, torch.randn(2, 6, 9)]))
