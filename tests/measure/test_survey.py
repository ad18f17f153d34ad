"""One pass over a data set against the same measures of all states together."""

import weakref

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader

import hiddenstate as hs
from hiddenstate.errors import BadInput
from tests.support.untouched import untouched

DATA = [(torch.randint(1, 30, (n,)), n % 2) for n in (3, 9, 5, 7, 2, 9, 4, 8, 6, 3)]


def padded(batch):
    rows, labels = zip(*batch, strict=True)
    return pad_sequence(rows, batch_first=True), torch.tensor([len(row) for row in rows]), torch.tensor(labels)


LOADER = DataLoader(DATA, batch_size=4, collate_fn=padded, generator=torch.Generator())


class Sentiment(nn.Module):
    """As in articles: an embedding, a packed recurrent layer, a classifier on its final state."""

    def __init__(self, kind=nn.LSTM, packs=True):
        super().__init__()
        self.embed, self.rnn, self.head = nn.Embedding(30, 6), kind(6, 8, batch_first=True), nn.Linear(8, 2)
        self.packs = packs

    def forward(self, text, text_lengths=None):
        x = self.embed(text)
        if self.packs and text_lengths is not None:
            x = pack_padded_sequence(x, text_lengths.cpu(), batch_first=True, enforce_sorted=False)
        _, state = self.rnn(x)
        return self.head(state[0][-1] if isinstance(state, tuple) else state[-1])


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
@pytest.mark.parametrize("packs", [True, False])
def test_a_survey_is_what_the_measures_say_of_all_real_states(kind, packs):
    model = Sentiment(kind, packs)
    alone = []
    with torch.no_grad():
        for row, _ in DATA:
            alone.append(model.rnn(model.embed(row.unsqueeze(0)))[0])
    with untouched(model):
        found = hs.measure.survey(model, LOADER)
    assert (found.batches, found.rows, found.steps) == (3, 10, sum(len(row) for row, _ in DATA))
    expected = hs.measure.statistics(alone)
    torch.testing.assert_close(found.statistics["rnn.l0"].mean, expected.mean, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(found.statistics["rnn.l0"].max, expected.max, atol=1e-5, rtol=1e-4)
    pressed = hs.measure.saturation(alone, 0.1)
    assert hs.measure.survey(model, LOADER, threshold=0.1).saturation["rnn.l0"].share == pytest.approx(pressed.share)


def test_lengths_may_be_told_by_a_function_and_the_call_be_ones_own():
    model = Sentiment(nn.GRU)
    loader = [{"words": padded(DATA[:4])[0]}]
    found = hs.measure.survey(
        model, loader, call=lambda m, batch: m(batch["words"]), lengths=lambda batch: (batch["words"] > 0).sum(1)
    )
    assert found.steps == 3 + 9 + 5 + 7


def test_a_nan_is_named_with_its_batch_and_the_rest_still_counts():
    model, batches = nn.GRU(3, 4, batch_first=True), [torch.randn(2, 5, 3) for _ in range(3)]
    batches[1][1, 2, 0] = torch.nan
    found = hs.measure.survey(model, batches)
    assert found.first_bad == {"l0": (1, 1, 2)}
    assert found.statistics["l0"].nan == 3 * 4
    assert "the first NaN or Inf is in batch 1, at row 1, step 2" in str(found)
    assert found.saturation["l0"].share == 0


def test_units_that_move_in_some_batch_are_not_still():
    model = nn.RNN(1, 3, nonlinearity="relu", batch_first=True)
    with torch.no_grad():
        model.weight_ih_l0.copy_(torch.tensor([[1.0], [1.0], [0.0]]))
        model.weight_hh_l0.zero_()
        for bias in (model.bias_ih_l0, model.bias_hh_l0):
            bias.copy_(torch.tensor([-5.0, 0.0, 0.0]))
    batches = [torch.rand(2, 4, 1), torch.full((2, 4, 1), 20.0)]
    assert hs.measure.survey(model, batches[:1]).still("l0").tolist() == [0, 2]
    assert hs.measure.survey(model, batches).still("l0").tolist() == [2]


def test_one_batch_is_held_at_a_time():
    model, alive = nn.GRU(3, 4, batch_first=True), []

    def batches():
        for _ in range(6):
            batch = torch.randn(2, 5, 3)
            alive.append(weakref.ref(batch))
            yield batch
            del batch
            assert sum(one() is not None for one in alive) <= 1

    assert hs.measure.survey(model, batches()).batches == 6


def test_a_cell_is_stepped_along_its_batches():
    assert hs.measure.survey(nn.GRUCell(3, 4), [torch.randn(2, 5, 3)]).steps == 10


def test_ctrl_c_keeps_what_is_done():
    def batches():
        yield torch.randn(2, 5, 3)
        raise KeyboardInterrupt

    found = hs.measure.survey(nn.GRU(3, 4, batch_first=True), batches())
    assert found.interrupted
    assert found.batches == 1
    assert "interrupted" in str(found)


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([], "there are no batches to look at"),
        (iter(()), "there are no batches to look at"),
        ([torch.randn(2, 5, 4)], "GRU cannot be called with batch 0 of the data set: RuntimeError.*call=lambda"),
        (torch.randn(2, 5, 3), r"a DataLoader or a list of batches, but this is Tensor: \[batch\]"),
    ],
)
def test_what_cannot_be_surveyed_is_refused(batches, message):
    with pytest.raises(BadInput, match=message):
        hs.measure.survey(nn.GRU(3, 4, batch_first=True), batches)


def test_a_threshold_beyond_the_range_is_refused():
    with pytest.raises(BadInput, match="above 0 and up to 1, but is 2"):
        hs.measure.survey(nn.GRU(3, 4), [torch.randn(2, 5, 3)], threshold=2)


class Tokens(nn.Module):
    """Reads tokens; its embedding may say which one is padding."""

    def __init__(self, padding_idx=None):
        super().__init__()
        self.embed, self.rnn = nn.Embedding(30, 3, padding_idx=padding_idx), nn.GRU(3, 4, batch_first=True)

    def forward(self, x):
        return self.rnn(self.embed(x))[0]


def without_lengths(batch):
    tokens, _, labels = padded(batch)
    return tokens, labels


@pytest.mark.parametrize("how", ["padding_idx", "lengths=", "in the batch"])
def test_where_lengths_are_told_steps_are_real(how):
    collate = padded if how == "in the batch" else without_lengths
    model = Tokens(padding_idx=0 if how == "padding_idx" else None)
    told = {"lengths": lambda batch: (batch[0] != 0).sum(1)} if how == "lengths=" else {}
    found = hs.measure.survey(model, DataLoader(DATA, 4, collate_fn=collate), **told)
    assert found.untold == 0
    assert f"10 rows, {sum(len(row) for row, _ in DATA)} real steps\n" in str(found)


def test_where_nothing_tells_lengths_it_is_said_that_padding_counts():
    loader = DataLoader(DATA, 4, collate_fn=without_lengths)
    found = hs.measure.survey(Tokens(), loader)
    assert found.untold == found.batches == 3
    assert "real steps" not in str(found)
    assert "steps (nothing tells the lengths of rows: padding, where there is any, counts; lengths=" in str(found)
    assert "nothing tells the lengths of rows" in hs.diagnose(Tokens(), loader).text()
    assert "nothing tells" not in hs.diagnose(Tokens(0), loader).text()


def test_of_some_batches_it_is_said_how_many():
    batches = [torch.randint(1, 30, (4, 6)), padded(DATA[:4])]
    assert "lengths of rows of 1 batches" in str(hs.measure.survey(Tokens(), batches))
