"""Does feeding two pieces equal the whole, and if not, who breaks the law?"""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from hiddenstate.carry import Carry, check_split
from hiddenstate.errors import BadInput, NotRecurrent, StateMismatch
from tests.support.cells import CELLS
from tests.support.models import Chunked, Deep, Stepping, TimeFirst, ZerosInside


class WithConvolution(Deep):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(3, 3, 3, padding=1)

    def forward(self, x):
        return super().forward(self.conv(x.transpose(1, 2)).transpose(1, 2))


class WithAttention(Deep):
    def forward(self, x):
        out = super().forward(x)
        weights = out.sum(-1, keepdim=True).softmax(dim=1)
        return (weights * out).sum(1)


class LastStep(Deep):
    def forward(self, x):
        return super().forward(x)[:, -1]


class ReturnsState(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 4, batch_first=True)

    def forward(self, x, state=None):
        out, state = self.lstm(x, state)
        return {"out": out, "state": state}


HEALTHY = {
    "deep": (Deep, (3, 8, 3)),
    "chunked": (Chunked, (3, 8, 3)),
    "stepping": (lambda: Stepping(nn.LSTMCell(3, 4)), (3, 8, 3)),
    "time first": (TimeFirst, (8, 3, 3)),
    "time first, square": (TimeFirst, (8, 8, 3)),
    "last step": (LastStep, (3, 8, 3)),
    "returns its state": (ReturnsState, (3, 8, 3)),
    "a layer": (lambda: nn.GRU(3, 4, 2), (8, 3, 3)),
    "with dropout": (lambda: nn.LSTM(3, 4, 2, dropout=0.5, batch_first=True), (3, 8, 3)),
    "one row": (Deep, (1, 8, 3)),
}


@pytest.mark.parametrize(("make", "shape"), HEALTHY.values(), ids=HEALTHY)
def test_the_law_holds_for_healthy_models(make, shape):
    model, x = make(), torch.randn(shape)
    for at in (None, 3):
        split = check_split(model, x, at=at)
        assert split, str(split)
        assert "equal the whole" in str(split)
        assert split.where == ""
        assert all(error < 1e-4 for error in split.layers.values())


@pytest.mark.parametrize("sample", CELLS.values(), ids=CELLS)
def test_the_law_holds_for_cells_by_themselves(sample):
    assert check_split(sample.cell(), sample.x(batch=3, steps=6))


SICK = {
    "both directions": (
        lambda: nn.Sequential(nn.LSTM(3, 4, bidirectional=True, batch_first=True)),
        "0",
        r"'0' breaks the law, by .*both directions",
    ),
    "zeros inside": (ZerosInside, "lstm", r"'lstm' breaks the law, by .*zeros made in forward"),
    "convolution": (WithConvolution, "before encoder.lstm", r"input of 'encoder.lstm' differs already.*a convolution"),
    "attention": (WithAttention, "after the layers", r"Every recurrent layer keeps the law.*attention or pooling"),
}


@pytest.mark.parametrize(("make", "where", "why"), SICK.values(), ids=SICK)
def test_whoever_breaks_the_law_is_named(make, where, why):
    split = check_split(make(), torch.randn(3, 8, 3))
    assert not split
    assert split.where == where
    assert re.search(why, str(split))
    assert re.search(r"cut at step \d differ from the whole \(largest difference .*tolerance", str(split))


