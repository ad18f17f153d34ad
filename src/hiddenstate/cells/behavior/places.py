"""The place of each operation in the code: calls, loops, and the turns of each loop.

A Python loop is observed in the interpreter: a frame comes back to an earlier instruction, or the variable of its `for`
has changed. Nothing is guessed from what operations look like, so turns may differ (a first one, a skipped one).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from inspect import CO_GENERATOR
from types import CodeType, FrameType
from typing import Any, Literal

import torch

from .bytecode import CodeLoop, loops_of

_LIBRARY = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
# Packages whose code is between the model and its caller, or between two of its modules.
OURS = tuple(os.path.join(_LIBRARY, floor) + os.sep for floor in ("cells", "carry", "recording", "diagnosis"))
_TORCH = torch.__path__[0]


@dataclass(slots=True, eq=False, repr=False)
class Scope:
    """A call of a function, a loop in it, or one turn of a loop; together they form a tree."""

    kind: Literal["call", "loop", "turn"]
    parent: Scope | None
    key: Any  # the offset of the call, the head of the loop, or the number of the turn
    code: CodeType
    start: int  # first operation
    end: int = -1  # one after the last
    loop: CodeLoop | None = None
    turns: list[Scope] = field(default_factory=list)
    owner: int = -1  # the module call that contains it


@dataclass(slots=True, eq=False, repr=False)
class _OpenLoop:
    """A loop that a frame is in now."""

    scope: Scope  # a loop
    token: tuple[int, ...]
    offset: int  # of the last event in it
    first: tuple[int, ...]  # its token at the beginning
    early: bool = False  # the turn began at the head, before the variable changed


@dataclass(slots=True, eq=False, repr=False)
class _Activation:
    """A frame on the stack, with the loops that it is in, outermost first."""

    frame: FrameType
    scope: Scope
    offset: int
    levels: list[_OpenLoop] = field(default_factory=list)
    child: Scope | None = None  # the last call it made, and the scope of that call
    child_from: Scope | None = None

    @property
    def inner(self) -> Scope:
        return self.levels[-1].scope.turns[-1] if self.levels else self.scope


class StackTracker:
    """Follows the interpreter's stack from operation to operation, and keeps all scopes it meets."""

    def __init__(
        self, root: FrameType, on_turn: Callable[[Scope, FrameType], None], on_end: Callable[[Scope, FrameType], None]
    ) -> None:
        """Follow the calls made from `root`; report each new turn of a loop, and its end."""
        self._root = root
        self._on_turn, self._on_end = on_turn, on_end
        self.scopes: list[Scope] = [Scope("call", None, 0, root.f_code, 0)]
        self._stack: list[_Activation] = []
        self._depths: dict[FrameType, int] = {}  # by frame: its index on the stack
        self.owner = -1

    def here(self, frame: FrameType | None, number: int) -> tuple[Scope, int]:
        """Return scope and offset of the operation `number`, called from `frame`."""
        frames: list[FrameType] = []
        depth = 0
        while frame is not None and frame is not self._root:
            known = self._depths.get(frame)
            if known is not None and not frame.f_code.co_flags & CO_GENERATOR:
                depth = known  # the frames above wait for this one, and have not moved
                frames.append(frame)
                break
            if not is_between(frame.f_code):
                frames.append(frame)
            frame = frame.f_back
        frames.reverse()
        stack, last, base = self._stack, len(frames) - 1, depth
        while depth - base <= last and depth < len(stack) and stack[depth].frame is frames[depth - base]:
            if depth - base == last or self._changed(depth, frames[depth - base :]):
                self._event(stack[depth], frames[depth - base].f_lasti, number)
                depth += 1
                break
            depth += 1
        self._forget(depth)
        for each in frames[depth - base :]:
            self._enter(each, number)
        if not stack:
            return self.scopes[0], 0
        return stack[-1].inner, stack[-1].offset

    def _changed(self, depth: int, frames: list[FrameType]) -> bool:
        """Say whether a frame has moved since the last operation, or now calls another function."""
        known, frame, below = self._stack[depth], frames[0], frames[1]
        if known.offset != frame.f_lasti or depth + 1 >= len(self._stack) or self._stack[depth + 1].frame is not below:
            return True
        if not below.f_code.co_flags & CO_GENERATOR:
            return False
        # A loop over a generator meets the same frame at the same place, one turn later.
        return any(_token(frame, level.scope.loop) != level.token for level in known.levels)

    def _enter(self, frame: FrameType, number: int) -> None:
        above = self._stack[-1] if self._stack else None
        if above is not None and frame.f_code is not None:
            parent: Scope = above.inner
            if (
                above.child is not None
                and above.child_from is parent
                and above.child.key == above.offset
                and above.child.code is frame.f_code
            ):
                parent = self._again(above, number)
        else:
            parent = self.scopes[0]
        scope = Scope("call", parent, above.offset if above else 0, frame.f_code, number, owner=self.owner)
        self.scopes.append(scope)
        if above is not None:
            above.child, above.child_from = scope, above.inner
        activation = _Activation(frame, scope, -1)
        self._depths[frame] = len(self._stack)
        self._stack.append(activation)
        self._event(activation, frame.f_lasti, number)

    def _again(self, above: _Activation, number: int) -> Scope:
        """Return the next turn of a loop that is not written in Python: `functools.reduce`, `map`, `accumulate`."""
        first = above.child
        assert first is not None
        turn = first.parent
        if turn is None or turn.kind != "turn" or turn.parent is None or turn.parent.loop is not None:
            made = Scope(
                "loop", above.inner, ("each", above.offset), above.frame.f_code, first.start, owner=first.owner
            )
            turn = Scope("turn", made, 0, above.frame.f_code, first.start)
            made.turns.append(turn)
            first.parent = turn
            self.scopes += [made, turn]
        loop = turn.parent
        assert loop is not None
        turn = Scope("turn", loop, len(loop.turns), above.frame.f_code, number)
        loop.turns.append(turn)
        self.scopes.append(turn)
        self._on_turn(loop, above.frame)
        return turn

    def _event(self, activation: _Activation, offset: int, number: int) -> None:
        """Find the loops of a frame that contain an instruction."""
        loops = loops_of(activation.frame.f_code)
        around = loops.around(offset) if loops.loops else ()
        levels = activation.levels
        for depth, loop in enumerate(around):
            token = _token(activation.frame, loop)
            if depth < len(levels) and levels[depth].scope.loop is loop:
                level = levels[depth]
                innermost = depth == len(around) - 1 == len(levels) - 1
                begun = bool(token) or innermost or _begun(activation, around, depth + 1)
                if self._next_turn(level, token, offset, innermost=innermost, begun=begun):
                    self._end(activation, depth + 1)
                    self._turn(level, activation.frame, number)
                level.token, level.offset = token, offset
                continue
            self._end(activation, depth)
            scope = Scope("loop", activation.inner, loop.head, loop.code, number, loop=loop, owner=self.owner)
            self.scopes.append(scope)
            level = _OpenLoop(scope, token, offset, token)
            self._turn(level, activation.frame, number)
            levels.append(level)
        self._end(activation, len(around))
        activation.offset = offset

    def _end(self, activation: _Activation, depth: int) -> None:
        for level in activation.levels[depth:]:
            self._on_end(level.scope, activation.frame)
        del activation.levels[depth:]

    def _forget(self, depth: int) -> None:
        """Drop frames that have returned; their variables still have their last values."""
        for gone in self._stack[depth:]:
            self._end(gone, 0)
            self._depths.pop(gone.frame, None)
        del self._stack[depth:]

    def _next_turn(
        self, level: _OpenLoop, token: tuple[int, ...], offset: int, *, innermost: bool, begun: bool
    ) -> bool:
        """Say whether an instruction belongs to another turn; `begun`: the inner loops are at their first turn."""
        loop = level.scope.loop
        assert loop is not None
        if token != level.token:
            early, level.early = level.early, False
            return not early
        if offset == loop.head and level.offset > offset:
            level.early = bool(token)
            return True
        # Without a loop variable, only a jump back shows a new turn, unless an inner loop jumped.
        if token:
            return offset < level.offset and innermost and not level.early
        return offset <= level.offset if innermost else offset < level.offset and begun

    def _turn(self, level: _OpenLoop, frame: FrameType, number: int) -> None:
        loop = level.scope
        turn = Scope("turn", loop, len(loop.turns), loop.code, number)
        loop.turns.append(turn)
        self.scopes.append(turn)
        self._on_turn(loop, frame)

    def close(self, ops: list[Any]) -> None:
        """Set the end of every scope, and forget all frames."""
        for number, op in enumerate(ops):
            op.scope.end = number + 1
        # A scope is created after its parent, except for loops found at their second turn: go up from each.
        for scope in reversed(self.scopes):
            end, above = scope.end, scope.parent
            while above is not None and above.end < end:
                above.end = end
                above = above.parent
        self._forget(0)


