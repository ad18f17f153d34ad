"""Which steps of a call's input reach which values: what led there is run again, with something else in one step."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_sequence

from .memory import Value
from .operation import DRAWS, INDEXED, MOVES, Op, leaves, replaced
from .places import Scope
from .trace import Trace

_SEED = 86_028_121  # nobody's input is drawn from the same numbers
_LONGEST = 2048  # operations between an argument and what it reaches beyond which we do not look


_SORTS = {"sort", "topk", "msort", "kthvalue"}
_MOVED = INDEXED | {"_pack_padded_sequence", "_pad_packed_sequence"}


class Untold(Exception):
    """What leads to a value cannot be run again."""


class Way:
    """The operations that lead from arguments of the model's call to some values."""

    def __init__(self, trace: Trace, arguments: list[Value], targets: list[Value], fixed: set[int]) -> None:
        """Look for it, also from a list of arguments; whoever reads one of the values in `fixed` reads what it was."""
        self._trace = trace
        self._arguments = arguments
        self._targets = targets
        self._fixed = fixed
        self.ops = self._between()
        self._before: dict[int, Tensor] | None = None

    @property
    def leads(self) -> bool:
        """Whether any of the values depends on the arguments."""
        return any(value.op in self.ops or value in self._arguments for value in self._targets)

    def recurs(self, own: Scope | None, timed: set[Scope], stepped: list[tuple[int, int]]) -> bool:
        """Say whether a recurrence may be on the way, other than layers of torch; `own` is the loop it leads to."""
        starts = [turn.start for turn in own.turns] if own is not None else []
        for number in self.ops:
            op = self._trace.ops[number]
            if own is not None and own.start <= number < own.end:
                before = [
                    v.op for v in op.ins if v.op >= own.start and v.op in self.ops and v.number not in self._fixed
                ]
                if any(bisect_right(starts, each) != bisect_right(starts, number) for each in before):
                    return True
                continue
            opaque = op.name.endswith(".forward") and not _stands_in(op)
            if opaque or within_any(op, timed) or any(start <= number < end for start, end in stepped):
                return True
        return False

    def changed(self, axis: int | None, step: int) -> list[Tensor]:
        """Return where each value changes, if a step along an axis of the argument, or of the list, is another."""
        which = self._arguments[step if axis is None else 0]
        given = which.data()
        if given is None:
            raise Untold
        if self._before is None:
            self._before = self._run({}) if self._anew else {}
        after = self._run({which.number: _other_at(given, axis, step)})
        before = [self._before.get(value.number, value.data()) for value in self._targets]
        return [_unequal(old, after[value.number]) for old, value in zip(before, self._targets, strict=True)]

    @property
    def _anew(self) -> bool:
        """Whether some operation is run in another way than it was."""
        return any(_is_other(self._trace.ops[number]) for number in self.ops)

    def _between(self) -> dict[int, None]:
        trace, last = self._trace, max(value.op for value in self._targets)
        reached = {value.number for value in self._arguments}
        onward: dict[int, None] = {}
        for number in range(last + 1):
            op = trace.ops[number]
            if any(value.number in reached for value in op.ins):
                onward[number] = None
                reached.update(value.number for value in op.outs if value.number not in self._fixed)
        needed: set[int] = set()
        todo = [value.op for value in self._targets if value.op in onward]
        while todo:
            number = todo.pop()
            if number not in needed:
                needed.add(number)
                todo += [v.op for v in trace.ops[number].ins if v.op in onward and v.number not in self._fixed]
        return dict.fromkeys(number for number in onward if number in needed)

    def _run(self, made: dict[int, Tensor]) -> dict[int, Tensor]:
        if len(self.ops) > _LONGEST:
            raise Untold

        def data(value: Value) -> Tensor:
            found = made.get(value.number) if value.number not in self._fixed else None
            found = value.data() if found is None else found
            if found is None:
                raise Untold
            return found

        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            for number in self.ops:
                try:
                    _again(self._trace.ops[number], made, data)
                except Exception as error:  # whatever an operation raises out of its place
                    raise Untold from error
        for value in self._targets:
            if value.number not in made:
                made[value.number] = data(value)
        return made


def within_any(op: Op, loops: set[Scope]) -> bool:
    """Say whether an operation happens within one of these loops."""
    scope: Scope | None = op.scope
    while scope is not None and scope not in loops:
        scope = scope.parent
    return scope is not None


def _again(op: Op, made: dict[int, Tensor], data: Callable[[Value], Tensor]) -> None:
    """Run an operation again, so that what it makes shows which steps it depends on."""
    if _is_still(op):
        made[op.outs[0].number] = data(op.ins[0])  # what it draws, or takes of all rows, is no matter of steps
    elif op.name in DRAWS:
        return
    elif op.name in _SORTS and op.ins[0].tensor.is_floating_point():
        raise Untold  # where a number goes depends on the others
    elif op.name == "alias" or (op.name in MOVES and any(value not in op.ins for _, value in op.reads)):
        for value in op.outs:
            made[value.number] = _in_memory(op, value, data)
    elif _stands_in(op):
        results = _stand_in(op, data)
        made.update({value.number: results[value.place] for value in op.outs})
    else:
        _as_it_was(op, made, data)


