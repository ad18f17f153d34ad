"""Modules and tensors that a model holds without having registered them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..cells import attributes, plain_object


@dataclass(frozen=True, slots=True, eq=False)
class Unregistered:
    """A module or tensor that `.to()`, `.parameters()` and `state_dict()` do not see."""

    name: str  # as one would write it: encoder.cells[0]
    value: Any
    holder: str  # the attribute that holds it: encoder.cells
    direct: bool  # an attribute of a module itself, rather than inside a list, dict or object


def unregistered(model: nn.Module) -> list[Unregistered]:
    """Return what is held in plain attributes, lists, dicts and objects, and registered nowhere."""
    known = {id(module) for module in model.modules()}
    known |= {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    found: list[Unregistered] = []
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for attribute, value in attributes(module).items():
            if attribute in _TORCH_OWN or attribute.startswith("_flat_weight"):
                continue
            holder = f"{prefix}.{attribute}" if prefix else attribute
            for name, thing, direct in _inside(value, holder, 0):
                if id(thing) not in known and id(thing) not in seen:
                    seen.add(id(thing))
                    found.append(Unregistered(name, thing, holder, direct))
    return found


_TORCH_OWN = set(nn.Module().__dict__) | {"_all_weights", "_flat_weights"}


def _inside(value: Any, name: str, depth: int) -> Iterator[tuple[str, Any, bool]]:
    if isinstance(value, nn.Module | Tensor):
        yield name, value, depth == 0
    elif depth > 3:
        return
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _inside(inner, f"{name}[{key!r}]", depth + 1)
    elif isinstance(value, list | tuple | set):
        for place, inner in enumerate(value):
            yield from _inside(inner, f"{name}[{place}]", depth + 1)
    elif plain_object(value):
        for attribute, inner in vars(value).items():
            yield from _inside(inner, f"{name}.{attribute}", depth + 1)


def held_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return all tensors that a model holds and that are no parameters, by the name one would write."""
    held = {thing.name: thing.value for thing in unregistered(model) if isinstance(thing.value, Tensor)}
    return {**held, **{name: buffer for name, buffer in model.named_buffers() if isinstance(buffer, Tensor)}}
