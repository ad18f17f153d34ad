"""The State: a value whose verbs obey the laws of lists of rows, and whose refusals say what to do."""

import copy
import pickle
import re
import weakref
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree

from hiddenstate.errors import BadInput, StateMismatch
from hiddenstate.state import State, tensors
from tests.support.strategies import COMPLEX, DTYPES, FLOATING, row_lists, same, slices, states, states_like


def lstm_state(batch: int = 3, **kwargs) -> State:
    return State({"h": torch.randn(2, batch, 4, **kwargs), "c": torch.randn(2, batch, 5, **kwargs)}, batch_axis=1)


def rows_of(state: State) -> list[dict[str, torch.Tensor]]:
    """The oracle: a state as a plain list of rows."""
    return [
        {name: part.select(state.batch_axis[name], row) for name, part in state.items()} for row in range(state.batch)
    ]


def same_rows(state: State, rows: list[dict[str, torch.Tensor]]) -> bool:
    mine = rows_of(state)
    return len(mine) == len(rows) and all(
        torch.equal(one[name], other[name]) for one, other in zip(mine, rows, strict=True) for name in state
    )


class TestIsAMapping:
    def test_it_gives_the_tensors_it_was_given(self):
        h, c = torch.zeros(3, 2), torch.ones(3, 2)
        state = State({"h": h, "c": c})
        assert isinstance(state, Mapping)
        assert state["h"] is h
        assert dict(state) == {"h": h, "c": c}
        assert list(state) == ["h", "c"]
        assert len(state) == 2
        assert "c" in state
        assert "x" not in state
        assert state.get("x") is None
        assert {**state}["c"] is c

    def test_an_unknown_part_is_a_key_error_that_lists_the_parts(self):
        with pytest.raises(KeyError, match="no part named 'x'; this state has h, c"):
            lstm_state()["x"]

    @pytest.mark.parametrize("rows", [0, [0, 2], slice(2), torch.tensor([1])])
    def test_rows_in_brackets_are_told_how_rows_are_taken(self, rows):
        with pytest.raises(
            KeyError,
            match=r"no part named .* this state has h, c\. To take rows of all parts at once, use state\.select",
        ):
            lstm_state()[rows]

    def test_it_reads_as_one_line(self):
        state = State({"h": torch.zeros(2, 3, 4), "n": torch.zeros(3).long()}, {"h": 1, "n": 0})
        assert repr(state) == "State(h (2, 3, 4) float32, n (3,) int64; batch of 3)"

    def test_it_is_compared_by_identity(self):
        state = lstm_state()
        assert state == state
        assert state != state.clone()
        assert {state: 1}[state] == 1
        assert weakref.ref(state)() is state

    def test_a_row_may_be_a_mere_number(self):
        assert State({"count": torch.arange(3)}).batch == 3


class TestNeverChanges:
    def test_nothing_can_be_set_or_deleted(self):
        state = lstm_state()
        for name in ("batch", "h", "_parts", "new"):
            with pytest.raises(AttributeError, match=f"a State never changes, so '{name}' cannot be set.*put, map"):
                setattr(state, name, 1)
            with pytest.raises(AttributeError, match=f"a State never changes, so '{name}' cannot be deleted"):
                delattr(state, name)
        with pytest.raises(TypeError, match="item assignment"):
            state["h"] = torch.zeros(1)
        with pytest.raises(TypeError, match="item assignment"):
            state.batch_axis["h"] = 0
        assert not hasattr(state, "__dict__")

    def test_the_mappings_it_was_made_from_may_change(self):
        parts, axes = {"h": torch.zeros(2, 3)}, {"h": 1}
        state = State(parts, axes)
        parts["c"], axes["h"] = torch.zeros(2, 3), 0
        assert (list(state), state.batch) == (["h"], 3)

    @given(state=states(batch=st.integers(1, 4)), data=st.data())
    def test_no_verb_changes_it(self, state, data):
        before = copy.deepcopy(state)
        other = data.draw(states_like(state, batch=1))
        state.put([0], other), state.select([0]), state.repeat(2), State.cat([state, other]), state.clone()
        state.detach(), state.to(torch.float64), state.map(torch.clone)
        assert same(state, before)


