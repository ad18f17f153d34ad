"""Making and tracing calls of a model, hearing the calls of its modules, and leaving the model unchanged."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import BadInput
from ...state import ends
from ..dynamo import eager
from ..listener import unheard, watching
from ..snapshot import Snapshot, random_streams_kept
from .memory import version_of
from .names import module_tensors
from .operation import ModuleCall, Op, leaves
from .places import OURS
from .taps import LoopTaps
from .trace import Enough, Function, Trace


def _prepare(trace: Trace, model: nn.Module, inputs: Any) -> None:
    """Name all tensors that exist before the call."""
    trace.lazy = any(isinstance(end, Iterator) for _, end in ends(inputs))
    trace.name_values("argument", {label_of(place): t for place, t in leaves(inputs)})
    trace.name_values("parameter", dict(model.named_parameters(remove_duplicate=True)))
    trace.name_values("buffer", dict(model.named_buffers(remove_duplicate=True)))
    for path, module in model.named_modules():
        trace.paths[module] = path
        trace.name_values("attribute", {f"{path}.{name}".strip("."): t for name, t in module_tensors(module)})


class ModelCall:
    """A model and its arguments: called once by the user, and by us, as often as needed, without a trace."""

    def __init__(
        self, model: nn.Module, inputs: tuple[tuple[Any, ...], dict[str, Any]], known: set[nn.Module], *, again: Any
    ) -> None:
        """Keep how a call is made; `again` is what we call: the model, or only its forward."""
        self.model = model
        self.inputs = inputs
        self.known = known
        self._again = again
        self._before: Snapshot | None = None  # the model before the user's call
        self._weights: dict[int, tuple[Tensor, Tensor]] = {}  # weights that a call writes, with their old values

    @property
    def is_real(self) -> bool:
        """Whether the user makes the call: then we avoid calls of our own."""
        return self._before is not None

    def real(self, run: Callable[[], Any], taps: LoopTaps | None = None) -> tuple[Trace, Any]:
        """Trace and tap the call that the user makes, which `run` continues."""
        self._before = Snapshot(self.model, weights=False)
        written = [version_of(tensor) for _, tensor in leaves(self.inputs)]
        trace = Trace(sys._getframe())
        proceed = run if taps is None else partial(taps.around, run)
        made = traced(self.model, self.inputs, trace, known=self.known, proceed=lambda *_, **__: proceed())
        self._weights = {
            id(value.tensor): (value.tensor, value.tensor.detach().clone())
            for value in trace.memory.values
            if value.origin == "parameter" and value.copy is not None
        }
        if [version_of(tensor) for _, tensor in leaves(self.inputs)] != written:
            self._before.lost.append("tensor that the call has written")
        return trace, made

    def traced(self, inputs: Any, enough: Callable[[Trace], bool] | None = None) -> Trace:
        """Call the model under a trace."""
        trace = Trace(sys._getframe(), enough)
        try:
            traced(self.model, inputs, trace, known=self.known, call=self._again)
        finally:
            for value in trace.memory.values:
                if value.origin == "parameter" and value.copy is not None:
                    self._weights.setdefault(id(value.tensor), (value.tensor, value.copy))
        return trace

    def plain(self, inputs: Any) -> None:
        """Call the model without a trace."""
        with eager():
            self._again(*inputs[0], **inputs[1])

    @contextmanager
    def unharmed(self) -> Iterator[None]:
        """Start from where the user's call started, unheard, and restore everything afterwards, whatever happens."""
        snapshot, given = Snapshot(self.model, weights=False), [(t, t.detach().clone()) for _, t in leaves(self.inputs)]
        before = self._before or snapshot
        used_up = before.lost + [type(end).__name__ for _, end in ends(self.inputs) if isinstance(end, Iterator)]
        if used_up:
            raise BadInput(f"a second call would use up a {used_up[0]}")
        with unheard(), random_streams_kept(), torch.set_grad_enabled(torch.is_grad_enabled()):
            try:
                if self._before is not None:
                    self._before.restore()
                yield
            finally:
                snapshot.restore()
                with torch.no_grad():
                    for tensor, content in (*given, *self._weights.values()):
                        if tensor.layout is torch.strided and not torch.equal(tensor, content):
                            tensor.detach().copy_(content)


def traced(
    model: nn.Module,
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
    trace: Trace,
    *,
    known: Iterable[nn.Module] = (),
    call: Callable[..., Any] | None = None,
    proceed: Callable[..., Any] | None = None,
) -> Any:
    """Call the model once under a trace, or let a call of it `proceed` under one, and return the trace and the result.

    Errors of the model are raised unchanged; an error in the trace itself ends the trace and is kept as `broken`.
    """
    trace.safely(_prepare, trace, model, inputs)
    result = None
    with _listening(model, set(known), trace, but=model if proceed else None), eager(), watching(trace):
        called = _heard(model, "", trace, proceed) if proceed else call or model
        with trace, suppress(Enough):
            result = called(*inputs[0], **inputs[1])
    trace.safely(trace.places.close, trace.ops)
    return result


