"""What makes a state, and which states fit each other: every refusal says what is so and what to do."""

import re

import numpy as np
import pytest
import torch

from hiddenstate.errors import StateMismatch
from hiddenstate.state import State


def lstm_state(batch: int = 3, **kwargs) -> State:
    return State({"h": torch.randn(2, batch, 4, **kwargs), "c": torch.randn(2, batch, 5, **kwargs)}, batch_axis=1)


class TestBirth:
    @pytest.mark.parametrize("native", [(torch.zeros(3), torch.zeros(3)), torch.zeros(3), None, 5])
    def test_what_has_no_names_is_refused(self, native):
        message = rf"State\(\{{'h': h\}}\), but this is {type(native).__name__}.*Layer\.to_state"
        with pytest.raises(StateMismatch, match=message):
            State(native)

    def test_no_parts_are_refused(self):
        with pytest.raises(StateMismatch, match=r"at least one part, for example State\(\{'h': h\}\)"):
            State({})

    def test_names_that_are_not_strings_are_refused(self):
        with pytest.raises(StateMismatch, match="part names are strings, but this one is 0"):
            State({0: torch.zeros(3)})

    @pytest.mark.parametrize("part", [(torch.zeros(3),), 1.0, None, np.zeros(3)])
    def test_parts_that_are_not_tensors_are_refused(self, part):
        with pytest.raises(StateMismatch, match=rf"part 'h' is {type(part).__name__}, but a tensor.*Layer\.to_state"):
            State({"h": part})

    @pytest.mark.parametrize(
        ("axes", "named"), [({"h": 0}, "h"), ({}, "no part"), ({0: 0}, "0"), ({"h": 0, "c": 0, "x": 0}, "h, c, x")]
    )
    def test_axes_of_other_parts_are_refused(self, axes, named):
        with pytest.raises(StateMismatch, match=rf"batch_axis names {named}, but the state has h, c: give one"):
            State({"h": torch.zeros(3), "c": torch.zeros(3)}, axes)

    @pytest.mark.parametrize("axis", [1.0, None, "0", True])
    def test_an_axis_that_is_no_number_is_refused(self, axis):
        message = rf"the batch axis of part 'h' is {re.escape(repr(axis))}, but a whole number is needed"
        with pytest.raises(StateMismatch, match=message):
            State({"h": torch.zeros(3, 3)}, axis)

    @pytest.mark.parametrize(
        ("shape", "axis", "at"), [((2, 4), 2, 2), ((), 0, 0), ((), 1, 0), ((4,), -2, 0), ((4,), 1, 1)]
    )
    def test_an_axis_that_is_not_there_is_refused_and_the_way_out_works(self, shape, axis, at):
        part = torch.zeros(shape)
        message = rf"part 'h' has shape {re.escape(str(shape))}, so it has no axis {axis} .*part\.unsqueeze\({at}\)"
        with pytest.raises(StateMismatch, match=message):
            State({"h": part}, axis)
        assert State({"h": part.unsqueeze(at)}, at).batch == 1

    def test_parts_of_different_rows_are_refused(self):
        message = r"'h' has 3 rows \(axis 1 of \(2, 3, 4\)\), but part 'c' has 4 \(axis 1 of \(2, 4, 4\)\).*batch_axis"
        with pytest.raises(StateMismatch, match=message):
            State({"h": torch.zeros(2, 3, 4), "c": torch.zeros(2, 4, 4)}, 1)


def joined(one: State, other: State) -> list:
    return [lambda: one.put([0], other), lambda: State.cat([one, other])]


class TestStatesThatDoNotFit:
    @pytest.mark.parametrize("other", [{"h": torch.zeros(1, 2)}, torch.zeros(1, 2), None])
    def test_what_is_no_state(self, other):
        for join in joined(State({"h": torch.zeros(3, 2)}), other):
            with pytest.raises(
                StateMismatch, match=rf"a State is needed, but this is {type(other).__name__}.*to_state"
            ):
                join()

    def test_other_parts(self):
        for join in joined(lstm_state(), State({"h": torch.zeros(2, 1, 4)}, 1)):
            with pytest.raises(StateMismatch, match=r"has the parts h, c, but the other has h\. .*hs\.Bridge"):
                join()

    def test_another_axis(self):
        for join in joined(State({"h": torch.zeros(1, 1)}, 0), State({"h": torch.zeros(1, 1)}, 1)):
            with pytest.raises(StateMismatch, match="part 'h' has its batch axis at 0, but the other state's is at 1"):
                join()

    @pytest.mark.parametrize("shape", [(1, 5), (1, 4, 1), (1,)])
    def test_another_size(self, shape):
        message = (
            rf"'h' has shape \(3, 4\), but .* has {re.escape(str(shape))}: they may differ in rows \(axis 0\) only"
        )
        for join in joined(State({"h": torch.zeros(3, 4)}), State({"h": torch.zeros(shape)})):
            with pytest.raises(StateMismatch, match=message):
                join()

    def test_another_dtype_and_the_way_out_works(self):
        state, other = State({"h": torch.zeros(3)}), State({"h": torch.ones(1, dtype=torch.bfloat16)})
        message = r"'h' is torch\.float32, but .* is torch\.bfloat16.*autocast.*other\.to\(torch\.float32\)"
        for join in joined(state, other):
            with pytest.raises(StateMismatch, match=message):
                join()
        assert state.put([1], other.to(torch.float32))["h"].tolist() == [0.0, 1.0, 0.0]

    def test_another_device(self):
        for join in joined(State({"h": torch.zeros(3)}), State({"h": torch.ones(1, device="meta")})):
            with pytest.raises(StateMismatch, match=r"'h' is on cpu, but .* is on meta.*other\.to\('cpu'\)"):
                join()
