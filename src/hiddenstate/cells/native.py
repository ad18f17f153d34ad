"""A module's own form of state (tensor, nested tuple or dict) to named parts, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from torch import Tensor

from ..errors import StateMismatch

Native: TypeAlias = Any  # a tensor, or a nested tuple, list or dict of tensors
Form: TypeAlias = Any  # the same nesting with part names in place of tensors


def flatten(native: Native) -> tuple[dict[str, Tensor], Form]:
    """Return the named parts of a native state, and the form that `rebuild` needs.

    >>> parts, form = flatten((torch.ones(2, 3), torch.zeros(2, 3)))
    >>> form
    ('h', 'c')
    """
    if isinstance(native, Tensor):
        return {"h": native}, "h"
    if isinstance(native, tuple | list) and len(native) == 2 and all(isinstance(part, Tensor) for part in native):
        return {"h": native[0], "c": native[1]}, _like(native, ["h", "c"])
    parts: dict[str, Tensor] = {}
    form = _flatten(native, "", parts)
    if not parts:
        raise StateMismatch(f"a state needs at least one tensor, but this is {native!r}.")
    return parts, form


def rebuild(form: Form, parts: Mapping[str, Any]) -> Native:
    """Return the native state of this form with these parts."""
    if isinstance(form, str):
        return parts[form]
    if isinstance(form, dict):
        return {key: rebuild(inner, parts) for key, inner in form.items()}
    return _like(form, [rebuild(inner, parts) for inner in form])


def matches(form: Form, native: Native) -> bool:
    """Say whether `native` is nested as `form` is; lists and tuples count as the same."""
    if isinstance(form, str):
        return isinstance(native, Tensor)
    if isinstance(form, dict):
        return (
            isinstance(native, dict)
            and form.keys() == native.keys()
            and all(matches(inner, native[key]) for key, inner in form.items())
        )
    return (
        isinstance(native, tuple | list)
        and len(form) == len(native)
        and all(matches(inner, part) for inner, part in zip(form, native, strict=True))
    )


def names(form: Form) -> list[str]:
    """Return the part names of a form, in order."""
    if isinstance(form, str):
        return [form]
    inner = form.values() if isinstance(form, dict) else form
    return [name for part in inner for name in names(part)]


def _flatten(native: Native, path: str, parts: dict[str, Tensor]) -> Form:
    if isinstance(native, Tensor):
        if path in parts:
            raise StateMismatch(f"two parts of the state would both be named {path!r}: use keys without dots.")
        parts[path] = native
        return path
    prefix = f"{path}." if path else ""
    if isinstance(native, dict):
        return {key: _flatten(part, f"{prefix}{key}", parts) for key, part in native.items()}
    if isinstance(native, tuple | list):
        return _like(native, [_flatten(part, f"{prefix}{place}", parts) for place, part in enumerate(native)])
    raise StateMismatch(
        f"{f'part {path!r} of the state' if path else 'the state'} is {type(native).__name__}, "
        f"but a state is a tensor, or a (nested) tuple or dict of tensors."
    )


def _like(template: Any, items: list[Any]) -> Any:
    if hasattr(template, "_fields"):  # a named tuple takes its fields one by one
        return type(template)(*items)
    return type(template)(items)
