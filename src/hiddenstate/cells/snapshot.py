"""Snapshots of a model: all that a call may change is saved before it and restored after it."""

from __future__ import annotations

import dis
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .._torch_names import lookup

_is_wrapped = lookup("torch._C._functorch.is_functorch_wrapped_tensor")
_DEPTH = 5  # levels of containers and plain objects to look into
_SMALL = 64  # a container outside the model with at most so many entries may be state; a larger one is data
# Libraries whose objects are large and hold no state of the model.
_FOREIGN = {
    *("torch", "builtins", "numpy", "collections", "hiddenstate", "threading", "logging", "weakref"),
    *("lightning", "pytorch_lightning", "lightning_fabric", "wandb", "tensorboard", "torchmetrics", "transformers"),
}


class Snapshot:
    """A copy of everything that a call may change in a model: attributes, containers, tensors, gradients, modes, hooks.

    With `weights`, it also copies the values of parameters and their gradients, which only training changes.
    """

    def __init__(self, model: nn.Module, *others: nn.Module, weights: bool = True) -> None:
        """Save `model`, and modules that it uses without having registered them."""
        self._weights = weights
        self._dicts: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        self._lists: list[tuple[Any, list[Any]]] = []
        self._tensors: list[tuple[Tensor, Tensor, int, bool]] = []  # with a copy of the content and the version counter
        self._grads: list[tuple[Tensor, Tensor | None, Tensor | None, bool]] = []
        self._streams: list[tuple[Callable[[Any], Any], Any]] = []  # a function that restores a stream, its state
        self._bindings: list[
            tuple[Callable[[Any], Any], Any]
        ] = []  # a function that rebinds a variable outside a forward, and its value
        self._modes: list[tuple[nn.Module, bool]] = []  # of scripted modules, which do not keep theirs in an attribute
        self.lost: list[str] = []  # what a call may use up for good, such as iterators and open files
        self._seen: set[int] = set()
        for root in (model, *others):
            for module in root.modules():
                if isinstance(module, torch.jit.ScriptModule):
                    self._modes.append((module, module.training))
                self._keep(module.__dict__, 0)
                for method in _methods(type(module)):
                    for thing in _beside(method):
                        self._keep(thing, 1)
                    self._bindings += _bindings(method)
        self._alive = (model, *others)
        members = (module for root in (model, *others) for module in root.modules())
        self._sharded = [_ShardedModule(module) for module in members if is_sharded(module)]

    def restore(self) -> None:
        """Restore everything."""
        for sharded in self._sharded:  # first: nothing else may exchange the weights of such a module
            sharded.restore()
        for kept, content in self._dicts:
            if len(kept) != len(content) or any(kept.get(key, kept) is not value for key, value in content.items()):
                kept.clear()
                kept.update(content)
        for items, entries in self._lists:
            if len(items) != len(entries) or any(a is not b for a, b in zip(items, entries, strict=False)):
                items.clear()
                items.update(entries) if isinstance(items, set) else items.extend(entries)
        for put_back, state in (*self._streams, *self._bindings):
            put_back(state)
        for module, training in self._modes:
            module.train(training)
        for tensor, value, version, counted in self._tensors:
            if not counted or tensor._version != version:
                _write(tensor, value)
                if version >= 0 and tensor._version != version:  # a graph may need the old version
                    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))
        for tensor, grad, slope, requires in self._grads:
            if tensor.is_leaf and tensor.requires_grad != requires:
                tensor.requires_grad_(requires)
            if tensor.is_leaf and tensor.grad is not grad:
                tensor.grad = grad
            if grad is not None and slope is not None:
                _write(grad, slope)

    def _keep(self, thing: Any, depth: int) -> None:
        if depth > _DEPTH or id(thing) in self._seen:
            return
        if isinstance(thing, Tensor):
            self._seen.add(id(thing))
            self._keep_tensor(thing)
        elif isinstance(thing, dict):
            self._seen.add(id(thing))
            self._dicts.append((thing, dict(thing)))
            for value in list(thing.values()):
                self._keep(value, depth + 1)
        elif isinstance(thing, list | set | deque):
            self._seen.add(id(thing))
            self._lists.append((thing, list(thing)))
            for value in list(thing):
                self._keep(value, depth + 1)
        elif isinstance(thing, tuple):
            for value in thing:
                self._keep(value, depth + 1)
        elif (stream := _stream(thing)) is not None:
            self._seen.add(id(thing))
            self._streams.append(stream)
        elif isinstance(thing, Iterator):
            self.lost.append(type(thing).__name__)
        elif plain_object(thing):
            self._seen.add(id(thing))
            self._keep(thing.__dict__, depth + 1)

    def _keep_tensor(self, tensor: Tensor) -> None:
        grad = tensor.grad if tensor.is_leaf else None
        if tensor.layout != torch.strided or (isinstance(tensor, nn.Parameter) and not self._weights):
            self._grads.append((tensor, grad, None, tensor.requires_grad))
            return
        with torch.no_grad():
            # Kernels such as batch_norm's write to buffers without counting it; nothing writes to parameters so.
            # Tensors that torch.func has wrapped have no values to compare.
            wrapped = _is_wrapped is not None and _is_wrapped(tensor)
            counted = wrapped or (isinstance(tensor, nn.Parameter) and not tensor.is_inference())
            version = -1 if tensor.is_inference() else tensor._version
            self._tensors.append((tensor, tensor.detach().clone(), version, counted))
            value = None if grad is None else grad.detach().clone()
            self._grads.append((tensor, grad, value, tensor.requires_grad))


