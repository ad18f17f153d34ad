"""The tensors that a module holds: finding them, replacing them during a call, and noticing changes."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..cells import attributes, plain_object
from ..errors import BadInput
from .twins import members, twin

# Of a module's attributes, those that torch keeps in every module.
_TORCHS_OWN = frozenset(nn.Module().__dict__)
_DEPTH = 4  # of containers within each other that are looked into
_exchanging = threading.RLock()


@dataclass(frozen=True, slots=True, eq=False)
class HeldTensor:
    """A tensor of a module, and where it is kept."""

    path: str  # as `inner.weight`
    store: dict[str, Any]
    key: str

    @property
    def tensor(self) -> Tensor:
        """The tensor that is there now."""
        found: Tensor = self.store[self.key]
        return found


def held_tensors(module: nn.Module) -> list[HeldTensor]:
    """Return the parameters, buffers and further tensor attributes of a module and of those in it."""
    found = []
    for name, member in module.named_modules():
        for store in (member._parameters, member._buffers, member.__dict__):
            for key, value in store.items():
                if isinstance(value, Tensor):
                    found.append(HeldTensor(f"{name}.{key}" if name else key, store, key))
    return found


def kept_astray(module: nn.Module) -> str:
    """Return which tensors or modules lie in a module's containers, where nobody can exchange them; "" for none."""
    held = {id(held.tensor) for held in held_tensors(module)} | set(map(id, members(module)))
    for member in members(module):
        for store, key, thing in _in_containers(member):
            if id(thing) not in held or store is None:
                what = "tensor" if isinstance(thing, Tensor) else "module"
                return (
                    f"{type(member).__name__} keeps a {what} in a container ({key!r}) that is no parameter, buffer or "
                    f"module of its own, and a graph would not see it change"
                )
    return ""


@contextmanager
def put_in(module: nn.Module, tensors: Sequence[Tensor]) -> Iterator[None]:
    """Have a module hold these tensors, in the order of `held_tensors`, in the place of its own."""
    # An exported program may run in several threads: none looks while another one's tensors are in.
    with _exchanging:
        there = all(place.tensor is given for place, given in zip(held_tensors(module), tensors, strict=True))
    if there:
        yield
        return
    with _exchanging, _exchanged(module, tensors):
        yield


@contextmanager
def _exchanged(module: nn.Module, tensors: Sequence[Tensor]) -> Iterator[None]:
    held = held_tensors(module)
    own = [place.tensor for place in held]
    instead = {id(mine): given for mine, given in zip(own, tensors, strict=True)}
    # Some modules have their weights in a list or dict besides, as torch's own layers do.
    others = [(store, key, thing) for member in members(module) for store, key, thing in _in_containers(member)]
    others = [place for place in others if isinstance(place[2], Tensor)]
    try:
        for place, given in zip(held, tensors, strict=True):
            place.store[place.key] = given
        for store, key, thing in others:
            store[key] = instead.get(id(thing), thing)
        yield
    finally:
        for place, mine in zip(held, own, strict=True):
            place.store[place.key] = mine
        for store, key, thing in others:
            store[key] = thing


@contextmanager
def changing_nothing(module: nn.Module) -> Iterator[None]:
    """Refuse a call that changes an attribute or a buffer of a module: the graph around it would not see it."""
    inside = members(module)
    before = [dict(attributes(member)) for member in inside]
    sizes = [{key: len(value) for key, value in own.items() if isinstance(value, list | dict | set)} for own in before]
    versions = [_version(place.tensor) for place in held_tensors(module)]
    yield
    for member, own, lengths in zip(inside, before, sizes, strict=True):
        now = attributes(member)
        changed = [key for key in {**own, **now} if now.get(key, now) is not own.get(key, now)]
        changed += [key for key, length in lengths.items() if len(own[key]) != length]
        if changed:
            raise BadInput(
                f"{type(member).__name__} changes its attribute {changed[0]!r} as it runs, and a graph around it would "
                f"not see it. Return what changes as a part of the state, or keep the call out of the graph with "
                f"torch.compiler.disable."
            )
    for place, version in zip(held_tensors(module), versions, strict=True):
        if _version(place.tensor) != version:
            raise BadInput(
                f"{type(module).__name__} writes into {place.path!r} as it runs, and a graph around it would not see "
                f"it. Make it a part of the state, or keep the call out of the graph with torch.compiler.disable."
            )


def stand_in(module: nn.Module) -> nn.Module:
    """Return a module with the same settings, frozen as they are, and tensors that take no memory."""
    body = twin(module)
    held = held_tensors(body)
    made: dict[int, Tensor] = {}
    for place in held:
        mine = place.tensor
        empty = torch.zeros((), dtype=mine.dtype, device=mine.device).expand(tuple(map(int, mine.shape)))
        made[id(mine)] = nn.Parameter(empty) if isinstance(mine, nn.Parameter) and mine.is_floating_point() else empty
    others = [(store, key, thing) for member in members(body) for store, key, thing in _in_containers(member)]
    for place in held:
        place.store[place.key] = made[id(place.tensor)]
    for store, key, thing in others:
        if isinstance(thing, Tensor):
            store[key] = made[id(thing)]
    return body


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _in_containers(member: nn.Module) -> Iterator[tuple[Any, Any, Any]]:
    """Yield the tensors and modules in lists, dicts and objects among a module's attributes, each with its place."""
    for name, value in attributes(member).items():
        if name not in _TORCHS_OWN and not isinstance(value, Tensor | nn.Module):
            yield from _within(value, 0)


def _within(value: Any, depth: int) -> Iterator[tuple[Any, Any, Any]]:
    store: Any = None  # which nobody can write to
    if isinstance(value, dict):
        store, items = value, list(value.items())
    elif isinstance(value, list):
        store, items = value, list(enumerate(value))
    elif isinstance(value, tuple | set | frozenset):
        items = list(enumerate(value))
    elif plain_object(value):
        store, items = value.__dict__, list(value.__dict__.items())
    else:
        return
    for key, thing in items:
        if isinstance(thing, Tensor | nn.Module):
            yield store, key, thing
        elif depth < _DEPTH:
            yield from _within(thing, depth + 1)
