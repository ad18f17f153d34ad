"""Runs: put in the user's order, joined, under way, kept."""

import threading
import warnings
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hiddenstate.cells import OpenRun
from hiddenstate.errors import RecordingWarning
from hiddenstate.recording.recording import Options
from hiddenstate.recording.runs import Arranged, Joined, OpenRuns, RecordedRun, warn_and_go_on
from hiddenstate.unrolling import RowPlaces


@dataclass
class Known:
    """Values that are there from the start."""

    h: Tensor  # (time, batch, unit)
    taps: dict[str, Tensor] = field(default_factory=dict)
    arrived: dict[str, Tensor] = field(default_factory=dict)
    asked: int = 0

    def states(self):
        self.asked += 1
        return {"h": self.h}

    @property
    def gates(self):
        return self.taps

    def grads(self):
        return self.arrived

    def expects_grads(self):
        return not self.arrived


def run_of(source, options=None, time=None, **about):
    time, batch = source.h.shape[0] if time is None else time, source.h.shape[1]
    return RecordedRun(
        "l0", "gru", options or Options(), torch.full((batch,), time), {"h": source.h[0]}, source, **about
    )


# What is kept of a run.


@given(time=st.integers(1, 7), every=st.integers(1, 4))
def test_only_every_so_many_steps_are_kept(time, every):
    source = Known(torch.randn(time, 2, 3))
    trajectory = run_of(source, Options(every=every)).trajectory()
    assert torch.equal(trajectory.h, source.h[::every].transpose(0, 1))
    assert trajectory.lengths.tolist() == [len(range(0, time, every))] * 2


def test_steps_that_a_source_left_out_are_not_left_out_again():
    source = Known(torch.randn(3, 2, 3))  # of 5 steps
    trajectory = run_of(source, Options(every=2), time=5, thinned=True).trajectory()
    assert torch.equal(trajectory.h, source.h.transpose(0, 1))
    assert trajectory.lengths.tolist() == [3, 3]


def test_the_source_is_asked_once_and_let_go():
    source = Known(torch.randn(3, 2, 3), {"leak": torch.randn(3, 2, 1)})
    run = run_of(source, Options(gates=True)).settle()
    assert run.source is None
    assert list(run.trajectory().gates) == ["leak"]
    assert source.asked == 1


def test_gates_that_nobody_asked_for_are_not_kept():
    run = run_of(Known(torch.randn(3, 2, 3), {"leak": torch.randn(3, 2, 1)}))
    assert list(run.values()) == ["states.h"]


def test_gradients_may_arrive_after_a_run_has_settled():
    source = Known(torch.randn(3, 2, 3))
    run = run_of(source, Options(grads=True)).settle()
    assert run.waits()
    source.arrived = {"h": torch.ones(3, 2, 3)}
    assert not run.waits()
    assert torch.equal(run.trajectory().grads["h"], torch.ones(2, 3, 3))


def test_values_are_stored_as_asked_and_integers_stay_so():
    source = Known(torch.randn(3, 2, 3), {"count": torch.arange(6).view(3, 2, 1)})
    run = run_of(source, Options(gates=True, dtype=torch.float16))
    assert {name: value.dtype for name, value in run.entries().items()} == {
        "states.h": torch.float16,
        "gates.count": torch.int64,
        "initial.h": torch.float16,
        "lengths": torch.int64,
    }
    assert run.nbytes == 18 * 2 + 6 * 8


# The user's order.


@st.composite
def cut_rows(draw):
    """Rows of different lengths, cut into segments that are run side by side in any order."""
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4), label="lengths")
    segments = []
    for row, length in enumerate(lengths):
        cuts = sorted(draw(st.sets(st.integers(1, length - 1)), label="cuts")) if length > 1 else []
        segments += [(row, a, b) for a, b in zip([0, *cuts], [*cuts, length], strict=True)]
    return lengths, draw(st.permutations(segments), label="order")