class TestNumbers:
    @given(state=states())
    def test_batch_and_bytes_are_those_of_the_tensors(self, state):
        assert {part.shape[state.batch_axis[name]] for name, part in state.items()} == {state.batch}
        assert state.nbytes == sum(part.clone().untyped_storage().nbytes() for part in state.values())

    def test_bytes_count_every_element(self):
        state = State({"h": torch.zeros(3, 5), "z": torch.zeros(3, dtype=torch.complex128), "b": torch.zeros(3).bool()})
        assert state.nbytes == 3 * 5 * 4 + 3 * 16 + 3

    @pytest.mark.parametrize("axis", [1, -2, np.int64(1), {"h": 1, "c": -2}])
    def test_axes_are_counted_from_the_front(self, axis):
        assert dict(State(dict(lstm_state()), axis).batch_axis) == {"h": 1, "c": 1}

    def test_the_device_is_that_of_all_parts(self):
        assert lstm_state().device == torch.device("cpu")

    def test_parts_on_different_devices_have_no_common_device(self):
        state = State({"h": torch.zeros(2, 3), "c": torch.zeros(2, 3, device="meta")})
        with pytest.raises(StateMismatch, match=r"h on cpu, c on meta.*state\.to\(device\)"):
            _ = state.device


class TestSelect:
    @given(state=states(), data=st.data())
    def test_it_gives_the_rows_a_list_would(self, state, data):
        rows = data.draw(row_lists(state.batch))
        plain = rows_of(state)
        assert same_rows(state.select(rows), [plain[row] for row in rows])

    @given(state=states(), data=st.data())
    def test_a_slice_is_the_slice_of_a_list(self, state, data):
        rows = data.draw(slices(state.batch))
        assert same_rows(state.select(rows), rows_of(state)[rows])

    @given(state=states(), data=st.data())
    def test_a_mask_is_the_indices_where_it_is_true(self, state, data):
        mask = data.draw(st.lists(st.booleans(), min_size=state.batch, max_size=state.batch))
        rows = [row for row, chosen in enumerate(mask) if chosen]
        assert same(state.select(torch.tensor(mask, dtype=torch.bool)), state.select(rows))

    @given(state=states(), data=st.data())
    def test_selecting_twice_is_selecting_once(self, state, data):
        first = data.draw(row_lists(state.batch))
        second = data.draw(row_lists(len(first)))
        assert same(state.select(first).select(second), state.select([first[row] for row in second]))

    @given(state=states())
    def test_all_rows_are_the_state(self, state):
        assert same(state.select(range(state.batch)), state)
        assert same(state.select(slice(None)), state)

    def test_a_slice_shares_memory_and_indices_do_not(self):
        state = lstm_state()
        assert state.select(slice(1, 3))["h"].data_ptr() == state["h"][:, 1:].data_ptr()
        assert state.select([1, 2])["h"].untyped_storage().data_ptr() != state["h"].untyped_storage().data_ptr()

    def test_zeros_and_ones_as_long_as_the_batch_are_indices(self):
        state = lstm_state(2)
        assert same(state.select(torch.tensor([1, 1])), state.select([1, 1]))

    def test_a_slice_without_a_step_forward_is_pythons_error(self):
        with pytest.raises(ValueError, match="step cannot be zero"):
            lstm_state().select(slice(None, None, 0))

    def test_gradients_flow_to_the_rows_asked_for(self):
        h = torch.zeros(3, 2, requires_grad=True)
        State({"h": h}).select([2, 2, 0])["h"].sum().backward()
        assert h.grad[:, 0].tolist() == [1.0, 0.0, 2.0]


