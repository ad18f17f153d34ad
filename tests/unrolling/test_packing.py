"""Where each step comes to lie: checked against torch's own packing, and against counting by hand."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_padded_sequence

from hiddenstate.unrolling.checks import Task
from hiddenstate.unrolling.packing import plan

LENGTHS = st.lists(st.integers(1, 6), min_size=1, max_size=5)


@given(lengths=LENGTHS)
def test_lengths_are_packed_as_torch_packs_them(lengths):
    x = torch.randn(len(lengths), 6, 2)
    packing = plan(Task(x, None, torch.tensor(lengths)))
    theirs = pack_padded_sequence(x, torch.tensor(lengths), batch_first=True, enforce_sorted=False)
    assert torch.equal(packing.batch_sizes, theirs.batch_sizes)
    assert sorted(packing.rows.tolist()) == list(range(len(lengths)))
    rows = x[packing.rows]
    ours_sorted = pack_padded_sequence(rows, torch.tensor(lengths)[packing.rows], batch_first=True)
    assert torch.equal(packing.pack(x), ours_sorted.data)


@given(lengths=LENGTHS, data=st.data())
def test_packing_then_unpacking_gives_back_every_valid_step(lengths, data):
    resets = torch.tensor([data.draw(st.lists(st.booleans(), min_size=6, max_size=6)) for _ in lengths])
    x = torch.randn(len(lengths), 6, 2)
    packing = plan(Task(x, None, torch.tensor(lengths), resets))
    valid = torch.arange(6) < torch.tensor(lengths)[:, None]
    assert torch.equal(packing.unpack(packing.pack(x), len(lengths), 6), x * valid[..., None])


@given(lengths=LENGTHS, data=st.data())
def test_segments_are_those_one_counts_by_hand(lengths, data):
    resets = [data.draw(st.lists(st.booleans(), min_size=6, max_size=6)) for _ in lengths]
    packing = plan(Task(torch.zeros(len(lengths), 6, 1), None, torch.tensor(lengths), torch.tensor(resets)))
    expected = []  # (row, first step, length, continues)
    for row, length in enumerate(lengths):
        starts = [t for t in range(length) if t == 0 or resets[row][t]]
        for start, end in zip(starts, [*starts[1:], length], strict=True):
            expected.append((row, start, end - start, start == 0 and not resets[row][0]))
    expected.sort(key=lambda segment: -segment[2])
    assert packing.rows.tolist() == [segment[0] for segment in expected]
    assert packing.continues.tolist() == [segment[3] for segment in expected]
    places = [
        row * 6 + start + offset
        for offset in range(max(segment[2] for segment in expected))
        for row, start, length, _ in expected
        if offset < length
    ]
    assert packing.index.tolist() == places
    for row in range(len(lengths)):
        mine = [(start, number) for number, (r, start, *_) in enumerate(expected) if r == row]
        assert packing.last[row] == max(mine)[1]
