"""The values of a model's attributes: looked up by the names that discovery uses, copied, and put back."""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ..cells import attributes, plain_object
from ..errors import CarryError
from ..state import mapped

Way: TypeAlias = "tuple[Any, ...]"  # from a module to a tensor in it: the attribute's name, then keys and fields
Attribute: TypeAlias = tuple[nn.Module, str]

_DEPTH = 4  # levels of containers within an attribute
_LARGEST = 2**24  # a larger tensor is taken for a table, not a state
_TORCHS_OWN = {"_parameters", "_modules", "_buffers"}


def attributes_of(model: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    """Yield the attributes and buffers of all modules of a model: module, name and value."""
    for module in model.modules():
        for name, value in (*attributes(module).items(), *module._buffers.items()):
            if name not in _TORCHS_OWN:
                yield module, name, value


def changed_numbers(first: Mapping[Attribute, Any]) -> list[Attribute]:
    """Return the attributes that hold another plain number than they did at first."""
    numbers = {place: old for place, old in first.items() if type(old) in (int, float)}
    now = {(module, name): getattr(module, name, old) for (module, name), old in numbers.items()}
    return [place for place, old in numbers.items() if type(now[place]) is type(old) and now[place] != old]


def copied(value: Any, depth: int = _DEPTH, *, graph: bool = False) -> Any:
    """Return a copy of an attribute's value: containers and objects are copied, tensors cloned, other values shared.

    With `graph`, the clones stay in the graph of their originals.
    """
    if isinstance(value, nn.Parameter | nn.Module) or depth < 0:
        return value
    inside = partial(copied, depth=depth - 1, graph=graph)
    if isinstance(value, Tensor):
        own = value if graph else value.detach()
        return own.clone() if value.numel() <= _LARGEST and value.layout is torch.strided else value
    if isinstance(value, dict):
        made = copy.copy(value)
        made.update({key: inside(inner) for key, inner in value.items()})
        return made
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(inside, value))
    if type(value) in (list, set, tuple):
        return type(value)(map(inside, value))
    if isinstance(value, deque):
        return deque(map(inside, value), value.maxlen)
    if plain_object(value):
        made = copy.copy(value)
        for name, inner in vars(value).items():
            object.__setattr__(made, name, inside(inner))
        return made
    return value


def is_plain(value: Any) -> bool:
    """Say whether a value consists of tensors, numbers and strings in dicts, lists and tuples, as checkpoints do."""
    if type(value) in (dict, list, tuple):
        return all(map(is_plain, value.values() if isinstance(value, dict) else value))
    return value is None or type(value) in (Tensor, bool, int, float, str)


def moved(value: Any, device: torch.device) -> Any:
    """Return a value with its tensors on a device."""
    return mapped(value, lambda _, end: end.to(device) if isinstance(end, Tensor) else end)


def home(module: nn.Module) -> torch.device:
    """Return the device that a module is on."""
    return next((tensor.device for tensor in (*module.parameters(), *module.buffers())), torch.device("cpu"))


def put_back(module: nn.Module, name: str, value: Any) -> None:
    """Put a copy of a value into an attribute; an existing container or object is filled, not replaced."""
    there: Any = getattr(module, name, None)
    value = copied(value, graph=True)
    if type(there) is type(value) and isinstance(there, dict):
        there.clear()
        there.update(value)
    elif type(there) is type(value) and isinstance(there, list | deque):
        there.clear()
        there.extend(value)
    elif type(there) is type(value) and plain_object(there):
        vars(there).clear()
        vars(there).update(vars(value))
    else:
        setattr(module, name, value)


def attribute_holding(module: nn.Module, label: str) -> Attribute | None:
    """Return the attribute that holds the tensor which discovery names so."""
    way = ways_in(module).get(label)
    return None if way is None else (module, way[0])


def ways_in(module: nn.Module) -> dict[str, Way]:
    """Return the paths to all tensors in a module, by the names that discovery uses."""
    values = {**attributes(module), **module._buffers}
    return {
        label: way
        for name, value in values.items()
        if name not in _TORCHS_OWN
        for label, way in _tensors_in(value, name, (name,))
    }


