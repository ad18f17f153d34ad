"""How a loop runs by the engine: learned from one run as it is written, and proven on that run's own numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from ...cells import Layer
from ...errors import Untraceable
from ...state import State, ends, mapped
from ..checks import Task
from .body import (
    TensorKind,
    TensorSlot,
    TurnForm,
    kind_of,
    make_body,
    make_turn,
    packed_dtype,
    slotted,
    spelled_out,
)
from .collected import Collected
from .index import LeftAlone
from .joined import apart
from .loop_code import LoopCode
from .turns import Turns


@dataclass(frozen=True, slots=True, eq=False)
class SeenRun:
    """One run of a loop as it was written: what it began with, and what it left."""

    turns: Turns
    names: dict[str, Any]  # as they were when it began
    lengths: dict[str, int]  # of the lists that it appends to, before
    versions: list[tuple[Tensor, int]]  # of the tensors that it reads
    stream: list[Tensor]  # the random streams before it
    line: int  # of the loop

    def unwritten(self) -> bool:
        """Say whether the tensors that it read are as they were."""
        return all(tensor._version == version for tensor, version in self.versions)


@dataclass(frozen=True, slots=True, eq=False)
class Left:
    """What all turns left in one list, or in one tensor."""

    values: list[Any]  # of a turn, with slots
    along: list[Tensor]  # the tensors of all turns, (turn, ...), by the number of their slot
    handed_on: frozenset[int] = frozenset()  # the numbers of those that are states

    @property
    def whole(self) -> Tensor | None:
        """What they left as one tensor, (turn, ...), where each left one."""
        only = self.values[0] if len(self.values) == 1 else None
        return self.along[only.number] if isinstance(only, TensorSlot) else None

    def items(self) -> list[Any]:
        """Return one thing after the other."""
        used = {end.number for _, end in ends(self.values) if isinstance(end, TensorSlot)}
        each = {number: apart(self.along[number], states=number in self.handed_on) for number in used}
        if self.whole is not None:
            return next(iter(each.values()))
        count = self.along[0].shape[0] if self.along else 0
        turns = [{number: items[turn] for number, items in each.items()} for turn in range(count)]
        return [_filled(value, turn) for turn in turns for value in self.values]


@dataclass(frozen=True, slots=True, eq=False)
class Given:
    """What the engine gave, as the loop would have left it."""

    carried: dict[str, Any]
    left: dict[str, Left]  # collecting list -> what turns left there
    finals: dict[str, Any]


class RollPlan:
    """One form of a loop's turn: put together for the engine, and taken apart again."""

    def __init__(self, code: LoopCode, function: FunctionType, form: TurnForm, names: Sequence[str]) -> None:
        """Write the code of a turn."""
        self.code, self.form = code, form
        self.reads = list(names)
        self.layer: Layer = make_body(code, function, form, names)
        self._turn = make_turn(code, function, [*names, *code.carried, *form.pieces])

    def fits(self, turns: Turns) -> bool:
        """Say whether these turns take the same kinds of pieces."""
        rows, pieces = self.form.rows, turns.pieces
        if any(kind_of(piece[0], rows) != self.form.pieces.get(name) for name, piece in pieces.items()):
            return False
        return not rows or len({piece.shape[1] for piece in pieces.values()}) <= 1

    def settled(self, carried: dict[str, Any], count: int | None) -> list[Tensor] | None:
        """Return the tensors of a state that is of this form, else None; `count`: rows of it."""
        try:
            nested, found = _slots({name: carried[name] for name in self.code.carried}, self.code.line)
        except LeftAlone:
            return None
        kinds = [kind_of(tensor, self.form.rows) if tensor.dim() or not self.form.rows else None for tensor in found]
        if kinds != [kind for _, kind in self.form.states] or spelled_out(nested) != spelled_out(self.form.nested):
            return None
        counts = {part.shape[0] for part in found} | (set() if count is None else {count}) if self.form.rows else set()
        return found if len(counts) <= 1 else None

    def first_turn(self, turns: Turns, names: dict[str, Any]) -> dict[str, Any]:
        """Run the first turn as it is written; returns what it bound and left."""
        given = {name: names[name] for name in (*self.reads, *self.code.carried) if name in names}
        made: dict[str, Any] = self._turn(**given, **{name: piece[0] for name, piece in turns.pieces.items()})
        return made

    def as_written(self, turns: Turns, names: dict[str, Any]) -> list[dict[str, Any]]:
        """Run all turns as they are written, one after the other; returns what each bound and left."""
        given = {name: names[name] for name in (*self.reads, *self.code.carried) if name in names}
        found = []
        for turn in range(turns.count):
            found.append(self._turn(**given, **{name: piece[turn] for name, piece in turns.pieces.items()}))
            given.update({name: found[-1][name] for name in self.code.carried})
        return found

    def task(self, turns: Turns, parts: Sequence[Tensor], first: int) -> Task:
        """Return turns from `first` on as a task for the engine."""
        rows = self.form.rows
        pieces = {name: piece[first:] for name, piece in turns.pieces.items()}
        if rows and len(pieces) == 1:
            (only,) = pieces.values()
            x = only.transpose(0, 1)
        elif pieces:
            dtype = packed_dtype(self.form.pieces.values())
            flat = [
                piece.flatten(2 if rows else 1).to(dtype)
                if piece.dim() > (2 if rows else 1)
                else piece.unsqueeze(-1).to(dtype)
                for piece in pieces.values()
            ]
            joined = torch.cat(flat, -1)
            x = joined.transpose(0, 1) if rows else joined.unsqueeze(0)
        else:
            count = parts[0].shape[0] if rows else 1
            x = torch.zeros(1, dtype=torch.float32, device=parts[0].device).expand(count, turns.count - first, 1)
        given = parts if rows else [part.unsqueeze(0) for part in parts]
        return Task(x, State({name: part for (name, _), part in zip(self.form.states, given, strict=True)}))

    def outputs(self, out: Tensor) -> list[Tensor]:
        """Return what the turns gave, each (turn, ...)."""
        form = self.form
        # As turns make them, each has a place of its own in memory: by that a `view` of one succeeds.
        along, found, start = out.transpose(0, 1).contiguous(), [], 0
        if along.shape[-1] != sum(kind.size for kind in form.outputs) and not (form.rows and len(form.outputs) == 1):
            raise Untraceable("turns leave tensors of other shapes than they did")
        if form.rows and len(form.outputs) == 1:
            return [along]
        for kind in form.outputs:
            piece = along[..., start : start + kind.size]
            shape = (*along.shape[:2], *kind.shape) if form.rows else (along.shape[0], *kind.shape)
            found.append(piece.reshape(shape).to(kind.dtype))
            start += kind.size
        return found

    def values(self, out: Tensor, state: State) -> Given:
        """Return what the names and lists of the loop get of what the engine gave."""
        parts = list(state.values()) if self.form.rows else [part.squeeze(0) for part in state.values()]
        carried = {name: _filled(value, parts) for name, value in self.form.nested.items()}
        along = self.outputs(out) if self.form.outputs else []
        left = {name: Left(values, along, self.form.handed_on) for name, values in self.form.left.items()}
        finals = {}
        for name, value in self.form.finals.items():
            finals[name] = mapped(value, lambda _, end: along[end.number][-1] if isinstance(end, TensorSlot) else end)
        return Given(carried, left, finals)


