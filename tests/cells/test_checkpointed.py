"""Both kinds of activation checkpointing are told while they run a call, and while they run it again."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from hiddenstate.cells import may_be_recomputed, recomputing, under_checkpointing


def seen_by(run):
    """What is told in each run of a function: under checkpointing, run again now, may be run again."""
    told = []

    def function(x):
        told.append((under_checkpointing(), recomputing(), may_be_recomputed(grad_before=True)))
        return x.sin().sin()

    run(function, torch.ones(3, requires_grad=True))
    return told


def test_a_plain_call_is_none():
    assert seen_by(lambda function, x: function(x).sum().backward()) == [(False, False, False)]


def test_a_plain_call_without_gradients_is_none():
    with torch.no_grad():
        assert seen_by(lambda function, x: function(x)) == [(False, False, False)]


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_call_may_be_run_again_and_is(reentrant):
    def run(function, x):
        checkpoint(function, x, use_reentrant=reentrant).sum().backward()

    first, again = seen_by(run)
    assert first == (True, False, True)
    assert again[:2] == (True, True)
