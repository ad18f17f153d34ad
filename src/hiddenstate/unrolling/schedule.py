"""A cell's step, split and put together again as a schedule: before the loop, in it, after it, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from .capture import Captures
from .native import CompiledRunner
from .pieces import Piece, make_piece
from .reaching import Reaching
from .scan import Loop, PythonRunner, Runner
from .split import Stage, StagedTrace
from .sums import Sum, Sums
from .sweep import Sweep
from .tracing import StepTrace

_SPREAD = 2**16  # numbers up to which a gradient is kept for each step, rather than added up in the loop


@dataclass(slots=True, eq=False)
class Bound:
    """The values of nodes while a schedule runs."""

    steps: int
    fused: bool = False  # whether what runs for all steps at once is fused
    same: dict[fx.Node, Tensor] = field(default_factory=dict)
    varying: dict[fx.Node, Tensor] = field(default_factory=dict)  # (time, ...)
    totals: dict[fx.Node, Tensor] = field(default_factory=dict)
    multiply: Callable[[Tensor, Tensor], Tensor] = field(default=torch.mm)  # by which sums over all steps are taken

    def fixed(self, node: fx.Node) -> Tensor:
        """Return a value that is the same at all steps."""
        return self.same[node]

    def along(self, node: fx.Node) -> Tensor:
        """Return the values at all steps, (time, ...)."""
        if node in self.varying:
            return self.varying[node]
        value = self.same[node]
        return value.expand(self.steps, *value.shape)

    def total(self, node: fx.Node) -> Tensor:
        """Return a value that a loop has added up."""
        return self.totals[node]


class Schedule:
    """The forward pass, and where asked for the backward pass, of any number of steps."""

    def __init__(
        self, split: StagedTrace, runner: Callable[[Loop], Runner] = PythonRunner, *, wide: bool, ends: bool
    ) -> None:
        """Cut the graph into its pieces."""
        self.split, self.trace, self._runner = split, split.trace, runner
        self.grad = bool(self.trace.grad_news)
        self.reaching = Reaching(self.trace, ends=ends)
        self.captures: tuple[Captures, Captures] | None = None  # of both passes, where they are replayed
        self.runs = "its loops run by torch's own operations"
        self.steps_first = False  # whether outputs lie in memory as steps make them, rather than row by row
        self.plain_because = ""  # why its loops are not compiled, where that was tried
        self._limit = _SPREAD if wide else 0
        self._saved: tuple[list[fx.Node], list[fx.Node]] | None = None
        stage = split.nodes
        self._back = _Back(self) if self.grad else None
        asked = self._back.asked if self._back is not None else set()
        wanted = {self.trace.out, *asked}
        once = stage(Stage.ONCE)
        self._once = make_piece(once, [node for node in once if _leaves(node, split, Stage.ONCE) or node in wanted])
        after = stage(Stage.AFTER)
        self._after = Sweep(make_piece(after, [node for node in after if node in wanted]))
        self.loop = self._make_loop(wanted | set(self._after.piece.inputs))
        needed = {*wanted, *self._after.piece.inputs, *self.loop.body.inputs}
        before = stage(Stage.BEFORE)
        self._before = Sweep(make_piece(before, [node for node in before if node in needed]))
        self._run_loop: Runner = runner(self.loop)

    def forward(self, bound: Bound, carry: Sequence[Tensor]) -> list[Tensor]:
        """Run the forward pass; the output is bound afterwards, and the final state is returned."""
        trace = self.trace
        bound.same.update(trace.constants)
        bound.same.update(zip(self._once.outputs, self._once(*map(bound.fixed, self._once.inputs)), strict=True))
        self._before(bound, own_products=self.own_products)
        ran = self._run_loop(carry, *_arguments(self.loop, bound), steps=bound.steps)
        for node, new, path in zip(trace.states, trace.news, ran.paths, strict=True):
            if path is not None:
                bound.varying[node] = path[:-1]
                if self.split.stages.get(new) is Stage.LOOP:
                    bound.varying[new] = path[1:]
        bound.varying.update(zip(self.loop.kept, ran.kept, strict=True))
        self._after(bound, own_products=self.own_products)
        return ran.last

    def backward(self, bound: Bound, carry: Sequence[Tensor]) -> list[Tensor]:
        """Run the backward pass from the gradients of the final state; returns those of the first."""
        assert self._back is not None
        if isinstance(self._run_loop, CompiledRunner):
            bound.multiply = self._run_loop.multiply
        return self._back.run(bound, carry)

    def loops(self) -> list[Loop]:
        """Return the forward loop, and the backward loop where there is one."""
        return [self.loop, *([] if self._back is None else [self._back.loop])]

    def use(self, runners: Sequence[Runner]) -> None:
        """Have the loops run by these from now on."""
        self._run_loop = runners[0]
        if self._back is not None:
            self._back.run_loop = runners[1]

    def go_plain(self, because: str) -> None:
        """Have the loops run by torch's own operations again, and remember why."""
        self.plain_because, self.captures = because, None
        self.use([PythonRunner(loop) for loop in self.loops()])

    def saved(self) -> tuple[list[fx.Node], list[fx.Node]]:
        """Return the nodes whose values the backward pass needs beside what was given: the same, and along time."""
        if self._saved is None:
            assert self._back is not None
            given = {*self.trace.weights, *self.trace.firsts, *self.trace.inputs}
            asked = sorted(self._back.asked - given, key=lambda node: node.name)
            fixed = self.fixed_nodes()
            self._saved = [node for node in asked if node in fixed], [node for node in asked if node not in fixed]
        return self._saved

    def sums(self) -> tuple[list[Sum | None], list[Sum | None]]:
        """Return how the gradients of weights and of first states are summed over time."""
        assert self._back is not None
        return self._back.to_weights, self._back.to_firsts

    @property
    def own_products(self) -> bool:
        """Say whether products around the loops are computed by our own code: where the loops are ours, too."""
        return isinstance(self._run_loop, CompiledRunner) and self._run_loop.own_products

    def fixed_nodes(self) -> set[fx.Node]:
        """Return the nodes whose value is the same at all steps."""
        trace = self.trace
        return {*trace.weights, *trace.firsts, *trace.constants, *self.split.nodes(Stage.ONCE)}

    def _make_loop(self, wanted: set[fx.Node]) -> Loop:
        trace, inside = self.trace, self.split.nodes(Stage.LOOP)
        carried_on = {new: place for place, new in enumerate(trace.news)}
        path = [
            state in wanted or (new in wanted and self.split.stages.get(new) is Stage.LOOP)
            for state, new in zip(trace.states, trace.news, strict=True)
        ]
        kept = [node for node in inside if node in wanted and node not in carried_on]
        body = make_piece(inside, [*trace.news, *kept], first=trace.states)
        return _loop(body, len(trace.states), self.fixed_nodes(), kept=kept, path=path)


