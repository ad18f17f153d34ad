"""What a function's bytecode tells of its loops: where they are, what they count with, what they go on from."""

from __future__ import annotations

import dis
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from types import CodeType


@dataclass(frozen=True)
class CodeLoop:
    """A loop in a code object: from its head to its last jump back."""

    code: CodeType
    head: int  # offset of the instruction that the loop jumps back to
    last: int  # offset of the last jump back
    targets: tuple[str, ...]  # the variables of a `for` that nothing else in the loop sets; none for a `while`
    line: int
    lives: tuple[str, ...]  # local variables that a repetition reads before it writes them, in order of reading


@dataclass(frozen=True)
class CodeLoops:
    """All loops of a code object, and lines by offset."""

    code: CodeType
    loops: tuple[CodeLoop, ...]  # outermost first

    def around(self, offset: int) -> tuple[CodeLoop, ...]:
        """Return the loops that an instruction lies in, outermost first."""
        return tuple(loop for loop in self.loops if loop.head <= offset <= loop.last)

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
    """Return the loops of a code object, read once."""
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
    empty = CodeLoops(code, ())
    loops = [_loop(code, instructions, (head, last), empty) for head, last in ends.items()]
    return CodeLoops(code, tuple(sorted(loops, key=lambda loop: (loop.head, -loop.last))))


def _loop(code: CodeType, instructions: list[dis.Instruction], span: tuple[int, int], lines: CodeLoops) -> CodeLoop:
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
    stored = Counter(name for i in body if i.opname.startswith("STORE_") for name in _stored(i))
    alone = tuple(name for name in targets if stored[name] == 1)
    return CodeLoop(code, head, last, alone, lines.line(head), _lives(body))


def _stored(instruction: dis.Instruction) -> list[str]:
    names = _names(instruction)
    return names[:1] if "LOAD" in instruction.opname else names


def _lives(body: list[dis.Instruction]) -> tuple[str, ...]:
    first: dict[str, bool] = {}
    for instruction in body:
        name, names = instruction.opname, _names(instruction)
        if name.startswith("STORE_FAST_LOAD"):
            first.setdefault(names[0], False)
            first.setdefault(names[-1], True)
        elif name.startswith(("LOAD_FAST", "LOAD_DEREF")):
            for each in names:
                first.setdefault(each, True)
        elif name.startswith(("STORE_FAST", "STORE_DEREF")):
            for each in names:
                first.setdefault(each, False)
    return tuple(name for name, read in first.items() if read)


def _names(instruction: dis.Instruction) -> list[str]:
    value = instruction.argval
    if isinstance(value, str):
        return [value]
    return [each for each in value if isinstance(each, str)] if isinstance(value, tuple) else []