def label_of(place: tuple[Any, ...]) -> str:
    """Return the name of an argument in the trace."""
    return "args" + "".join(f"[{step!r}]" for step in place)


@contextmanager
def _listening(model: nn.Module, known: set[nn.Module], trace: Trace, but: nn.Module | None) -> Iterator[None]:
    changed: list[tuple[nn.Module, Any]] = []
    seen: set[nn.Module] = set()
    try:
        for path, module in _members(model, known):
            if module in seen or module is but:
                continue
            seen.add(module)
            changed.append((module, module.__dict__.get("forward", changed)))
            opaque = module in known or isinstance(module, torch.jit.ScriptModule)
            module.__dict__["forward"] = _heard(
                module, path, trace, module.forward, opaque=opaque, known=module in known
            )
        yield
    finally:
        for module, before in changed:
            if before is changed:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = before


def _members(model: nn.Module, known: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of a model with their paths, except those inside known or scripted ones."""
    closed: list[str] = []
    for path, module in model.named_modules():
        if any(path.startswith(prefix) for prefix in closed):
            continue
        if module in known or isinstance(module, torch.jit.ScriptModule):
            closed.append(f"{path}." if path else "")
        if type(module).__name__ != "OptimizedModule":  # the wrapper of torch.compile; the module in it is heard itself
            yield ".".join(step for step in path.split(".") if step != "_orig_mod"), module


def _heard(
    module: nn.Module,
    path: str,
    trace: Trace,
    forward: Callable[..., Any],
    *,
    opaque: bool = False,
    known: bool = False,
) -> Callable[..., Any]:
    """Return a forward that notes its calls in `trace`; inside an `opaque` one nothing is noted."""

    def heard(*args: Any, **kwargs: Any) -> Any:
        if not trace.listening:
            if not trace.paused and not trace.ours:
                trace.blind[path, ""] = "it is called in another thread, whose operations are not seen"
            return forward(*args, **kwargs)
        call = ModuleCall(len(trace.calls), module, path, trace.inside, len(trace.ops), known=known)
        call.site = _site(sys._getframe(1))
        call.args = trace.safely(_values, trace, {"args": args, "kwargs": kwargs}) or []
        call.given = {"args": args, "kwargs": kwargs}
        trace.open(call)
        try:
            result = _opaque(module, forward, trace, (args, kwargs)) if opaque else forward(*args, **kwargs)
        finally:
            trace.shut(call)
        if trace.broken is not None:
            return result
        call.results, call.returned = trace.safely(_values, trace, result) or [], result
        if any(value.op < 0 and value.origin in ("outside", "unseen") for _, value in call.results):
            trace.blind[path, f"{os.path.basename(call.site[0])}:{call.site[1]}" if path else ""] = _BLIND
        return result

    return heard


_BLIND = (
    "it returns a tensor that no operation seen from Python has made (a scripted function or a kernel of its own): "
    "whether anything recurs in there was not seen"
)


def _opaque(module: nn.Module, forward: Callable[..., Any], trace: Trace, called: tuple[Any, Any]) -> Any:
    """Run a module as one operation on its arguments and weights."""
    args, kwargs = called
    tensors = [tensor for _, tensor in leaves((args, kwargs))]
    tensors += [*module.parameters(), *module.buffers()]
    given = tensors, [version_of(tensor) for tensor in tensors]
    trace.paused += 1
    try:
        result = forward(*args, **kwargs)
    finally:
        trace.paused -= 1
    function = Function(forward, f"{type(module).__name__}.forward")
    trace.safely(trace.record, function, called, given, result, sys._getframe(1))
    return result


def _values(trace: Trace, thing: Any) -> list[tuple[tuple[Any, ...], Any]]:
    """Return the values of the tensors in a call, by place."""
    found = []
    for place, tensor in leaves(thing):
        value = trace.peek(tensor)
        if value is None:
            op = Op(leaves, "module call", ((), {}), (trace.places.scopes[0], 0, trace.inside))
            value = trace.value_of(tensor, op, version_of(tensor))
        found.append((place, value))
    return found


def _site(frame: Any) -> tuple[str, int]:
    """Return file and line of the code that calls a module, skipping torch's own code."""
    while frame is not None and frame.f_code.co_filename.startswith((_TORCH, *OURS)):
        frame = frame.f_back
    return ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)


_TORCH = torch.__path__[0]
