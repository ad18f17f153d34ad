"""What to call the parts of a recurrence."""

from __future__ import annotations

from dataclasses import dataclass, field

from .memory import Value
from .names import Held
from .places import Scope
from .trace import Trace


@dataclass(slots=True)
class Namer:
    """Calls parts by what the code calls them, each name once."""

    held: dict[int, dict[int, Held]]  # by boundary
    trace: Trace
    taken: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, trace: Trace, scope: Scope | None) -> Namer:
        """Read the names that were seen at the first turns of a loop."""
        return cls(trace.held.get(scope, {}) if scope is not None else {}, trace)

    def seen(self, values: list[Value | None]) -> Held | None:
        """Return how a part is held as turns begin; `values` are those after each turn."""
        for boundary in (2, 1):
            held = self.held.get(boundary)
            value = values[boundary - 1] if len(values) >= boundary else None
            if held is None or value is None:
                continue
            if id(value.tensor) in held:
                return self._lasting(values, held[id(value.tensor)])
            entries = self.trace.memory.entries
            for number, name in held.items():  # held as part of a larger tensor, or written in place
                entry = entries.get(number)
                if entry is not None and entry.store is not None and entry.store is value.store:
                    return name
        return None

    def listed(self, first: Value | None) -> str:
        """Return the name of the list that holds what the first turn made."""
        held = self.held.get(2, {}).get(id(first.tensor)) if first is not None else None
        return held.name[: held.name.rindex("[")] if held is not None and held.name.endswith("]") else ""

    def _lasting(self, values: list[Value | None], now: Held) -> Held:
        """Call the last item of a list that grows by the list's name."""
        first, before = values[0] if values else None, self.held.get(1, {})
        then = before.get(id(first.tensor)) if first is not None else None
        if then is None or then.name == now.name or not now.name.endswith("]"):
            return now
        base = now.name[: now.name.rindex("[")]
        return Held(base, now.module) if then.name.startswith(f"{base}[") else now

    def name(self, values: list[Value | None], otherwise: str, inside: str = "") -> str:
        """Return a name for a part: of its variable, key or attribute; else `inside` a module; else `otherwise`."""
        held = self.seen(values)
        name = held.name if held is not None else otherwise
        if inside and (held is None or name.endswith("]")):
            name = inside
        base, count = name, 2
        while name in self.taken:
            name, count = f"{base}_{count}", count + 1
        self.taken.add(name)
        return name