class TestPut:
    @given(state=states(), data=st.data())
    def test_it_replaces_the_rows_of_a_list(self, state, data):
        rows = data.draw(row_lists(state.batch, unique=True))
        other = data.draw(states_like(state, batch=len(rows)))
        expected = rows_of(state)
        for row, value in zip(rows, rows_of(other), strict=True):
            expected[row] = value
        assert same_rows(state.put(rows, other), expected)

    @given(state=states(), data=st.data())
    def test_what_was_put_is_what_is_selected(self, state, data):
        rows = data.draw(row_lists(state.batch, unique=True))
        other = data.draw(states_like(state, batch=len(rows)))
        rest = [row for row in range(state.batch) if row not in rows]
        assert same(state.put(rows, other).select(rows), other)
        assert same(state.put(rows, other).select(rest), state.select(rest))

    @given(state=states(), data=st.data())
    def test_putting_back_what_was_selected_changes_nothing(self, state, data):
        rows = data.draw(row_lists(state.batch, unique=True) | slices(state.batch))
        assert same(state.put(rows, state.select(rows)), state)

    @given(state=states(), data=st.data())
    def test_the_last_to_put_wins(self, state, data):
        rows = data.draw(row_lists(state.batch, unique=True))
        one, other = (data.draw(states_like(state, batch=len(rows))) for _ in range(2))
        assert same(state.put(rows, one).put(rows, other), state.put(rows, other))

    def test_parts_may_come_in_another_order(self):
        state = lstm_state()
        other = lstm_state(1)
        turned = State({"c": other["c"], "h": other["h"]}, 1)
        assert same(state.put([1], turned), state.put([1], other))

    # Torch's own forward mode is built with torch.jit.
    @pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
    @pytest.mark.parametrize("rows", [[2, 0], torch.tensor([False, True, True]), slice(1, 3), slice(None, 1, -1)])
    def test_it_is_differentiable_in_both_states(self, rows):
        count = State({"h": torch.zeros(3)}).select(rows).batch

        def put(h, c, new_h, new_c):
            axes = {"h": 1, "c": 0}
            return tuple(State({"h": h, "c": c}, axes).put(rows, State({"h": new_h, "c": new_c}, axes)).values())

        inputs = [
            torch.randn(shape, dtype=torch.float64, requires_grad=True)
            for shape in ((2, 3, 2), (3, 2), (2, count, 2), (count, 2))
        ]
        assert torch.autograd.gradcheck(put, inputs, check_forward_ad=True)
        assert torch.autograd.gradgradcheck(put, inputs)

    def test_a_replaced_row_gets_no_gradient(self):
        h, new = torch.zeros(3, 2, requires_grad=True), torch.ones(1, 2, requires_grad=True)
        State({"h": h}).put([1], State({"h": new}))["h"].sum().backward()
        assert h.grad[:, 0].tolist() == [1.0, 0.0, 1.0]
        assert new.grad.tolist() == [[1.0, 1.0]]

    @pytest.mark.parametrize("flags", [torch.tensor([0, 1, 1]), np.array([1, 0, 0])])
    def test_an_integer_mask_is_refused(self, flags):
        with pytest.raises(StateMismatch, match=r"3 integers, all 0 or 1.*a mask was meant.*rows\.bool\(\)"):
            lstm_state().put(flags, lstm_state(1))

    def test_a_row_named_twice_is_refused(self):
        with pytest.raises(StateMismatch, match="row 2 is named more than once"):
            lstm_state().put([2, -1], lstm_state(2))

    def test_another_number_of_rows_is_refused_and_the_way_out_works(self):
        state, other = lstm_state(), lstm_state()
        message = (
            r"2 rows are to be replaced, but the other state has 3 rows.*state\.put\(rows, other\.select\(rows\)\)"
        )
        with pytest.raises(StateMismatch, match=message):
            state.put([0, 2], other)
        assert same(state.put([0, 2], other.select([0, 2])).select([0, 2]), other.select([0, 2]))


class TestRepeat:
    @given(state=states(), n=st.integers(1, 3))
    def test_it_is_a_selection_of_each_row_n_times(self, state, n):
        assert same(state.repeat(n), state.select([row for row in range(state.batch) for _ in range(n)]))

    @given(state=states(), m=st.integers(1, 3), n=st.integers(1, 3))
    def test_repeating_twice_is_repeating_the_product(self, state, m, n):
        assert same(state.repeat(m).repeat(n), state.repeat(m * n))

    def test_a_number_of_numpy_will_do(self):
        assert lstm_state().repeat(np.int64(2)).batch == 6

    @pytest.mark.parametrize("n", [0, -1, 1.5, None, "2"])
    def test_less_than_once_is_refused(self, n):
        with pytest.raises(StateMismatch, match=rf"1 time or more, not {re.escape(repr(n))}"):
            lstm_state().repeat(n)


