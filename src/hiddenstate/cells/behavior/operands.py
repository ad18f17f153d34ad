"""Taking tensors out of whatever a call is given or gives back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor


def leaves(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    """Yield every tensor in a value with its place: indices, keys and fields."""
    if isinstance(value, Tensor):
        yield place, value
    elif isinstance(value, tuple | list):
        for index, inner in enumerate(value):
            if inner is not None and not isinstance(inner, int | float | str):
                yield from leaves(inner, (*place, index))
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from leaves(inner, (*place, key))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for each in dataclasses.fields(value):
            yield from leaves(getattr(value, each.name, None), (*place, each.name))
    elif isinstance(value, slice):
        yield from leaves((value.start, value.stop, value.step), place)
    elif hasattr(value, "__dict__") and type(value).__module__.split(".")[0] not in ("torch", "builtins", "numpy"):
        for key, inner in vars(value).items():
            if isinstance(inner, Tensor | tuple | list | dict):
                yield from leaves(inner, (*place, key))


def operands(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors that an operation is called with, in order."""
    found: list[Tensor] = []
    for arg in args:
        if isinstance(arg, Tensor):
            found.append(arg)
        elif isinstance(arg, tuple | list | dict | slice):
            found += [tensor for _, tensor in leaves(arg)]
    for arg in kwargs.values():
        if isinstance(arg, Tensor):
            found.append(arg)
        elif isinstance(arg, tuple | list | dict):
            found += [tensor for _, tensor in leaves(arg)]
    return found


def replaced(value: Any, with_: Callable[[Tensor], Any]) -> Any:
    """Return an operation's argument with each tensor in it replaced."""
    if isinstance(value, Tensor):
        return with_(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(replaced(inner, with_) for inner in value))
    if isinstance(value, tuple | list):
        return type(value)(replaced(inner, with_) for inner in value)
    if isinstance(value, dict):
        return {key: replaced(inner, with_) for key, inner in value.items()}
    if isinstance(value, slice):
        return slice(*(replaced(inner, with_) for inner in (value.start, value.stop, value.step)))
    return value
