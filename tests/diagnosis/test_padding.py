"""Masks of padding are read as lengths, by name and by form; others are left alone, or said not to be read."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import hiddenstate as hs
from hiddenstate.cells import Calling
from hiddenstate.diagnosis.admission import read_inputs
from hiddenstate.diagnosis.padding import padded, unread_padding

LENGTHS = torch.tensor([6, 4, 1, 3])
MASK = torch.arange(6) < LENGTHS[:, None]  # (batch, time)


def read(*args, names, batch_axis=0, lengths=None):
    return read_inputs(Calling(names), args, batch_axis=batch_axis, lengths=lengths)


def tokens(*shape):
    return torch.randint(2, 9, shape or (4, 6))


@given(st.lists(st.integers(1, 6), min_size=4, max_size=4))
def test_a_mask_of_padding_tells_the_lengths(lengths):
    mask = (torch.arange(6) < torch.tensor(lengths)[:, None]).long()
    assert read(tokens(), mask, names=("input_ids", "attention_mask")).lengths.tolist() == lengths


@pytest.mark.parametrize("dtype", [torch.bool, torch.long, torch.float32])
@pytest.mark.parametrize("inverted", [False, True])
@pytest.mark.parametrize("axes", [2, 3])
def test_of_any_dtype_with_an_axis_of_its_own_and_the_other_way_round(dtype, inverted, axes):
    mask = (MASK ^ inverted).to(dtype)
    found = read(tokens(), mask[..., None] if axes == 3 else mask, names=("x", "padding_mask"))
    assert found.lengths.tolist() == LENGTHS.tolist()
    assert found.arguments[1].real == int(not inverted)


def test_time_first():
    found = read(tokens(6, 4), MASK.T, names=("x", "mask"), batch_axis=1)
    assert found.lengths.tolist() == LENGTHS.tolist()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_sequence_is_not_the_mask_whichever_comes_first(order):
    both = (("input_ids", tokens()), ("attention_mask", MASK.long()))
    names, args = zip(*(both[k] for k in order), strict=True)
    found = read(*args, names=names)
    assert found.name(found.main) == "input_ids"
    assert found.lengths.tolist() == LENGTHS.tolist()


@pytest.mark.parametrize("name", ["done", "episode_starts", "is_first", "resets", "token_type_ids"])
def test_marks_of_another_meaning_are_no_padding(name):
    assert read(tokens(), MASK.long(), names=("x", name)).lengths is None


def test_a_plain_mask_beside_a_state_may_say_where_to_start_anew():
    assert read(torch.randn(4, 6, 3), torch.zeros(4, 5), MASK, names=("obs", "hidden", "masks")).lengths is None


@pytest.mark.parametrize("mask", [MASK.flip(1), MASK ^ (torch.arange(6) == 2), ~MASK])
def test_padding_that_is_not_behind_each_row_is_said_not_to_be_read(mask):
    found = read(tokens(), mask, names=("x", "attention_mask"))
    assert found.lengths is None
    assert unread_padding(found) == ["attention_mask"]


def test_the_report_says_so():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.gru = nn.Embedding(9, 4), nn.GRU(4, 4, batch_first=True)

        def forward(self, x, attention_mask):
            return self.gru(self.embed(x) * attention_mask.unsqueeze(-1))[0]

    assumed = " ".join(hs.diagnose(Model(), tokens(), MASK.flip(1)).assumed)
    assert "attention_mask does not hold one value at the real steps of each row" in assumed
    assert "lengths= tells it" in assumed
    assert "padding is where attention_mask says so" in hs.diagnose(Model(), tokens(), MASK).assumed


def test_lengths_that_are_told_win():
    told = torch.tensor([6, 6, 6, 6])
    found = read(tokens(), MASK, names=("x", "attention_mask"), lengths=told)
    assert found.lengths.tolist() == told.tolist()
    assert found.arguments[1].real is None


@given(st.lists(st.integers(1, 6), min_size=4, max_size=4), st.booleans(), st.booleans())
def test_other_lengths_are_written_into_the_mask(lengths, inverted, time_first):
    mask = MASK ^ inverted
    axis = int(time_first)
    args = (tokens(6, 4), mask.T) if time_first else (tokens(), mask)
    other = read(*args, names=("x", "pad_mask"), batch_axis=axis).with_lengths(torch.tensor(lengths))
    again = read(*other.args, names=("x", "pad_mask"), batch_axis=axis)
    assert again.lengths.tolist() == lengths


@pytest.mark.parametrize("inverted", [False, True])
def test_more_padding_is_marked_as_padding(inverted):
    found = read(tokens(), MASK ^ inverted, names=("x", "pad_mask"))
    longer = padded(found, 3)
    assert longer.steps == 9
    assert read(*longer.args, names=("x", "pad_mask")).lengths.tolist() == LENGTHS.tolist()


def test_a_second_sequence_of_as_many_steps_cannot_be_padded():
    assert padded(read(torch.randn(4, 6, 3), torch.randn(4, 6, 2), names=("x", "y")), 3) is None
