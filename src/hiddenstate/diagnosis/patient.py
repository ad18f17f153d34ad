"""The model under examination: how it is called, and calls of it that leave no trace."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ..carry import Carry
from ..cells import Layer, Snapshot, as_layer, has_own_code, layers, random_streams_kept, seed, unheard
from ..errors import NotRecurrent
from ..state import Path, mapped, tensors
from .calls import Calls, collected
from .hiding import Hidden, hidden_things
from .inputs import Cut, Inputs
from .thresholds import Thresholds
from .tracing import Trace, Tracer

RESETS = ("reset", "reset_state", "reset_hidden")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """What one call of the model gave."""

    result: Any
    inputs: Inputs
    calls: Calls  # of its layers, where they were to be collected
    trace: Trace

    @property
    def outputs(self) -> dict[Path, Tensor]:
        """All tensors of real numbers with at least one axis in what the model returned."""
        return {path: t for path, t in tensors(self.result).items() if t.is_floating_point() and t.dim() > 0}


@dataclass(eq=False)
class Patient:
    """A model, its inputs, and everything that probes have learned of it so far."""

    model: nn.Module
    inputs: Inputs
    thresholds: Thresholds = field(default_factory=Thresholds)
    targets: Any = None
    loss: Callable[[Any, Any], Tensor] | None = None
    optimizers: tuple[torch.optim.Optimizer, ...] = ()
    assumed: list[str] = field(default_factory=list)
    alone: bool = False  # a cell or layer by itself, rather than a model around one
    memo: dict[str, Any] = field(default_factory=dict)
    cut: Cut | None = None  # where the inputs are a piece of what the user gave

    def __post_init__(self) -> None:
        """Find the layers, registered or not, and keep what calls may change."""
        self.hidden: list[Hidden] = hidden_things(self.model)
        others = [thing.value for thing in self.hidden if isinstance(thing.value, nn.Module)]
        self.layers: list[Layer] = list(layers(self.model))
        if self.alone:  # the cell that was given, not what it is made of
            cell = as_layer(getattr(self.model, "cell"))  # noqa: B009
            self.layers = [Layer("cell", cell.module, cell.adapter)]
        for thing in self.hidden:
            if isinstance(thing.value, nn.Module):
                for layer in layers(thing.value):
                    name = f"{thing.name}.{layer.name}" if layer.name else thing.name
                    self.layers.append(Layer(name, layer.module, layer.adapter))
        self.seen: list[Layer] = []  # what recurs by itself, beside the layers that types tell of
        self.doubts: list[str] = []  # what could not be told
        self.snapshot = Snapshot(self.model, *others)
        self.whole = self.inputs  # those that the targets belong to: as the user gave them, unless both were cut
        self.carry = Carry.of(self.model) if layers(self.model) else None

    def look(self) -> None:
        """Watch one call for what recurs in it beside the layers that types tell of."""
        if has_own_code(self.model) and not self.alone:
            try:
                with unheard(), torch.no_grad():
                    found = layers(self.model, *copied(self.inputs.args))
            except Exception:  # the model itself fails: the examination will say so
                return
            self.seen = [layer for layer in found if layer.seen is not None]
            self.doubts = found.doubts()
        for layer in self.seen:
            self.assumed.append(
                f"{layer.label} ({layer.kind} at {layer.seen.line if layer.seen else ''}) was found by what it does: "
                f"its states were looked at, how it is called was not"
            )
        self.assumed += [f"not examined: {doubt}" for doubt in self.doubts]

    def check_recurrent(self) -> None:
        """Refuse a model in which nothing recurrent was seen."""
        if not (self.layers or self.seen or self.doubts or self.hidden):
            raise NotRecurrent(
                f"nothing recurrent was seen in {type(self.model).__name__}, so there is no hidden state to examine. "
                f"hs.layers(model, *inputs).explain() shows what was looked at; hs.register teaches a new kind."
            )

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Put back, afterwards, all that the whole examination may have changed."""
        kept = self.carry.state_dict() if self.carry is not None else None
        with random_streams_kept(), warnings.catch_warnings(), torch.inference_mode(False):
            warnings.simplefilter("ignore")
            try:
                yield
            finally:
                self.snapshot.restore()
                if self.carry is not None and kept is not None:
                    self.carry.load_state_dict(kept)

    @contextmanager
    def afresh(self) -> Iterator[None]:
        """Begin from the state the user's model was found in; what is called inside goes on from call to call."""
        self.snapshot.restore()
        with ExitStack() as stack:
            if self.carry is not None:
                stack.enter_context(self.carry.fresh())
            self._reset()
            # Nothing is put back at the end: a backward pass may still need what the call left behind.
            yield

    def call(
        self,
        inputs: Inputs | None = None,
        *,
        train: bool = False,
        number: int = 0,
        grad: bool = False,
        collect: bool = False,
        trace: bool = False,
        own: bool = False,
    ) -> Run:
        """Call the model once, wherever its state has got to; `number` seeds all random streams.

        It is given copies of the inputs, which it may write into, unless they are its `own`.
        """
        inputs = self.inputs if inputs is None else inputs
        self.model.train(train)
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(grad))
            stack.enter_context(torch.backends.cudnn.flags(enabled=not grad, deterministic=True, benchmark=False))
            calls = stack.enter_context(collected(self.model, self.layers, leaves=grad)) if collect else Calls()
            seed(number)
            tracer = stack.enter_context(Tracer()) if trace else None
            result = self.model(*(inputs.args if own else copied(inputs.args)))
        return Run(result, inputs, calls, tracer.trace if tracer is not None else Trace())

    def run(self, inputs: Inputs | None = None, **how: Any) -> Run:
        """Call the model once, from the state it was found in."""
        with self.afresh():
            return self.call(inputs, **how)

    @property
    def reset_method(self) -> str:
        """The method by which the model says that it keeps its state on purpose, "" where it has none."""
        return next((name for name in RESETS if callable(getattr(self.model, name, None))), "")

    def _reset(self) -> None:
        name = self.reset_method
        if not name:
            return
        method = getattr(self.model, name)
        try:
            needed = [
                p
                for p in inspect.signature(method).parameters.values()
                if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
            ]
            method(*[self.inputs.batch] * len(needed))
        except Exception:  # then the state it was found in has to do
            self.snapshot.restore()


def copied(args: Any) -> Any:
    """Return the same arguments in tensors of their own."""

    def copy(_: Path, end: Any) -> Any:
        if isinstance(end, PackedSequence):
            return end._replace(data=end.data.clone())
        return end.clone() if isinstance(end, Tensor) else end

    return mapped(args, copy)


def probe(experiment: Callable[[Patient], T]) -> Callable[[Patient], T]:
    """Run an experiment once for all checks that ask for it; a failure is remembered too."""

    @wraps(experiment)
    def once(patient: Patient) -> T:
        name = f"{experiment.__module__}.{experiment.__name__}"
        if name not in patient.memo:
            try:
                patient.memo[name] = (experiment(patient), None)
            except Exception as error:  # kept, and raised again for everyone who asks
                patient.memo[name] = (None, error)
        kept: tuple[T, Exception | None] = patient.memo[name]
        if kept[1] is not None:
            raise kept[1]
        return kept[0]

    return once