@given(rows=cut_rows(), reverse=st.booleans())
def test_segments_go_back_to_their_rows(rows, reverse):
    lengths, segments = rows
    whole = torch.zeros(max(lengths), len(lengths), 2)
    for row, length in enumerate(lengths):
        whole[:length, row] = torch.randn(length, 2)
    run_lengths = torch.tensor([b - a for _, a, b in segments])
    run = torch.full(
        (int(run_lengths.max()), len(segments), 2), torch.nan
    )  # what lies behind a segment is not looked at
    for place, (row, a, b) in enumerate(segments):
        piece = whole[a:b, row]
        run[: b - a, place] = piece.flip(0) if reverse else piece
    places = RowPlaces(
        torch.tensor([row for row, _, _ in segments]), torch.tensor([a for _, a, _ in segments]), len(lengths)
    )
    arranged = Arranged(Known(run, {"leak": run}, {"h": run}), places, run_lengths, reverse=reverse)
    assert arranged.lengths.tolist() == lengths
    for values in (arranged.states()["h"], arranged.gates["leak"], arranged.grads()["h"]):
        assert torch.equal(values, whole)
    starts = torch.randn(len(segments), 2)
    wanted = {row: starts[place] for place, (row, a, _) in enumerate(segments) if a == 0}
    assert torch.equal(arranged.rows(starts), torch.stack([wanted[row] for row in range(len(lengths))]))


@given(times=st.lists(st.integers(1, 4), min_size=1, max_size=4), reached=st.sets(st.integers(0, 3)))
def test_calls_in_a_row_are_one_run(times, reached):
    pieces = [Known(torch.randn(time, 2, 3)) for time in times]
    for at, piece in enumerate(pieces):
        piece.taps = {"leak": piece.h * 2}
        piece.arrived = {"h": piece.h * 3} if at in reached else {}
    joined = Joined(pieces)
    whole = torch.cat([piece.h for piece in pieces])
    assert torch.equal(joined.states()["h"], whole)
    assert torch.equal(joined.gates["leak"], whole * 2)
    wanted = [piece.h * 3 if piece.arrived else torch.zeros_like(piece.h) for piece in pieces]
    if any(piece.arrived for piece in pieces):
        assert torch.equal(joined.grads()["h"], torch.cat(wanted))
        assert not joined.expects_grads()
    else:
        assert joined.grads() == {}
        assert joined.expects_grads()


# Runs under way.


RUN = OpenRun(())


class Counted(OpenRuns[Known]):
    """Runs that are what they are."""

    def recorded(self, track, run):
        return RecordedRun(track, "gru", self.options, torch.tensor([len(run.h)]), {}, run)


@pytest.fixture
def under_way():
    """Two tracks' runs of this thread and one of another, and the list to which they go."""
    kept = []
    runs = Counted(Options(), lambda run, *, last=True: kept.append(run.track))
    here, other = threading.current_thread(), threading.Thread()
    for key in ((here, "a", RUN), (here, "b", RUN), (other, "a", RUN)):
        runs.open[key] = Known(torch.randn(2, 1, 1))
    return runs, kept, other


def test_a_run_is_kept_once_when_it_is_closed(under_way):
    runs, kept, _ = under_way
    runs.close("a", RUN)
    runs.close("a", RUN)
    assert kept == ["a"]
    assert sorted(runs.under_way()) == ["a", "b"]  # another thread has a run of that track, too


def test_the_runs_of_one_thread_are_closed_apart_from_those_of_others(under_way):
    runs, kept, other = under_way
    runs.close_all(other)
    assert kept == ["a"]
    runs.close_all()
    assert sorted(kept) == ["a", "a", "b"]
    assert runs.under_way() == []


def test_what_is_forgotten_is_not_kept(under_way):
    runs, kept, _ = under_way
    runs.forget("a")
    runs.close_all()
    assert kept == ["b"]


def test_a_look_at_a_run_does_not_end_it(under_way):
    runs, kept, _ = under_way
    assert [run.track for run in runs.so_far("a")] == ["a", "a"]
    assert kept == []
    assert sorted(runs.under_way()) == ["a", "a", "b"]


# What goes on from what.


def test_a_warning_that_a_filter_makes_an_error_stops_nothing():
    with pytest.warns(RecordingWarning, match="the disk is full"):
        warn_and_go_on("the disk is full")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_and_go_on("the disk is full")