def _begun(activation: _Activation, around: tuple[CodeLoop, ...], depth: int) -> bool:
    """Say whether those loops from `depth` on that the frame is still in are at their first turn."""
    same = [lv for lv, loop in zip(activation.levels[depth:], around[depth:], strict=False) if lv.scope.loop is loop]
    return all(_token(activation.frame, level.scope.loop) == level.first != () for level in same)


def _token(frame: FrameType, loop: CodeLoop | None) -> tuple[int, ...]:
    """Return what tells the turns of a `for` apart: the ids of its variables' objects; nothing for other loops."""
    if loop is None or not loop.targets:
        return ()
    held = frame.f_locals
    return tuple([id(held.get(name)) for name in loop.targets])


def in_torch(code: CodeType) -> bool:
    """Say whether code is torch's own."""
    return code.co_filename.startswith(_TORCH)


def line_at(scope: Scope, offset: int) -> str:
    """Return file and line of an instruction; if it is torch's own, of the user's line that led to it."""
    while in_torch(scope.code):
        while scope.kind != "call" and scope.parent is not None:
            scope = scope.parent
        offset, above = scope.key, scope.parent
        if above is None:
            return ""
        scope = above
    if scope.parent is None:
        return ""  # the model itself is torch's, so the call contains no line of the user's
    return f"{os.path.basename(scope.code.co_filename)}:{loops_of(scope.code).line(offset)}"


def line_of(loop: Scope) -> str:
    """Return file and line of a loop."""
    if loop.loop is not None:
        return line_at(loop, loop.loop.head)
    return line_at(loop, loop.key[1] if isinstance(loop.key, tuple) else 0)


_between: dict[int, tuple[bool, CodeType]] = {}  # by id, since hashing code is slow; the code keeps its id in use
# Functions between a call and the function that it calls, which are not places of their own.
_BETWEEN = {os.path.join(_TORCH, "overrides.py"), os.path.join(_TORCH, "nn", "modules", "module.py")}


def is_between(code: CodeType) -> bool:
    """Say whether code is only between a call and its target: ours, or torch's own way to a forward."""
    known = _between.get(id(code))
    if known is None:
        name = code.co_filename
        known = _between[id(code)] = name.startswith(OURS) or name in _BETWEEN, code
    return known[0]