class _Back:
    """The pieces of the backward pass."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, split, trace = schedule, schedule.split, schedule.trace
        self.seeds, self.ends = _carried(trace)
        looped, late = split.nodes(Stage.BACK_LOOP), split.nodes(Stage.BACK_AFTER)
        early, fixed = split.nodes(Stage.BACK_BEFORE), schedule.fixed_nodes()
        sums = Sums(fixed=fixed, looped=set(looped), sunk={*early, *late}, limit=schedule._limit)
        self.to_weights = [None if node is None else sums.plan(node) for node in trace.to_weights]
        self.to_firsts = [None if node is None else sums.plan(node) for node in trace.to_firsts]
        wanted = {*sums.along, *([] if trace.to_x is None else [trace.to_x])}
        self.after = Sweep(make_piece(late, [node for node in late if node in wanted]))
        outer = wanted | set(self.after.piece.inputs)
        self.totals = list(sums.totals)
        self.loop = self._make_loop(looped, outer, fixed)
        outer |= set(self.loop.body.inputs)
        self.before = Sweep(make_piece(early, [node for node in early if node in outer]))
        outer |= set(self.before.piece.inputs)
        inside = {
            *looped,
            *late,
            *early,
            *self.seeds,
            *self.accumulators,
            *([trace.grad_out] if trace.grad_out else []),
        }
        self.asked = {node for node in outer if node not in inside} | self._by_sums(trace, fixed)
        self.run_loop: Runner = schedule._runner(self.loop)

    def _by_sums(self, trace: StepTrace, fixed: set[fx.Node]) -> set[fx.Node]:
        # A sum may be scaled or multiplied by something that is the same at all steps.
        back = {*self.schedule.split.nodes(Stage.BACK_AFTER), *self.schedule.split.nodes(Stage.BACK_BEFORE)}
        used = {arg for node in back for arg in node.all_input_nodes if arg in fixed}
        given = {node for node in (*trace.to_weights, *trace.to_firsts) if node is not None and node in fixed}
        return used | given

    def _make_loop(self, inside: list[fx.Node], wanted: set[fx.Node], fixed: set[fx.Node]) -> Loop:
        graph = fx.Graph()
        self.accumulators = [graph.placeholder(f"sum_of_{node.name}") for node in self.totals]
        for so_far, node in zip(self.accumulators, self.totals, strict=True):
            so_far.meta = dict(node.meta)
        kept = [node for node in inside if node in wanted and node not in self.ends]
        pairs = list(zip(self.accumulators, self.totals, strict=True))
        # What is carried comes first among the outputs, and sums are carried too.
        body = make_piece(inside, [*self.ends, *kept], first=[*self.seeds, *self.accumulators], sums=pairs)
        path = [
            seed in wanted or (end in wanted and end in set(inside))
            for seed, end in zip(self.seeds, self.ends, strict=True)
        ] + [False] * len(pairs)
        body = _sums_first(body, len(self.ends), len(pairs))
        return _loop(body, len(path), fixed, kept=kept, path=path, backward=True)

    def run(self, bound: Bound, carry: Sequence[Tensor]) -> list[Tensor]:
        """Run the backward pass."""
        self.before(bound, own_products=self.schedule.own_products)
        fakes = [node.meta["val"] for node in self.totals]
        zeros = [torch.zeros(tuple(fake.shape), dtype=fake.dtype, device=fake.device) for fake in fakes]
        ran = self.run_loop([*carry, *zeros], *_arguments(self.loop, bound), steps=bound.steps)
        count = len(self.ends)
        looped = set(self.schedule.split.nodes(Stage.BACK_LOOP))
        for seed, end, path in zip(self.seeds, self.ends, ran.paths[:count], strict=True):
            if path is not None:
                bound.varying[seed] = path[1:]
                if end in looped:
                    bound.varying[end] = path[:-1]
        bound.varying.update(zip(self.loop.kept, ran.kept, strict=True))
        bound.totals.update(zip(self.totals, ran.last[count:], strict=True))
        self.after(bound, own_products=self.schedule.own_products)
        return list(ran.last[:count])


def _carried(trace: StepTrace) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return, for each state that has a gradient, the node that it comes in by and the one it goes out by."""
    pairs = zip(trace.grad_news, trace.to_states, strict=True)
    found = [(seed, end) for seed, end in pairs if seed is not None and end is not None]
    return [seed for seed, _ in found], [end for _, end in found]


