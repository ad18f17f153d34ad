"""The model under examination: how it is called, and calls of it that leave no trace."""

from __future__ import annotations

import inspect
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ..carry import Carry
from ..cells import Layer, Snapshot, as_layer, has_own_code, layers, random_streams_kept, seed, unheard
from ..errors import NotRecurrent
from ..state import Path, mapped
from .inputs import Excerpt, ModelInputs
from .outcome import LayerCalls, Operations, Outcome, Tracer, collected
from .thresholds import Thresholds
from .unregistered import Unregistered, unregistered

RESETS = ("reset", "reset_state", "reset_hidden")
Measured = TypeVar("Measured", bound="PatientProbe")


class PatientProbe(ABC):
    """What one experiment with a patient showed: an instance is the result, `measure` the experiment.

    A probe may ask for others, `patient[Another]`, and knows nothing of the rules that ask for it.
    """

    __slots__ = ()

    @classmethod
    @abstractmethod
    def measure(cls: type[Measured], patient: Patient) -> Measured:
        """Make the experiment. Called once in a diagnosis, when somebody first asks."""


@dataclass(eq=False)
class Patient:
    """A model, its inputs, and everything that probes have learned of it so far."""

    model: nn.Module
    inputs: ModelInputs
    thresholds: Thresholds = field(default_factory=Thresholds)
    targets: Any = None
    loss: Callable[[Any, Any], Tensor] | None = None
    optimizers: tuple[torch.optim.Optimizer, ...] = ()
    assumed: list[str] = field(default_factory=list)
    alone: bool = False  # a cell or layer by itself, rather than a model around one
    excerpt: Excerpt | None = None  # where the inputs are a piece of what the user gave
    unbatched: bool = False  # an input of two axes that the layers read as one sequence

    def __post_init__(self) -> None:
        """Find the layers, registered or not, and keep what calls may change."""
        self.unregistered: list[Unregistered] = unregistered(self.model)
        others = [thing.value for thing in self.unregistered if isinstance(thing.value, nn.Module)]
        self.layers: list[Layer] = list(layers(self.model))
        if self.alone:  # the cell that was given, not what it is made of
            cell = as_layer(getattr(self.model, "cell"))  # noqa: B009
            self.layers = [Layer("cell", cell.module, cell.adapter)]
        for thing in self.unregistered:
            if isinstance(thing.value, nn.Module):
                for layer in layers(thing.value):
                    name = f"{thing.name}.{layer.name}" if layer.name else thing.name
                    self.layers.append(Layer(name, layer.module, layer.adapter))
        self.seen: list[Layer] = []  # what recurs by itself, beside the layers that types tell of
        self.doubts: list[str] = []  # what could not be told
        self.snapshot = Snapshot(self.model, *others)
        self.whole = self.inputs  # those that the targets belong to: as the user gave them, unless both were cut
        self.carry = Carry.of(self.model) if layers(self.model) else None
        self._measured: dict[type[PatientProbe], Any] = {}  # what each probe showed, or the exception that it ended in
        self._declared: tuple[type[PatientProbe], ...] | None = None  # the probes that may be asked for; None: all

    def __getitem__(self, probe: type[Measured]) -> Measured:
        """Return what a probe shows; it is measured once, and a failure is raised for everyone who asks."""
        if self._declared is not None and probe not in self._declared:
            raise LookupError(f"{probe.__name__} is not among the probes that this rule declares")
        if probe not in self._measured:
            with self.declared(None):
                try:
                    self._measured[probe] = probe.measure(self)
                except Exception as error:  # kept, and raised again for everyone who asks
                    self._measured[probe] = error
        found = self._measured[probe]
        if isinstance(found, Exception):
            raise found
        return found  # type: ignore[no-any-return]

    @contextmanager
    def declared(self, probes: tuple[type[PatientProbe], ...] | None) -> Iterator[None]:
        """Let only these probes be asked for inside; None stands for all."""
        before, self._declared = self._declared, probes
        try:
            yield
        finally:
            self._declared = before

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
        if not (self.layers or self.seen or self.doubts or self.unregistered):
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
        inputs: ModelInputs | None = None,
        *,
        train: bool = False,
        number: int = 0,
        grad: bool = False,
        collect: bool = False,
        trace: bool = False,
        own: bool = False,
    ) -> Outcome:
        """Call the model once, wherever its state has got to; `number` seeds all random streams.

        It is given copies of the inputs, which it may write into, unless they are its `own`.
        """
        inputs = self.inputs if inputs is None else inputs
        self.model.train(train)
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(grad))
            stack.enter_context(torch.backends.cudnn.flags(enabled=not grad, deterministic=True, benchmark=False))
            calls = stack.enter_context(collected(self.model, self.layers, leaves=grad)) if collect else LayerCalls()
            seed(number)
            tracer = stack.enter_context(Tracer()) if trace else None
            result = self.model(*(inputs.args if own else copied(inputs.args)))
        return Outcome(result, inputs, calls, tracer.trace if tracer is not None else Operations())

    def run(self, inputs: ModelInputs | None = None, **how: Any) -> Outcome:
        """Call the model once, from the state it was found in."""
        with self.afresh():
            return self.call(inputs, **how)

    @property
    def optimized(self) -> set[int]:
        """The ids of all parameters that an optimizer holds."""
        return {id(p) for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]}

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
