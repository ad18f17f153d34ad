"""Places where a recurrence could hide from the trace, or in a call of a step or two. They are named, never ignored."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Container, Iterator
from itertools import pairwise
from types import CodeType
from typing import TypeAlias

import torch

from ..custom import is_cell
from .candidates import TOO_FEW, Analysis
from .found import Unsure
from .memory import Value
from .operation import ESCAPES, GROWS, MOVES, UNWRITTEN, Op
from .places import Scope, in_torch, line_of
from .repetition import owner_of, signature, where_of, windows_of
from .trace import Trace

Spot: TypeAlias = tuple[tuple[str, str], str]

_TORCH = torch.__path__[0]
_SCANS = {"cumsum", "cumprod", "logcumsumexp", "cummax", "cummin", "cumsum_", "associative_scan", "scan"}
_FUSED = {"lstm", "gru", "rnn_tanh", "rnn_relu", "quantized_lstm", "quantized_gru", "mkldnn_rnn_layer", "_cudnn_rnn"}
_USES = 3  # successive uses of the same weights, each on the result of the last, that need an explanation
_TAKES_STEPS = {"unbind", "split", "chunk", "tensor_split", "split_with_sizes"}
_TAKES_ONE = {"__getitem__", "select", "narrow", "index_select"}
_ONE = "only one repetition: call the model with three or more to decide"


def blind_spots(analysis: Analysis) -> Iterator[Spot]:
    """Yield places where something may recur unseen, each with a sentence."""
    trace = analysis.trace
    yield from _scans(trace, analysis.marks)
    yield from _kernels(analysis)
    yield from _scripts(analysis)
    yield from _written_out(analysis)
    yield from _recursions(trace)
    yield from _numbers(trace)
    yield from _strangers(trace)
    yield from _from_outside(analysis)


def _where(trace: Trace, op: Op) -> tuple[str, str]:
    return (trace.calls[op.call].path if op.call >= 0 else ""), op.where


def _scans(trace: Trace, marks: bytearray) -> Iterator[Spot]:
    """Yield sums and products along an axis other than the last: a scan needs no loop."""
    for op in trace.ops:
        if op.name not in _SCANS or not op.ins or not op.outs or not marks[op.ins[0].number]:
            continue
        axis = op.args[1] if len(op.args) > 1 else op.kwargs.get("dim", op.kwargs.get("axis"))
        rank = len(op.outs[0].shape)
        along = not isinstance(axis, int) or axis % max(rank, 1) != rank - 1
        if along and op.outs[0].tensor.is_floating_point():
            why = f"{op.name} runs along an axis: a scan without a loop, which may be a recurrence and was not examined"
            yield _where(trace, op), why


def _kernels(analysis: Analysis) -> Iterator[Spot]:
    """Yield fused kernels, and reads of memory that was filled unseen."""
    trace = analysis.trace
    told = {candidate.module for candidate in analysis.candidates}
    for op in trace.ops:
        if op.name in _FUSED:
            call = trace.calls[op.call]
            where = (call.path, f"{os.path.basename(call.site[0])}:{call.site[1]}" if call.path else "")
            if call.path not in told:
                yield where, f"a fused recurrent kernel ({op.name}) runs here: its steps are not seen from Python"
        elif op.name not in UNWRITTEN:
            for value in op.ins:
                if value.op >= 0 and trace.ops[value.op].name in UNWRITTEN and _never_written(value):
                    why = f"{op.name} reads memory that no operation seen has written: a kernel of its own may recur"
                    yield _where(trace, op), why


def _never_written(value: Value) -> bool:
    return value.store is not None and not value.store.writes and value.tensor.numel() > 0


def _scripts(analysis: Analysis) -> Iterator[Spot]:
    told = {candidate.module for candidate in analysis.candidates}
    for call in analysis.trace.calls:
        if isinstance(call.module, torch.jit.ScriptModule) and not call.known and call.path not in told:
            yield (call.path, ""), "it is scripted: whether anything recurs inside it is not seen from Python"


def _written_out(analysis: Analysis) -> Iterator[Spot]:
    """Yield weights that are used repeatedly, each time on the last result, without a loop or chain to explain it."""
    trace = analysis.trace
    spans = [(loop.start, loop.end) for loop in trace.places.scopes if loop.kind == "loop" and len(loop.turns) > 1]
    spans += [candidate.span for candidate in analysis.candidates]
    spans.sort()
    uses: dict[int, list[int]] = defaultdict(list)
    reach = -1  # the end of the last span that began
    after = iter([*spans, (len(trace.ops) + 1, 0)])
    start, end = next(after)
    for number, op in enumerate(trace.ops):
        while number >= start:
            reach = max(reach, end)
            start, end = next(after)
        if number >= reach:
            for value in op.ins:
                if value.origin == "parameter" and value.tensor.dim() > 1:
                    uses[value.number].append(number)
    said: set[str] = set()
    for weight, ops in uses.items():
        if len(ops) >= _USES and all(_follows(trace, a, b) for a, b in pairwise(ops)):
            path, line = _where(trace, trace.ops[ops[0]])
            if path not in said:
                said.add(path)
                name = trace.memory.values[weight].label
                yield (
                    (path, line),
                    f"{name} is used {len(ops)} times, each on what the time before gave, without a loop",
                )


def _recursions(trace: Trace) -> Iterator[Spot]:
    """Yield functions that call themselves and apply weights to the result: trees, whose calls are no turns."""
    around: dict[CodeType, list[Scope]] = defaultdict(list)
    said: set[CodeType] = set()
    for scope in trace.places.scopes:
        code = scope.code
        if scope.kind != "call" or code in said or code.co_name.endswith(("comp>", "expr>")):
            continue
        outer = around[code]
        while outer and outer[-1].end <= scope.start:
            outer.pop()
        if outer and not in_torch(code) and _goes_up(trace, scope, outer[-1]):
            said.add(code)
            owner = owner_of(trace, scope.start, scope.end)
            line = f"{os.path.basename(code.co_filename)}:{code.co_firstlineno}"
            why = f"{code.co_name} calls itself: a recursion, which was not examined"
            yield (owner.path if owner is not None else "", line), why
        outer.append(scope)


def _goes_up(trace: Trace, inner: Scope, outer: Scope) -> bool:
    """Say whether a call applies weights to the result of a call that it made."""
    used = {value.number: number for number in range(inner.start, inner.end) for value in _weights(trace.ops[number])}
    later = ((number, value.number) for number in range(inner.end, outer.end) for value in _weights(trace.ops[number]))
    return any(weight in used and _follows(trace, used[weight], number) for number, weight in later)


def _weights(op: Op) -> list[Value]:
    return [value for value in op.ins if value.origin == "parameter"]


def _follows(trace: Trace, one: int, other: int) -> bool:
    """Say whether an operation depends on the result of an earlier one."""
    todo, seen = [other], {other}
    while todo:
        for value in trace.ops[todo.pop()].ins:
            if value.op == one:
                return True
            if value.op > one and value.op not in seen:
                seen.add(value.op)
                todo.append(value.op)
    return False


def _strangers(trace: Trace) -> Iterator[Spot]:
    """Yield operands that were made or written unseen."""
    for op in trace.ops:
        if any(value.origin == "unseen" for value in op.ins):
            yield _where(trace, op), f"an operand of {op.name} was made or written by something that was not seen"


def _from_outside(analysis: Analysis) -> Iterator[Spot]:
    """Yield loops whose turns meet new tensors that were made unseen, for example by numpy or vmap."""
    trace = analysis.trace
    for op in trace.ops if not trace.lazy else ():
        many = {value.number for value in op.ins if value.origin == "outside" and value.tensor.dim()}
        if op.name in GROWS and len(many) > 2:
            yield _where(trace, op), f"{op.name} joins {len(many)} tensors that nothing seen has made, as a loop would"
    for loop in trace.places.scopes if not trace.lazy else ():
        if loop.kind != "loop" or len(loop.turns) < 3 or in_torch(loop.code):
            continue
        first: dict[int, int] = {}  # for each operand from outside, the turn that meets it first
        windows = windows_of(trace, loop)
        for turn in range(windows.count):
            for _, op in windows.of_turn(turn):
                first.update({v.number: first.get(v.number, turn) for v in op.ins if v.origin == "outside"})
        if len(set(first.values()) - {0}) >= windows.count - 2:
            why = "every turn meets tensors that nothing seen has made: a state that is kept in them is not seen"
            yield where_of(windows), why


def _numbers(trace: Trace) -> Iterator[Spot]:
    """Yield loops in which numbers leave for Python, and other numbers, which change from turn to turn, come back."""
    for loop in trace.places.scopes:
        if loop.kind != "loop" or len(loop.turns) < 3 or loop.code.co_filename.startswith(_TORCH):
            continue
        ops = trace.ops[loop.start : loop.end]
        if not any(op.name in ESCAPES and op.name != "__bool__" for op in ops):
            continue
        windows = windows_of(trace, loop)
        seen: dict[int, set[float]] = defaultdict(set)
        for turn in range(windows.count):
            for number, op in windows.of_turn(turn):
                seen[windows.place(number)].update(_floats(signature(op.args)))
        if any(len(values) >= windows.count - 1 for values in seen.values()):
            why = "numbers leave for Python within the loop, and others come back: a state kept in them is not seen"
            yield where_of(windows), why


def _floats(thing: object) -> Iterator[float]:
    if isinstance(thing, float):
        yield thing
    elif isinstance(thing, tuple):
        for inner in thing:
            yield from _floats(inner)


def undecided(analysis: Analysis) -> Iterator[Unsure]:
    """Yield places that may hold a state, if this call is too short to show it.

    In a call of a step or two, nothing repeats, and a possible state looks like a constant.
    """
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
    """Yield stretches of the call that read a step or two of an input: first and last operation, and the reader."""
    trace = analysis.trace
    for number, op in enumerate(trace.ops):
        count, loop = _count(op, analysis), _loop_of(op.scope)
        if not count or _within(op.scope, analysis.timed):
            continue  # not from the call's own input, or something within a step of it
        if op.name in _TAKES_STEPS:
            yield number, len(trace.ops), op
        elif loop is not None and len(loop.turns) == count and op.ins[0].op < loop.start and not in_torch(loop.code):
            yield loop.start, loop.end, op


def _count(op: Op, analysis: Analysis) -> int:
    """Return the number of steps, one or two, that an operation takes, together or singly; 0 for other operations."""
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
    """Say whether an operation is, or is part of, a call of a module that may be a cell."""
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
    """Say whether an operation reads a value that was made before the steps, or only the model's tensors."""
    sources = [_source(trace, value) for value in op.ins]
    sources = [value for value in sources if value.number not in steps]
    if not sources or (op.name in MOVES and len(op.ins) == 1):
        return False
    held = [value.op < 0 and value.origin in ("parameter", "buffer", "attribute") for value in sources]
    made = [value.op >= 0 and (value.op < begin or not trace.ops[value.op].ins) for value in sources]
    return any(made) or all(held)


def _source(trace: Trace, value: Value) -> Value:
    """Return the value that this one was moved from."""
    while value.op >= 0 and trace.ops[value.op].name in MOVES and len(trace.ops[value.op].ins) == 1:
        value = trace.ops[value.op].ins[0]
    return value
