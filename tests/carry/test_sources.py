"""Sequences of any make are read the same, one at a time, and what does not fit is named."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hiddenstate.carry.streams import Streams
from hiddenstate.errors import BadInput


def chunks(sequences, **settings):
    return [chunk.x.tolist() for chunk in Streams(sequences, 2, 3, **settings)]


TOKENS = [[1, 2, 3, 4], [5, 6], [7, 8, 9]]
FLOATS = [[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0]], [[7.0, 8.0]]]


@pytest.mark.parametrize("plain", [TOKENS, FLOATS], ids=["tokens", "features"])
@pytest.mark.parametrize(
    "make",
    [
        torch.tensor,
        np.array,
        lambda s: np.flip(np.flip(np.array(s), 0).copy(), 0),
        lambda s: np.array(s, dtype=np.array(s).dtype.newbyteorder(">")),
        tuple,
    ],
    ids=["tensor", "array", "reversed view", "big endian", "tuple"],
)
def test_every_make_of_sequence_is_read_as_the_same_numbers(plain, make):
    assert chunks([make(s) for s in plain]) == chunks(plain)


def test_a_read_only_array_is_read_without_a_warning():
    arrays = [np.array(s) for s in TOKENS]
    for one in arrays:
        one.flags.writeable = False
    assert chunks(arrays, targets="next") == chunks(TOKENS, targets="next")


def test_the_rows_of_one_tensor_or_array_are_sequences():
    table = torch.arange(1, 13).view(3, 4)
    assert chunks(table) == chunks(table.numpy()) == chunks(table.tolist())


def test_numbers_keep_their_dtype():
    for dtype in (torch.uint8, torch.bool, torch.bfloat16, torch.complex64):
        (chunk,) = Streams([torch.ones(2, dtype=dtype), torch.ones(1, dtype=dtype)], 2, 3)
        assert chunk.x.dtype == dtype
        assert chunk.x.sum() == 3


class Loaded:
    """Sequences that are made when they are asked for."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __len__(self) -> int:
        return len(TOKENS)

    def __getitem__(self, index: int) -> torch.Tensor:
        self.asked.append(index)
        return torch.tensor(TOKENS[index])


def test_sequences_that_load_on_demand_are_read_once_an_epoch():
    loaded = Loaded()
    streams = Streams(loaded, 2, 1, targets="next")
    loaded.asked.clear()
    assert [c.x.tolist() for c in streams] == [c.x.tolist() for c in Streams(TOKENS, 2, 1, targets="next")]
    assert loaded.asked == [0, 1, 2]


def test_a_list_that_changes_later_does_not_matter():
    given = [torch.tensor(s) for s in TOKENS]
    streams = Streams(given, 2, 3)
    given.reverse()
    assert [c.x.tolist() for c in streams] == chunks(TOKENS)


def test_a_sequence_that_changes_its_length_is_refused():
    given = [list(s) for s in TOKENS]
    streams = Streams(given, 2, 3)
    given[1].append(0)
    with pytest.raises(BadInput, match=r"sequences\[1\] has 3 steps now, but had 2 when Streams was built.*another"):
        next(iter(streams))


@pytest.mark.parametrize(
    ("sequences", "message"),
    [
        ("abc", r"sequences is of type str, but a list of sequences \(time, \.\.\.\) is needed"),
        ({0: [1]}, r"sequences is of type dict, but a list of sequences \(time, \.\.\.\) is needed"),
        ((s for s in TOKENS), r"sequences is of type generator, but a list of sequences \(time, \.\.\.\) is needed"),
        (torch.tensor(3), r"sequences is of type Tensor, but a list of sequences \(time, \.\.\.\) is needed"),
        ([], r"sequences has 0 entries, so there is nothing to stream"),
        ([[1], []], r"sequences\[1\] has shape \(0,\), but \(time, \.\.\.\) with at least one step.*Leave empty"),
        (torch.arange(5), r"sequences\[0\] has shape \(\), but .*put one single sequence in a list"),
        ([[1], [[1]]], r"sequences\[1\] has shape \(1,\), but sequences\[0\] has \(\)\. .*bring all to one shape"),
        ([[[1, 2]], [[1, 2, 3]]], r"sequences\[1\] has shape \(3,\), but sequences\[0\] has \(2,\)"),
        ([[1], [1], [1.0]], r"sequences\[2\] has dtype torch.float32, but sequences\[0\] has torch.int64"),
        (
            [np.ones(2), np.ones(2, "f4")],
            r"sequences\[1\] has dtype torch.float32, but sequences\[0\] has torch.float64",
        ),
        ([torch.ones(1), torch.ones(1, device="meta")], r"sequences\[1\] has device meta, but sequences\[0\] has cpu"),
        ([[1], "abc"], r"sequences\[1\] is a str, which torch cannot read .*list\(text\.encode\(\)\)"),
        ([[[1], [1, 2]]], r"sequences\[0\] is a list, which torch cannot read \(expected sequence of length 1"),
        ([np.array(["a"])], r"sequences\[0\] is an array of <U1, which torch cannot read .*lists of numbers"),
    ],
)
def test_what_cannot_be_streamed_is_named(sequences, message):
    with pytest.raises(BadInput, match=message):
        Streams(sequences, 1, 3)


def test_targets_are_read_as_strictly_as_sequences():
    with pytest.raises(BadInput, match=r"targets\[1\] has dtype torch.float32, but targets\[0\] has torch.int64"):
        Streams(TOKENS[:2], 1, 3, targets=[[1, 2, 3, 4], [1.0, 2.0]])
    with pytest.raises(BadInput, match=r"targets\[0\] has shape \(\).*repeat a label for each step"):
        Streams(TOKENS, 1, 3, targets=[0, 1, 0])
    with pytest.raises(BadInput, match=r"targets is of type int, but a list of sequences \(time, \.\.\.\) is needed"):
        Streams(TOKENS, 1, 3, targets=3)
