"""Turning a module's own form of state (a tensor, nested tuple or dict) into named parts, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeAlias

from torch import Tensor

from ..errors import StateMismatch
from ..state import Path, ends, mapped

Native: TypeAlias = Any  # a tensor, or a nested tuple, list, dict or dataclass of tensors
Form: TypeAlias = Any  # the same nesting with part names instead of tensors


def flatten(native: Native) -> tuple[dict[str, Tensor], Form]:
    """Return the named parts of a native state, and the form by which `rebuild` restores it.

    >>> parts, form = flatten((torch.ones(2, 3), torch.zeros(2, 3)))
    >>> form
    ('h', 'c')
    """
    found = list(ends(native))
    plain = isinstance(native, tuple | list) and len(native) == 2 and all(isinstance(part, Tensor) for part in native)
    parts: dict[str, Tensor] = {}
    for path, part in found:
        name = _name(path, plain=plain)
        if not isinstance(part, Tensor):
            raise StateMismatch(
                f"{f'part {name!r} of the state' if path else 'the state'} is {type(part).__name__}, "
                f"but a state is a tensor, or a (nested) tuple or dict of tensors."
            )
        if name in parts:
            raise StateMismatch(f"two parts of the state would both be named {name!r}: use keys without dots.")
        parts[name] = part
    if not parts:
        raise StateMismatch(f"a state needs at least one tensor, but this is {native!r}.")
    return parts, mapped(native, lambda path, _: _name(path, plain=plain))


def rebuild(form: Form, parts: Mapping[str, Any]) -> Native:
    """Return the native state with this form and these parts."""
    return mapped(form, lambda _, name: parts[name])


def matches(form: Form, native: Native) -> bool:
    """Say whether `native` has the nesting of `form`; lists and tuples count as the same."""
    if isinstance(form, str):
        return isinstance(native, Tensor)
    if isinstance(form, Mapping):
        return (
            isinstance(native, Mapping)
            and form.keys() == native.keys()
            and all(matches(inner, native[key]) for key, inner in form.items())
        )
    if dataclasses.is_dataclass(form):
        fields = [field.name for field in dataclasses.fields(form)]
        return type(native) is type(form) and all(matches(getattr(form, n), getattr(native, n)) for n in fields)
    return (
        isinstance(native, tuple | list)
        and len(form) == len(native)
        and all(matches(inner, part) for inner, part in zip(form, native, strict=True))
    )


def names(form: Form) -> list[str]:
    """Return the part names in a form, in order."""
    return [name for _, name in ends(form)]


def _name(path: Path, *, plain: bool) -> str:
    if not path:
        return "h"
    return "hc"[path[0]] if plain else ".".join(map(str, path))
