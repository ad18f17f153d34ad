"""Reading a call's arguments, and changing single rows and steps of them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from hiddenstate.cells import calling
from hiddenstate.diagnosis.admission import read_inputs


class Any(nn.Module):
    def forward(self, x, hidden=None, lengths=None, mask=None):
        return x


def read(*args, batch_axis=0, lengths=None):
    return read_inputs(calling(Any(), args, {}), args, batch_axis=batch_axis, lengths=lengths)


LAYOUTS = st.sampled_from([0, 1])


def sequence(kind, batch, steps, axis):
    shape = (batch, steps) if axis == 0 else (steps, batch)
    if kind == "tokens":
        return torch.randint(1, 9, shape)
    if kind == "ones":
        return torch.ones(*shape, 2)
    if kind == "counts":
        return torch.randint(3, (*shape, 2)).float()
    return torch.rand(*shape, 2) if kind == "shares" else torch.randn(*shape, 2)


KINDS = st.sampled_from(["tokens", "ones", "counts", "shares", "floats"])


@given(kind=KINDS, batch=st.integers(2, 6), steps=st.integers(2, 6), axis=LAYOUTS, data=st.data())
def test_other_rows_are_other_and_the_rest_is_untouched(kind, batch, steps, axis, data):
    x = sequence(kind, batch, steps, axis)
    rows = torch.tensor(data.draw(st.lists(st.booleans(), min_size=batch, max_size=batch)))
    changed = read(x, batch_axis=axis).other_rows(rows).args[0]
    assert changed.shape == x.shape
    assert changed.dtype == x.dtype
    by_rows, old = changed.movedim(axis, 0), x.movedim(axis, 0)
    assert torch.equal(by_rows[~rows], old[~rows])
    if kind not in ("counts", "tokens"):  # of few values, some may be drawn again
        assert (by_rows[rows] != old[rows]).flatten(1).any(1).all()
    if kind == "shares":
        assert ((changed >= 0) & (changed <= 1)).all()
    if kind == "counts":
        assert set(changed.unique().tolist()) <= set(x.unique().tolist()) or x.std() == 0


@given(batch=st.integers(2, 5), steps=st.integers(2, 6), axis=LAYOUTS, data=st.data())
def test_other_steps_are_other_and_the_rest_is_untouched(batch, steps, axis, data):
    x = sequence("floats", batch, steps, axis)
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=batch * steps, max_size=batch * steps)))
    mask = mask.reshape(batch, steps)
    inputs = read(x, batch_axis=axis)
    changed = inputs.other_steps(mask, [inputs.main]).args[0]
    same = (changed == x).all(-1)
    assert torch.equal(same if axis == 0 else same.T, ~mask)


@given(batch=st.integers(2, 5), steps=st.integers(2, 6), axis=LAYOUTS, cut=st.integers(1, 5))
def test_crop_and_tail_make_the_whole(batch, steps, axis, cut):
    cut = min(cut, steps - 1)
    x = sequence("floats", batch, steps, axis)
    inputs = read(x, batch_axis=axis)
    head, tail = inputs.crop(cut, [inputs.main]), inputs.tail(cut, [inputs.main])
    assert torch.equal(torch.cat([head.args[0], tail.args[0]], 1 - axis), x)
    assert (head.steps, tail.steps) == (cut, steps - cut)


def test_lists_of_lengths_stay_lists():
    inputs = read(torch.randn(3, 5, 2), None, [5, 3, 1], lengths=[5, 3, 1])
    assert inputs.select([2, 0]).args[2] == [1, 5]
    assert inputs.with_lengths(torch.tensor([2, 2, 2])).args[2] == [2, 2, 2]


def test_packed_sequences_are_changed_row_by_row():
    lengths = torch.tensor([2, 4, 3])
    packed = pack_padded_sequence(torch.randn(3, 4, 2), lengths, batch_first=True, enforce_sorted=False)
    inputs = read(packed)
    assert (inputs.batch, inputs.steps, inputs.lengths.tolist()) == (3, 4, [2, 4, 3])
    one = inputs.select([2]).args[0]
    assert isinstance(one, PackedSequence)
    assert one.batch_sizes.tolist() == [1, 1, 1]
    changed = inputs.other_rows(torch.tensor([True, False, False])).args[0]
    assert int((changed.data != packed.data).any(1).sum()) == 2


def test_a_padding_token_is_never_moved():
    x = torch.tensor([[1, 2, 3, 0], [4, 5, 0, 0]])
    from dataclasses import replace

    inputs = replace(read(x), pad_token=0, vocabulary=9)
    changed = inputs.other_rows(torch.tensor([True, True])).args[0]
    assert torch.equal(changed == 0, x == 0)
    assert ((changed != x) | (x == 0)).all()


@pytest.mark.parametrize("layout", [(6, 4, 3), (4, 6, 3)])
def test_memory_layout_is_kept(layout):
    inputs = read(torch.randn(*layout))
    assert inputs.other_rows(torch.ones(layout[0], dtype=torch.bool)).args[0].is_contiguous()
    assert inputs.crop(2, [inputs.main]).args[0].is_contiguous()


@given(batch=st.integers(1, 5), steps=st.integers(2, 30), axis=LAYOUTS, data=st.data())
def test_of_a_shortened_call_real_steps_and_padding_keep_their_shares_and_values(batch, steps, axis, data):
    lengths = torch.tensor(data.draw(st.lists(st.integers(1, steps), min_size=batch, max_size=batch)))
    fewer = data.draw(st.integers(1, steps))
    place = torch.arange(steps).expand(batch, -1)
    x = torch.where(place < lengths[:, None], place, -place)[..., None].double()  # padding counts downwards
    x = x + torch.arange(batch)[:, None, None] / 10
    inputs = read(x.movedim(0, axis), batch_axis=axis, lengths=lengths)
    short = inputs.shortened(fewer)
    kept = short.args[0].movedim(axis, 0)
    assert kept.shape[:2] == (batch, fewer)
    assert (short.steps, short.argument(short.main).steps) == (fewer, fewer)
    assert torch.equal(short.lengths, (lengths * fewer / steps).ceil().long())
    for row, (old, new) in enumerate(zip(lengths.tolist(), short.lengths.tolist(), strict=True)):
        assert torch.equal(kept[row, :new], x[row, :new])
        assert torch.equal(kept[row, new:], x[row, old : old + fewer - new])


def test_everything_that_goes_with_the_steps_is_shortened_along():
    x, lengths, mask = torch.randn(3, 12, 2), [12, 6, 4], torch.ones(3, 12)
    mask[1, 6:], mask[2, 4:] = 0, 0
    packed = pack_padded_sequence(x, torch.tensor(lengths), batch_first=True)
    short = read(x, None, lengths, mask.bool()).shortened(6)
    assert short.args[2] == [6, 3, 2]
    assert short.args[3].sum(1).tolist() == [6, 3, 2]
    assert read(packed).shortened(6).args[0].batch_sizes.tolist() == [3, 3, 2, 1, 1, 1]


def test_sequences_of_another_length_are_shortened_along_unless_they_are_to_stay():
    inputs = read(torch.randn(3, 12, 2), None, torch.randn(3, 9, 2))
    assert [end.shape[1] for end in inputs.shortened(4).args[::2]] == [4, 4]
    assert [end.shape[1] for end in inputs.shortened(4, others=False).args[::2]] == [4, 9]
