"""A diagnosis of a whole data set: experiments on its first batch, the states of all of them."""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader, TensorDataset

import hiddenstate as hs
from hiddenstate.errors import BadInput
from tests.support.untouched import untouched

DATA = [(torch.randint(1, 30, (n,)), n % 2) for n in (3, 9, 5, 7, 2, 9, 4, 8, 6, 3)]


def collate(batch):
    rows, labels = zip(*batch, strict=True)
    return pad_sequence(rows, batch_first=True), torch.tensor(labels)


def with_lengths(batch):
    rows, labels = collate(batch)
    return rows, torch.tensor([len(row) for row, _ in batch]), labels


def loader(collate):
    return DataLoader(DATA, batch_size=4, collate_fn=collate, generator=torch.Generator())


class Sentiment(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.rnn = nn.Embedding(30, 6, padding_idx=0), nn.LSTM(6, 8, batch_first=True)
        self.head = nn.Linear(8, 2)

    def forward(self, text, lengths=None):
        x = self.embed(text)
        if lengths is not None:
            x = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return self.head(self.rnn(x)[1][0][-1])


def test_a_loader_is_examined_and_all_its_batches_are_looked_at():
    model = Sentiment()
    with untouched(model):
        report = hs.diagnose(model, loader(with_lengths), loss=nn.functional.cross_entropy)
    assert report.ok
    assert (report.survey.batches, report.survey.rows) == (3, 10)
    assert any("states were looked at in 3 batches, 10 rows" in line for line in report.assumed)


def test_padding_that_is_not_told_is_found_though_nobody_gave_lengths():
    assert hs.diagnose(Sentiment(), loader(collate)).codes == ("HS106",)


def test_an_input_alone_has_no_survey():
    assert hs.diagnose(nn.GRU(3, 8, batch_first=True), torch.randn(4, 9, 3)).survey is None


def test_a_nan_in_a_later_batch_is_found_and_its_batch_named():
    x = torch.randn(12, 9, 3)
    x[9, 4, 1] = torch.nan
    report = hs.diagnose(nn.GRU(3, 8, batch_first=True), DataLoader(TensorDataset(x), batch_size=4))
    (found,) = (one for one in report if one.code == "HS401")
    assert "first in batch 2 of the data set at row 1, step 4" in found.evidence
    assert found.numbers["batch"] == 2


def relu(dead):
    layer = nn.RNN(3, 16, nonlinearity="relu", batch_first=True)
    with torch.no_grad():
        layer.bias_ih_l0[:dead] = -30.0
    return layer


def test_units_that_only_some_batches_move_are_not_dead():
    calm, wild = torch.randn(40, 9, 3), 300 * torch.randn(8, 9, 3)
    dead = hs.diagnose(relu(6), DataLoader(TensorDataset(calm), batch_size=8))
    (found,) = (one for one in dead if one.code == "HS403")
    assert "over all rows and steps of 5 batches" in found.evidence
    alive = hs.diagnose(relu(6), DataLoader(TensorDataset(torch.cat([calm, wild])), batch_size=8))
    assert "HS403" not in alive.codes


def test_saturation_is_that_of_all_batches():
    model, calm, wild = nn.RNN(3, 8, batch_first=True), torch.randn(4, 9, 3), 1000 * torch.randn(60, 9, 3)
    assert "HS402" not in hs.diagnose(model, calm).codes
    (found,) = (one for one in hs.diagnose(model, iter([calm, wild])) if one.code == "HS402")
    assert "of 2 batches" in found.evidence


def test_a_batch_that_cannot_be_run_is_told_and_the_first_is_examined():
    report = hs.diagnose(nn.GRU(3, 8, batch_first=True), iter([torch.randn(4, 9, 3), torch.randn(4, 9, 2)]))
    assert report.ok
    assert any(
        "the first batch alone was examined: GRU cannot be called with batch 1" in line for line in report.assumed
    )


def test_an_empty_loader_is_refused():
    with pytest.raises(BadInput, match="the data set has no batches"):
        hs.diagnose(nn.GRU(3, 8, batch_first=True), iter(()))


def test_the_call_may_be_ones_own():
    batches = [{"words": torch.randn(4, 9, 3), "id": "a"}, {"words": torch.randn(2, 5, 3), "id": "b"}]
    model = nn.GRU(3, 8, batch_first=True)
    report = hs.diagnose(model, iter(batches), call=lambda model, batch: model(batch["words"]))
    assert report.ok
    assert (report.survey.batches, report.survey.rows) == (2, 6)
