"""The replay law: a repetition that runs again from the found parts alone must give the same; else nothing is claimed.

Three things are checked. Of all that earlier repetitions made, each repetition reads only the parts, always at the
same places. Some repetitions, run again from the parts, give the same parts. And run again from other numbers, they
give something else: a part that never matters is not a part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack

import torch
from torch import Tensor

from ..snapshot import random_streams
from .candidates import Analysis, Candidate, Draft
from .memory import Value, storage_of
from .operation import BLENDS, DRAWS, MAY_DRAW, MOVES, UNWRITTEN, Op, leaves, replaced
from .repetition import reached
from .trace import Trace

_RTOL, _ATOL = 1e-3, 1e-5


class Lost(Exception):
    """A value that a replay needs no longer exists."""


class Law:
    """The replay law for one recurrence."""

    def __init__(self, analysis: Analysis, candidate: Candidate) -> None:
        """Prepare to check a recurrence among the others of its call."""
        self._candidate = candidate
        self._windows = candidate.windows
        self._trace = analysis.trace
        self._chain = candidate.chain
        self._others = set(analysis.settled)  # values that belong to other recurrences of the same call
        self._others.update(*(chain.on_the_way for chain in analysis.chains if chain is not self._chain))
        for other in analysis.candidates:
            if other is not candidate:
                self._others |= other.numbers
        count = self._windows.count
        self._turns = sorted({min(1, count - 1), count // 2, count - 1})

    def broken(self) -> str:
        """Return the reason if the law does not hold, else an empty string."""
        drafts = self._candidate.drafts
        if any(value is None for draft in drafts for value in draft.values):
            return "what crosses was not found after every repetition"
        steps = {}
        for turn in range(1, self._windows.count):
            ops, foreign = self._step(turn)
            if foreign is not None:
                return (
                    f"repetition {turn} reads {_described(foreign)} of an earlier one that is none of the found parts"
                )
            steps[turn] = ops
        if not self._steady(steps):
            return "which part is which changes from repetition to repetition"
        if self._stale():
            return "what is taken for the last state was made before the last repetition"
        for turn in self._turns if self._windows.count > 1 else ():
            reason = self._run_again(turn, steps[turn])
            if reason:
                return reason
        lost = any(value is not None and value.data() is None for draft in drafts for value in draft.values)
        return "what crosses was overwritten, and its values are lost" if lost else ""

    def idle(self) -> list[Draft]:
        """Return the parts that never matter: whatever they hold, every repetition gives the same."""
        return [
            draft for draft in self._candidate.drafts if not any(self._matters(draft, turn) for turn in self._turns)
        ]

    def _sources(self, turn: int) -> dict[int, int]:
        """Return the parts that a repetition starts from: value number -> index of the part."""
        drafts = self._candidate.drafts
        return {v.number: place for place, d in enumerate(drafts) if (v := d.values[turn - 1]) is not None}

    def _targets(self, turn: int) -> list[Value]:
        return [value for draft in self._candidate.drafts if (value := draft.values[turn]) is not None]

    def _step(self, turn: int) -> tuple[list[int], Value | None]:
        """Return the operations between the parts before and after a repetition, and an operand that is not a part.

        Operands made by an earlier repetition are not allowed, unless they belong to another recurrence. What a cell is
        given besides its state is its input, wherever it comes from.
        """
        sources, todo = self._sources(turn), self._targets(turn)
        low, begin = self._windows.span(turn)[0], self._windows.starts[0]
        seen: set[int] = set()
        ops: set[int] = set()
        while todo:
            value = todo.pop()
            if value.number in sources or value.number in seen or value.op < begin or self._windows.between(value.op):
                continue
            seen.add(value.number)
            if self._is_input(value, turn):
                continue
            if value.op < low:
                if value.number not in self._others:
                    return [], value
                continue
            ops.add(value.op)
            todo += self._operands(value, turn)
        return sorted(ops), None

    def _is_input(self, value: Value, turn: int) -> bool:
        if self._chain is None:
            return False
        states = {draft.argument for draft in self._candidate.drafts}
        given = self._chain.calls[turn].args
        if not any(one.number == value.number for place, one in given if place not in states):
            return False
        # The cell's own earlier result, plain or masked, is state, unless it belongs to another recurrence.
        earlier = {one.number for _, one in self._chain.calls[turn - 1].results}
        low, todo = self._windows.span(turn)[0], [value]
        for one in todo:
            if one.number in earlier and one.number not in self._others and one.number not in self._sources(turn):
                return False
            if one.op >= low and self._trace.ops[one.op].name in MOVES | BLENDS and len(todo) < _LISTED:
                todo += self._trace.ops[one.op].ins
        return True

    def _operands(self, value: Value, turn: int) -> list[Value]:
        """Return the operands of a value; around a cell's calls, where the state is masked, only its carriers."""
        op = self._trace.ops[value.op]
        if self._chain is None:
            return op.ins
        call = self._chain.calls[turn]
        if call.start <= value.op < call.end:
            return op.ins
        results = {one.number for _, one in call.results}
        sources = self._sources(turn)
        way = [v for v in op.ins if v.number in self._chain.on_the_way or v.number in results or v.number in sources]
        return way or op.ins

    def _steady(self, steps: dict[int, list[int]]) -> bool:
        """Say whether each part is always read at the same places, and passed as the same argument."""
        if self._chain is not None:
            return all(self._handed(draft, turn) for draft in self._candidate.drafts for turn in steps)
        seen: dict[tuple[int, int], int] = {}
        for turn, ops in steps.items():
            sources = self._sources(turn)
            for number in ops:
                for position, value in enumerate(self._trace.ops[number].ins):
                    part = sources.get(value.number)
                    if part is not None and len(self._trace.ops[number].ins) < _LISTED:
                        site = (self._windows.place(number), position)
                        if seen.setdefault(site, part) != part:
                            return False
        return True

    def _handed(self, draft: Draft, turn: int) -> bool:
        """Say whether a cell's call was given this part, and no other part instead."""
        assert self._chain is not None
        given = next((v for place, v in self._chain.calls[turn].args if place == draft.argument), None)
        own, sources = draft.values[turn - 1], self._sources(turn)
        if given is None or own is None or given is own:
            return True
        todo, low, met = [given], self._windows.span(turn)[0], set()
        for value in todo:
            if value.number in sources:
                met.add(value.number)
            elif value.op >= low and len(todo) < _LISTED:
                todo += self._trace.ops[value.op].ins
        return own.number in met or not met

    def _stale(self) -> bool:
        """Say whether the last repetition made a state, but an older one was taken for it."""
        windows, last = self._windows, self._windows.count - 1
        if self._chain is not None:
            made = {value.number for _, value in self._chain.calls[-1].results} | self._made_after(last)
            return any(value.number not in made for value in self._targets(last))
        for draft in self._candidate.drafts:
            value, before = draft.values[last], draft.values[last - 1]
            if value is before and value is not None and windows.turn(value.op) == last - 1:
                place = windows.place(value.op)
                if any(windows.place(number) == place for number in range(*windows.span(last))):
                    return True
        return False

    def _made_after(self, turn: int) -> set[int]:
        start, end = self._windows.span(turn)
        start = self._chain.calls[turn].start if self._chain is not None else start
        ops = self._trace.ops[start : max([end, *(value.op + 1 for value in self._targets(turn))])]
        return {value.number for op in ops for value in op.outs}

    def _run_again(self, turn: int, ops: list[int]) -> str:
        try:
            made = run_again(self._trace, ops, {})
        except Lost as lost:
            return f"repetition {turn} could not be run again: {lost}"
        except Exception as error:  # an operation that runs alone may raise anything
            return f"repetition {turn} could not be run again ({type(error).__name__}: {str(error)[:80]})"
        for value in self._targets(turn):
            before, after = value.data(), made.get(value.number)
            if before is None:
                return "what crosses was overwritten, and its values are lost"
            if after is not None and not _close(before, after):
                return f"repetition {turn}, run again from what crossed, gives something else"
        return ""

    def _matters(self, draft: Draft, turn: int) -> bool:
        """Say whether a repetition with another value of this part ends in another state, or leaves something else."""
        part = draft.values[turn - 1]
        old = part.data() if part is not None else None
        if part is None or old is None or old.numel() == 0:
            return True
        if any(other is not draft and other.values[turn] is part for other in self._candidate.drafts):
            return True  # passed on as another part: a window
        low, high = self._windows.span(turn)
        high = max([high, *(value.op + 1 for value in self._targets(turn))])
        ops = reached(self._trace, {part.number}, (max(low, part.op + 1), high))
        if any(_cannot_tell(self._trace.ops[number]) for number in ops):
            return True
        lasting = self._lasting(ops, turn, high)
        for other in _others_than(old):
            try:
                made = run_again(self._trace, ops, {part.number: other})
            except Exception:  # for example an index out of range: then the part is used
                return True
            if any(value.number in made and not _equal(value.data(), made[value.number]) for value in lasting):
                return True
        return False

    def _lasting(self, ops: list[int], turn: int, high: int) -> list[Value]:
        """Return what these operations leave behind: parts, and anything that is read after the repetition."""
        outs = {value.number: value for number in ops for value in self._trace.ops[number].outs}
        kept = {value.number for value in self._targets(turn)}
        kept |= {value.number for op in self._trace.ops[high:] for value in op.ins if value.number in outs}
        kept |= {value.number for call in self._trace.calls for _, value in call.results if value.number in outs}
        return [value for number, value in outs.items() if number in kept]


