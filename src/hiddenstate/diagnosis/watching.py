"""What each recurrent layer is given and gives back while the model runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ..cells import Layer
from ..state import State
from .inputs import unpacked


@dataclass(slots=True, eq=False)
class Call:
    """One call of a layer: what went in and what came out, with their graphs."""

    layer: Layer
    x: Any  # a tensor or a packed sequence
    given: State | None
    given_native: Any
    rows: int
    output: Any = None
    state: State | None = None
    touched: bool = False  # the state it was given has other values afterwards
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """How many steps this call made."""
        if not self.layer.fused:
            return 1
        if isinstance(self.x, PackedSequence):
            return len(self.x.batch_sizes)
        if self.x.dim() < 3:
            return int(self.x.shape[0])
        return int(self.x.shape[1 if self.layer.spec.batch_first else 0])

    @property
    def sequence(self) -> tuple[Tensor, Tensor]:
        """The output as (batch, time, unit), and lengths (batch,)."""
        return _by_rows(self.output, self)

    @property
    def source(self) -> tuple[Tensor, Tensor]:
        """The input as (batch, time, feature), and lengths (batch,)."""
        return _by_rows(self.x, self)


def _by_rows(value: Any, call: Call) -> tuple[Tensor, Tensor]:
    if isinstance(value, PackedSequence):
        return unpacked(value)
    if not call.layer.fused:
        value = value if value.dim() > 1 else value[None]
        return value.unsqueeze(1), torch.ones(len(value), dtype=torch.int64)
    if value.dim() == 2:
        value = value[None]
    elif not call.layer.spec.batch_first:
        value = value.transpose(0, 1)
    return value, torch.full((len(value),), value.shape[1], dtype=torch.int64)


@dataclass(slots=True, eq=False)
class Watch:
    """All calls of all layers in one run of the model, and what embeddings gave."""

    calls: list[Call] = field(default_factory=list)
    embedded: list[tuple[str, Tensor, Tensor]] = field(default_factory=list)  # name, tokens, vectors
    entered: set[str] = field(default_factory=set)  # names of modules that were called
    unread: dict[str, str] = field(default_factory=dict)  # layers that could not be understood, and why

    def of(self, layer: Layer) -> list[Call]:
        """Return the calls of one layer."""
        return [call for call in self.calls if call.layer.module is layer.module]


@contextmanager
def watched(model: nn.Module, layers: list[Layer], *, leaves: bool = False) -> Iterator[Watch]:
    """Note every call of `layers`; with `leaves`, inputs that have no gradient get one."""
    watch = Watch()
    with ExitStack() as stack:
        for layer in layers:
            waiting: list[tuple[Call | None, Any]] = []
            first = _Entry(watch, layer, waiting, leaves=leaves)
            last = _Exit(watch, layer, waiting)
            if not isinstance(layer.module, torch.jit.ScriptModule):  # which takes no hooks
                stack.callback(layer.module.register_forward_pre_hook(first, with_kwargs=True).remove)
                stack.callback(layer.module.register_forward_hook(last, with_kwargs=True).remove)
        for name, module in model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue
            stack.callback(module.register_forward_pre_hook(lambda *_, name=name: watch.entered.add(name)).remove)
            if isinstance(module, nn.Embedding):
                stack.callback(module.register_forward_hook(_Embedded(watch, name, leaves=leaves)).remove)
        yield watch


class _Entry:
    def __init__(self, watch: Watch, layer: Layer, waiting: list[tuple[Call | None, Any]], *, leaves: bool) -> None:
        self.watch, self.layer, self.waiting, self.leaves = watch, layer, waiting, leaves

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        changed = None
        if self.leaves and args:
            x = _with_gradient(args[0])
            if x is not args[0]:
                args = (x, *args[1:])
                changed = (args, kwargs)
        try:
            rows, _ = self.layer.rows(args, kwargs)
            native = self.layer.given(args, kwargs)
            given = None if native is None else self.layer.to_state(native, batch=rows)
            x = args[0] if args else next(iter(kwargs.values()))
            call = Call(self.layer, x, given, native, rows, args=args, kwargs=kwargs)
            kept = None if given is None or self.layer.fused else given.detach().clone()
            self.waiting.append((call, kept))
        except Exception as error:  # whatever a user's cell does, watching it must not stop it
            self.watch.unread[self.layer.name] = f"{type(error).__name__}: {error}"
            self.waiting.append((None, None))
        return changed


class _Exit:
    def __init__(self, watch: Watch, layer: Layer, waiting: list[tuple[Call | None, Any]]) -> None:
        self.watch, self.layer, self.waiting = watch, layer, waiting

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        call, kept = self.waiting.pop() if self.waiting else (None, None)
        if call is None:
            return
        try:
            call.output, native = self.layer.split(result)
            call.state = self.layer.to_state(native, batch=call.rows)
            if kept is not None and call.given is not None:
                call.touched = any(not same(call.given[name], part) for name, part in kept.items())
            self.watch.calls.append(call)
        except Exception as error:  # as above
            self.watch.unread[self.layer.name] = f"{type(error).__name__}: {error}"


class _Embedded:
    def __init__(self, watch: Watch, name: str, *, leaves: bool) -> None:
        self.watch, self.name, self.leaves = watch, name, leaves

    def __call__(self, module: nn.Module, args: tuple[Any, ...], result: Tensor) -> Tensor | None:
        if not args or not isinstance(args[0], Tensor):
            return None
        vectors = _with_gradient(result) if self.leaves else result
        self.watch.embedded.append((self.name, args[0], vectors))
        return vectors if vectors is not result else None


def _with_gradient(x: Any) -> Any:
    if not torch.is_grad_enabled():
        return x
    if isinstance(x, Tensor) and x.is_floating_point() and not x.requires_grad:
        return x.detach().requires_grad_()
    if isinstance(x, PackedSequence) and x.data.is_floating_point() and not x.data.requires_grad:
        return x._replace(data=x.data.detach().requires_grad_())
    return x


def same(a: Tensor, b: Tensor) -> bool:
    """Say whether two tensors hold the same values, NaN being equal to NaN."""
    if a.shape != b.shape:
        return False
    return bool(((a == b) | ((a != a) & (b != b))).all())
