"""What a trace may turn out to hold: recurrences in the making, and what was looked at."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .chains import Chain
from .found import Kind, Unsure
from .memory import Value
from .places import Scope
from .repetition import Windows
from .trace import Trace
from .traits import escape_of

if TYPE_CHECKING:
    from .order import Cuts


@dataclass(slots=True, eq=False, repr=False)
class Draft:
    """A part in the making."""

    name: str
    values: list[Value | None]
    initial: Value | None
    argument: tuple[Any, ...] | None = None
    result: tuple[Any, ...] | None = None


@dataclass(slots=True, eq=False, repr=False)
class Candidate:
    """A recurrence in the making."""

    kind: Kind
    module: str
    line: str
    windows: Windows
    drafts: list[Draft]
    evidence: list[str]
    chain: Chain | None = None

    @property
    def numbers(self) -> set[int]:
        """All values that it carries."""
        own = {value.number for draft in self.drafts for value in (*draft.values, draft.initial) if value is not None}
        return own | (self.chain.on_the_way if self.chain is not None else set())

    @property
    def span(self) -> tuple[int, int]:
        """Its operations, from and to."""
        return self.windows.starts[0], self.windows.end


@dataclass(slots=True, eq=False, repr=False)
class Analysis:
    """All that one trace tells."""

    trace: Trace
    marks: bytearray  # by value: it depends on the call's input
    moves: bytearray  # by value: it depends on the call's input, or on random draws
    candidates: list[Candidate] = field(default_factory=list)
    unsure: dict[Unsure, None] = field(default_factory=dict)
    passed: dict[Unsure, None] = field(default_factory=dict)
    known: dict[Unsure, None] = field(default_factory=dict)
    iterated: dict[str, None] = field(default_factory=dict)  # known modules that are only ever stepped so
    chains: list[Chain] = field(default_factory=list)  # modules that are handed what they gave before
    covered: set[int] = field(default_factory=set)  # values that chains account for
    settled: set[int] = field(default_factory=set)  # values that lists and caches hold, and constants made in a loop
    incomplete: set[Scope] = field(default_factory=set)  # loops in which more crosses than could be told apart
    timed: set[Scope] = field(default_factory=set)  # loops that take the call's input piece by piece
    later: list[str] = field(default_factory=list)  # what only a second call can tell
    cuts: Cuts | None = None  # where pieces of the input cannot give what the whole gives

    def doubt(self, where: tuple[str, str], why: str, *, kept: bool = False) -> None:
        """Name something that could not be decided."""
        self.unsure[Unsure(*where, why, kept)] = None

    def leave(self, where: tuple[str, str], why: str) -> None:
        """Name something that is certainly no recurrence."""
        self.passed[Unsure(*where, why)] = None


TOO_FEW = "only two repetitions: call the model with three or more to decide"


def how(own: bool) -> str:
    """Say by what a repetition is known as time or as iteration."""
    if own:
        return "each repetition takes its own piece of the call's input: time"
    return "no repetition takes a piece of the call's input of its own: an iteration, not time"


def problem_of(windows: Windows, crossing: set[int], strange: str) -> str:
    """Return why what crosses cannot be told for sure, else nothing."""
    escape = escape_of(windows, crossing)
    if escape is not None:
        place = f"{escape.name} at {escape.where}"
        return f"a number that depends on the state leaves for Python ({place}): it may steer the loop"
    if strange:
        return f"an operand of {strange} changes from repetition to repetition, and its origin was not seen"
    return ""
