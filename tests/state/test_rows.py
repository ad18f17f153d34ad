"""Rows: every way to name them gives the rows that Python's own lists would give, or a message that helps."""

import re
from collections import deque

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hiddenstate.errors import StateMismatch
from hiddenstate.state import State
from hiddenstate.state.rows import row_index
from tests.support.strategies import row_lists, slices

CPU = torch.device("cpu")

WAYS = {
    "list": list,
    "tuple": tuple,
    "deque": deque,
    "list of numpy numbers": lambda rows: list(np.array(rows, dtype=np.int32)),
    "list of tensors": lambda rows: [torch.tensor(row) for row in rows],
    "int64 tensor": lambda rows: torch.tensor(rows, dtype=torch.int64),
    "int8 tensor": lambda rows: torch.tensor(rows, dtype=torch.int8),
    "strided tensor": lambda rows: torch.tensor([rows, rows], dtype=torch.int64).T[:, 0],
    "array": lambda rows: np.array(rows, dtype=np.int64),
    "array of another byte order": lambda rows: np.array(rows, dtype=">i4"),
    "reversed array": lambda rows: np.array(rows[::-1], dtype=np.int64)[::-1],
}
MASKS = {
    "list": list,
    "list of numpy bools": lambda mask: list(np.array(mask, dtype=bool)),
    "list of tensors": lambda mask: [torch.tensor(entry) for entry in mask],
    "tensor": lambda mask: torch.tensor(mask, dtype=torch.bool),
    "array": lambda mask: np.array(mask, dtype=bool),
}


def index(rows, batch, **kwargs) -> list[int]:
    found = row_index(rows, batch, CPU, **kwargs)
    assert found.dtype == torch.int64
    assert found.dim() == 1
    return found.tolist()


@pytest.mark.parametrize("way", WAYS)
@given(data=st.data(), batch=st.integers(0, 5))
def test_indices_name_the_rows_a_list_would_give_also_from_the_end(way, data, batch):
    rows = data.draw(row_lists(batch))
    asked = [row - batch if data.draw(st.booleans()) else row for row in rows]
    assert index(WAYS[way](asked), batch) == rows


@pytest.mark.parametrize("way", MASKS)
@given(mask=st.lists(st.booleans(), max_size=5))
def test_a_mask_names_the_rows_where_it_is_true(way, mask):
    for unique in (False, True):
        assert index(MASKS[way](mask), len(mask), unique=unique) == [row for row, yes in enumerate(mask) if yes]


@given(data=st.data(), batch=st.integers(0, 5))
def test_a_slice_names_the_rows_a_list_would_give(data, batch):
    rows = data.draw(slices(batch))
    assert index(rows, batch, unique=True) == list(range(batch))[rows]


@pytest.mark.parametrize("row", [1, np.int64(1), np.array(1), torch.tensor(1), torch.tensor(1, dtype=torch.uint8), -2])
def test_one_number_is_one_row(row):
    assert index(row, 3) == [1]
    assert index(row, 3, unique=True) == [1]


@pytest.mark.parametrize("nothing", [[], (), torch.tensor([]), torch.tensor([], dtype=torch.int64), np.array([])])
def test_no_rows_are_no_rows(nothing):
    for batch in (0, 3):
        assert index(nothing, batch, unique=True) == []


def test_a_read_only_array_is_read_without_a_warning():
    rows = np.array([2, 0])
    rows.flags.writeable = False
    assert index(rows, 3) == [2, 0]


@given(data=st.data(), batch=st.integers(1, 5))
def test_zeros_and_ones_are_indices_when_read_and_refused_when_written(data, batch):
    flags = data.draw(st.lists(st.integers(0, min(1, batch - 1)), min_size=batch, max_size=batch))
    for kind in (torch.tensor, np.array):
        assert index(kind(flags), batch) == flags
        message = rf"{batch} integers, all 0 or 1.*a mask was meant.*rows\.bool\(\).*a list for indices"
        with pytest.raises(StateMismatch, match=message):
            index(kind(flags), batch, unique=True)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_a_mask_of_any_integer_dtype_is_refused_for_writing(dtype):
    with pytest.raises(StateMismatch, match="a mask was meant"):
        row_index(torch.tensor([0, 1, 1], dtype=dtype), 3, CPU, unique=True)


def test_a_list_of_zeros_and_ones_is_always_indices():
    assert index([1, 0], 2, unique=True) == [1, 0]
    assert index((0,), 1, unique=True) == [0]


