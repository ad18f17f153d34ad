"""One step of a cell as torch's own tracer reads it: a graph, what goes into it, and whether that is still so.

Torch's compiler is asked to compile `cell(x, state)`, with a backend of ours. It reads the cell's Python code, guards
all that it read, and calls what the backend made whenever the guards hold. Ours stops the call there, and tells which
graph it was, with the tensors that the cell reads now, wherever they come from. So a reading runs nothing and writes
nothing; a graph that was read before is found again in some twenty microseconds, and where anything has changed, the
cell is read anew.
"""

from __future__ import annotations

import builtins
import logging
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..errors import Untraceable
from .reasons import NOT_USERS, blame, line_in
from .step_graph import Reading, StepGraph, with_numbers
from .twins import members, unheard_twin
from .unguarded import Unguarded, functions_of, misnamed

_AGAIN = 3  # times that a cell is read before it is said to change while that is done
_ASKED = {  # what Python code may ask for -> why a trace has no answer
    **dict.fromkeys(
        ("requires_grad", "grad_fn", "is_leaf", "_version", "data_ptr", "storage_offset"),
        "of a tensor, which changes from step to step",
    ),
    **dict.fromkeys(("is_compiling", "is_dynamo_compiling"), "which is answered otherwise while it is read"),
    "addcdiv": "which torch's tracer computes in another order",
}
_SHAPED = {
    *("view", "reshape", "expand", "repeat", "unflatten", "zeros", "ones", "empty", "randn", "rand"),
    *("new_zeros", "new_ones", "new_empty", "broadcast_to", "Size"),
    *("output", "autograd_function_apply"),
}
_IDENTITY = {"ID_MATCH", "CLASS_MATCH", "FUNCTION_MATCH", "CLOSURE_MATCH", "BUILTIN_MATCH", "MODULE_MATCH"}
_TALKATIVE = [
    *("torch._dynamo", "torch._dynamo.convert_frame", "torch._subclasses.fake_tensor", "torch._guards"),
    "torch._inductor.select_algorithm",
]


class _Stopped(BaseException):
    """The call that a reader makes, stopped where the graph would run."""


class _ReadingNow(threading.local):
    """Where a reader is with a thread."""

    unlogged = False
    graph: StepGraph | None = None
    given: Sequence[Any] = ()
    names: dict[str, Any] = {}  # noqa: RUF012  # by which guards know what they look at
    outputs: list[Any] | None = None  # what the graph is to return, where the call shall go on
    described: Any = None  # what torch's tracer knows tensors by


_place = _ReadingNow()
TRACING = threading.RLock()  # torch's tracers swap out parts of torch itself, so there is only ever one at a time


