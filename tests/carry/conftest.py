"""What several tests of carrying share."""

import warnings

import pytest
import torch
from torch import Tensor

from hiddenstate.errors import CarryWarning


@pytest.fixture
def x(request) -> Tensor:
    """The same sequence for every test of a module, of the sizes that the module names."""
    shape = [getattr(request.module, size) for size in ("BATCH", "STEPS", "FEATURES")]
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def no_warnings():
    """Whatever Carry warns of is an error here."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", CarryWarning)
        yield