def _is_still(op: Op) -> bool:
    """Say whether an operation is passed over: what comes out depends on the same steps as what goes in."""
    return "dropout" in op.name or op.name == "batch_norm"


def _is_other(op: Op) -> bool:
    """Say whether an operation is run in another way than it was."""
    return _is_still(op) or op.name.endswith(".forward")


def _as_it_was(op: Op, made: dict[int, Tensor], data: Callable[[Value], Tensor]) -> None:
    """Call an operation once more, with what is in `made` in place of what its operands held."""
    held = {id(tensor): value for tensor, value in op.reads}
    copies: dict[int, Tensor] = {}

    # What is moved by an index that depends on the input is moved as it was: by lengths, say, or to sort the rows.
    moved = op.name in _MOVED and bool(op.ins) and op.ins[0].number in made

    def put(tensor: Tensor) -> Tensor:
        if id(tensor) in held and id(tensor) not in copies:
            value = held[id(tensor)]
            was = value.data() if moved and value is not op.ins[0] else None
            found = data(value) if was is None else was
            copies[id(tensor)] = found.clone() if any(value.tensor is tensor for value in op.outs) else found
        return copies.get(id(tensor), tensor)

    with ExitStack() as casts:
        for device, dtype in op.cast:
            casts.enter_context(torch.autocast(device, dtype))
        result = op.func(*replaced(op.args, put), **{key: replaced(arg, put) for key, arg in op.kwargs.items()})
    results = [tensor for _, tensor in leaves(result)]
    for value in op.outs:
        made[value.number] = copies[id(value.tensor)] if id(value.tensor) in copies else results[value.place]


def _in_memory(op: Op, value: Value, data: Callable[[Value], Tensor]) -> Tensor:
    """Return what a tensor holds after others were written to parts of it, or what is written to a part."""
    tensor, sources = value.tensor, [source for source in op.ins if source.store is value.store]
    if not sources:
        return data(op.ins[0]).expand(value.shape)
    flat = tensor.new_zeros(tensor.untyped_storage().nbytes() // tensor.element_size())
    for source in reversed(sources):  # the newest comes first
        at = source.tensor
        flat.as_strided(at.shape, at.stride(), int(at.storage_offset())).copy_(data(source))
    return flat.as_strided(tensor.shape, tensor.stride(), int(tensor.storage_offset()))


def _stands_in(op: Op) -> bool:
    """Say whether something simpler is run in place of an operation: of a fused layer of torch's."""
    return isinstance(getattr(op.func, "__self__", None), nn.RNNBase) and op.name.endswith(".forward")


def _stand_in(op: Op, data: Callable[[Value], Tensor]) -> list[Tensor]:
    """Return what depends on the steps as a layer's outputs do, its own state left out: that is carried."""
    module: Any = op.func.__self__  # type: ignore[attr-defined]
    x, packed = data(op.ins[0]).mean(-1, keepdim=True), isinstance(op.args[0], PackedSequence)
    sizes = data(op.ins[1]).tolist() if packed else []
    steps = pad_sequence(list(torch.split(x, sizes))) if packed else x
    end = steps.mean(1 if packed or (module.batch_first and x.dim() == 3) else 0, keepdim=True)
    outputs, ways = x, 2 if module.bidirectional else 1
    if module.bidirectional:
        outputs = torch.cat([end[:rows, 0] for rows in sizes]) if packed else end.expand_as(x)
    rows = end.flatten(0, -2)  # (rows, 1)
    if packed and op.args[0].unsorted_indices is not None:
        rows = rows[op.args[0].unsorted_indices]
    deep = ways * module.num_layers
    size = getattr(module, "proj_size", 0) or module.hidden_size
    many = (deep,) if x.dim() == 2 and not packed else (deep, len(rows))
    indices = [index for index in op.args[0][1:] if index is not None] if packed else []
    ends = [rows.expand(*many, width) for width in (size, module.hidden_size)]
    return [outputs.expand(*x.shape[:-1], ways * size), *indices, *ends]


def _other_at(given: Tensor, axis: int | None, step: int) -> Tensor:
    """Return other numbers at one step, or everywhere, of the kind that are there."""
    new = given.clone()
    old = new if axis is None else new.select(axis, step)
    if given.is_floating_point() or given.is_complex():
        noise = torch.randn(old.shape, generator=torch.Generator().manual_seed(_SEED + step)).to(given.device)
        old.copy_(0.3 - 0.5 * old + (0.5 + given.abs().mean()) * noise.to(given.dtype))
        return new
    kinds = torch.unique(given)
    if given.dtype is torch.bool or len(kinds) < 2:
        raise Untold
    old.copy_(kinds[(torch.searchsorted(kinds, old.contiguous()) + 1) % len(kinds)])
    return new


def _unequal(one: Tensor | None, other: Tensor) -> Tensor:
    if one is None or one.shape != other.shape:
        raise Untold
    unequal: Tensor = one != other
    if one.is_floating_point():
        unequal[unequal.clone()] = ~torch.isclose(one[unequal], other[unequal], 1e-5, 1e-7, equal_nan=True)
    return unequal