def test_the_model_comes_back_as_it_was():
    class Normalized(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(3)
            self.lstm = nn.LSTM(3, 4, 2, dropout=0.3, batch_first=True)

        def forward(self, x):
            return self.lstm(self.norm(x.transpose(1, 2)).transpose(1, 2))

    model, x = Normalized(), torch.randn(3, 8, 3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    check_split(model, x)
    assert model.training
    assert model.lstm.training
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()) == 0
    assert all(parameter.grad is None for parameter in model.parameters())


def test_an_attached_carry_keeps_its_state():
    model, x = Deep(), torch.randn(3, 8, 3)
    with Carry(model) as carry:
        model(x)
        before = carry.state
        assert check_split(model, torch.randn(5, 8, 3))
        assert all(torch.equal(carry.state[name], before[name]) for name in before)


def test_packed_inside_is_judged_by_what_comes_out():
    class PackedInside(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru = nn.GRU(3, 4, batch_first=True)

        def forward(self, x):
            packed = pack_padded_sequence(x, [x.shape[1]] * len(x), batch_first=True)
            return pad_packed_sequence(self.gru(packed)[0], batch_first=True)[0]

    assert check_split(PackedInside(), torch.randn(3, 8, 3))


def test_tokens_are_fine_too():
    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(11, 3)
            self.gru = nn.GRU(3, 4)

        def forward(self, tokens):
            return self.gru(self.embed(tokens))[0].argmax(-1)

    assert check_split(Tagger(), torch.randint(11, (9, 4)))


def test_bad_arguments_are_refused():
    with pytest.raises(BadInput, match=r"cut is at 8, but with 8 steps it must be between 1 and 7"):
        check_split(Deep(), torch.randn(3, 8, 3), at=8)
    with pytest.raises(BadInput, match=r"x has 1 step, but two pieces need 2"):
        check_split(Deep(), torch.randn(3, 1, 3))
    with pytest.raises(NotRecurrent, match=r"no recurrent layer"):
        check_split(nn.Linear(3, 3), torch.randn(3, 8, 3))


def test_a_layer_whose_rows_are_steps_of_the_input_is_named():
    class WordsInSentences(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.sentences = nn.GRU(3, 4, batch_first=True), nn.GRU(4, 5, batch_first=True)

        def forward(self, x):
            _, h = self.words(x.flatten(0, 1))
            return self.sentences(h[0].view(*x.shape[:2], 4))[0]

    message = r"'words' runs 6 rows for the whole input and 2 for its first 1 steps: steps lie among its rows, as words"
    with pytest.raises(StateMismatch, match=message):
        check_split(WordsInSentences(), torch.randn(2, 3, 4, 3), time_axis=1)


class PastTheLayer(nn.Module):
    """Runs its layer without calling it."""

    def __init__(self, how):
        super().__init__()
        self.rnn, self.how = nn.LSTM(3, 4, batch_first=True), how

    def forward(self, x):
        return self.how(self.rnn, x)[0]


@pytest.mark.parametrize(
    "how",
    [
        nn.LSTM.forward,
        lambda rnn, x: torch.lstm(
            x, (x.new_zeros(1, len(x), 4),) * 2, list(rnn.parameters()), True, 1, 0.0, False, False, True
        ),
    ],
)
def test_a_layer_that_is_run_past_itself_is_named_and_not_what_follows_it(how):
    found = check_split(PastTheLayer(how), torch.randn(3, 7, 3))
    assert found.where == "rnn"
    assert re.search(r"'rnn' was found, but not called\. Where it is run past itself.*call it, layer\(x\)\.", found.why)


class Reading(nn.Module):
    def __init__(self, read):
        super().__init__()
        self.gru, self.read = nn.GRU(3, 4, batch_first=True), read

    def forward(self, x):
        return self.read(self.gru(x)[0])


CUT_BADLY = {
    "fixed steps": (lambda h: h[:, [0, 5]], r"a piece raises IndexError .*reads them by their number"),
    "fixed length": (
        lambda h: h.flatten(1) @ torch.ones(32, 2),
        r"a piece raises RuntimeError .*one number of steps alone",
    ),
    "all but the first": (lambda h: h[:, 1:], r"cannot be put together .*drops steps at the ends"),
    "one step more": (lambda h: torch.cat([h, h[:, -1:]], 1), r"cannot be put together .*or adds some"),
    "steps by steps": (lambda h: h @ h.transpose(1, 2), r"cannot be put together .*an axis grows"),
}


@pytest.mark.parametrize("case", CUT_BADLY)
def test_pieces_that_raise_or_cannot_be_put_together_are_not_the_whole(case):
    read, reason = CUT_BADLY[case]
    found = check_split(Reading(read), torch.randn(2, 8, 3))
    assert not found
    assert re.search(reason, str(found))


def test_a_list_with_an_output_for_each_step_is_put_together():
    assert check_split(Reading(lambda h: list(h.unbind(1))), torch.randn(2, 8, 3))
    assert not check_split(Reading(lambda h: list(h.flip(1).unbind(1))), torch.randn(2, 8, 3))


@pytest.mark.parametrize("batch_first", [True, False])
def test_scores_flattened_for_a_loss_are_put_together(batch_first):
    class Flat(nn.Module):
        def __init__(self, sick):
            super().__init__()
            self.rnn, self.out, self.sick = nn.LSTM(3, 8, batch_first=batch_first), nn.Linear(8, 2), sick

        def forward(self, x):
            states, _ = self.rnn(x)
            states = states - states.mean(int(batch_first), keepdim=True) if self.sick else states
            return self.out(states.reshape(-1, 8))

    x = torch.randn(4, 15, 3) if batch_first else torch.randn(15, 4, 3)
    assert check_split(Flat(sick=False), x)
    assert check_split(Flat(sick=True), x).where == "after the layers"