class StepReader:
    """Reads the steps of one cell."""

    def __init__(self) -> None:
        """Begin with nothing read."""
        self.made = 0  # graphs so far
        self._compiled: dict[bool, tuple[Callable[..., Any], dict[str, Any]]] = {}
        self._dynamic = True  # whether shapes may differ from call to call
        self._more: dict[str, bool] = {}  # settings of torch's tracer that this cell needs
        self._seen: set[Any] = set()  # kinds of calls that a graph was found for
        self._nameless: list[dict[str, Any]] = []  # globals that are not to be looked for by their name

    def read(self, module: nn.Module, x: Tensor, native: Any, parts: Sequence[Tensor]) -> Reading:
        """Return what the step `module(x, native)` is now; `parts` are the tensors in `native`."""
        inside = members(module)
        body = unheard_twin(module)
        with TRACING:
            try:
                return self._read(body, x, native, parts, kinds=list(map(type, inside)))
            finally:
                if _place.described is not None:  # torch keeps it, and what is known weakly cannot be swapped
                    _place.described.clear()
                _place.names, _place.given, _place.graph, _place.described = {}, (), None, None

    def _read(self, body: nn.Module, x: Tensor, native: Any, parts: Sequence[Tensor], *, kinds: list[type]) -> Reading:
        for _ in range(_AGAIN):
            graph = self._find(body, x, native)
            if not graph.known:
                graph.learn(_place.given, [x, *parts])
                graph.misnamed, graph.kinds = graph.unguarded.settle(_place.names), kinds
            if graph.unguarded.unsure:
                raise Untraceable(graph.unguarded.unsure)
            new = [names for names in graph.misnamed if not any(names is known for known in self._nameless)]
            if not new and graph.kinds == kinds and graph.unguarded.holds(_place.names):
                return self._reading(graph)
            self._nameless += new
            self._forget()
        raise Untraceable("what it reads changes while it is read")

    def result(self, module: nn.Module, x: Tensor, native: Any, *, outputs: list[Any]) -> Any:
        """Return what the step returns where its graph gives these outputs."""
        body = unheard_twin(module)
        with TRACING:
            _place.outputs = outputs
            try:
                return self._call(body, x, native, kind=None)
            finally:
                _place.outputs, _place.names = None, {}

    def _reading(self, graph: StepGraph) -> Reading:
        given = _place.given
        weights = [given[place] for place in graph.weights]
        odd = next((tensor for tensor in weights if not isinstance(tensor, Tensor) or _is_odd(tensor)), None)
        if odd is not None:
            raise Untraceable(f"it reads a tensor of a kind of its own, {type(odd).__name__}")
        numbers = (given[place] for place in graph.numbers)
        return Reading(graph, weights, tuple(n.item() if isinstance(n, Tensor) else n for n in numbers))

    def _find(self, body: nn.Module, x: Tensor, native: Any) -> StepGraph:
        from torch._dynamo.exc import FailOnRecompileLimitHit  # not before it is needed: it takes a second to load

        kind = (x.shape, x.dtype, torch.is_grad_enabled())
        try:
            self._call(body, x, native, kind=kind)
        except _Stopped:
            assert _place.graph is not None
            self._seen.add(kind)
            return _place.graph
        except FailOnRecompileLimitHit:
            self._forget()
            return self._find(body, x, native)
        except Exception as error:  # whatever the tracer meets in a user's code is a reason to run it plainly
            known = getattr(error, "inner_exception", error)
            if isinstance(known, Untraceable):
                raise Untraceable(known.reason, known.line) from error
            if not self._more:
                self._more = _settings()  # what torch traces only when asked to
            elif self._dynamic:
                self._dynamic = False  # some operations bear no shape that is not known
            else:
                raise Untraceable(*blame(error)) from error
            self._forget()
            return self._find(body, x, native)
        raise Untraceable("torch's compiler is switched off")

    def _call(self, body: nn.Module, x: Tensor, native: Any, *, kind: Any) -> Any:
        call, scope = self._step(body)
        _place.names = {"L": {"module": body, "x": x, "state": native}, "G": scope}
        hidden = [(names, names.pop("__name__")) for names in self._nameless if "__name__" in names]
        # Torch leaves out what functions of Python's own library read, and of all modules that have such a name.
        tracer: Any = torch._dynamo.symbolic_convert
        tracer.is_stdlib, told = _never, tracer.is_stdlib
        try:
            if (kind in self._seen or kind is None) and not self._more:
                return call(body, x, native)
            with warnings.catch_warnings(), unlogged(), torch._dynamo.config.patch(self._more), _sizes_apart():
                warnings.simplefilter("ignore")  # of what tracing itself does, which is none of the user's business
                return call(body, x, native)
        finally:
            tracer.is_stdlib = told
            for names, name in hidden:
                names["__name__"] = name

    def _step(self, body: nn.Module) -> tuple[Callable[..., Any], dict[str, Any]]:
        if self._dynamic not in self._compiled:
            inside = [function for member in members(body) for function in functions_of(type(member))]
            self._nameless += misnamed(inside)
            self._compiled[self._dynamic] = self._compile(self._dynamic)
        return self._compiled[self._dynamic]

    def _compile(self, dynamic: bool) -> tuple[Callable[..., Any], dict[str, Any]]:
        import torch._dynamo

        torch._dynamo.symbolic_convert._import_module.cache_clear()  # a module may be another by now
        # Code of its own for each cell, since torch counts how often one piece of code was compiled.
        scope: dict[str, Any] = {"__builtins__": builtins, "__name__": "step"}
        own = types.FunctionType(_step_of.__code__.replace(co_name="step"), scope, "step")
        # As torch.compile(fullgraph=True) does, but told of the guards too.
        compiler = torch._dynamo.optimize(self._backend, nopython=True, guard_export_fn=self._hold, dynamic=dynamic)
        return compiler(own), scope

    def _forget(self) -> None:
        self._compiled.clear()
        self._seen.clear()

    def _backend(self, call: fx.GraphModule, _: Any, **__: Any) -> Callable[..., Any]:
        from torch._dynamo.utils import get_traced_code

        _refuse_writes()
        _refuse_random(call)
        _refuse_effects(call)
        codes = frozenset(get_traced_code() or ())
        _refuse_questions(codes)
        given = [node for node in call.graph.nodes if node.op == "placeholder"]
        numbers = [place for place, node in enumerate(given) if _is_number(node)]
        sizes = [place for place, node in enumerate(given) if _is_own_size(node)]
        graph = StepGraph(_copied(call), numbers, sizes, unguarded=Unguarded(codes))
        graph.counts = _counts(call)
        for fake in {node.meta["example_value"].fake_mode for node in given if _is_fake(node)}:
            _place.described = fake.fake_tensor_converter.meta_converter.describer.lookup_tensor
        _place.graph, self.made = graph, self.made + 1

        def stop(*given: Any) -> Any:
            if _place.outputs is not None:
                return _place.outputs
            _place.graph, _place.given = graph, given
            raise _Stopped

        return stop

    def _hold(self, guards: Iterable[Any]) -> None:
        assert _place.graph is not None
        for guard in guards:
            name = guard.name() if callable(guard.name) else guard.name
            kinds = {guard.create_fn_name(), *(guard.guard_types or ())}
            if name:
                _place.graph.unguarded.add(name, _place.names, by_identity=bool(kinds & _IDENTITY))


