"""Recurrences in the making, and the traits that tell what they are.

A repetition is time or iteration; what crosses in it is a state or a sum, of fixed size or growing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from .found import Kind, Unsure
from .memory import Value
from .operation import COLLECTS, GROWS, INDEXED, MOVES, Op
from .places import Scope
from .repetition import Windows, reached, reaching, signature
from .trace import Trace

if TYPE_CHECKING:
    from .chains import Chain
    from .crossings import Role
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
    maybe: list[tuple[str, str]] = field(default_factory=list)  # the attributes that this is about: module, and name
    going_on: list[tuple[str, str]] = field(default_factory=list)  # those that a forward may read before it writes them
    cleared: list[tuple[str, str]] = field(default_factory=list)  # those whose old content a call has put aside unread
    caches: bool = False  # whether a module keeps something from call to call that is no layer's state
    cuts: Cuts | None = None  # where pieces of the input cannot give what the whole gives

    def doubt(self, where: tuple[str, str], why: str, *, kept: bool = False, gave: str = "") -> None:
        """Name something that could not be decided."""
        self.unsure[Unsure(*where, why, kept, gave)] = None

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


_TORCH = torch.__path__[0]


@dataclass(slots=True, eq=False)
class Pieces:
    """What each repetition takes from outside, on the way to what crosses."""

    own: bool  # each takes its own piece of the call's input
    depth: bool  # each has weights of its own: layers, one after the other
    weights: int  # how many weights there are
    strange: str = ""  # an operand of unknown origin, changing from repetition to repetition


def pieces_of(
    windows: Windows,
    targets: list[list[Value]],
    marks: bytearray,
    states: set[int] | frozenset[int] = frozenset(),
    *,
    starts: set[int] | frozenset[int] = frozenset(),
) -> Pieces:
    """Look at all that repetitions need for their `targets` and do not make; `states` of loops around are no input."""
    trace, begins = windows.trace, windows.starts[0]
    keys: list[set[Any]] = []
    uses: list[set[int]] = []
    strange: dict[Any, set[int]] = defaultdict(set)
    for turn in range(windows.count):
        span = windows.span(turn)
        mine: set[Any] = set()
        used: set[int] = set()
        for number in reaching(trace, targets[turn], span):
            op = trace.ops[number]
            for position, value in enumerate(op.ins):
                if value.op >= begins:
                    continue
                if value.origin in ("parameter", "buffer", "attribute"):
                    used.add(value.number)
                elif value.origin in ("outside", "unseen"):
                    strange[op.name, op.offset, op.scope.code, position].add(value.number)
                elif marks[value.number] and value.number not in states:
                    mine.add((value.number, _moving(trace, op, span)))
        mine.update((value.number, ()) for value in targets[turn] if value.op < begins and marks[value.number])
        keys.append(mine)
        uses.append(used)
    own = _own(windows, targets, keys)
    odd = next((f"{where[0]} in {where[2].co_name}" for where, seen in strange.items() if len(seen) > 1), "")
    weights = Counter(weight for used in uses for weight in used)
    for weight in starts:  # what a loop only starts from is no weight of its first repetition
        if weights[weight] == 1 and weight in uses[0]:
            del weights[weight]
    alone = sum(any(weights[weight] == 1 for weight in used) for used in uses)
    once, each = max(weights.values(), default=0) == 1, alone >= max(2, windows.count - 1)
    depth = (once and not own) or (each and (once or not own))
    return Pieces(own, depth, len(weights), odd)


def _own(windows: Windows, targets: list[list[Value]], keys: list[set[Any]]) -> bool:
    """Say whether most repetitions take something that not all of them take.

    The first one does not count: it also reads what everything starts from. Nor do those that leave the state as it
    is. Not all others have to: a decoder may now and then be fed its own output.
    """
    later = [
        mine
        for turn, mine in enumerate(keys)
        if turn and any(value.op >= windows.starts[turn] or value.op < windows.starts[0] for value in targets[turn])
    ]
    times = Counter(key for mine in later for key in mine)
    changing = {key for key, often in times.items() if often < len(later) or len(later) == 1}
    having = [bool(mine & changing) for mine in later]
    most = 2 * sum(having) > len(later) and 2 * len(changing) >= len(later)
    return most or sum(having[1:]) > 1


def _moving(trace: Trace, op: Op, span: tuple[int, int]) -> Any:
    """Return what tells one use of an outside tensor from another: indices, also those made into tensors."""
    made = [trace.ops[value.op] for value in op.ins if span[0] <= value.op < span[1]]
    constants = [signature(each.args) for each in made if not each.ins]
    return (signature(op.args), signature(tuple(op.kwargs.values())), *constants)


def collects(windows: Windows, role: Role, others: list[Role]) -> bool:
    """Say whether a value only collects: it is added to, or handed on to nobody, and nothing else reads it."""
    turns = sorted({windows.turn(op) for op in role.readers})
    some = turns[:: max(1, len(turns) // _LOOKED_AT)]
    theirs = {v.number for other in others if other is not role for v in other.values if v is not None}
    own = {value.number for value in role.values if value is not None} | role.members
    return bool(some) and all(_collected(windows, role, turn, theirs - own) for turn in some)


_LOOKED_AT = 16  # turns in which we look who reads a value


def _collected(windows: Windows, role: Role, turn: int, theirs: set[int]) -> bool:
    trace = windows.trace
    before = {number for number in role.members if trace.memory.values[number].op < windows.starts[turn]}
    touched = reached(trace, before, windows.span(turn))
    if not all(trace.ops[op].name in COLLECTS or trace.ops[op].name in MOVES for op in touched):
        return False
    made = before | {value.number for op in touched for value in trace.ops[op].outs}
    if _mixes(trace, touched, made):
        return False
    if any(value.number in made for op in touched if trace.ops[op].name in INDEXED for value in trace.ops[op].ins[1:]):
        return False  # as an index it is read, not handed on
    return not any(value.number in theirs for op in touched for value in trace.ops[op].outs)


def _mixes(trace: Trace, touched: list[int], made: set[int]) -> bool:
    """Say whether numbers of a value meet each other, or move to other places and are added to.

    A sum adds to each number for itself. A lattice (forward algorithm, CTC, Viterbi) puts numbers of the same value
    together, by nothing but sums and maxima.
    """
    adds = moves = False
    for number in touched:
        op = trace.ops[number]
        if op.name in MOVES:
            # Joined from pieces of itself, or rolled: what stood at one place stands at another.
            pieces = sum(value.number in made for value in op.ins) if op.name in GROWS else 0
            moves = moves or op.name in ("roll", "flip") or (pieces > 0 and _same_size(op))
            continue
        own = [value for value in op.ins if value.number in made]
        if len({value.number for value in own}) > 1:
            return True
        if len(op.ins) == 1 and op.outs and op.outs[0].tensor.numel() < op.ins[0].tensor.numel():
            return True  # a maximum over an axis
        adds = adds or (op.name not in GROWS and any(value.tensor.numel() > 1 for value in own))
    return adds and moves


def _same_size(op: Op) -> bool:
    """Say whether an operation joins pieces of one storage to something as long as that storage."""
    bases = [value.store.base for value in op.ins if value.store is not None]
    return bool(op.outs) and any(base.shape == op.outs[0].tensor.shape for base in bases)


def escape_of(windows: Windows, crossing: set[int]) -> Op | None:
    """Return an operation that gives Python a number which depends on what crosses."""
    trace = windows.trace
    for turn in range(windows.count):
        span = windows.span(turn)
        escapes = [op for op in range(*span) if trace.ops[op].escapes]
        escapes = [op for op in escapes if not trace.ops[op].scope.code.co_filename.startswith(_TORCH)]
        if escapes:
            touched = set(reached(trace, crossing, span))
            hit = next((op for op in escapes if op in touched), None)
            if hit is not None:
                return trace.ops[hit]
    return None


def grows_by_joining(windows: Windows, role: Role) -> bool:
    """Say whether a value gets longer along one axis, turn after turn, or is a list that does."""
    if role.grows:
        return True
    shapes = [value.shape for value in role.values if value is not None]
    if len(shapes) < 2 or len({len(shape) for shape in shapes}) > 1:
        return False
    sizes = [sum(shape) for shape in shapes]
    if sum(b > a for a, b in pairwise(sizes)) < (len(sizes) - 1) / 2:
        return False
    return any(_joined(windows.trace, *pair) for pair in pairwise(role.values))


def _joined(trace: Trace, before: Value | None, after: Value | None) -> bool:
    """Say whether a value is the one before with something put to its end, in whatever order of steps."""
    todo, joined = [after] if before is not None and after is not None else [], False
    for value in todo[:32]:
        if value is before:
            return joined
        if value is None or value.op < 0:
            continue
        op = trace.ops[value.op]
        if op.name in GROWS or op.name in MOVES:
            joined = joined or op.name in GROWS
            todo += op.ins
    return any(value is before for value in todo) and joined