def _sums_first(body: Piece, ends: int, sums: int) -> Piece:
    """Reorder the outputs: carried states, carried sums, then what is kept of each step."""
    if not sums:
        return body
    output = next(node for node in body.call.graph.nodes if node.op == "output")
    values = list(output.args[0])
    kept = len(values) - ends - sums
    order = [*range(ends), *range(ends + kept, ends + kept + sums), *range(ends, ends + kept)]
    output.args = (tuple(values[place] for place in order),)
    body.call.recompile()
    return Piece(body.call, body.inputs, tuple(body.outputs[place] for place in order))


def _loop(
    body: Piece,
    carried: int,
    same: set[fx.Node],
    *,
    kept: Iterable[fx.Node],
    path: Iterable[bool],
    backward: bool = False,
) -> Loop:
    rest = body.inputs[carried:]
    fixed = tuple(node for node in rest if node in same)
    along = tuple(node for node in rest if node not in same)
    # Placeholders in the order that every runner relies on: carried, fixed, along.
    graph = body.call.graph
    made = [node for node in graph.nodes if node.op == "placeholder"]
    by_name = dict(zip(body.inputs, made, strict=True))
    first = next(iter(graph.nodes))
    for node in (*body.inputs[:carried], *fixed, *along):
        if by_name[node] is not first:
            first.prepend(by_name[node])
        else:
            first = first.next
    body.call.recompile()
    body = Piece(body.call, (*body.inputs[:carried], *fixed, *along), body.outputs)
    return Loop(body, carried, fixed, along, tuple(kept), tuple(path), backward)


def _arguments(loop: Loop, bound: Bound) -> tuple[list[Tensor], list[Tensor]]:
    return [bound.fixed(node) for node in loop.fixed], [bound.along(node) for node in loop.along]


def _leaves(node: fx.Node, split: StagedTrace, stage: Stage) -> bool:
    """Say whether a node's value is used outside its own stage, and is one tensor."""
    if isinstance(node.meta.get("val"), tuple | list):
        return False
    return any(split.stages.get(user) is not stage for user in node.users)
