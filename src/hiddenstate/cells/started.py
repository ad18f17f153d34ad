"""Calling a model with a sequence alone: states that its forward requires are made and passed along."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ..errors import BadInput
from ..state import State
from .discovery import cell_along, layers
from .first_states import FIRST_STATES
from .layer import Layer
from .listener import unheard
from .signature import named_like_state
from .snapshot import untouched
from .wrappers import unwrap

Given: TypeAlias = "tuple[Any, ...]"  # the arguments after the sequence
Making: TypeAlias = Callable[[int], Given]  # makes them for a number of rows

_CELL_STATES = ("c", "c0", "c_0", "cx", "c_t", "c_prev", "cell", "cells", "cell_0")


@dataclass(frozen=True, slots=True, eq=False)
class StartedModel:
    """A model that is called with a sequence alone; the states that its forward requires are passed along."""

    model: nn.Module
    make: Making | None = None  # makes the first states; None if none are needed, or if the model takes None for them
    blank: Given = ()  # the arguments to pass in that case
    onward: tuple[Layer, ...] = ()  # the layers whose states may be passed instead of first ones
    rows_axis: int = 0

    @property
    def hands_over(self) -> bool:
        """Whether carried states have to be passed as arguments of the call."""
        return self.make is not None

    def __call__(self, x: Tensor, states: Mapping[str, State] | None = None) -> Any:
        """Call the model; `states`, by layer name, are passed instead of first states."""
        if self.make is not None and states and all(layer.name in states for layer in self.onward):
            return self.model(x, *_spread(self.onward, lambda layer: states[layer.name], len(self.blank)))
        return self.model(x, *self.beside(x))

    def beside(self, x: Tensor) -> Given:
        """Return the first states to pass with a sequence."""
        return self.blank if self.make is None else self.make(x.shape[self.rows_axis])

    def goes_on(self) -> bool:
        """Say whether the model can run a sequence in pieces: if it requires states, its layers' states must do."""
        return self.make is None or bool(self.onward)


def started(model: nn.Module, x: Tensor) -> StartedModel:
    """Return `model` as a function of `x` alone; raise if its forward requires something that is not a state.

    For each required state the model gets None, if it accepts that (as models do that pass it on to a layer), else its
    own first state (`init_hidden(batch)`), else the first states of its layers.

    >>> class Net(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.rnn = torch.nn.LSTM(3, 4)
    ...     def forward(self, x, hidden):
    ...         h, c = hidden
    ...         return self.rnn(x, (h, c))[0]
    >>> x = torch.randn(5, 2, 3)
    >>> started(Net(), x)(x).shape
    torch.Size([5, 2, 4])
    """
    inner = unwrap(model)
    names = _insists_on(inner)
    if not names:
        return StartedModel(model)
    title = f"{type(inner).__name__}.forward"
    if cell_along(inner, x) is not None:
        raise BadInput(
            f"{title} takes one step and its state, but x of shape {tuple(x.shape)} is a sequence. A cell is stepped "
            f"along it: hs.unroll(cell, x), or make a layer of it, hs.Recurrent({type(inner).__name__}, ...)."
        )
    strange = [name for name in names if not _is_state(name)]
    if strange:
        raise BadInput(
            f"{title} needs {_listed(names)} besides the sequence, and {strange[0]!r} is not named like a state, which "
            f"could be handed in. Give a default to it, or wrap the model in a module whose forward takes x alone."
        )
    blank = (None,) * len(names)
    why = ""
    with untouched(inner), unheard(), torch.no_grad():
        inner.eval()
        for piece in (x[:5, :7] if x.dim() > 1 else x[:7], x):  # a model may only take certain numbers of steps
            try:
                inner(piece, *blank)
            except Exception as error:  # a trial call: the user's model does not accept None
                why = " ".join(f"{type(error).__name__}: {error}".split())
            else:
                return StartedModel(model, blank=blank)
            kinds = _accepted(inner, piece, len(names))
            if kinds:
                break
    if not kinds:
        raise BadInput(
            f"{title} needs {_listed(names)} besides the sequence, and takes neither None for it ({why}) nor a first "
            f"state of its layers. Let it begin with `if {names[0]} is None`, or give the model a method "
            f"init_hidden(batch) that returns one."
        )
    onward = next((each for _, each, _ in kinds if each), ())
    make, _, axis = kinds[0]
    return StartedModel(model, make, blank, onward, axis)


def needed_states(model: nn.Module) -> list[str]:
    """Return the names of the states that a forward requires after its sequence; none if it requires anything else."""
    names = _insists_on(model)
    return names if all(map(_is_state, names)) else []


def _is_state(name: str) -> bool:
    return named_like_state(name) or name.lower() in _CELL_STATES


def _insists_on(model: nn.Module) -> list[str]:
    """Return the arguments of a forward that have no default, without the first one."""
    try:
        parameters = list(inspect.signature(model.forward).parameters.values())
    except (TypeError, ValueError):
        return []
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in parameters[1:] if p.default is p.empty and p.kind in by_position]


def _accepted(model: nn.Module, x: Tensor, count: int) -> list[tuple[Making, tuple[Layer, ...], int]]:
    """Return the ways of making first states that the model accepts: its own method first, then its layers'."""
    found = []
    for make, onward in _makings(model, count):
        for axis in _row_axes(model, x):
            try:
                model(x, *make(x.shape[axis]))
            except Exception:  # a trial call
                continue
            found.append((make, onward, axis))
            break
    return found


def _makings(model: nn.Module, count: int) -> Iterator[tuple[Making, tuple[Layer, ...]]]:
    for name in FIRST_STATES:
        method = getattr(model, name, None)
        if callable(method):
            yield partial(_made_by, method, count), ()
    found = layers(model)
    for some in dict.fromkeys((tuple(found[:1]), tuple(found))):
        if some:
            yield partial(_made_of, some, count), some


def _made_by(method: Callable[..., Any], count: int, rows: int) -> Given:
    try:
        inspect.signature(method).bind(rows)
    except TypeError:
        return _as_many(method(), count)
    return _as_many(method(rows), count)


def _made_of(some: tuple[Layer, ...], count: int, rows: int) -> Given:
    return _spread(some, lambda layer: layer.initial(rows), count)


def _as_many(states: Any, count: int) -> Given:
    if count == 1:
        return (states,)
    if not isinstance(states, tuple | list) or len(states) != count:
        raise BadInput(f"{count} states are needed, but there is {type(states).__name__}.")
    return tuple(states)


def _spread(some: tuple[Layer, ...], state_of: Callable[[Layer], State], count: int) -> Given:
    """Return the states of some layers as `count` arguments: one per layer, one per part, or one for all."""
    natives = [layer.to_native(state_of(layer)) for layer in some]
    if len(natives) == count:
        return tuple(natives)
    if count == 1:
        return (tuple(natives),)
    return _as_many(natives[0] if len(natives) == 1 else natives, count)


def _row_axes(model: nn.Module, x: Tensor) -> list[int]:
    fused = [layer for layer in layers(model) if layer.fused]
    axes = [0, 1] if not fused or fused[0].spec.batch_first else [1, 0]
    return [axis for axis in axes if axis < x.dim()]


def _listed(names: list[str]) -> str:
    return " and ".join(repr(name) for name in names)
