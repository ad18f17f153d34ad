"""The user's model is found in wrappers, and refused where only the wrapper may call it."""

import pytest
import torch
from torch import nn

from hiddenstate.cells import unwrap, unwrap_to_call
from hiddenstate.errors import BadInput


def test_the_users_model_is_found_in_what_is_wrapped_around_it():
    model = nn.GRU(3, 4)
    assert unwrap(nn.DataParallel(nn.DataParallel(model))) is model
    assert unwrap(torch.compile(model)) is model
    assert unwrap(model) is model


def test_a_model_that_only_its_wrapper_may_call_is_refused_with_a_way_out():
    class FullyShardedDataParallel(nn.Module):
        def __init__(self, module):
            super().__init__()
            self._fsdp_wrapped_module = module

    model = nn.GRU(3, 4)
    assert unwrap(FullyShardedDataParallel(model)) is model
    for wrapped in (FullyShardedDataParallel(model), nn.Sequential(FullyShardedDataParallel(model))):
        with pytest.raises(BadInput, match=r"wrapped in FullyShardedDataParallel.* Do it before the model is wrapped"):
            unwrap_to_call(wrapped)
    assert unwrap_to_call(nn.DataParallel(model)) is model
