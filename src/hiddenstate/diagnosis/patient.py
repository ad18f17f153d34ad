"""The patient: a model under examination, and calls of it that leave no trace."""

from __future__ import annotations

import inspect
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType, MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from ..carry import Carry
from ..cells import (
    Called,
    Layer,
    Snapshot,
    as_layer,
    attributes,
    has_own_code,
    layers,
    plain_object,
    random_streams_kept,
    seed,
    unheard,
)
from ..errors import NotRecurrent
from ..measure import Survey
from ..state import Path, mapped
from .inputs import Excerpt, ModelInputs
from .outcome import LayerCalls, Operations, Outcome, Tracer, collected
from .thresholds import Thresholds

# What people call a method by which a new sequence begins; `init_hidden(batch)` mostly returns a state, and sets none.
_BEGINS = re.compile(
    r"^_?(reset|clear|flush|forget|zero|init|initialize|start|begin|new)_?(all_?)?"
    r"((rnn|lstm|gru|cell|hidden|recurrent|internal)_?)?"
    r"(states?|hiddens?|h|memory|memories|mem|cells?|cache|context|history|carry|buffers?|sequences?|episode|net|neurons?)?$",
    re.IGNORECASE,
)
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
    survey: Survey | None = None  # the states of a whole data set, where the inputs are its first batch
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
        self.resets = _resets(self.model)  # by name; what they do is for a probe to find out
        self.seen: list[Layer] = []  # what recurs beside the layers that are known by their types
        self.doubts: list[str] = []  # what could not be told
        self.snapshot = Snapshot(self.model, *others)
        self.given = self.inputs  # as the user gave them, however much of them is looked at
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

    def looked_at(self) -> str:
        """Return what the evidence of states says of a whole data set, "" where there is one input alone."""
        return "" if self.survey is None else f" of {self.survey.batches} batches"

    def look(self) -> None:
        """Watch one call for what recurs in it beside the layers that are known by their types."""
        if has_own_code(self.model) and not self.alone:
            try:
                positional, named = self.inputs.calling.parted(self.inputs.own_args())
                with unheard(), torch.no_grad():
                    found = layers(self.model, *positional, **named)
            except Exception:  # the model itself fails: the examination will say so
                return
            known = {layer.module for layer in self.layers}
            stepped = [each for each in found if each.seen is not None and each.kind == "cell"]
            # A module that is handed back what it gave is a cell like others.
            self.layers += [each for each in stepped if each.module not in known]
            self.seen = [each for each in found if each.seen is not None and each not in stepped]
            self.doubts = found.doubts()
        for layer in self.seen:
            self.assumed.append(
                f"{layer.label} ({layer.kind} at {layer.seen.line if layer.seen else ''}) was found by what it does: "
                f"its states were looked at, how it is called was not"
            )
        self.assumed += [f"not examined: {doubt}" for doubt in self.doubts]

    @property
    def recurrent(self) -> bool:
        """Whether anything in the model was seen to recur, or may."""
        return bool(self.layers or self.seen or self.doubts or self.unregistered)

    def check_recurrent(self) -> None:
        """Refuse a model in which nothing recurrent was seen."""
        if not self.recurrent:
            raise NotRecurrent(
                f"nothing recurrent was seen in {type(self.model).__name__}, so there is no hidden state to examine. "
                f"A state that goes in and comes out of each call is seen where both are given and have one shape: "
                f"hs.diagnose(model, x, hidden). hs.layers(model, *inputs).explain() shows what was looked at; "
                f"hs.register teaches a new kind."
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
    def afresh(self, rows: int | None = None) -> Iterator[None]:
        """Begin from the state the user's model was found in; what is called inside goes on from call to call."""
        self.snapshot.restore()
        with ExitStack() as stack:
            if self.carry is not None:
                stack.enter_context(self.carry.fresh())
            self._reset(self.inputs.batch if rows is None else rows)
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
            result = inputs.calling(self.model, inputs.args if own else inputs.own_args())
        return Outcome(readable(result), inputs, calls, tracer.trace if tracer is not None else Operations())

    def call_after_reset(self, **how: Any) -> Outcome:
        """Call the model once more, after the methods by which a new sequence begins."""
        self._reset(self.inputs.batch)
        return self.call(**how)

    def run(self, inputs: ModelInputs | None = None, **how: Any) -> Outcome:
        """Call the model once, from the state it was found in."""
        with self.afresh((self.inputs if inputs is None else inputs).batch):
            return self.call(inputs, **how)

    @property
    def quantized(self) -> bool:
        """Whether modules compute in whole numbers, whose scale they take from what they are given."""
        return any("quantized" in type(module).__module__ for module in self.model.modules())

    @property
    def optimized(self) -> set[int]:
        """The ids of all parameters that an optimizer holds."""
        return {id(p) for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]}

    def _reset(self, rows: int) -> None:
        for name, method in list(self.resets.items()):
            before = [p._version for p in self.model.parameters()]
            try:
                needed = [
                    p
                    for p in inspect.signature(method).parameters.values()
                    if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
                ]
                method(*[rows] * len(needed))
            except Exception:  # then the state it was found in has to do
                self.snapshot.restore()
            if before != [p._version for p in self.model.parameters()]:  # it begins with new weights, no new sequence
                del self.resets[name]
                self.snapshot.restore()
                self._reset(rows)
                return