def _step_of(module, x, state):  # type: ignore[no-untyped-def]  # read by torch, which annotations would only hold up
    return module(x, state)


def _never(_: Any) -> bool:
    return False


def _sizes_apart() -> Any:
    """Have torch tell sizes apart that are the same by chance: as many rows as units."""
    import torch.fx.experimental._config as settings

    known: Any = settings
    return known.patch(use_duck_shape=False) if hasattr(known, "use_duck_shape") else nullcontext()


def _settings() -> dict[str, bool]:
    known: Any = torch._dynamo.config
    return {name: True for name in ("trace_autograd_ops", "allow_rnn") if hasattr(known, name)}


def _is_odd(tensor: Tensor) -> bool:
    return type(tensor) not in (Tensor, nn.Parameter, nn.Buffer)


def _is_number(node: fx.Node) -> bool:
    return bool(getattr(node.meta.get("grapharg"), "pass_arg_as_tensor", False))


def _is_size(node: fx.Node) -> bool:
    return type(getattr(node.meta.get("grapharg"), "source", None)).__name__ == "TensorPropertySource"


def _is_own_size(node: fx.Node) -> bool:
    """Say whether a number is a size of the input or the state, whose shapes are known anyway."""
    source: Any = getattr(node.meta.get("grapharg"), "source", None)
    if not _is_size(node):
        return False
    kind = source.prop.name
    while hasattr(source, "base"):
        source = source.base
    own = getattr(source, "local_name", "") in ("x", "state")
    if own and kind != "SIZE" and node.users:
        raise Untraceable("it computes with how its input or state lies in memory, which changes from step to step")
    return own


def _is_fake(node: fx.Node) -> bool:
    return hasattr(node.meta.get("example_value"), "fake_mode")


def _counts(call: fx.GraphModule) -> bool:
    """Say whether a graph, or one within it, computes with the number of rows."""
    graphs = [module.graph for module in call.modules() if isinstance(module, fx.GraphModule)]
    given = [node for graph in graphs for node in graph.nodes if node.op == "placeholder"]
    counted = next((size for node in given if (size := _whole(node)) is not None and _is_rows(node)), None)
    return counted is not None and not all(_only_shapes(node) for node in given if _whole(node) == counted)


def _only_shapes(node: fx.Node) -> bool:
    """Say whether tensors are only shaped by a size, or by what is made of it."""
    for user in node.users:
        if isinstance(user.meta.get("example_value"), torch.SymBool | bool):
            continue  # a comparison, which is guarded
        name = user.target if isinstance(user.target, str) else getattr(user.target, "__name__", "")
        if name not in _SHAPED and (_whole(user) is None or not _only_shapes(user)):
            return False
    return True


