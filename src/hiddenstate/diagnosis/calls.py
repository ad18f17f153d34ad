"""The calls that one run of a model makes of its recurrent layers, and what its embeddings gave."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ..cells import Call, Layer, Listener, Proceed, around, listen, may_be_recomputed
from ..state import State
from .equal import same


@dataclass(frozen=True, slots=True, eq=False)
class Embedded:
    """One call of an embedding."""

    name: str
    tokens: Tensor
    vectors: Tensor


class Calls(list[Call]):
    """The calls of all layers in one run of a model, in their order."""

    def __init__(self) -> None:
        """Start with none."""
        super().__init__()
        self.overwritten: list[Call] = []  # those whose given state has other values afterwards
        self.embedded: list[Embedded] = []
        self.unread: dict[str, str] = {}  # layers whose calls could not be understood, and why

    def of(self, layer: Layer) -> list[Call]:
        """Return the calls of one layer."""
        return [call for call in self if call.layer.module is layer.module]


@contextmanager
def collected(model: nn.Module, layers: list[Layer], *, leaves: bool = False) -> Iterator[Calls]:
    """Collect every call of `layers`; with `leaves`, inputs to which no gradient would come back get one."""
    calls = Calls()
    heard = [layer for layer in layers if not isinstance(layer.module, torch.jit.ScriptModule)]
    with ExitStack() as stack:
        stack.callback(listen(model, heard, _Collector(calls, leaves=leaves)).remove)
        for name, module in model.named_modules():
            if isinstance(module, nn.Embedding):
                stack.callback(around(module, partial(_embedding, calls, name, leaves)).remove)
        yield calls


class _Collector(Listener):
    def __init__(self, calls: Calls, *, leaves: bool) -> None:
        self._calls, self._leaves = calls, leaves

    def layer_call(self, call: Call, proceed: Proceed) -> Call:
        """Note what went in and what came out."""
        before: State | None = None
        with self._reading(call):
            call = with_gradient(call) if self._leaves else call
            given = None if isinstance(call.layer.module, nn.RNNBase) else call.given  # torch's write into nothing
            before = None if given is None else given.detach().clone()
        done = proceed(call)
        with self._reading(done):
            given, _ = done.given, (done.output, done.state)  # a call that cannot be read is not collected
            self._calls.append(done)
            if given is not None and before is not None and not all(same(given[n], p) for n, p in before.items()):
                self._calls.overwritten.append(done)
        return done

    @contextmanager
    def _reading(self, call: Call) -> Iterator[None]:
        """Let neither a trace see what we do, nor the model fail where we cannot read what it does."""
        with torch._C.DisableTorchFunction():
            try:
                yield
            except Exception as error:  # whatever a user's cell does, looking at it must not stop it
                self._calls.unread[call.layer.label] = f"{type(error).__name__}: {error}"


def _embedding(
    calls: Calls, name: str, leaves: bool, arguments: tuple[Any, dict[str, Any]], run: Callable[[Any], Tensor]
) -> Tensor:
    args, kwargs = arguments
    tokens, vectors = args[0] if args else kwargs.get("input"), run(arguments)
    if isinstance(tokens, Tensor):
        with torch._C.DisableTorchFunction():
            vectors = _leaf(vectors) if leaves else vectors
        calls.embedded.append(Embedded(name, tokens, vectors))
    return vectors


def with_gradient(call: Call) -> Call:
    """Return the call with an input that gradients come back to, where that can be had."""
    x = call.input
    data = x.data if isinstance(x, PackedSequence) else x
    leaf = _leaf(data)
    if leaf is data:
        return call
    return call.fed(x._replace(data=leaf) if isinstance(x, PackedSequence) else leaf)


def _leaf(x: Tensor) -> Tensor:
    if x.requires_grad or not x.is_floating_point() or not torch.is_grad_enabled():
        return x
    if may_be_recomputed(grad_before=False):  # then as many tensors must be saved again, with the input as it was
        return x
    return x.detach().requires_grad_()


def steps_of_rows(call: Call) -> Tensor:
    """Return how many steps of each row are real: (batch,), on the CPU."""
    return torch.full((call.rows,), call.steps) if call.lengths is None else call.lengths
