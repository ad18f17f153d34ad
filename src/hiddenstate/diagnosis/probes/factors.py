"""By what a model multiplies its states from one step to the next, entry by entry."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from ...state import tensors as given
from ..outcome import PASSING, SIGMOIDS, Makers, Operation, Operations, same
from ..patient import Patient, PatientProbe
from .calls import TracedCall

_SUMS = {"add", "__add__", "__radd__"}
_DIFFERENCES = {"sub", "__sub__", "subtract"}
_REVERSED = {"rsub", "__rsub__"}
_PRODUCTS = {"mul", "__mul__", "__rmul__", "multiply"}
_QUOTIENTS = {"div", "__truediv__", "true_divide", "divide"}
_KEPT = {"clone", "contiguous", "to", "float", "double"}
_MIXED = {"lerp", "addcmul"}
_STRAIGHT = _SUMS | _DIFFERENCES | _REVERSED | _PRODUCTS | _QUOTIENTS | _KEPT | _MIXED | {"neg", "__neg__"}
_MAPS = {"linear", "matmul", "__matmul__", "addmm", "mm", "bmm", "conv1d", "conv2d", "relu", "relu_", "softplus"}
_FILLED = {
    "zeros",
    "ones",
    "full",
    "empty",
    "zeros_like",
    "ones_like",
    "full_like",
    "new_zeros",
    "new_ones",
    "new_full",
}
_MOST = 40  # operations between two steps that are looked through

Share = float | Tensor


class _NotStraightError(Exception):
    """A state does not go into the next one by sums and products alone."""


@dataclass(frozen=True, slots=True)
class Factor:
    """What one state is multiplied by, all on its straight way to the next step taken together."""

    line: str
    low: float
    high: float
    varies: bool  # from step to step, as a gate does, and a leak or a decay does not
    made_by: frozenset[str]  # the operations, beside sums and products, that made it
    complement: bool  # it is one minus something, or a number was added to it


class StateFactors(tuple[Factor, ...], PatientProbe):
    """The factors of all states that loops hand on; those that nothing squashes, with larger inputs too."""

    @classmethod
    def measure(cls, patient: Patient) -> StateFactors:
        """Read them from a trace; where a linear map takes part, from one with inputs a hundred times as large too."""
        found = list(_factors(patient[TracedCall].trace))
        inputs = patient.inputs
        x = inputs.get(inputs.main)
        if any(factor.made_by & _MAPS for factor in found) and isinstance(x, Tensor) and x.is_floating_point():
            driven = patient.run(inputs.put(inputs.main, 100 * x), trace=True).trace
            found += [factor for factor in _factors(driven) if factor.made_by & _MAPS]
        return cls(found)


@dataclass(frozen=True, slots=True)
class NeverUpdated(PatientProbe):
    """A first state that a gate of each step is applied to, and that is the same at all of them."""

    line: str = ""  # "" where there is none
    steps: int = 0

    @classmethod
    def measure(cls, patient: Patient) -> NeverUpdated:
        """Look for products of gates with one tensor that is made of no input, in sums that do not go on."""
        run = patient[TracedCall]
        made = run.trace.makers()
        fed = {id(tensor) for tensor in given(patient.inputs.args).values()}
        places: dict[tuple[str, int], list[tuple[Tensor, Tensor, Tensor]]] = {}
        for operation in run.trace.named(*_PRODUCTS):
            if len(operation.inputs) != 2 or not operation.line:
                continue
            for gate, state in (operation.inputs, operation.inputs[::-1]):
                maker = made.origin(gate)
                if maker is not None and maker.name in SIGMOIDS and state.shape == gate.shape and state.dim() > 1:
                    step = (gate, state, operation.output)
                    places.setdefault((operation.line, operation.instruction), []).append(step)
        for (line, _), steps in places.items():
            gates, states, products = zip(*steps, strict=True)
            if len(steps) < 3 or same(gates[0], gates[1]) or any(not same(states[0], each) for each in states[1:]):
                continue
            if all(_is_first(made, state, fed) for state in states) and not _goes_on(run.trace, made, products):
                return cls(line, len(steps))
        return cls()


def _is_first(made: Makers, state: Tensor, fed: set[int]) -> bool:
    """Whether a tensor is made of numbers and weights alone, by operations that only fill and arrange."""
    waiting, seen = [state], set[int]()
    while waiting:
        value = waiting.pop()
        operation = made.get(id(value))
        if id(value) in seen or operation is None:
            if id(value) in fed:
                return False
            continue
        seen.add(id(value))
        if operation.name in _FILLED:
            continue
        if operation.name not in PASSING | _STRAIGHT:
            return False
        waiting.extend(operation.inputs)
    return True


def _goes_on(trace: Operations, made: Makers, products: tuple[Tensor, ...]) -> bool:
    """Whether what a product goes into takes part in what that of the next step goes into, by sums and products."""
    sums: list[Tensor] = []
    for product in products:
        found = [o for o in trace if o.name in _SUMS and any(t is product for t in o.inputs)]
        if not found or not isinstance(found[0].output, Tensor):
            return True  # it is used in another way
        sums.append(found[0].output)
    try:
        return any(_Passage(made, before, set()).share(after) is not None for before, after in pairwise(sums))
    except _NotStraightError:
        return True


def _factors(trace: Operations) -> Iterator[Factor]:
    """Yield a factor for each place in the code whose result goes into that of the next step."""
    made = trace.makers()
    places: dict[tuple[str, int], list[Tensor]] = {}
    for operation in trace:
        value = operation.output
        if operation.line and operation.name in _STRAIGHT and isinstance(value, Tensor) and value.is_floating_point():
            places.setdefault((operation.line, operation.instruction), []).append(value)
    for (line, _), values in places.items():
        if len(values) < 3 or len(set(map(id, values))) < len(values) or len({value.shape for value in values}) > 1:
            continue
        others = {id(value) for value in values}
        try:
            ways = [_Passage(made, before, others - {id(before), id(after)}) for before, after in pairwise(values)]
            shares = [way.share(after) for way, after in zip(ways, values[1:], strict=True)]
        except _NotStraightError:
            continue
        tensors = [torch.as_tensor(share).detach() for share in shares if share is not None]
        if len(tensors) < len(shares) or not all(bool(each.isfinite().all()) and each.numel() for each in tensors):
            continue
        gates = [gate for way in ways for gate in way.gates]
        mixed = any(way.mixed for way in ways)
        yield Factor(
            line,
            min(float(each.min()) for each in tensors),
            max(float(each.max()) for each in tensors),
            any(not same(tensors[0], each) for each in tensors[1:]),
            frozenset(name for gate in gates for name in _makers(made, gate)),
            mixed or any((by := made.origin(gate)) is not None and by.name in _STRAIGHT - _PRODUCTS for gate in gates),
        )


class _Passage:
    """The straight way from a state to the next one."""

    def __init__(self, made: Makers, old: Tensor, others: set[int]) -> None:
        self._made, self._old, self._others = made, old, others
        self._known: dict[int, Share | None] = {}
        self.gates: list[Tensor] = []  # tensors that it, or what is taken from it, is multiplied by
        self.mixed = False  # a gate goes from the old state to a new one: lerp, or h + z * (n - h)

    def share(self, tensor: object) -> Share | None:
        """Return by what the old state is multiplied in a tensor; None where it does not go into it straight."""
        if not isinstance(tensor, Tensor):
            return None
        if tensor is self._old:
            return 1.0
        if id(tensor) in self._others or len(self._known) > _MOST:
            raise _NotStraightError  # an earlier step takes part as well
        if id(tensor) not in self._known:
            self._known[id(tensor)] = None
            operation = self._made.get(id(tensor))
            self._known[id(tensor)] = None if operation is None else self._through(operation)
        return self._known[id(tensor)]

    def _through(self, operation: Operation) -> Share | None:
        name, args = operation.name, operation.args
        if name not in _STRAIGHT:
            if name in PASSING and any(self.share(t) is not None for t in operation.inputs):
                raise _NotStraightError  # its entries change places
            return None
        if name in _KEPT:
            return self.share(args[0])
        if name in ("neg", "__neg__"):
            return _times(self.share(args[0]), -1.0)
        if len(args) < 2 or operation.kwargs or name in _MIXED:
            return self._mixed(operation)
        a, b = (args[1], args[0]) if name in _REVERSED else args[:2]
        if name in _SUMS:
            return _plus(self.share(a), self.share(b))
        if name in _DIFFERENCES | _REVERSED:
            return _plus(self.share(a), _times(self.share(b), -1.0))
        one, other = self.share(a), self.share(b)
        if other is not None and (one is not None or name in _QUOTIENTS):
            raise _NotStraightError
        if name in _QUOTIENTS:
            return None if one is None else self._gated(one, 1.0 / b)
        for share, factor, gate in ((one, a, b), (other, b, a)):
            if share is not None:
                maker = self._made.get(id(factor))
                turned = isinstance(share, float) and share == -1.0
                self.mixed |= turned and maker is not None and maker.name in _DIFFERENCES
                return self._gated(share, gate)
        return None

    def _mixed(self, operation: Operation) -> Share | None:
        args = operation.args
        if operation.name != "lerp" or len(args) != 3 or operation.kwargs:
            if any(self.share(t) is not None for t in operation.inputs):
                raise _NotStraightError
            return None
        start, end, weight = args
        if self.share(weight) is not None:
            raise _NotStraightError
        one, other = self.share(start), self.share(end)
        if one is None and other is None:
            return None
        self.mixed = True
        if isinstance(weight, Tensor):
            self.gates.append(weight)
        return _plus(_times(one, 1.0 - weight), _times(other, weight))

    def _gated(self, share: Share, gate: Share) -> Share:
        if isinstance(gate, Tensor):
            self.gates.append(gate)
        return share * gate


def _plus(a: Share | None, b: Share | None) -> Share | None:
    return b if a is None else a if b is None else a + b


def _times(a: Share | None, number: Share) -> Share | None:
    return None if a is None else a * number


def _makers(made: Makers, tensor: Tensor) -> set[str]:
    """Return the names of the operations at which sums and products begin that made a tensor, weights left out."""
    waiting, seen, found = [tensor], set[int](), set[str]()
    while waiting and len(seen) < _MOST:
        value = made.source(waiting.pop())
        operation = made.get(id(value))
        if id(value) in seen or isinstance(value, nn.Parameter) or operation is None:
            continue
        seen.add(id(value))
        if operation.name in _STRAIGHT:
            waiting.extend(operation.inputs)
        else:
            found.add("sigmoid" if operation.name in SIGMOIDS else operation.name)
    return found
