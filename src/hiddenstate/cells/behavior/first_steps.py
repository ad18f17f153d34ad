"""A first step that is written before its loop: it has no state to read, and else does what every turn does."""

from __future__ import annotations

from .candidates import Draft
from .operation import Op
from .operations import MOVES
from .repetition import Windows, reaching


def first_step(windows: Windows, drafts: list[Draft]) -> int | None:
    """Return the operation that such a step begins with; None where what comes before the loop is no step of it.

    It is one if all that leads to the starts, beside what the turns read too, is done in each turn with the same
    weights, and if the turns read nothing else of it.
    """
    trace, begin = windows.trace, windows.starts[0]
    starts = [draft.initial for draft in drafts if draft.initial is not None]
    if [each.shape for each in starts] != [draft.values[0].shape for draft in drafts if draft.values[0] is not None]:
        return None
    turns = [value for turn in range(1, windows.count) for _, op in windows.of_turn(turn) for value in op.ins]
    shared = reaching(trace, (value for value in turns if value.op < begin), (0, begin))
    step = sorted(reaching(trace, starts, (0, begin)) - shared)
    made = {_kind(trace.ops[number]) for number in step if trace.ops[number].name not in MOVES}
    if not made <= {_kind(op) for _, op in windows.of_turn(1)} or not any(weights for _, weights in made):
        return None
    own = {value.number for value in starts}
    first = [value for _, op in windows.of_turn(0) for value in op.ins if step[0] <= value.op < begin]
    return step[0] if all(value.number in own for value in first) else None


def _kind(op: Op) -> tuple[str, frozenset[int]]:
    return op.name, frozenset(value.number for value in op.ins if value.origin == "parameter")
