"""Calls of a step or two: in them nothing repeats, and what may be a state cannot be told from a constant."""

from __future__ import annotations

from collections.abc import Container, Iterator

from ..custom import is_cell
from .candidates import TOO_FEW, Analysis
from .found import Unsure
from .memory import Value
from .operation import MOVES, Op
from .places import Scope, in_torch, line_of
from .trace import Trace

_TAKES_STEPS = {"unbind", "split", "chunk", "tensor_split", "split_with_sizes"}
_TAKES_ONE = {"__getitem__", "select", "narrow", "index_select"}
_ONE = "only one repetition: call the model with three or more to decide"


def undecided(analysis: Analysis) -> Iterator[Unsure]:
    """Yield places that may hold a state which this call is too short to show."""
    yield from (each for each in analysis.unsure if each.why == TOO_FEW)
    trace = analysis.trace
    said = {each.line for each in analysis.candidates} | {each.line for each in analysis.unsure}
    loops = [each for each in trace.places.scopes if each.kind == "loop" and not in_torch(each.code)]
    for begin, end, step in _steps(analysis):
        ops = [number for number in range(begin, end) if not _in_cell(trace, trace.ops[number])]
        used = [number for number in ops if trace.ops[number].name not in MOVES and _reads_weights(trace.ops[number])]
        steps = {_source(trace, op.ins[0]).number for op in trace.ops[begin:end] if _count(op, analysis)}
        starts = [number for number in ops if _reads_a_start(trace, trace.ops[number], begin, steps)]
        cells = any(is_cell(call.module) or call.known for call in trace.calls if begin <= call.start < end)
        line = next((line_of(each) for each in loops if begin <= each.start < end), step.where)
        if line not in said and (starts or (used and not cells)):
            said.add(line)
            why = _ONE if _count(step, analysis) == 1 else TOO_FEW
            yield Unsure(trace.calls[step.call].path if step.call >= 0 else "", line, why)


def _steps(analysis: Analysis) -> Iterator[tuple[int, int, Op]]:
    """Yield stretches of the call in which a step or two of an input are read: from, to, and what takes them."""
    trace = analysis.trace
    for number, op in enumerate(trace.ops):
        count, loop = _count(op, analysis), _loop_of(op.scope)
        if not count or _within(op.scope, analysis.timed):
            continue  # none of the call's own input, or something within a step of it
        if op.name in _TAKES_STEPS:
            yield number, len(trace.ops), op
        elif loop is not None and len(loop.turns) == count and op.ins[0].op < loop.start and not in_torch(loop.code):
            yield loop.start, loop.end, op


def _count(op: Op, analysis: Analysis) -> int:
    """Return of how many steps, one or two, an operation takes all or each; 0 where it takes none of the input's."""
    if op.name not in _TAKES_STEPS and op.name not in _TAKES_ONE:
        return 0
    if not op.ins or not op.outs or not analysis.marks[op.ins[0].number]:
        return 0
    whole, taken = tuple(op.ins[0].shape), tuple(op.outs[0].shape)
    for axis, size in enumerate(whole[:2]):
        rest = whole[:axis], whole[axis + 1 :]
        all_taken = op.name in _TAKES_ONE or len(op.outs) == size
        if size in (1, 2) and all_taken and taken in (rest[0] + rest[1], (*rest[0], 1, *rest[1])):
            return size
    return 0


def _loop_of(scope: Scope | None) -> Scope | None:
    while scope is not None and scope.kind != "loop":
        scope = scope.parent if scope.kind == "turn" else None
    return scope


def _within(scope: Scope | None, loops: Container[Scope]) -> bool:
    while scope is not None and scope not in loops:
        scope = scope.parent
    return scope is not None


def _in_cell(trace: Trace, op: Op) -> bool:
    """Say whether an operation is, or happens in, a call of a module that is taken for a cell."""
    number = op.call
    while number >= 0:
        call = trace.calls[number]
        if call.known or (call.path and is_cell(call.module)):
            return True
        number = call.parent
    return op.name.endswith(".forward")


def _reads_weights(op: Op) -> bool:
    return any(value.origin == "parameter" for value in op.ins)


def _reads_a_start(trace: Trace, op: Op, begin: int, steps: set[int]) -> bool:
    """Say whether an operation reads what was made before the steps and is none, or only what the model holds."""
    sources = [_source(trace, value) for value in op.ins]
    sources = [value for value in sources if value.number not in steps]
    if not sources or (op.name in MOVES and len(op.ins) == 1):
        return False
    held = [value.op < 0 and value.origin in ("parameter", "buffer", "attribute") for value in sources]
    made = [value.op >= 0 and (value.op < begin or not trace.ops[value.op].ins) for value in sources]
    return any(made) or all(held)


def _source(trace: Trace, value: Value) -> Value:
    """Return what a value is moved from."""
    while value.op >= 0 and trace.ops[value.op].name in MOVES and len(trace.ops[value.op].ins) == 1:
        value = trace.ops[value.op].ins[0]
    return value
