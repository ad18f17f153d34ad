"""Several runs as one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import hiddenstate as hs
from hiddenstate import Trajectory
from hiddenstate.errors import BadInput
from hiddenstate.recording.joining import joined, stacked


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(0, 4), min_size=3, max_size=3), min_size=1, max_size=5))
def test_each_row_has_the_real_steps_of_all_runs_in_their_order(lengths):
    runs = [Trajectory(torch.randn(3, max(each), 2), torch.tensor(each)) for each in lengths]
    whole = joined(runs)
    for row in range(3):
        steps = torch.cat([run.h[row, : each[row]] for run, each in zip(runs, lengths, strict=True)])
        assert int(whole.lengths[row]) == len(steps)
        assert torch.equal(whole.h[row, : len(steps)], steps)
        assert len(runs) == 1 or not whole.h[row, len(steps) :].any()


def test_joined_puts_the_steps_of_each_row_one_after_another(tmp_path):
    rnn = nn.LSTM(3, 5, batch_first=True)
    pieces = [nn.utils.rnn.pack_sequence([torch.randn(n, 3) for n in lengths]) for lengths in ([4, 2], [3, 1])]
    with hs.record(rnn, gates=True) as rec, hs.record(rnn, gates=True, to=tmp_path):
        for piece in pieces:
            rnn(piece)
    first, second = rec.runs("l0")
    joined = rec.joined("l0")
    assert joined.lengths.tolist() == [7, 3]
    for name in ("h", "c", "forget"):
        part = joined.part(name)
        assert torch.equal(part[0], torch.cat([first.part(name)[0], second.part(name)[0]]))
        assert torch.equal(part[1, :3], torch.cat([first.part(name)[1, :2], second.part(name)[1, :1]]))
        assert not part[1, 3:].any()
    assert torch.equal(hs.load_recording(tmp_path).joined("l0").h, joined.h)


def test_what_cannot_be_joined_is_refused_with_the_reason():
    rnn = nn.GRU(3, 5, batch_first=True)
    with hs.record(rnn) as rec:
        rnn(torch.randn(2, 4, 3))
        rnn(torch.randn(3, 4, 3))
    with pytest.raises(BadInput, match=r"run 2 of 'l0' has 3 rows, run 1 has 2.*drop_last=True"):
        rec.joined("l0")
    with hs.record(rnn, every=2) as thin:
        rnn(torch.randn(2, 4, 3))
        rnn(torch.randn(2, 4, 3))
    with pytest.raises(BadInput, match=r"every=2.*every=1"):
        thin.joined("l0")


def test_runs_of_other_widths_are_refused():
    with pytest.raises(BadInput, match="run 2 of '' has 4 units, run 1 has 3"):
        joined([Trajectory(torch.randn(2, 5, 3)), Trajectory(torch.randn(2, 5, 4))])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=3), min_size=1, max_size=5))
def test_stacked_runs_have_every_row_as_it_was(lengths):
    runs = [Trajectory(torch.randn(len(each), max(each), 2), torch.tensor(each)) for each in lengths]
    whole = stacked(runs)
    rows = [run[row] for run in runs for row in range(len(run.h))]
    assert whole.lengths.tolist() == [length for each in lengths for length in each]
    for row, alone in enumerate(rows):
        assert torch.equal(whole[row].h[:, : alone.h.shape[1]], alone.h)
        assert not whole[row].h[:, alone.h.shape[1] :].any()


def test_the_batches_of_a_data_set_are_stacked_with_their_gates_and_starts():
    lstm, starts = nn.LSTM(3, 4, batch_first=True), []
    with hs.record(lstm, gates=True) as rec:
        for rows, steps in ((3, 7), (3, 5), (1, 6)):
            starts.append(torch.randn(1, rows, 4))
            lstm(torch.randn(rows, steps, 3), (starts[-1], torch.zeros(1, rows, 4)))
    whole = rec.stacked("l0")
    assert whole.h.shape == whole.c.shape == whole.gates["forget"].shape == (7, 7, 4)
    assert torch.equal(whole.initial["h"], torch.cat(starts, dim=1)[0])
    with pytest.raises(BadInput, match=r"rec.stacked\('l0'\)"):
        rec.joined("l0")


def test_runs_of_other_units_or_thinned_otherwise_are_not_stacked():
    with pytest.raises(BadInput, match="run 2 of '' has 3 units, run 1 has 2"):
        stacked([Trajectory(torch.ones(1, 2, 2)), Trajectory(torch.ones(1, 2, 3))])
    with pytest.raises(BadInput, match="not recorded with the same every="):
        stacked([Trajectory(torch.ones(1, 2, 2)), Trajectory(torch.ones(1, 2, 2), every=2)])