def zeros_for(there: Any, last: Sequence[int], rows: int | None) -> Any:
    """Return zeros for these rows in place of zeros for other ones than a call has left; all else as it is."""
    if not isinstance(there, Tensor) or there.dim() != len(last) or bool(there.any()):
        return there
    others = [axis for axis, size in enumerate(last) if there.shape[axis] != size]
    shape = [rows or size if axis in others else size for axis, size in enumerate(last)]
    return there.new_zeros(shape) if len(others) == 1 else there


def _tensors_in(value: Any, label: str, way: Way) -> Iterator[tuple[str, Way]]:
    """Yield the tensors in a value: the name that discovery uses, and the path."""
    if isinstance(value, Tensor):
        if not isinstance(value, nn.Parameter):
            yield label, way
    elif len(way) > _DEPTH or value is None or isinstance(value, str | bytes | int | float | nn.Module | type):
        return
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _tensors_in(inner, str(key), (*way, key))
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        for place, name in enumerate(value._fields):
            yield from _tensors_in(value[place], name, (*way, place))
    elif isinstance(value, list | tuple | deque):
        for place, inner in enumerate(value):
            yield from _tensors_in(inner, f"{label}[{place}]", (*way, place))
    elif dataclasses.is_dataclass(value) or plain_object(value):
        for name, inner in vars(value).items():
            yield from _tensors_in(inner, name, (*way, name))


def value_at(thing: Any, way: Way) -> Any:
    """Return the value at the end of a path."""
    for step in way:
        thing = thing[step] if isinstance(thing, Mapping | list | tuple | deque) else getattr(thing, step)
    return thing


def set_at(thing: Any, way: Way, value: Any) -> Any:
    """Put a value at the end of a path; return `thing`, or a replacement if it cannot be changed in place."""
    step, *rest = way
    inner = set_at(value_at(thing, (step,)), tuple(rest), value) if rest else value
    if isinstance(thing, tuple):
        items = [inner if place == step else item for place, item in enumerate(thing)]
        return type(thing)(*items) if hasattr(thing, "_fields") else type(thing)(items)
    if isinstance(thing, dict | list | deque):
        thing[step] = inner
    elif dataclasses.is_dataclass(thing) and vars(type(thing))["__dataclass_params__"].frozen:
        return dataclasses.replace(thing, **{step: inner})  # type: ignore[type-var]
    else:
        setattr(thing, step, inner)
    return thing


def tensors_of(place: Attribute) -> list[Tensor]:
    """Return the tensors that are in an attribute now."""
    module, name = place
    return [value_at(module, way) for _, way in _tensors_in(getattr(module, name, None), name, (name,))]


def unchanged(now: list[Tensor], left: list[tuple[Tensor, int]]) -> bool:
    """Say whether these are the tensors that were left there, and nothing was written to them."""
    return len(now) == len(left) and all(
        part is other and version_of(part) == version for part, (other, version) in zip(now, left, strict=True)
    )


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was written to; -1 if it does not count."""
    return -1 if tensor.is_inference() else tensor._version


def checkpointed(who: str, attribute: str) -> CarryError:
    """Return the error for activation checkpointing around an attribute that the model continues from."""
    return CarryError(
        f"{who} goes on from {attribute}, which the model keeps itself, under activation checkpointing: when the "
        f"backward pass runs it once more, {attribute} holds something else, and gradients would be wrong. Let this "
        f"part of the model run without checkpointing, or hand the state in as an argument."
    )


def is_view(one: Tensor, other: Tensor) -> bool:
    """Say whether two tensors are the same memory in the same shape."""
    same = one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    return same and one.shape == other.shape and one.storage_offset() == other.storage_offset()


def holds(kept: Tensor, last: Tensor) -> bool:
    """Say whether an attribute holds what a loop ended in, itself or a copy."""
    if kept.untyped_storage().data_ptr() == last.untyped_storage().data_ptr():
        return True
    return kept.shape == last.shape and kept.dtype == last.dtype and torch.equal(kept.detach(), last.detach())


def is_cut(values: list[Tensor], place: Attribute) -> bool:
    """Say whether a loop's last value has a graph that the attribute does not have."""
    module, label = place
    return bool(values) and values[-1].requires_grad and not value_at(module, ways_in(module)[label]).requires_grad
