"""Patterns of rows: any two rows are told apart by some of them."""

import pytest
import torch

from hiddenstate.diagnosis.probes.rows import patterns


@pytest.mark.parametrize("batch", range(2, 40))
def test_any_two_rows_are_told_apart_both_ways(batch):
    masks = patterns(batch)
    assert len(masks) <= 2 * max(1, (batch - 1).bit_length())
    apart = masks.unsqueeze(2) & ~masks.unsqueeze(1)  # (patterns, touched, untouched)
    assert torch.equal(apart.any(0), ~torch.eye(batch, dtype=torch.bool))
