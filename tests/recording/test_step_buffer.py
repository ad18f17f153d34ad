"""The steps of a run, joined along time: whatever their shapes, however often the buffer is split."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hiddenstate.errors import BadInput
from hiddenstate.recording.recording import Options
from hiddenstate.recording.step_buffer import Placed, StepBuffer

shrinking = st.lists(st.integers(1, 4), min_size=1, max_size=7).map(lambda rows: sorted(rows, reverse=True))


def filled(rows, options=None, **gates):
    """A buffer of steps of so many rows, and the states that it was given."""
    buffer = StepBuffer(options or Options(), rows[0], {"h": torch.zeros(rows[0], 2)})
    states = [torch.randn(count, 2) for count in rows]
    for state in states:
        buffer.add({"h": Placed(state)}, dict(gates))
    return buffer, states


@given(rows=shrinking, every=st.integers(1, 4))
def test_each_row_has_its_own_steps_and_zeros_behind_them(rows, every):
    buffer, states = filled(rows, Options(every=every))
    h = buffer.states()["h"]  # (time, batch, unit)
    assert len(h) == len(states[::every])
    for step, state in zip(h, states[::every], strict=True):
        assert torch.equal(step[: len(state)], state)
        assert not step[len(state) :].any()
    assert buffer.row_lengths().tolist() == [sum(count > row for count in rows) for row in range(rows[0])]


@given(rows=shrinking, every=st.integers(1, 3), cuts=st.sets(st.integers(0, 5)))
def test_splitting_loses_no_step(rows, every, cuts):
    torch.manual_seed(0)
    whole, states = filled(rows, Options(every=every))
    buffer, pieces = StepBuffer(Options(every=every), rows[0], {}), []
    for at, state in enumerate(states):
        buffer.add({"h": Placed(state)}, {})
        if at in cuts:
            pieces.append(buffer.split())
    pieces.append(buffer)
    assert [piece.pieces for piece in pieces] == list(range(len(pieces)))
    assert [piece.batch for piece in pieces[1:]] == [rows[at] for at in sorted(cuts) if at < len(rows)]
    seen = [step for piece in pieces for step in piece.parts.get("h", [])]
    assert all(map(torch.equal, seen, whole.parts["h"]))
    assert len(seen) == len(whole.parts["h"])


@pytest.mark.parametrize(
    ("shape", "axis"), [((3, 2), 0), ((2, 3), 1), ((2, 3, 4), 1), ((3,), 0), ((2, 2), None), ((3, 0), 0)], ids=str
)
def test_a_part_of_any_shape_becomes_rows_of_units(shape, axis):
    value = torch.randn(shape)
    part = Placed(value, axis)
    rows = 1 if axis is None else shape[axis]
    assert (part.rows, part.flat(value).shape) == (rows, (rows, part.units))
    for row in range(rows):
        own = value if axis is None else value.select(axis, row)
        assert torch.equal(part.flat(value)[row], own.flatten())


def test_a_step_is_kept_as_it_was_when_it_came():
    buffer, states = filled([2, 2])
    wanted = [state.clone() for state in states]
    for state in states:
        state.zero_()
    assert torch.equal(buffer.states()["h"], torch.stack(wanted))


def test_a_gate_that_a_step_did_not_tap_is_nan_there():
    buffer = StepBuffer(Options(gates=True), 2, {})
    buffer.add({"h": Placed(torch.zeros(2, 3))}, {"leak": torch.ones(2, 1)})
    buffer.add({"h": Placed(torch.zeros(2, 3))}, {("reset", "update"): torch.arange(4.0).view(2, 2)})
    gates = buffer.gates
    assert torch.equal(gates["leak"][0], torch.ones(2, 1))
    assert gates["leak"][1].isnan().all()
    assert gates["reset"][0].isnan().all()
    assert (gates["reset"][1].flatten().tolist(), gates["update"][1].flatten().tolist()) == ([0, 2], [1, 3])


def test_a_gate_without_its_rows_is_refused_with_a_way_out():
    with pytest.raises(
        BadInput, match=r"hs.tap\('leak', ...\).* shape \(5,\) in a step of 2 rows.*value.expand\(batch"
    ):
        filled([2], leak=torch.ones(5))


@given(rows=shrinking, other=st.integers(1, 5), units=st.integers(1, 3))
def test_rows_may_end_but_none_may_join_and_none_may_widen(rows, other, units):
    buffer, _ = filled(rows)
    assert buffer.fits({"h": Placed(torch.randn(other, units))}) == (other <= rows[-1] and units == 2)
    assert not buffer.fits({"c": Placed(torch.randn(rows[-1], 2))})


def test_gradients_arrive_at_the_steps_that_a_loss_reaches():
    buffer = StepBuffer(Options(grads=True), 2, {})
    start = torch.ones(2, 3, requires_grad=True)
    first = start * 2
    second = first * 3
    for state in (first, second):
        buffer.add({"h": Placed(state)}, {})
    assert buffer.expects_grads()
    second.sum().backward()
    assert not buffer.expects_grads()
    assert torch.equal(buffer.grads()["h"], torch.stack([torch.full((2, 3), 3.0), torch.ones(2, 3)]))


def test_without_a_graph_no_gradient_is_waited_for():
    buffer, _ = filled([2], Options(grads=True))
    assert not buffer.expects_grads()
    assert buffer.grads() == {}
