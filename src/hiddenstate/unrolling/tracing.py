"""One step of a cell, and its vjp, as a graph of aten operations."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..errors import Untraceable
from .decompositions import decompositions
from .draws import Draw, is_random, take_out
from .reading import TRACING, unlogged
from .reasons import blame, line_in
from .rewriting import rewrite, write_anew
from .step import Step, StepArguments

aten = torch.ops.aten

# What is made of numbers by how they lie in memory, which follows what a step is given.
_BY_MEMORY = {
    *(aten.as_strided.default, aten.as_strided_scatter.default),
    *(aten.view_as_complex.default, aten.view.dtype),
}


@dataclass(frozen=True, slots=True, eq=False)
class StepTrace:
    """A step as a graph: what goes in, what comes out, and by which role."""

    graph: fx.Graph
    constants: dict[fx.Node, Tensor]  # tensors found in the cell's code
    weights: list[fx.Node]
    firsts: list[fx.Node]  # the initial state, where rows may start anew
    inputs: list[fx.Node]  # x_t, and where asked for: which rows are alive, which start anew; random numbers
    states: list[fx.Node]
    out: fx.Node
    news: list[fx.Node]  # the states after the step
    grad_out: fx.Node | None = None
    grad_news: list[fx.Node | None] = field(default_factory=list)  # one for each state, None where it has no gradient
    to_weights: list[fx.Node | None] = field(default_factory=list)
    to_firsts: list[fx.Node | None] = field(default_factory=list)
    to_x: fx.Node | None = None
    to_states: list[fx.Node | None] = field(default_factory=list)
    draws: list[Draw] = field(default_factory=list)  # by which the last of the inputs are drawn


def trace(step: Step, arguments: StepArguments, *, grad: bool) -> StepTrace:
    """Trace a step, with its vjp where `grad`, or say why it cannot be traced."""
    try:
        step.try_out()
        with warnings.catch_warnings(), unlogged():
            warnings.simplefilter("ignore")  # of what tracing itself does, which is none of the user's business
            return _make_graph(step, arguments, grad)
    except Untraceable:
        raise
    except Exception as error:  # whatever tracing meets in a step is a reason to run it plainly
        raise Untraceable(*blame(error)) from error


def _make_graph(step: Step, arguments: StepArguments, grad: bool) -> StepTrace:
    flat = arguments.flat()
    counts = [len(arguments.weights), len(arguments.firsts), len(arguments.inputs), len(arguments.states)]
    # Without a gradient leaves still require one: torch's own cells then write into nothing. Buffers never do: to
    # statistics of batches torch has no gradient.
    call = _StepCall(step, counts, arguments.wanted())
    seeds = call.seeds(flat) if grad else []
    module, functional = _fx(call, flat, seeds)
    graph, constants = _clean(module)
    for node in graph.nodes:
        if node.target is aten.as_strided.default and _given(node):
            raise Untraceable("it reads memory by its layout", line_in(node))
    if functional:
        _refuse(graph, _writes, "it writes into its input")
    for node in graph.nodes:
        # What comes at run time may lie in memory otherwise.
        if node.target in (aten.view.default, aten._unsafe_view.default):
            node.target = aten.reshape.default
        elif node.target in _BY_MEMORY:
            _have_contiguous(graph, node)
    rewrite(graph, call.states(graph))
    made = call.roles(graph, constants, grad)
    places, draws = take_out(graph, arguments.inputs[0].shape[0])
    return replace(made, inputs=[*made.inputs, *places], draws=draws)


def _fx(call: _StepCall, flat: list[Tensor], seeds: list[Tensor]) -> tuple[fx.GraphModule, bool]:
    from torch.fx.experimental.proxy_tensor import make_fx

    table = decompositions()
    device = flat[-1].device.type
    # Attention in small steps: its fused kernels pass for random, whether or not they drop anything.
    attention = sdpa_kernel(SDPBackend.MATH)
    with TRACING, torch.enable_grad(), _autocast(device), attention, fx.traceback.preserve_node_meta():
        # Fake tensors have no values: code that asks for one, even through numpy, is found out.
        fake: dict[str, Any] = {"decomposition_table": table, "tracing_mode": "fake", "_allow_non_fake_inputs": True}
        module = make_fx(call.plain, **fake)(*flat, *seeds)
        write_anew(module.graph)
        if not any(_writes(node.target) for node in module.graph.nodes):
            return module, False
        # A cell that writes into tensors of its own is traced once more, with every write made a new value.
        return make_fx(torch.func.functionalize(call.pure), **fake)(*flat, *seeds), True


def _autocast(device: str) -> torch.autocast:
    # As it is now, but without its cache, which would hold on to tensors of the trace.
    on = torch.is_autocast_enabled(device)
    return torch.autocast(device, torch.get_autocast_dtype(device) if on else None, enabled=on, cache_enabled=False)


class _StepCall:
    """The function that is traced: flat tensors in, outputs and gradients out."""

    def __init__(self, step: Step, counts: Sequence[int], wanted: list[bool]) -> None:
        self.step, self.counts, self.wanted = step, counts, wanted
        self.total = sum(counts)
        self.made: list[bool] = []  # which gradients exist
        self.differentiable: list[bool] = []  # which outputs have one

    def forward(self, flat: Sequence[Tensor]) -> list[Tensor]:
        pieces, place = [], 0
        for count in self.counts:
            pieces.append(list(flat[place : place + count]))
            place += count
        return self.step(*pieces)

    def seeds(self, flat: Sequence[Tensor]) -> list[Tensor]:
        """Return one incoming gradient for each output that can have one."""
        from torch._subclasses import FakeTensorMode

        # With fake tensors, since a real call would draw random numbers and write into buffers.
        with FakeTensorMode(allow_non_fake_inputs=True) as fake, torch.enable_grad(), _autocast(flat[-1].device.type):
            outputs = self.forward(self._leaves([fake.from_tensor(tensor) for tensor in flat]))
        self.differentiable = [value.requires_grad for value in outputs]
        kinds = [(tuple(value.shape), value.dtype, value.device) for value in outputs if value.requires_grad]
        return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in kinds]

    def plain(self, *flat: Tensor) -> list[Tensor]:
        leaves = self._leaves(flat[: self.total])
        outputs = self.forward(leaves)
        seeds = flat[self.total :]
        if not seeds:
            self.made = [False] * self.total
            return outputs
        roots = [value for value, has in zip(outputs, self.differentiable, strict=True) if has]
        asked = [leaf for leaf, wanted in zip(leaves, self.wanted, strict=True) if wanted]
        found = torch.autograd.grad(roots, asked, list(seeds), allow_unused=True)
        return self._with_gradients(outputs, list(found))

    def pure(self, *flat: Tensor) -> list[Tensor]:
        given, seeds = flat[: self.total], flat[self.total :]

        def of_wanted(*asked: Tensor) -> tuple[list[Tensor], list[Tensor]]:
            waiting = iter(asked)
            outputs = self.forward([next(waiting) if w else t for t, w in zip(given, self.wanted, strict=True)])
            has_gradient = self.differentiable or [value.is_floating_point() for value in outputs]
            return [value for value, has in zip(outputs, has_gradient, strict=True) if has], outputs

        asked = [tensor for tensor, wanted in zip(given, self.wanted, strict=True) if wanted]
        _, back, outputs = cast(Any, torch.func.vjp(of_wanted, *asked, has_aux=True))
        values: list[Tensor] = outputs
        if not seeds:
            self.made = [False] * self.total
            return values
        return self._with_gradients(values, list(back(list(seeds))))

    def _with_gradients(self, outputs: list[Tensor], found: list[Tensor | None]) -> list[Tensor]:
        waiting = iter(found)
        slots = [next(waiting) if wanted else None for wanted in self.wanted]
        self.made = [slot is not None for slot in slots]
        return [*outputs, *(slot for slot in slots if slot is not None)]

    def _leaves(self, flat: Sequence[Tensor]) -> list[Tensor]:
        return [t.detach().requires_grad_() if w else t for t, w in zip(flat, self.wanted, strict=True)]

    def states(self, graph: fx.Graph) -> list[fx.Node]:
        """Return the nodes that the state comes in by."""
        given = [node for node in graph.nodes if node.op == "placeholder"]
        return given[self.total - self.counts[3] : self.total]

    def roles(self, graph: fx.Graph, constants: dict[fx.Node, Tensor], grad: bool) -> StepTrace:
        """Name the nodes that go in and come out."""
        given = [node for node in graph.nodes if node.op == "placeholder"]
        returned = list(next(node for node in graph.nodes if node.op == "output").args[0])
        groups, place = [], 0
        for count in self.counts:
            groups.append(given[place : place + count])
            place += count
        results = 1 + self.counts[3]
        weights, firsts, inputs, states = groups
        forward = StepTrace(graph, constants, weights, firsts, inputs, states, returned[0], returned[1:results])
        if not grad:
            return forward
        seeds, waiting = iter(given[self.total :]), iter(returned[results:])
        incoming = [next(seeds) if has else None for has in self.differentiable]
        outgoing = [next(waiting) if made else None for made in self.made]
        w, f, i, _ = self.counts
        for place, state in enumerate(groups[3]):
            if state.meta["val"].is_floating_point():
                incoming[1 + place] = incoming[1 + place] or _unused(graph, state)
                outgoing[w + f + i + place] = outgoing[w + f + i + place] or _zeros(graph, state)
        return replace(
            forward,
            grad_out=incoming[0],
            grad_news=incoming[1:],
            to_weights=outgoing[:w],
            to_firsts=outgoing[w : w + f],
            to_x=outgoing[w + f],
            to_states=outgoing[w + f + i :],
        )


def _have_contiguous(graph: fx.Graph, node: fx.Node) -> None:
    """Hand a node its first argument without gaps in memory, as it was while it was traced."""
    given = cast(fx.Node, node.args[0])
    if not given.meta["val"].is_contiguous() or given.meta["val"].storage_offset():
        raise Untraceable("it reads memory by its layout", line_in(node))
    with graph.inserting_before(node):
        whole = graph.call_function(aten.clone.default, (given,), {"memory_format": torch.contiguous_format})
    whole.meta = dict(given.meta)
    node.replace_input_with(given, whole)


def _unused(graph: fx.Graph, state: fx.Node) -> fx.Node:
    """Return a way in for the gradient of a state that the step never passes one to."""
    with graph.inserting_before(next(iter(graph.nodes))):
        node = graph.placeholder(f"unused_{state.name}")
    node.meta = dict(state.meta)
    return node


def _zeros(graph: fx.Graph, state: fx.Node) -> fx.Node:
    """Return a way out for the gradient of a state that the step does not depend on."""
    value = state.meta["val"]
    with graph.inserting_before(next(node for node in graph.nodes if node.op == "output")):
        arguments = {"dtype": value.dtype, "device": value.device}
        node = graph.call_function(aten.full.default, (list(value.shape), 0.0), arguments)
    node.meta = dict(state.meta)
    return node


def _given(node: fx.Node) -> bool:
    """Say whether a view shows memory that comes from outside, which may lie otherwise at another call."""
    while node.op == "call_function" and node.all_input_nodes and _views(node.target):
        node = node.all_input_nodes[0]
    return node.op != "call_function"


def _views(operation: Any) -> bool:
    schema = getattr(operation, "_schema", None)
    return schema is not None and any(result.alias_info is not None for result in schema.returns)


def _refuse(graph: fx.Graph, guilty: Callable[[Any], bool], reason: str) -> None:
    for node in graph.nodes:
        if node.op == "call_function" and guilty(node.target):
            name = str(node.target).removeprefix("aten.").split(".")[0]
            raise Untraceable(f"{reason} ({name})", line_in(node))


def _writes(operation: Any) -> bool:
    return isinstance(operation, torch._ops.OpOverload) and operation._schema.is_mutable


def _clean(module: fx.GraphModule) -> tuple[fx.Graph, dict[fx.Node, Tensor]]:
    """Drop what computes nothing, and compute what is computed twice only once."""
    graph = module.graph
    seen: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        same = _same(node)
        if same is None and node.op == "call_function":
            key = _key(node)
            same = seen.setdefault(key, node) if key is not None else None
        if same is not None and same is not node:
            node.replace_all_uses_with(same)
    graph.eliminate_dead_code()
    constants = {}
    for node in graph.nodes:
        if node.op == "get_attr":
            value = getattr(module, node.target)
            if not isinstance(value, Tensor):
                raise Untraceable(f"it calls a function of its own, {node.target!r}, that stays opaque")
            if value.requires_grad:
                raise Untraceable("it uses a tensor that requires a gradient but is none of its parameters")
            constants[node] = value
    return graph, constants


def _same(node: fx.Node) -> fx.Node | None:
    """Return the node that this one merely repeats."""
    first = node.args[0] if node.args else None
    if not isinstance(first, fx.Node):
        return None
    if node.target in (aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default):
        return first
    if node.target is aten.t.default and first.target is aten.t.default:
        inner = first.args[0]
        return inner if isinstance(inner, fx.Node) else None
    keeps = {aten.mul.Tensor: 1, aten.div.Tensor: 1}  # to add nothing makes 0.0 of -0.0
    if node.target in keeps and len(node.args) == 2 and not node.kwargs and type(node.args[1]) in (int, float):
        value, inner = node.meta.get("val"), first.meta.get("val")
        unchanged = value is not None and inner is not None and value.dtype == inner.dtype
        return first if unchanged and node.args[1] == keeps[node.target] else None
    return None


def _key(node: fx.Node) -> Any:
    def frozen(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return tuple(map(frozen, value))
        if isinstance(value, dict):
            return tuple((k, frozen(v)) for k, v in value.items())
        return (type(value), value)

    if node.target is not operator.getitem and not isinstance(node.target, torch._ops.OpOverload):
        return None
    if is_random(node.target) or _writes(node.target):
        return None
    key = (node.target, frozen(node.args), frozen(node.kwargs))
    try:
        hash(key)
    except TypeError:
        return None
    return key