class TestCat:
    @given(state=states(), data=st.data())
    def test_it_joins_lists_of_rows(self, state, data):
        others = [
            data.draw(states_like(state, batch=batch)) for batch in data.draw(st.lists(st.integers(0, 2), max_size=2))
        ]
        pieces = [state, *others]
        assert same_rows(State.cat(pieces), [row for piece in pieces for row in rows_of(piece)])
        assert same(State.cat(iter(pieces)), State.cat(pieces))

    @given(state=states(), data=st.data())
    def test_a_state_cut_anywhere_and_joined_is_whole(self, state, data):
        cut = data.draw(st.integers(0, state.batch))
        assert same(State.cat([state.select(slice(cut)), state.select(slice(cut, None))]), state)
        one, other = list(range(cut)), list(range(cut, state.batch))
        assert same(State.cat([state.select(one), state.select(other)]), state)

    @given(state=states(), data=st.data())
    def test_selecting_one_list_and_another_is_selecting_both(self, state, data):
        one, other = data.draw(row_lists(state.batch)), data.draw(row_lists(state.batch))
        assert same(State.cat([state.select(one), state.select(other)]), state.select(one + other))

    def test_nothing_is_refused(self):
        with pytest.raises(StateMismatch, match=r"no state to put together: State\.cat needs one or more"):
            State.cat([])

    @pytest.mark.parametrize("states", [lstm_state(), [{"h": torch.zeros(3)}], ["h"]])
    def test_what_are_no_states_is_refused(self, states):
        with pytest.raises(StateMismatch, match=r"a State is needed, but this is (str|dict)\. Layer\.to_state"):
            State.cat(states)


class TestMapAndCopies:
    @given(state=states())
    def test_map_with_the_identity_keeps_the_very_tensors(self, state):
        mapped = state.map(lambda part: part)
        assert same(mapped, state)
        assert all(mapped[name] is state[name] for name in state)

    @given(state=states())
    def test_mapping_twice_is_mapping_the_composition(self, state):
        assert same(
            state.map(torch.clone).map(torch.zeros_like), state.map(lambda part: torch.zeros_like(part.clone()))
        )

    def test_a_map_that_loses_the_batch_is_refused(self):
        with pytest.raises(StateMismatch, match=r"part 'h' has shape \(\), so it has no axis 1"):
            lstm_state().map(torch.sum)
        with pytest.raises(StateMismatch, match="part 'h' is float, but a tensor is needed"):
            lstm_state().map(lambda part: part.sum().item())

    def test_detach_shares_memory_and_cuts_the_graph(self):
        state = lstm_state(requires_grad=True).map(torch.sin)
        detached = state.detach()
        assert not any(part.requires_grad for part in detached.values())
        assert all(detached[name].data_ptr() == state[name].data_ptr() for name in state)

    @given(state=states())
    def test_a_clone_is_the_same_in_other_memory(self, state):
        clone = state.clone()
        assert same(clone, state)
        for name in state:
            pointer = clone[name].untyped_storage().data_ptr()
            assert pointer == 0 or pointer != state[name].untyped_storage().data_ptr()

    def test_a_clone_keeps_the_graph(self):
        state = lstm_state(requires_grad=True)
        state.clone()["h"].sum().backward()
        assert state["h"].grad is not None

    @pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda state: pickle.loads(pickle.dumps(state))])
    @given(state=states())
    def test_copies_and_pickles_are_the_same(self, again, state):
        assert same(again(state), state)

    def test_a_deep_copy_shares_no_memory_and_a_copy_does(self):
        state = lstm_state()
        assert copy.copy(state)["h"] is state["h"]
        assert copy.deepcopy(state)["h"].data_ptr() != state["h"].data_ptr()

    def test_a_checkpoint_with_a_state_opens_with_weights_only(self, tmp_path):
        state = lstm_state()
        torch.save({"state": state, "step": 3}, tmp_path / "checkpoint.pt")
        assert same(torch.load(tmp_path / "checkpoint.pt", weights_only=True)["state"], state)