def _slots(values: dict[str, Any], line: int) -> tuple[dict[str, Any], list[Tensor]]:
    nested: dict[str, Any] = {}
    found: list[Tensor] = []
    for name, value in values.items():
        nested[name], more = slotted(value, len(found), line)
        found += more
    return nested, found


def _filled(value: Any, tensors: Any) -> Any:
    return mapped(value, lambda _, end: tensors[end.number] if isinstance(end, TensorSlot) else end)


def learn(code: LoopCode, function: FunctionType, seen: SeenRun, after: dict[str, Any]) -> RollPlan:
    """Return a plan for runs like the one that was seen, or raise why there is none."""
    missing = [name for name in code.carried if name not in seen.names]
    if missing:
        raise LeftAlone(f"{missing[0]!r} is not bound before the loop", code.line)
    if not seen.unwritten():
        raise LeftAlone("turns write into tensors that were there before", code.line)
    nested, states = _slots({name: after[name] for name in code.carried}, code.line)
    if not states:
        raise LeftAlone("no tensor crosses from turn to turn", code.line)
    left, outputs = _left(code, seen, after)
    finals, more = _slots({name: after[name] for name in code.finals if name in after}, code.line)
    finals = mapped(
        finals, lambda _, end: TensorSlot(end.number + len(outputs)) if isinstance(end, TensorSlot) else end
    )
    outputs += more
    pieces = {name: piece[0] for name, piece in seen.turns.pieces.items()}
    everything = [*pieces.values(), *states, *outputs]
    rows = all(tensor.dim() > 0 for tensor in everything) and len({tensor.shape[0] for tensor in everything}) == 1
    kinds = [kind_of(tensor, rows) for tensor in outputs]
    form = TurnForm(
        rows,
        {name: kind_of(piece, rows) for name, piece in pieces.items()},
        [(name, kind_of(tensor, rows)) for name, tensor in zip(_names(nested), states, strict=True)],
        nested,
        left,
        finals,
        kinds,
        _handed_on(code, left, outputs, states),
        packed_dtype(kinds) if kinds else torch.float32,
    )
    if pieces:
        packed_dtype(form.pieces.values())
    local = {*function.__code__.co_varnames, *function.__code__.co_cellvars}
    unbound = sorted(name for name in code.read if name in local and name not in seen.names)
    if unbound:
        raise LeftAlone(f"{unbound[0]!r} is not bound before the loop", code.line)
    return RollPlan(code, function, form, sorted(name for name in code.read if name in seen.names and name in local))


def _names(nested: dict[str, Any]) -> list[str]:
    found = []
    for name, value in nested.items():
        for path, end in ends(value):
            if isinstance(end, TensorSlot):
                found.append(".".join([name, *map(str, path)]))
    return found