def _resets(model: nn.Module) -> dict[str, Callable[..., Any]]:
    """Return the methods by which a new sequence may begin, those of the model itself or else of modules in it."""
    found: dict[str, Callable[..., Any]] = {}
    for prefix, module in model.named_modules():
        if type(module).__module__.partition(".")[0] == "torch":
            continue
        names = [name for name in dir(type(module)) if _BEGINS.match(name) and callable(getattr(type(module), name))]
        found.update({f"{prefix}.{name}" if prefix else name: getattr(module, name) for name in names})
        if names and not prefix:
            return found
    return found


def readable(result: Any, depth: int = 0) -> Any:
    """Return a result with objects that hold tensors, such as distributions, as dicts of what they hold."""

    def opened(_: Path, end: Any) -> Any:
        if depth < 3 and (isinstance(end, Distribution) or (plain_object(end) and not isinstance(end, Tensor))):
            held = {name: value for name, value in vars(end).items() if not name.startswith("__")}
            return readable(held, depth + 1)
        return end

    return mapped(result, opened)


@dataclass(frozen=True, slots=True, eq=False)
class Unregistered:
    """A module or tensor that `.to()`, `.parameters()` and `state_dict()` do not see."""

    name: str  # as one would write it: encoder.cells[0]
    value: Any
    holder: str  # the attribute that holds it: encoder.cells
    direct: bool  # an attribute of a module itself, rather than inside a list, dict or object


def unregistered(model: nn.Module) -> list[Unregistered]:
    """Return what is held in plain attributes, lists, dicts, objects and functions, and registered nowhere."""
    known = {id(module) for module in model.modules()}
    known |= {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    found: list[Unregistered] = []
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        # A scripted module keeps all it holds out of sight; what the user's call reads is no part of the model.
        if isinstance(module, torch.jit.ScriptModule | Called):
            continue
        for attribute, value in attributes(module).items():
            if attribute in _TORCH_OWN or attribute.startswith("_flat_weight"):
                continue
            holder = f"{prefix}.{attribute}" if prefix else attribute
            for name, thing, direct in _inside(value, holder, 0):
                if id(thing) not in known and id(thing) not in seen:
                    seen.add(id(thing))
                    found.append(Unregistered(name, thing, holder, direct))
    return found


_TORCH_OWN = set(nn.Module().__dict__) | {"_all_weights", "_flat_weights"}


def _inside(value: Any, name: str, depth: int) -> Iterator[tuple[str, Any, bool]]:
    if isinstance(value, nn.Module | Tensor):
        yield name, value, depth == 0
    elif depth > 3:
        return
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _inside(inner, f"{name}[{key!r}]", depth + 1)
    elif isinstance(value, list | tuple | set):
        for place, inner in enumerate(value):
            yield from _inside(inner, f"{name}[{place}]", depth + 1)
    elif isinstance(value, partial):
        yield from _inside((*value.args, *value.keywords.values()), f"{name}.args", depth + 1)
    elif isinstance(value, FunctionType):  # a lambda keeps what it reads from around it
        for variable, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            with suppress(ValueError):  # not yet bound
                found = _inside(cell.cell_contents, f"{name} ({variable})", depth + 1)
                # A constant of a function is as good as one that is written down there.
                yield from (each for each in found if isinstance(each[1], nn.Module) or each[1].requires_grad)
    elif isinstance(value, MethodType):
        yield from _inside(value.__self__, f"{name}.__self__", depth + 1)
    elif plain_object(value):
        for attribute, inner in vars(value).items():
            yield from _inside(inner, f"{name}.{attribute}", depth + 1)


def held_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return all tensors that a model holds and that are no parameters, by the name one would write."""
    held = {thing.name: thing.value for thing in unregistered(model) if isinstance(thing.value, Tensor)}
    return {**held, **{name: buffer for name, buffer in model.named_buffers() if isinstance(buffer, Tensor)}}