def _whole(node: fx.Node) -> int | None:
    """Return the number that a size is while a step is read."""
    value = node.meta.get("example_value")
    hint = getattr(value.node, "hint", None) if isinstance(value, torch.SymInt) else None
    return hint if isinstance(hint, int) else None


def _is_rows(node: fx.Node) -> bool:
    source: Any = getattr(node.meta.get("grapharg"), "source", None)
    return _is_size(node) and getattr(source.base, "local_name", "") == "x" and source.idx == 0


def _copied(call: fx.GraphModule) -> fx.GraphModule:
    """Return a graph without what would keep the cell's tensors alive."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(call.graph, {}))
    for node in graph.nodes:
        node.meta = {key: node.meta[key] for key in ("stack_trace",) if key in node.meta}
    return with_numbers(fx.GraphModule(call, graph))


def _refuse_writes() -> None:
    """Refuse a step that changes anything but its own values: torch would do so once for each call."""
    frame: Any = sys._getframe()
    while frame is not None and not hasattr(frame.f_locals.get("self"), "side_effects"):
        frame = frame.f_back
    if frame is None:
        raise Untraceable(f"torch {torch.__version__} does not say what a step changes")
    effects = frame.f_locals["self"].side_effects
    for thing in effects.id_to_variable.values():
        if effects.is_modified(thing) and type(thing.mutation_type).__name__.endswith("Existing"):
            raise Untraceable(f"it changes {_spelled(effects, thing)} at every step")
    if effects.tensor_hooks:
        raise Untraceable("it puts a hook on a tensor at every step")


def _spelled(effects: Any, thing: Any) -> str:
    source = getattr(thing.source, "name", "")
    name, own = str(source() if callable(source) else source), "L['module']"
    changed = list(effects.store_attr_mutations.get(thing, ()))
    if name == own and changed:
        return f"its own attribute {changed[0]!r}"
    if name.startswith(f"{own}."):
        return f"its own attribute {name.removeprefix(f'{own}.')!r}"
    return (
        f"something outside itself, {name.removeprefix('G')}," if name.startswith("G[") else "something outside itself"
    )


def _refuse_random(call: fx.GraphModule) -> None:
    for node in call.graph.nodes:
        if "Random" in type(getattr(node.meta.get("grapharg"), "source", None)).__name__:
            raise Untraceable("it draws random numbers from Python or numpy, which a trace would freeze")


def _refuse_effects(call: fx.GraphModule) -> None:
    """Refuse a step that does what no value depends on, as to stop where values are wrong: it would be lost."""
    grad = torch.is_grad_enabled()
    for inner in call.modules():
        for node in inner.graph.nodes if isinstance(inner, fx.GraphModule) else ():
            name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
            if node.op.startswith("call_") and ("assert" in name or name.startswith("_check")):
                raise Untraceable("it checks values at every step, as assert does", line_in(node))
            if node.op.startswith("call_") and name == "register_hook":
                raise Untraceable("it puts a hook on a tensor at every step", line_in(node))
            if name == "_set_grad_enabled":
                grad = bool(node.args[0])
    if grad != torch.is_grad_enabled():
        raise Untraceable("it leaves gradients switched on or off")


def _refuse_questions(codes: Iterable[types.CodeType]) -> None:
    for code in codes:
        asked = _ASKED.keys() & code.co_names
        if asked and not code.co_filename.startswith(NOT_USERS):
            raise Untraceable(f"its Python code asks for {min(asked)!r} {_ASKED[min(asked)]}")


@contextmanager
def unlogged() -> Iterator[None]:
    """Have torch's loggers say nothing of what is met inside, in this thread: it is told in a sentence."""
    for name in _TALKATIVE:
        logger = logging.getLogger(name)
        if _unless_unlogged not in logger.filters:
            logger.addFilter(_unless_unlogged)
    before, _place.unlogged = _place.unlogged, True
    try:
        yield
    finally:
        _place.unlogged = before


def _unless_unlogged(_: logging.LogRecord) -> bool:
    return not _place.unlogged