def test_integers_that_cannot_be_a_mask_are_taken_for_writing():
    assert index(torch.tensor([1, 0]), 3, unique=True) == [1, 0]
    assert index(torch.tensor([1, 0, 2]), 3, unique=True) == [1, 0, 2]


@pytest.mark.parametrize("kind", [list, torch.tensor, np.array])
@pytest.mark.parametrize(
    ("row", "batch", "there"),
    [(3, 3, "3 rows, 0 to 2"), (-4, 3, "3 rows, 0 to 2"), (5, 1, "one row, 0"), (0, 0, "no rows")],
)
def test_a_row_outside_the_batch_is_refused(kind, row, batch, there):
    with pytest.raises(StateMismatch, match=rf"row {row} is asked for, but the state has {there}.*another batch"):
        index(kind([row]), batch)


@pytest.mark.parametrize("kind", [list, torch.tensor, np.array])
@pytest.mark.parametrize("rows", [[2, 1, 2], [2, -1], [0, 0, 1, 2, 3]])
def test_a_row_named_twice_is_refused_for_writing_and_taken_for_reading(kind, rows):
    batch = 3 if len(rows) < 4 else 4
    with pytest.raises(StateMismatch, match=r"row [02] is named more than once.*Name each row once"):
        index(kind(rows), batch, unique=True)
    assert index(kind(rows), batch) == [row % batch for row in rows]


@pytest.mark.parametrize("kind", [list, torch.tensor, np.array])
@pytest.mark.parametrize("mask", [[True, False], [True] * 4])
def test_a_mask_of_another_length_is_refused(kind, mask):
    with pytest.raises(StateMismatch, match=rf"the mask has {len(mask)} entries, but the state has 3 rows.*integers"):
        index(kind(mask), 3)


def test_an_empty_mask_fits_no_rows_only():
    assert index(torch.tensor([], dtype=torch.bool), 0) == []
    with pytest.raises(StateMismatch, match="the mask has 0 entries, but the state has 3 rows"):
        index(torch.tensor([], dtype=torch.bool), 3)


@pytest.mark.parametrize("rows", [torch.ones(3, 1, dtype=torch.bool), np.zeros((3, 1), dtype=int), torch.empty(0, 2)])
def test_rows_of_several_axes_are_refused(rows):
    with pytest.raises(StateMismatch, match=rf"{re.escape(str(tuple(rows.shape)))}.*mask of 3 entries.*mask\[:, 0\]"):
        index(rows, 3)


@pytest.mark.parametrize("rows", [torch.ones(3), np.ones(3, dtype=np.float32), torch.ones(3, dtype=torch.complex64)])
def test_numbers_that_are_not_whole_are_refused(rows):
    with pytest.raises(StateMismatch, match=r"rows are torch\.\w+, but indices \(int64\).*mask\.bool\(\)"):
        index(rows, 3)


NO_ROWS = {
    "None": None,
    "str": "01",
    "bytes": b"01",
    "bool": True,
    "bool of numpy": np.bool_(True),
    "tensor of one bool": torch.tensor(True),
    "float": 1.0,
    "floats": [1.0],
    "strings": ["0"],
    "bytes in a list": [b"0"],
    "nested": [[0]],
    "set": {0, 2},
    "iterator": iter([0]),
    "long tensors": [torch.ones(2)],
    "array of strings": np.array(["a"]),
    "array of objects": np.array([None]),
    "state": State({"h": torch.zeros(3)}),
}


@pytest.mark.parametrize("rows", NO_ROWS.values(), ids=NO_ROWS)
def test_what_names_no_rows_is_refused(rows):
    with pytest.raises(StateMismatch, match=r"(?s)rows cannot be read from .*an index, a slice, .*or a bool mask"):
        index(rows, 3)


def test_a_mix_of_bools_and_numbers_is_refused():
    with pytest.raises(StateMismatch, match=r"mix True or False with numbers.*one True or False for each row"):
        index([True, 2], 3)


@pytest.mark.cuda
@pytest.mark.parametrize("rows", [[2, 0], torch.tensor([2, 0]), torch.tensor([True, False, True])])
def test_rows_and_state_may_lie_on_different_devices(rows):
    there = rows.cuda() if isinstance(rows, torch.Tensor) else rows
    on_gpu = row_index(rows, 3, torch.device("cuda:0"))
    assert on_gpu.device == torch.device("cuda:0")
    assert on_gpu.tolist() == index(rows, 3) == index(there, 3)
