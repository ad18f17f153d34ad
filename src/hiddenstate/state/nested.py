"""Walking nested arguments and results: tuples, lists, dicts, named tuples and dataclasses with tensors in them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

Path = tuple[Any, ...]


def ends(thing: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield each leaf of a nested value with the path of keys that leads to it; a list of numbers is one leaf."""
    if isinstance(thing, Tensor | PackedSequence) or numbers(thing):
        yield path, thing
    elif isinstance(thing, Mapping):
        for key, inner in thing.items():
            yield from ends(inner, (*path, key))
    elif isinstance(thing, tuple | list):
        for place, inner in enumerate(thing):
            yield from ends(inner, (*path, place))
    elif dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        for field in dataclasses.fields(thing):
            yield from ends(getattr(thing, field.name), (*path, field.name))
    else:
        yield path, thing


def numbers(thing: Any) -> bool:
    """Say whether this is a list or tuple of whole numbers, such as lengths."""
    return isinstance(thing, list | tuple) and bool(thing) and all(type(item) is int for item in thing)


def tensors(thing: Any) -> dict[Path, Tensor]:
    """Return all tensors of a nested value by their paths; a packed sequence counts as its data tensor."""
    found = {path: end.data if isinstance(end, PackedSequence) else end for path, end in ends(thing)}
    return {path: end for path, end in found.items() if isinstance(end, Tensor)}


def mapped(thing: Any, fn: Callable[[Path, Any], Any], path: Path = ()) -> Any:
    """Return the same nesting with each leaf replaced by `fn(path, leaf)`."""
    if isinstance(thing, Tensor | PackedSequence) or numbers(thing):
        return fn(path, thing)
    if isinstance(thing, Mapping):
        made = {key: mapped(inner, fn, (*path, key)) for key, inner in thing.items()}
        return made if type(thing) is dict else _same_kind(thing, made)
    if isinstance(thing, tuple | list):
        items = [mapped(inner, fn, (*path, place)) for place, inner in enumerate(thing)]
        return type(thing)(*items) if hasattr(thing, "_fields") else type(thing)(items)
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        names = [field.name for field in dataclasses.fields(thing) if field.init]
        return dataclasses.replace(thing, **{n: mapped(getattr(thing, n), fn, (*path, n)) for n in names})
    return fn(path, thing)


def detached(thing: Any) -> Any:
    """Return the same nesting with each tensor detached from its graph; other leaves, such as None, are kept."""

    def cut(_: Path, end: Any) -> Any:
        return end.detach() if isinstance(end, Tensor) else end

    return mapped(thing, cut)


def _same_kind(thing: Any, made: dict[Any, Any]) -> Any:
    try:
        return type(thing)(made)
    except Exception:  # a mapping class of the user's own with another constructor: a plain dict reads the same
        return made


def spelled(path: Path) -> str:
    """Return a path as it is written in Python: `[1]['logits']`."""
    return "".join(f"[{key!r}]" for key in path)
