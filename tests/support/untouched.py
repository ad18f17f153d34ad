"""Everything that a look at a model could change, and must not."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn


def portrait(model: nn.Module) -> dict[str, Any]:
    """All that a user could find changed in a model and around it."""
    members = dict(model.named_modules())
    return {
        "weights": {name: weight.detach().clone() for name, weight in model.named_parameters()},
        "grads": {name: None if w.grad is None else w.grad.clone() for name, w in model.named_parameters()},
        "identity": {name: id(weight) for name, weight in model.named_parameters()},
        "requires_grad": {name: weight.requires_grad for name, weight in model.named_parameters()},
        "buffers": {name: buffer.clone() for name, buffer in model.named_buffers()},
        "modes": {name: module.training for name, module in members.items()},
        "hooks": {
            name: [list(hooks.items()) for hooks in (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks)]
            for name, m in members.items()
        },
        "attributes": {name: sorted(vars(module)) for name, module in members.items()},
        "random streams": (torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()),
        "grad mode": torch.is_grad_enabled(),
    }


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Whatever happens inside, the model and the world around it are as before."""
    before = portrait(model)
    try:
        yield
    finally:
        after = portrait(model)
        for aspect, value in before.items():
            assert _same(value, after[aspect]), f"{aspect} changed"


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return bool(one == other)
