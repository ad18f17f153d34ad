"""Names of arguments: the name of a path, and which names mean a state."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..state import Path

_STATE_WORDS = ("h", "c", "hs", "cs", "hx", "cx", "hn", "cn", "ht", "ct", "hid", "hids", "mem")  # as words of a name
_STATE_PARTS = ("hidden", "state", "hx", "h0", "c0", "carry", "memory", "hc")  # anywhere in one

_BEGINS = re.compile(
    r"(^|_)(not_?|non_?|is_?|no_?)?(dones?|resets?|starts?|firsts?|init|begins?|beginnings?|terminals?|terminated|terminations?"
    r"|truncated|truncations?|episodes?|ends?|ended|keeps?|continues?|new)(_|$)",
    re.IGNORECASE,
)


_FORCES = re.compile(
    r"teacher|forcing|(^|_)tf(_|$)|scheduled|sampling_(p|rate|ratio|prob)|ground_?truth|use_(gt|targets?)",
    re.IGNORECASE,
)


def path_name(names: Sequence[str], path: Path) -> str:
    """Return the name of an argument: its key in a dict, or what forward calls it."""
    keys = [key for key in path[1:] if isinstance(key, str)]
    return keys[-1] if keys else names[path[0]] if path[0] < len(names) else ""


def state_named(name: str) -> bool:
    """Say whether an argument of this name may be a state.

    What was before (prev_action, prev_output_tokens) is one only where the rest of its name says so.
    """
    words = [word for word in name.lower().split("_") if word not in ("prev", "previous", "last", "")]
    if not words:
        return bool(name)
    return any(word in _STATE_WORDS or any(part in word for part in _STATE_PARTS) for word in words)


def is_state(name: str, value: Any) -> bool:
    """Say whether an argument is a state: by its name, and by being real numbers with more than one axis."""
    return state_named(name) and isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 1


def forces_teacher(name: str) -> bool:
    """Say whether an argument or attribute of this name turns teacher forcing on and off."""
    return bool(_FORCES.search(name))


def begins_anew(name: str) -> bool:
    """Say whether a mask of this name tells where a sequence begins or ends, as `done` and `episode_starts` do."""
    return bool(_BEGINS.search(name))
