"""Lengths and states that cannot be, and what the refusal says."""

import math

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from hiddenstate.errors import BadInput
from hiddenstate.pool import Concat, Last, Mean, Steps
from hiddenstate.recording import Trajectory

H = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0))

WRONG = {
    "zero": ([5, 0, 2], r"row 1 has length 0, but .* at least one step.*keep = lengths > 0"),
    "negative": ([5, 2, -3], r"row 2 has length -3"),
    "too long": ([5, 6, 2], r"row 1 has length 6, but there are 5 steps.*time and batch are swapped"),
    "too few": ([5, 2], r"lengths have shape \(2,\), but the states have 3 rows \(3, 5, 4\)"),
    "a column": ([[5], [2], [1]], r"lengths have shape \(3, 1\)"),
    "one number": (5, r"lengths have shape \(\)"),
    "fractions": ([5.0, 2.0, 1.0], r"torch.float32, but whole numbers are needed: lengths.long\(\)"),
    "a mask": (torch.ones(3, 5).bool(), r"bool, so a mask was meant.*mask.sum\("),
    "another device": (
        torch.ones(3, dtype=torch.int64, device="meta"),
        r"on meta, but the states are on cpu.*to\('cpu'\)",
    ),
}


@pytest.mark.parametrize(("lengths", "complaint"), WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("pool", [Last(), Concat(Mean())])
def test_lengths_that_cannot_be_are_refused(pool, lengths, complaint):
    with pytest.raises(BadInput, match=complaint):
        pool(H, lengths)


SHAPES = {
    "no batch": (torch.randn(5, 4), r"\(batch, time, unit\), but these have shape \(5, 4\).*h.unsqueeze\(0\)"),
    "no steps": (torch.randn(2, 0, 4), r"shape \(2, 0, 4\) have no steps"),
    "whole numbers": (torch.ones(2, 3, 4).long(), r"floating point numbers, but these are torch.int64.*h.float\(\)"),
    "a list": ([[1.0]], r"this is list"),
}


@pytest.mark.parametrize(("h", "complaint"), SHAPES.values(), ids=SHAPES)
def test_states_that_cannot_be_are_refused(h, complaint):
    with pytest.raises(BadInput, match=complaint):
        Mean()(h)


@pytest.mark.parametrize("h", [Trajectory(H), pack_sequence([H[0], H[1, :3]])], ids=["trajectory", "packed"])
def test_two_opinions_on_lengths_are_refused(h):
    with pytest.raises(BadInput, match=r"lengths were given with a (Trajectory|PackedSequence), which knows its own"):
        Mean()(h, torch.tensor([1, 1, 1]))


def test_an_empty_row_of_a_trajectory_is_refused():
    with pytest.raises(BadInput, match="row 1 has length 0"):
        Mean()(Trajectory(H, torch.tensor([5, 0, 2])))


def test_steps_say_which_are_real_and_what_padding_is():
    steps = Steps(torch.ones(2, 3, 1), torch.tensor([1, 3]))
    assert steps.valid.tolist() == [[True, False, False], [True, True, True]]
    assert steps.filled(-math.inf).flatten().tolist() == [1, -math.inf, -math.inf, 1, 1, 1]
    assert Steps(torch.ones(2, 3, 1), None).valid.all()
