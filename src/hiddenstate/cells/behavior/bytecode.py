"""Loops in a function's bytecode: where they are, what they count with, and what they continue from."""

from __future__ import annotations

import dis
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import CodeType


@dataclass(frozen=True)
class CodeLoop:
    """A loop in a code object, from its head to its last jump back."""

    code: CodeType
    head: int  # offset of the instruction that the loop jumps back to
    last: int  # offset of the last jump back
    targets: tuple[str, ...]  # the variables of a `for` that nothing else in the loop sets; none for a `while`
    line: int
    lives: tuple[str, ...]  # local variables that a turn reads before it writes them, in order of reading


@dataclass(frozen=True)
class Inlined:
    """A comprehension's variable in Python 3.12 and later, where it runs in the enclosing function's frame."""

    name: str
    start: int  # offset at which the function's own variable of that name is saved
    end: int  # offset at which it is restored


@dataclass(frozen=True)
class CodeLoops:
    """All loops of a code object, and lines by offset."""

    code: CodeType
    loops: tuple[CodeLoop, ...]  # outermost first
    inlined: tuple[Inlined, ...] = ()

    def around(self, offset: int) -> tuple[CodeLoop, ...]:
        """Return the loops around an instruction, outermost first."""
        return tuple(loop for loop in self.loops if loop.head <= offset <= loop.last)

    def hidden(self, offset: int) -> set[str]:
        """Return the variables at an instruction that belong to a comprehension."""
        return {each.name for each in self.inlined if each.start <= offset <= each.end}

    @cached_property
    def _lines(self) -> tuple[list[int], list[int]]:
        spans = [(start, line) for start, _, line in self.code.co_lines() if line is not None]
        return [start for start, _ in spans], [line for _, line in spans]

    def line(self, offset: int) -> int:
        """Return the line of an instruction."""
        starts, lines = self._lines
        return lines[max(bisect_right(starts, offset) - 1, 0)] if lines else self.code.co_firstlineno


_known: dict[CodeType, CodeLoops] = {}


def loops_of(code: CodeType) -> CodeLoops:
    """Return the loops of a code object, with a cache."""
    found = _known.get(code)
    if found is None:
        found = _known[code] = _read(code)
    return found


def _read(code: CodeType) -> CodeLoops:
    instructions = list(dis.get_instructions(code))
    jumps = set(dis.hasjrel) | set(dis.hasjabs)
    ends: dict[int, int] = {}
    for instruction in instructions:
        target = instruction.argval
        if instruction.opcode in jumps and isinstance(target, int) and target <= instruction.offset:
            ends[target] = max(ends.get(target, 0), instruction.offset)
    empty = CodeLoops(code, (), inlined_in(instructions))
    loops = [_loop(instructions, (head, last), empty) for head, last in ends.items()]
    return CodeLoops(code, tuple(sorted(loops, key=lambda loop: (loop.head, -loop.last))), empty.inlined)


def inlined_in(instructions: list[dis.Instruction]) -> tuple[Inlined, ...]:
    """Return the variables of inlined comprehensions: each is cleared first, and restored after the loop."""
    found = []
    for place, instruction in enumerate(instructions):
        if instruction.opname == "LOAD_FAST_AND_CLEAR":
            (name,), after = _names(instruction), instructions[place:]
            over = next((i.argval for i in after if i.opname == "FOR_ITER"), instruction.offset)
            stores = (i.offset for i in after if i.offset >= over and name in _stored(i))
            found.append(Inlined(name, instruction.offset, next(stores, over)))
    return tuple(found)


def _loop(instructions: list[dis.Instruction], span: tuple[int, int], known: CodeLoops) -> CodeLoop:
    head, last = span
    body = [i for i in instructions if head <= i.offset <= last]
    targets: list[str] = []
    if body and body[0].opname == "FOR_ITER":
        for instruction in body[1:]:
            if instruction.opname.startswith(("UNPACK", "EXTENDED_ARG", "CACHE", "NOP")):
                continue
            if not instruction.opname.startswith("STORE_"):
                break
            targets += _stored(instruction)
            if "LOAD" in instruction.opname:
                break
    own = known.hidden(head)  # the loop's own, if it is a comprehension's
    stored = Counter(name for i in body for name in _stored(i) if name not in known.hidden(i.offset) - own)
    alone = tuple(name for name in targets if stored[name] == 1)
    return CodeLoop(known.code, head, last, alone, known.line(head), _lives(body, known))


_SETS, _READS = ("STORE_FAST", "STORE_DEREF", "STORE_NAME", "STORE_GLOBAL"), ("LOAD_FAST", "LOAD_DEREF")


def _stored(instruction: dis.Instruction) -> list[str]:
    """Return the variables that an instruction sets; a combined instruction may then read another one."""
    if not instruction.opname.startswith(_SETS):
        return []
    return _names(instruction)[:1] if "LOAD" in instruction.opname else _names(instruction)


def _lives(body: list[dis.Instruction], known: CodeLoops) -> tuple[str, ...]:
    first: dict[str, bool] = {}
    for instruction in body:
        hidden, stored = known.hidden(instruction.offset), _stored(instruction)
        read = _names(instruction)[len(stored) :] if stored or instruction.opname.startswith(_READS) else []
        for name, is_read in (*((name, False) for name in stored), *((name, True) for name in read)):
            if name not in hidden:
                first.setdefault(name, is_read)
    return tuple(name for name, is_read in first.items() if is_read)


def _names(instruction: dis.Instruction) -> list[str]:
    value = instruction.argval
    if isinstance(value, str):
        return [value]
    return [each for each in value if isinstance(each, str)] if isinstance(value, tuple) else []


def may_read_first(code: CodeType, name: str, methods: Mapping[str, CodeType] | None = None) -> bool:
    """Say whether a function may read an attribute, also by a string, before it has set it.

    An assignment in only one of two branches does not count as set. With `methods`, those it calls by name count too.
    """
    if any(constant == name for constant in code.co_consts if isinstance(constant, str)):
        return True
    if any(may_read_first(inner, name, methods) for inner in code.co_consts if isinstance(inner, CodeType)):
        return True
    return _first_use(code, name, dict(methods or {})) == "read"


def _first_use(code: CodeType, name: str, methods: dict[str, CodeType]) -> str:
    """Return whether an attribute is "read" or certainly "written" first; "" if neither.

    Each of `methods` is examined once, and removed.
    """
    instructions = list(dis.get_instructions(code))
    jumps = set(dis.hasjrel) | set(dis.hasjabs)
    over = [(i.offset, i.argval) for i in instructions if i.opcode in jumps and isinstance(i.argval, int)]
    for each in instructions:
        use, names = "", each.argval if isinstance(each.argval, str) else ""
        if names == name and "ATTR" in each.opname:
            use = "written" if each.opname == "STORE_ATTR" else "read"
        elif names in methods and ("ATTR" in each.opname or "METHOD" in each.opname):
            use = _first_use(methods.pop(names), name, methods)
        if use == "read" or (use and not any(start < each.offset < end for start, end in over)):
            return use
    return ""