class _ShardedModule:
    """A module under `fully_shard`, which holds either its whole weights or this rank's share of them.

    The module tracks which of the two it holds, so only its own methods may switch between them.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module: Any = module
        self._holders = [member._parameters for member in _own_members(module)]
        self._before = self._now()

    def restore(self) -> None:
        """Make the module hold the weights that it held before, whole or sharded."""
        for turn in (self._module.reshard, self._module.unshard):
            if any(now is not before for now, before in zip(self._now(), self._before, strict=True)):
                turn()

    def _now(self) -> list[Any]:
        return [parameter for holder in self._holders for parameter in holder.values()]


def is_sharded(module: nn.Module) -> bool:
    """Say whether a module is under `fully_shard`."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)  # a model under it has imported it
    return kind is not None and isinstance(module, kind)


def _own_members(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a sharded module and the modules in it, without those that are sharded separately."""
    yield module
    for child in module._modules.values():
        if child is not None and not is_sharded(child):
            yield from _own_members(child)


def _methods(kind: type) -> Iterator[Any]:
    """Yield the functions of a class that is not torch's or ours."""
    for own in kind.__mro__:
        if own.__module__.partition(".")[0] not in _FOREIGN:
            yield from (each for each in vars(own).values() if hasattr(each, "__code__"))


def _beside(forward: Any) -> Iterator[Any]:
    """Yield objects outside the module that a forward may change: defaults (`seen=[]`), closures, globals."""
    yield from getattr(forward, "__defaults__", None) or ()
    code, names = getattr(forward, "__code__", None), getattr(forward, "__globals__", {})
    found = [names[name] for name in (code.co_names if code is not None else ()) if name in names]
    for cell in getattr(forward, "__closure__", None) or ():
        with suppress(ValueError):  # a closure variable that is not set yet
            found.append(cell.cell_contents)
    for thing in found:
        small = isinstance(thing, dict | list | set | deque) and len(thing) <= _SMALL
        if small or _stream(thing) is not None:
            yield thing


def _bindings(forward: Any) -> list[tuple[Callable[[Any], Any], Any]]:
    """Return the outer variables that a forward assigns to: `global` and `nonlocal`."""
    code, names = getattr(forward, "__code__", None), getattr(forward, "__globals__", {})
    bound = {each.argval for each in dis.get_instructions(code) if each.opname == "STORE_GLOBAL"} if code else set()
    found: list[tuple[Callable[[Any], Any], Any]] = [
        (partial(names.__setitem__, name), names[name]) for name in bound if name in names
    ]
    for cell in getattr(forward, "__closure__", None) or ():
        with suppress(ValueError):  # a closure variable that is not set yet
            found.append((partial(setattr, cell, "cell_contents"), cell.cell_contents))
    return found


def _stream(thing: Any) -> tuple[Callable[[Any], Any], Any] | None:
    """Return a function that restores a model's own random stream, and its present state."""
    if isinstance(thing, random.Random):
        return thing.setstate, thing.getstate()
    if isinstance(thing, np.random.RandomState):
        return thing.set_state, thing.get_state()
    if isinstance(thing, np.random.Generator):
        bits = thing.bit_generator
        return partial(setattr, bits, "state"), bits.state
    if isinstance(thing, torch.Generator):
        return thing.set_state, thing.get_state()
    return None


def plain_object(thing: Any) -> bool:
    """Say whether this is an object of a user's own class, whose attributes may hold tensors."""
    if isinstance(thing, nn.Module | type | FunctionType | MethodType) or not hasattr(thing, "__dict__"):
        return False
    home = type(thing).__module__.partition(".")[0]
    return home not in _FOREIGN


def _write(tensor: Tensor, value: Tensor) -> None:
    with torch.no_grad():
        target = tensor.detach()
        if target.shape == value.shape and not torch.equal(target, value):
            target.copy_(value)


@contextmanager
def untouched(module: nn.Module) -> Iterator[None]:
    """Restore, on leaving, everything a trial call may change: attributes, buffers, modes, hooks, random streams."""
    snapshot = Snapshot(module, weights=False)
    with random_streams_kept():
        try:
            yield
        finally:
            snapshot.restore()


@contextmanager
def random_streams_kept() -> Iterator[None]:
    """Restore the random streams of torch, numpy and Python on leaving."""
    state, numpy_state = random.getstate(), np.random.get_state()
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if cuda else []):
        try:
            yield
        finally:
            random.setstate(state)
            np.random.set_state(numpy_state)


def random_streams() -> list[Tensor]:
    """Return the states of torch's random streams: the CPU's, and those of the GPUs in use."""
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if cuda else [])]


def put_random_streams(states: list[Tensor]) -> None:
    """Set torch's random streams to these states."""
    torch.set_rng_state(states[0])
    for index, state in enumerate(states[1:]):
        torch.cuda.set_rng_state(state, index)


def seed(number: int) -> None:
    """Seed all random streams."""
    random.seed(number)
    np.random.seed(number)
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(number)