class TestTo:
    @given(state=states(), dtype=st.sampled_from(FLOATING + COMPLEX))
    def test_a_dtype_casts_floating_parts_and_loses_no_imaginary_half(self, state, dtype):
        cast = state.to(dtype)
        for name, part in state.items():
            casts = part.is_floating_point() or (part.is_complex() and dtype.is_complex)
            assert torch.equal(cast[name], part.to(dtype) if casts else part)
            assert cast[name].dtype == (dtype if casts else part.dtype)
        assert cast.batch_axis == state.batch_axis

    @given(state=states(dtypes=(torch.float32, torch.bfloat16, torch.int64)))
    def test_there_and_back_to_a_wider_dtype_changes_nothing(self, state):
        wide = state.to(torch.float64)
        assert same(State({name: wide[name].to(state[name].dtype) for name in state}, state.batch_axis), state)

    def test_it_is_called_as_a_tensor_is(self):
        state = State({"h": torch.zeros(3), "n": torch.zeros(3).long()})
        like = torch.zeros((), dtype=torch.float64)
        for moved in (
            state.to(torch.float64),
            state.to("cpu", torch.float64),
            state.to(torch.device("cpu"), torch.float64, True),
            state.to(device="cpu", dtype=torch.float64, non_blocking=True),
            state.to(like),
        ):
            assert [part.dtype for part in moved.values()] == [torch.float64, torch.int64]
        assert state.to("meta").device == torch.device("meta")
        assert state.to(device="meta").device == torch.device("meta")

    def test_what_need_not_change_is_not_copied_unless_asked_for(self):
        state = lstm_state()
        assert state.to("cpu", torch.float32)["h"] is state["h"]
        assert state.to()["h"] is state["h"]
        assert state.to("cpu", copy=True)["h"].data_ptr() != state["h"].data_ptr()

    @pytest.mark.parametrize("target", [torch.int64, torch.bool, torch.zeros(3).long()])
    def test_a_cast_that_would_round_off_is_refused(self, target):
        with pytest.raises(BadInput, match=r"not to torch\.\w+, which would round it off.*state\.to\(tensor\.device\)"):
            lstm_state().to(target)

    def test_gradients_flow_through_a_cast(self):
        state = lstm_state(requires_grad=True)
        state.to(torch.float64)["h"].sum().backward()
        assert state["h"].grad is not None

    @pytest.mark.cuda
    @given(state=states(batch=st.integers(1, 4)), data=st.data())
    def test_every_verb_gives_on_a_gpu_what_it_gives_here(self, state, data):
        rows = data.draw(row_lists(state.batch, unique=True))
        other = data.draw(states_like(state, batch=len(rows)))
        there, other_there = state.to("cuda"), other.to("cuda")
        assert there.device == torch.device("cuda:0")
        assert same(there.to("cpu"), state)
        mask = torch.zeros(state.batch, dtype=torch.bool).index_fill(0, torch.tensor(rows, dtype=torch.int64), True)
        for same_mask in (mask, mask.cuda()):
            assert same(there.select(same_mask).to("cpu"), state.select(mask))
        assert same(there.select(rows).to("cpu"), state.select(rows))
        assert same(there.put(rows, other_there).to("cpu"), state.put(rows, other))
        assert same(there.repeat(2).to("cpu"), state.repeat(2))
        assert same(State.cat([there, other_there]).to("cpu"), State.cat([state, other]))

    @pytest.mark.cuda
    def test_parts_may_lie_on_different_devices(self):
        state = State({"h": torch.randn(3, 2), "c": torch.randn(3, 2, device="cuda")})
        put = state.put([1], state.select([2]))
        assert [part.device.type for part in put.values()] == ["cpu", "cuda"]
        assert same(put.to("cpu"), state.to("cpu").put([1], state.to("cpu").select([2])))

    @pytest.mark.cuda
    @pytest.mark.skipif(
        torch.__version__ < "2.13", reason="older loaders rebuild mappings themselves, without asking pin_memory"
    )
    def test_a_loader_pins_a_state_and_keeps_its_axes(self):
        state = lstm_state()
        loader = torch.utils.data.DataLoader([state], batch_size=None, pin_memory=True)
        pinned = next(iter(loader))
        assert pinned["h"].is_pinned()
        assert dict(pinned.batch_axis) == dict(state.batch_axis)


