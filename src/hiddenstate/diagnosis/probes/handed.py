"""Probe: the states passed to modules inside a model, and whether their results depend on these."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...cells import around, seed, unheard
from ...state import Path, mapped, tensors
from ..argument_names import state_named
from ..inputs import another_state
from ..outcome import apart, same
from ..patient import Patient, PatientProbe
from .calls import PlainCall


@dataclass(frozen=True, slots=True, eq=False)
class HandedState:
    """A state that a module within the model was handed."""

    module: str
    argument: str
    moved: float  # the largest change of what it returns, with another state, relative to its size
    again: int = 0  # how often in one forward it was handed the same state, where it gave another that fits; 0: not so


class HandedStates(tuple[HandedState, ...], PatientProbe):
    """For each module within the model that takes a state and was handed one, whether it follows it."""

    @classmethod
    def measure(cls, patient: Patient) -> HandedStates:
        """Note how such modules are called, and call each once more with another state."""
        heard: dict[str, _Heard] = {}
        known, any_taken = {layer.module for layer in patient.layers}, False
        with patient.afresh(), ExitStack() as stack:
            for name, module in patient.model.named_modules():
                taken = _state_arguments(module) if name and module not in known else ()
                if taken:
                    any_taken = True
                    stack.callback(around(module, partial(_note, heard, name, module, taken)).remove)
            if any_taken:
                patient.call()
        with patient.afresh(), torch.no_grad():
            patient.model.eval()
            return cls(HandedState(name, each.argument, _moved(each), _again(each)) for name, each in heard.items())


@dataclass(frozen=True, slots=True)
class StateGivenBack(PatientProbe):
    """A state among the arguments of forward that comes back in what it returns, another with another state.

    Such a model is one step of a recurrence whose loop is written outside, whatever it is made of.
    """

    name: str = ""  # of the argument, "" where there is none

    @classmethod
    def measure(cls, patient: Patient) -> StateGivenBack:
        """Hand in another state, and see which outputs of its shape follow it."""
        inputs = patient.inputs
        everything = inputs.other_rows(torch.ones(inputs.batch, dtype=torch.bool), seed=2)
        for argument in inputs.arguments:
            state = inputs.get(argument.path)
            if argument.kind != "state" or not isinstance(state, Tensor):
                continue
            other = patient.run(inputs.put(argument.path, everything.get(argument.path))).outputs
            for path, old in patient[PlainCall].outputs.items():
                new = other.get(path)
                if old.shape == state.shape and new is not None and new.shape == old.shape and not same(old, new):
                    return cls(inputs.name(argument.path) or "a state")
        return cls()


@dataclass(frozen=True, slots=True, eq=False)
class _Heard:
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    place: int | str
    argument: str
    calls: list[tuple[Any, Any]]  # the state it was handed each time, and what it gave


def _state_arguments(module: nn.Module) -> tuple[str, ...]:
    """Return what a module of the user's takes, where a state is among it."""
    if type(module).__module__.partition(".")[0] == "torch":
        return ()
    try:
        names = tuple(inspect.signature(module.forward).parameters)
    except (TypeError, ValueError):
        return ()
    return names if any(state_named(name) for name in names[1:]) else ()


def _note(
    heard: dict[str, _Heard],
    name: str,
    module: nn.Module,
    taken: tuple[str, ...],
    arguments: tuple[Any, dict[str, Any]],
    run: Callable[[Any], Any],
) -> Any:
    args, kwargs = arguments
    given: dict[int | str, tuple[str, Any]] = {k: (taken[k], v) for k, v in enumerate(args) if 0 < k < len(taken)}
    given.update({key: (key, value) for key, value in kwargs.items()})
    for place, (argument, value) in given.items():
        parts = tensors(value).values() if state_named(argument) else ()
        if parts and all(part.is_floating_point() and part.dim() > 1 for part in parts):
            calls = heard[name].calls if name in heard else []
            heard[name] = _Heard(module, _kept(args), _kept(kwargs), place, argument, calls)  # the last call
            result = run(arguments)
            calls.append((_kept(value), _kept(result)))
            return result
    return run(arguments)


def _again(heard: _Heard) -> int:
    """Return how often a cell was handed the same state, though each time it gave a new one of the same shapes."""
    if len(heard.calls) < 3 or not _CELL.search(type(heard.module).__name__):
        return 0
    first = list(tensors(heard.calls[0][0]).values())
    for given, gave in heard.calls:
        parts = list(tensors(given).values())
        if [p.shape for p in parts] != [p.shape for p in first] or apart(given, heard.calls[0][0]) > 0:
            return 0
        fits = [t for t in tensors(gave).values() if t.shape in {p.shape for p in parts}]
        if not fits or all(any(torch.equal(t, p) for p in parts) for t in fits):
            return 0
    return len(heard.calls)


_CELL = re.compile("cell|rnn|lstm|gru|recurrent", re.IGNORECASE)


def _kept(thing: Any) -> Any:
    return mapped(thing, lambda _, end: end.detach().clone() if isinstance(end, Tensor) else end)


def _moved(heard: _Heard) -> float:
    def other(_: Path, end: Any) -> Any:
        return another_state(end, 17) if isinstance(end, Tensor) else end

    args, kwargs = list(heard.args), dict(heard.kwargs)
    with unheard():
        seed(0)
        old = heard.module(*_kept(heard.args), **_kept(heard.kwargs))
        if isinstance(heard.place, int):
            args[heard.place] = mapped(args[heard.place], other)
        else:
            kwargs[heard.place] = mapped(kwargs[heard.place], other)
        seed(0)
        return apart(old, heard.module(*args, **kwargs))