def run_again(
    trace: Trace, ops: Iterable[int], made: dict[int, Tensor], *, only_changed: bool = False
) -> dict[int, Tensor]:
    """Run operations again with the values in `made`; with `only_changed`, only those that depend on these."""

    def data(value: Value) -> Tensor:
        if value.number in made:
            return made[value.number]
        found = value.data()
        if found is None:
            raise Lost(f"a tensor of shape {value.shape} was overwritten")
        return found

    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for number in ops:
            op = trace.ops[number]
            if not only_changed or any(value.number in made for value in op.ins):
                _again(op, made, data)
    return made


_LISTED = 64  # a list with more operands is treated as a whole, since their order identifies no parts


def _described(value: Value) -> str:
    kind = str(value.tensor.dtype).removeprefix("torch.")
    return f"a {kind} tensor of shape {value.shape}"


def _cannot_tell(op: Op) -> bool:
    """Say whether an operation cannot run on other numbers: it drew random ones, or passed them to Python or memory."""
    drawn = op.name in DRAWS and bool(op.ins)
    return (
        drawn or op.escapes or op.name == "grad" or _in_memory(op) or any(value.tensor.is_sparse for value in op.outs)
    )


def _in_memory(op: Op) -> bool:
    return op.name == "alias" or (op.name in MOVES and any(value not in op.ins for _, value in op.reads))