class TestWithinTorch:
    @given(state=states())
    def test_it_is_a_tree_whose_leaves_are_its_tensors(self, state):
        leaves, tree = _pytree.tree_flatten(state)
        assert all(leaf is part for leaf, part in zip(leaves, state.values(), strict=True))
        assert same(_pytree.tree_unflatten(leaves, tree), state)
        assert same(_pytree.tree_map(torch.clone, state), state)
        assert same(_pytree.tree_unflatten(leaves, _pytree.treespec_loads(_pytree.treespec_dumps(tree))), state)
        keys = [key for (key,), _ in _pytree.tree_flatten_with_path({"s": state}["s"])[0]]
        assert [key.key for key in keys] == list(state)

    def test_a_tree_may_hold_anything_for_a_while(self):
        shapes = _pytree.tree_map(lambda part: tuple(part.shape), lstm_state())
        assert dict(shapes) == {"h": (2, 3, 4), "c": (2, 3, 5)}

    def test_gradients_with_respect_to_a_state_are_a_state(self):
        state = lstm_state()
        grads = torch.func.grad(lambda state: (state.put([0], state.select([1]))["h"] ** 2).sum())(state)
        assert isinstance(grads, State)
        expected = torch.zeros(2, 3, 4).index_copy(1, torch.tensor([2]), 2 * state["h"][:, [2]])
        expected[:, 1] = 4 * state["h"][:, 1]
        assert torch.allclose(grads["h"], expected)
        assert torch.equal(grads["c"], torch.zeros(2, 3, 5))

    def test_vmap_runs_over_states_stacked_in_front(self):
        many = [lstm_state() for _ in range(4)]
        stacked = _pytree.tree_map(lambda *parts: torch.stack(parts), *many)
        put = torch.func.vmap(lambda state: state.put([2], state.select([0])).repeat(2))(stacked)
        for number, state in enumerate(many):
            one = _pytree.tree_map(lambda part, number=number: part[number], put)
            assert same(one, state.put([2], state.select([0])).repeat(2))

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_no_verb_changes_a_dtype(self, dtype):
        state = State({"h": torch.zeros(3, 2).to(dtype)})
        for result in (
            state.select([0]),
            state.put([0], state.select([1])),
            state.repeat(2),
            State.cat([state, state]),
        ):
            assert result["h"].dtype == dtype

    @pytest.mark.slow
    def test_every_verb_can_be_compiled_into_one_graph(self):
        @torch.compile(backend="eager", fullgraph=True)
        def step(state, rows):
            state = State({name: part.sin() for name, part in state.items()}, state.batch_axis)
            state = state.put([2, 0], state.select(rows)).put(slice(1), state.select(slice(1, 2)))
            return State.cat([state.repeat(2).detach(), state.to(torch.float32).map(torch.cos)])

        state, rows = lstm_state(), torch.tensor([1, -1])
        sine = state.map(torch.sin)
        put = sine.put([2, 0], sine.select([1, 2]))
        put = put.put([0], put.select([1]))
        compiled = step(state, rows)
        assert isinstance(compiled, State)
        expected = State.cat([put.repeat(2), put.map(torch.cos)])
        assert dict(compiled.batch_axis) == dict(expected.batch_axis)
        assert all(torch.allclose(compiled[name], expected[name]) for name in expected)


def test_a_state_of_any_form_is_detached_in_that_form():
    h = torch.ones(2, 3, requires_grad=True) * 2

    class Pair(NamedTuple):
        fast: torch.Tensor
        slow: torch.Tensor

    forms = [h, (h, h), [h, (h, h)], {"h": h, "rest": [h]}, Pair(h, h), State({"h": h}), None, (None, h)]
    for form in forms:
        cut = State.detached(form)
        assert type(cut) is type(form)
        before, after = tensors(form), tensors(cut)
        assert before.keys() == after.keys()
        assert not any(part.requires_grad for part in after.values())
        assert all(torch.equal(before[path], part) for path, part in after.items())


def test_a_detached_state_goes_on_in_every_kind_of_layer():
    for layer in (torch.nn.RNN(3, 4), torch.nn.GRU(3, 4), torch.nn.LSTM(3, 4), torch.nn.LSTMCell(3, 4)):
        x = torch.randn(5, 2, 3) if isinstance(layer, torch.nn.RNNBase) else torch.randn(2, 3)
        result = layer(x)
        state = State.detached(result[1] if isinstance(layer, torch.nn.RNNBase) else result)
        after = layer(x, state)
        sum(part.sum() for part in tensors(after).values()).backward()
        assert not any(part.requires_grad for part in tensors(state).values())
