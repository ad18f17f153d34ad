"""Thresholds: every limit at which a number becomes a finding, each adjustable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from ..errors import BadInput


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The limits of all rules; `hs.diagnose(..., thresholds={"vanishing": 1e-8})` changes single ones."""

    leak: float = 1e-4  # HS101, HS102: a foreign change, relative to the change of what was touched
    reach: float = 1e-6  # HS103, HS104: a change of the output, relative to its size
    padding: float = 1e-3  # HS106: a change of the output, relative to the change that real steps make
    row_order: float = 1e-3  # HS110: how far a row's output is from its own after rows were moved, relative to its size
    by_chance: float = 0.01  # HS111: how likely rows come sorted by length where nobody sorts them
    split: float = 1e-3  # HS108: difference between pieces and whole, relative to the size of the whole
    saturated: float = 0.95  # HS402: |h| from which a tanh counts as saturated
    saturated_share: float = 0.5  # HS402: share of saturated values
    saturated_gates: float = 0.9  # HS402: share of gate values beyond 0.05 and 0.95
    dead: float = 1e-5  # HS403: a unit that varies less than this is dead
    dead_share: float = 0.5  # HS403: share of dead units
    some_dead: float = 0.2  # HS403: share of dead units that is worth a word
    dead_share_relu: float = 0.9  # HS403: the same where a ReLU makes zeros on purpose
    identical: float = 1e-6  # HS404, HS405: spread relative to the size of the state
    vanishing: float = 1e-6  # HS501: first-to-last gradient ratio
    exploding: float = 1e3  # HS502: first-to-last gradient ratio

    @classmethod
    def adjusted(cls, changes: Mapping[str, float] | None) -> Thresholds:
        """Return the defaults with some of them changed."""
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(changes or {}) - known)
        if unknown:
            raise BadInput(f"there is no threshold named {unknown[0]!r}. There are {', '.join(sorted(known))}.")
        return cls(**(changes or {}))