def _others_than(old: Tensor) -> list[Tensor]:
    """Return other numbers to use instead of these, some near and some far."""
    if old.is_floating_point() or old.is_complex():
        noise = torch.randn(old.shape, generator=torch.Generator().manual_seed(0)).to(old.device).to(old.dtype)
        return [old + 0.1 * noise, 1.7 - 2 * old + noise]
    if old.dtype is torch.bool:
        return [~old]
    moved = old.flatten().roll(1).reshape(old.shape)
    return [old + 1 if torch.equal(moved, old) else moved, torch.where(old > 0, old - 1, old + 1)]


def _equal(one: Tensor | None, other: Tensor) -> bool:
    return one is not None and one.shape == other.shape and bool(torch.equal(one, other.to(one.dtype)))


def _again(op: Op, made: dict[int, Tensor], data: Callable[[Value], Tensor]) -> None:
    if "dropout" in op.name and len(op.ins) == len(op.outs) == 1:
        made[op.outs[0].number] = _masked_as_drawn(op, data(op.ins[0]), data)
        return
    if op.name in DRAWS or op.name in UNWRITTEN or op.name == "grad" or not op.outs:
        made.update({value.number: data(value) for value in op.outs})
        return
    if _in_memory(op):
        _again_in_memory(op, made, data)
        return
    held = {id(tensor): value for tensor, value in op.reads}
    copies: dict[int, Tensor] = {}

    def put(tensor: Tensor) -> Tensor:
        if id(tensor) not in held:
            return tensor
        if id(tensor) not in copies:
            found = data(held[id(tensor)])
            # Some kernels write to buffers without counting it.
            written = held[id(tensor)].origin in ("buffer", "attribute") or any(v.tensor is tensor for v in op.outs)
            copies[id(tensor)] = found.clone() if written else found
        return copies[id(tensor)]

    streams = random_streams() if op.name in MAY_DRAW or op.name.endswith(".forward") else []
    with ExitStack() as modes:
        for device, dtype in op.cast:
            modes.enter_context(torch.autocast(device, dtype))
        # Without gradients, torch's layers run other kernels, which round differently.
        modes.enter_context(torch.set_grad_enabled(op.grad and op.name.endswith(".forward")))
        result = op.func(*replaced(op.args, put), **{key: replaced(arg, put) for key, arg in op.kwargs.items()})
    if streams and not all(map(torch.equal, streams, random_streams())):  # it drew: repeat its draws
        made.update({value.number: data(value) for value in op.outs})
        return
    results = [tensor.detach() for _, tensor in leaves(result)]
    for value in op.outs:
        if id(value.tensor) in copies:
            made[value.number] = copies[id(value.tensor)]
        elif value.place < len(results):
            made[value.number] = results[value.place]


