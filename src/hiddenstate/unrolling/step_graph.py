"""A step as the graph that torch's tracer read, with its inputs, run on tensors of any kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from ..errors import Untraceable
from .fused_cells import equations_of
from .reasons import line_in
from .unguarded import Unguarded


@dataclass(slots=True, eq=False)
class StepGraph:
    """A step as a graph of all that it reads."""

    call: fx.GraphModule
    numbers: list[int]  # places among its inputs: of Python's own numbers
    sizes: list[int]  # of those among them that are sizes of tensors
    unguarded: Unguarded
    weights: list[int] = field(default_factory=list)  # of tensors that stay the same along time
    own: dict[int, int] = field(default_factory=dict)  # place -> 0 for x, then 1, 2, … for the parts of the state
    misnamed: list[dict[str, Any]] = field(default_factory=list)  # globals that torch may have looked for elsewhere
    kinds: list[type] = field(default_factory=list)  # of the cell and all modules in it
    known: bool = False  # whether these places are
    counts: bool = False  # whether it computes with the sizes of tensors, and does not only shape others by them
    floats: set[str] = field(default_factory=set)  # values that its numbers had, until there were two
    rigid: bool = False  # whether its numbers have to be constants
    form: Any = None  # what the step returns, with slots in place of tensors

    def is_fluid(self, floats: str) -> bool:
        """Say whether its numbers differ from call to call, so that they are better no part of a schedule."""
        if len(self.floats) < 2:
            self.floats.add(floats)
        return len(self.floats) > 1 and not self.rigid

    def learn(self, given: Sequence[Any], own: Sequence[Tensor]) -> None:
        """Find out which input is what, by the identity of what was given to the step itself."""
        place_of = {id(tensor): place for place, tensor in enumerate(own)}
        self.numbers = [place for place in self.numbers if not given[place].dim()]  # arrays come the same way
        for place, value in enumerate(given):
            if id(value) in place_of:
                self.own[place] = place_of[id(value)]
            elif isinstance(value, Tensor) and place not in self.numbers:
                self.weights.append(place)
            elif place not in self.numbers:
                self.numbers.append(place)
        self.known = True


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """What a step is now: its graph, the tensors that it reads beside its arguments, and its numbers.

    Numbers that change from call to call may stand among the tensors: then one schedule serves all of them.
    """

    graph: StepGraph
    weights: list[Tensor]
    numbers: tuple[float | int, ...]
    fluid: bool = False  # whether numbers with a fraction stand among the tensors

    def made_fluid(self) -> Reading:
        """Return the same with all numbers that are no whole ones as tensors."""
        extra = [
            torch.tensor(number, dtype=torch.float64, device="cpu")
            for number in self.numbers
            if isinstance(number, float)
        ]
        return Reading(self.graph, [*self.weights, *extra], self.numbers, fluid=True)

    def constants(self) -> tuple[float | int, ...]:
        """Return the numbers that a schedule is made for, apart from the sizes of tensors."""
        sizes = set(self.graph.sizes)
        kept = zip(self.graph.numbers, self.numbers, strict=True)
        return tuple(n for place, n in kept if place not in sizes and not (self.fluid and isinstance(n, float)))

    def run(self, weights: Sequence[Tensor], own: Sequence[Tensor]) -> list[Any]:
        """Return the graph's outputs for these weights, and for x with the parts of the state."""
        return list(_Interpreter(self.graph.call, self._floats()).run(*self._inputs(weights, own)))

    def run_watched(self, own: Sequence[Tensor]) -> list[Any]:
        """Return the outputs on copies of all tensors, or refuse a graph that writes into one of them."""
        copies = [[tensor.detach().clone() for tensor in group] for group in (self.weights, own)]
        interpreter = _Watching(self.graph.call, [*self.weights, *own], [*copies[0], *copies[1]], self._floats())
        outputs = list(interpreter.run(*self._inputs(*copies)))
        interpreter.check_values()
        return outputs

    def _floats(self) -> list[int]:
        """Return the places of numbers that stand among the tensors."""
        numbers = zip(self.graph.numbers, self.numbers, strict=True)
        return [place for place, number in numbers if self.fluid and isinstance(number, float)]

    def _inputs(self, weights: Sequence[Tensor], own: Sequence[Tensor]) -> list[Any]:
        graph = self.graph
        values: dict[int, Any] = dict(zip(graph.numbers, self.numbers, strict=True))
        values.update(zip([*graph.weights, *self._floats()], weights, strict=True))
        values.update((place, own[number]) for place, number in graph.own.items())
        return [values[place] for place in range(len(values))]


def number_of(value: Any) -> Any:
    """Return a number that comes as itself, or as a tensor of one."""
    return value if isinstance(value, float | int) else value.item()


def with_numbers(call: fx.GraphModule) -> fx.GraphModule:
    """Have the graphs within a graph take numbers as such, where torch hands them over as tensors of one."""
    for inner in call.modules():
        if inner is not call and isinstance(inner, fx.GraphModule):
            for node in inner.graph.nodes:
                if node.op == "call_method" and node.target == "item":
                    node.op, node.target = "call_function", number_of
            inner.recompile()
    return call


class _Interpreter(fx.Interpreter):
    """Runs a graph in which a number may stand for a tensor of one."""

    def __init__(self, call: fx.GraphModule, fluid: Sequence[int] = ()) -> None:
        super().__init__(call)
        self.extra_traceback = False  # what goes wrong is told in our own words
        self.fluid = fluid  # places of tensors that stand for numbers

    def run(self, *args: Any, **kwargs: Any) -> Any:
        # A tensor in the place of a number is one for whoever asks for its value.
        self._fluid = {id(args[place]) for place in self.fluid}
        return super().run(*args, **kwargs)

    def call_method(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target == "item" and self._is_number(args[0]):
            return args[0]
        return super().call_method(target, args, kwargs)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if getattr(target, "__name__", "") == "wrapped_item" and self._is_number(args[0]):
            return args[0]
        return super().call_function(equations_of(target, args) or target, args, kwargs)

    def _is_number(self, value: Any) -> bool:
        return isinstance(value, float | int) or id(value) in self._fluid


class _Watching(_Interpreter):
    """Runs a graph on copies, and finds the first operation that writes into one of them."""

    def __init__(
        self, call: fx.GraphModule, originals: list[Tensor], copies: list[Tensor], fluid: Sequence[int]
    ) -> None:
        super().__init__(call, fluid)
        self.originals, self.copies = originals, copies

    def run_node(self, n: fx.Node) -> Any:
        made = super().run_node(n)
        if any(not copy.is_inference() and copy._version for copy in self.copies):
            raise Untraceable("it writes into a tensor that it was given, or that it keeps", line_in(n))
        return made

    def check_values(self) -> None:
        """Refuse what was written without being counted, as statistics of batches are."""
        for original, copy in zip(self.originals, self.copies, strict=True):
            if not torch.equal(original.isnan(), copy.isnan()) or not torch.equal(
                original.nan_to_num(), copy.nan_to_num()
            ):
                raise Untraceable("it writes into a tensor that it keeps, such as the statistics of batches")