def _left(code: LoopCode, seen: SeenRun, after: dict[str, Any]) -> tuple[dict[str, list[Any]], list[Tensor]]:
    """Return what each turn leaves behind, with slots, and examples of the tensors."""
    left: dict[str, list[Any]] = {}
    outputs: list[Tensor] = []
    for collected in code.collected:
        into = after.get(collected.into)
        if collected.name in seen.turns.written:
            examples: list[Any] = [seen.turns.written[collected.name].pieces[-1]]
        elif collected.name in seen.turns.places:
            examples = placed(seen, into, collected)[-1:]
        elif collected.axis is not None:
            examples = grown(collected, seen, after)[-1:]
        else:
            examples = _appended(code, seen, into, collected)
        left[collected.name] = []
        for example in examples:
            value, more = slotted(example, len(outputs), code.line)
            left[collected.name].append(value)
            outputs += more
    return left, outputs


def _handed_on(
    code: LoopCode, left: dict[str, list[Any]], outputs: list[Tensor], states: list[Tensor]
) -> frozenset[int]:
    """Return which slots of what turns leave are states; refuse lists of them that are handed out with a graph."""
    found = {number for number, output in enumerate(outputs) if any(output is state for state in states)}
    for collected in code.collected:
        slots = {end.number for _, end in ends(left[collected.name]) if isinstance(end, TensorSlot)}
        if collected.into in code.escaping and any(outputs[number].requires_grad for number in slots & found):
            name = collected.into
            raise LeftAlone(
                f"states of single turns are handed out in {name!r}, and gradients may be asked for", code.line
            )
    return frozenset(found)


def grown(collected: Collected, seen: SeenRun, after: dict[str, Any]) -> list[Tensor]:
    """Return what each turn has made a tensor longer by."""
    before, now, axis = seen.names.get(collected.into), after.get(collected.into), collected.axis
    assert axis is not None
    if not isinstance(now, Tensor) or not (before is None or isinstance(before, Tensor)):
        raise LeftAlone(f"{collected.into!r}, which grows, is no tensor", seen.line)
    start = 0 if before is None or before.dim() != now.dim() else before.shape[axis]
    width, rest = divmod(now.shape[axis] - start, seen.turns.count)
    if rest or width < 1 or (before is not None and before.numel() and before.dim() != now.dim()):
        raise LeftAlone(f"{collected.into!r} grows now more, now less", seen.line)
    return list(now.narrow(axis, start, width * seen.turns.count).chunk(seen.turns.count, axis))


def placed(seen: SeenRun, into: Any, collected: Collected) -> list[Any]:
    """Return what turns put into places of a list or dict; all turns have to have put the same kind of thing there."""
    items = [into[place] for place in seen.turns.places[collected.name]]
    if any(_kinds(item) != _kinds(items[-1]) for item in items):
        raise LeftAlone(f"turns put different kinds of things into {collected.into!r}", seen.line)
    return items


def appended(seen: SeenRun, into: list[Any], collected: Collected) -> list[Any]:
    """Return what turns put into a list, one turn after the other."""
    count = len(into) - seen.lengths[collected.into]
    return into[:count][::-1] if collected.in_front else into[len(into) - count :]


def _appended(code: LoopCode, seen: SeenRun, into: Any, collected: Collected) -> list[Any]:
    """Return what the last turn put into a list; all turns have to have left the same kind of things."""
    name = collected.into
    if type(into) is not list:
        raise LeftAlone(f"what turns leave is kept in {name!r}, a {type(into).__name__}", code.line)
    new, count = appended(seen, into, collected), seen.turns.count
    if len(new) % count:
        raise LeftAlone(f"turns append now more, now less to {name!r}", code.line)
    each = len(new) // count
    last = new[len(new) - each :]
    expected = [_kinds(value) for value in last]
    for turn in range(1, count):
        if [_kinds(value) for value in new[turn * each : (turn + 1) * each]] != expected:
            raise LeftAlone(f"turns append different kinds of things to {name!r}", code.line)
    return last


def _kinds(value: Any) -> list[Any]:
    return [(path, kind_of(end, False) if isinstance(end, Tensor) else end) for path, end in ends(value)]


def results(plan: RollPlan, seen: SeenRun, after: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield all that a run left, by name, as it is compared with what the engine gives."""
    for name in plan.code.carried:
        yield name, after[name]
    for name in plan.form.finals:
        yield name, after[name]
    for collected in plan.code.collected:
        if collected.name in seen.turns.written:
            yield collected.into, list(seen.turns.written[collected.name].in_order().unbind(0))
        elif collected.axis is not None:
            yield collected.into, grown(collected, seen, after)
        elif collected.name in seen.turns.places:
            yield collected.into, placed(seen, after[collected.into], collected)
        else:
            yield collected.into, appended(seen, after[collected.into], collected)


__all__ = ["Given", "Left", "RollPlan", "SeenRun", "TensorKind", "learn", "results"]