def _masked_as_drawn(op: Op, new: Tensor, data: Callable[[Value], Tensor]) -> Tensor:
    """Apply a recorded dropout to other numbers: drop the same entries, and scale the rest in the same way."""
    old, out = op.ins[0].data(), data(op.outs[0])
    if old is None or old is new or new.shape != out.shape:
        return out
    return torch.where(old == 0, out, out / old * new).to(out.dtype)


def _again_in_memory(op: Op, made: dict[int, Tensor], data: Callable[[Value], Tensor]) -> None:
    """Follow numbers through a part of a tensor that is written and read by index."""
    for value in op.outs:
        if not any(source.number in made for source in op.ins):
            made[value.number] = data(value)
        elif len(op.ins) == 1 and op.ins[0].tensor.numel() == value.tensor.numel():
            made[value.number] = data(op.ins[0]).reshape(value.shape)
        else:
            made[value.number] = _overlaid(value, op.ins, data)


def _overlaid(value: Value, sources: list[Value], data: Callable[[Value], Tensor]) -> Tensor:
    """Return what a tensor would hold if other numbers had been written through tensors that share its memory."""
    key, old = storage_of(value.tensor), value.data()
    shared = [source for source in sources if key and storage_of(source.tensor) == key]
    if old is None or not key:
        raise Lost(f"a tensor of shape {value.shape} was overwritten")
    if not shared and len(sources) == 1:  # the single source was written over all of it
        return data(sources[0]).broadcast_to(value.shape)
    size = value.tensor.untyped_storage().nbytes() // value.tensor.element_size()
    if size > _LARGEST or any(source.tensor.dtype != value.tensor.dtype for source in shared):
        raise Lost(f"a tensor of shape {value.shape} was written in pieces")
    index = torch.arange(size, device=value.tensor.device)
    memory = torch.zeros(size, dtype=value.tensor.dtype, device=value.tensor.device)

    def place(tensor: Tensor) -> Tensor:
        return index.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    memory[place(value.tensor)] = old
    for source in reversed(shared):  # the latest write comes first
        memory[place(source.tensor)] = data(source)
    return memory[place(value.tensor)]


_LARGEST = 2**22  # numbers in a storage that is examined piece by piece


def _close(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return one.numel() == other.numel() and _close(one.reshape(-1), other.reshape(-1))
    if not one.is_floating_point() and not one.is_complex():
        return bool(torch.equal(one, other.to(one.dtype)))
    coarse = 16 if one.dtype in (torch.float16, torch.bfloat16) else 1
    return bool(torch.allclose(one, other.to(one.dtype), _RTOL * coarse, _ATOL * coarse, equal_nan=True))
