"""Nothing is claimed where nothing crosses in time."""

from __future__ import annotations

import pytest
import torch

from hiddenstate.cells.behavior import find
from tests.cells.behavior import decoys
from tests.support.untouched import untouched


@pytest.mark.parametrize("make", decoys.ALL, ids=lambda make: make.__name__)
@pytest.mark.parametrize("training", [True, False])
def test_nothing_is_found_where_nothing_crosses(make: type, training: bool) -> None:
    torch.manual_seed(0)
    model = make().train(training)
    x = torch.randn(3, 3, 8, 8) if make is decoys.ResNet else torch.randn(3, 6, 4)
    with untouched(model):
        found = find(model, (x,))
    assert found.recurrences == (), found.explain()
    assert found.unsure == (), found.explain()
