"""Putting a model back as it was: weights, grads, buffers, attributes, modes, hooks, inputs and random streams."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .flat import leaves
from .memory import version_of
from .names import module_tensors

_DEPTH = 5
_CONTAINERS = (list, dict, set, deque)


class Snapshot:
    """Everything that a call of a model may change, as it was; one copy serves any number of calls."""

    def __init__(self, model: nn.Module, inputs: Any) -> None:
        """Copy the model's tensors and those it will be called with."""
        members = list(model.modules())
        found: dict[int, Any] = {}
        for member in members:
            _contents(member.__dict__, found, _DEPTH)
        self._contents = [(thing, thing.copy()) for thing in found.values() if not isinstance(thing, torch.Generator)]
        self._generators = [(g, g.get_state()) for g in found.values() if isinstance(g, torch.Generator)]
        tensors = [*model.parameters(), *model.buffers(), *(t for m in members for _, t in module_tensors(m))]
        tensors += [tensor for _, tensor in leaves(inputs)]
        self._tensors = [
            (t, t.detach().clone(), t.grad if t.is_leaf else None) for t in {id(t): t for t in tensors}.values()
        ]
        self._devices = sorted({t.device.index for t in tensors if t.is_cuda})

    @contextmanager
    def unharmed(self) -> Iterator[None]:
        """Whatever happens inside, put everything back."""
        streams = random.getstate(), np.random.get_state()
        mode = torch.is_grad_enabled()
        with torch.random.fork_rng(devices=self._devices):
            try:
                yield
            finally:
                torch.set_grad_enabled(mode)
                self._put_back()
                random.setstate(streams[0])
                np.random.set_state(streams[1])

    def _put_back(self) -> None:
        for held, content in self._contents:
            held.clear()
            if isinstance(held, list | deque):
                held.extend(content)
            else:
                held.update(content)
        for generator, state in self._generators:
            generator.set_state(state)
        for tensor, content, grad in self._tensors:
            if not _equal(tensor, content):
                _restore(tensor, content)
            if tensor.is_leaf and tensor.grad is not grad:
                tensor.grad = grad


def _contents(thing: Any, found: dict[int, Any], depth: int) -> None:
    """Collect the containers in a module's attributes, however they are nested."""
    if id(thing) in found or depth == 0:
        return
    if isinstance(thing, torch.Generator):
        found[id(thing)] = thing
    elif isinstance(thing, _CONTAINERS):
        found[id(thing)] = thing
        for inner in list(thing.values() if isinstance(thing, dict) else thing):
            _contents(inner, found, depth - 1)
    elif isinstance(thing, tuple):
        for inner in thing:
            _contents(inner, found, depth - 1)
    elif not isinstance(thing, Tensor | nn.Module | type) and type(thing).__module__.split(".")[0] not in _LIBRARIES:
        own = getattr(thing, "__dict__", None)
        if isinstance(own, dict):
            _contents(own, found, depth - 1)


_LIBRARIES = {"builtins", "torch", "numpy", "functools", "types", "random", "logging", "threading"}


def _equal(one: Tensor, other: Tensor) -> bool:
    if one.layout is not torch.strided:
        return version_of(one) == 0 or one.shape == other.shape
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool(torch.equal(one.detach(), other)) or bool(torch.allclose(one.detach(), other, 0, 0, equal_nan=True))


def _restore(tensor: Tensor, content: Tensor) -> None:
    """Write the content back into the same memory, which others may look at too."""
    try:
        if tensor.shape != content.shape or tensor.dtype != content.dtype:
            raise RuntimeError("of another shape by now")
        tensor.data.copy_(content)
    except RuntimeError:
        tensor.data = content
