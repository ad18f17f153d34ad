"""One calling convention: what follows a model is what it is called with, by position or name; or `call=` says how."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import CellType, FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ..errors import BadInput
from ..state import Path, ends, mapped, numbers, tensors
from .axes import InputAxes
from .batches import are_lengths, as_tensors, named_like_lengths
from .layer import unwrap_to_call
from .signature import named_like_state

T = TypeVar("T")
_AXES = ("time_axis", "batch_axis")  # options that say how the user means his input


@dataclass(frozen=True, slots=True)
class Calling:
    """The names of the arguments of a call; the last `keywords` of them are handed in by name."""

    names: tuple[str, ...]  # "" where forward does not tell
    keywords: int = 0

    def __call__(self, model: nn.Module, args: tuple[Any, ...]) -> Any:
        """Call the model."""
        positional, named = self.parted(args)
        return model(*positional, **named)

    def parted(self, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments as they are handed in: by position, and by name."""
        first = len(args) - self.keywords
        return args[:first], dict(zip(self.names[len(self.names) - self.keywords :], args[first:], strict=True))


def calling(model: nn.Module, inputs: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Calling:
    """Return how a model is called with these inputs."""
    named = list(taken_by_position(model))
    told = [named[place] if place < len(named) else "" for place in range(len(inputs))]
    return Calling((*told, *kwargs), len(kwargs))


def taken_by_position(model: nn.Module) -> dict[str, inspect.Parameter]:
    """Return what forward takes by position, by name."""
    try:
        taken = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):
        return {}
    return {p.name: p for p in taken if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)}


def refuse_clashes(model: nn.Module, inputs: tuple[Any, ...], told: Mapping[str, Any]) -> None:
    """Refuse an option of ours that forward takes too, and was not given: whose it is cannot be known."""
    if type(model).__module__.startswith(f"{__package__.partition('.')[0]}."):
        return  # a layer of ours means the same by it
    try:
        taken = list(inspect.signature(model.forward).parameters)
    except (TypeError, ValueError):
        return
    for name, value in told.items():
        if value is not None and name in taken and taken.index(name) >= len(inputs):
            raise BadInput(
                f"{name}= is an option of ours, and {type(model).__name__}.forward takes a {name} as well. To hand it "
                f"to the model, give it by position. For us alone, say how the model is called: "
                f"call=lambda model: model(x)."
            )


class Called(nn.Module):
    """A model that is called by a function of the user's, with what that function reads as arguments."""

    def __init__(self, model: nn.Module, function: Callable[..., Any], variables: tuple[str, ...] | None) -> None:
        """Take the model as it is; `variables` are those that the function reads, None where it takes arguments."""
        super().__init__()
        self.__class__ = type(type(model).__name__, (type(self),), {})  # messages name the user's model, not this one
        self.model = model
        self.training = model.training
        self._function, self._variables = function, variables

    def forward(self, *args: Any) -> Any:
        """Call the model as the user does."""
        if self._variables is None:
            return self._function(self.model, *args)
        return _rebound(self._function, dict(zip(self._variables, args, strict=True)))(self.model)


def called(
    model: nn.Module, inputs: tuple[Any, ...], call: Callable[..., Any], *, name: str = "hs.diagnose"
) -> tuple[Called, tuple[Any, ...], Calling]:
    """Return a model that is called by `call`, its arguments, and how they are called.

    They are `inputs`, for `call(model, *inputs)`; for a function of the model alone, the tensors that it reads from
    around it. `name` is what the user called.
    """
    if inputs:
        try:
            names = list(inspect.signature(call).parameters)[1:]
        except (TypeError, ValueError):
            names = []
        told = tuple(names[place] if place < len(names) else "" for place in range(len(inputs)))
        return Called(model, call, None), inputs, Calling(told)
    found = _variables(call)
    if not found:
        raise BadInput(
            f"call= reads no tensor from around it, so there is nothing to vary: {name}(model, call=lambda model: "
            f"model.act(x)) with a tensor x, or {name}(model, x, call=lambda model, x: model.act(x))."
        )
    return Called(model, call, tuple(found)), tuple(found.values()), Calling(tuple(found))


@dataclass(frozen=True, slots=True, eq=False)
class GivenCall:
    """A call as the user gave it, whose sequence can be replaced or cut."""

    model: nn.Module  # called as `model(*args)`: the user's own, or one that calls it as he says
    args: tuple[Any, ...]
    names: tuple[str, ...]  # of the arguments, "" where nothing tells
    main: Path = ()  # where the sequence is among them, () where there is none
    given: tuple[tuple[Any, ...], Mapping[str, Any], Callable[..., Any] | None] = ((), {}, None)  # by the user

    def ask(self, function: Callable[..., T], **options: Any) -> T:
        """Return what another function of ours says of the same call."""
        if not isinstance(self.model, Called):
            return function(self.model, *self.args, **options)
        inputs, kwargs, call = self.given
        return function(self.own, *inputs, call=call, **kwargs, **options)

    @property
    def own(self) -> nn.Module:
        """The user's model."""
        model = self.model
        while isinstance(model, Called):
            model = model.model
        return model

    @property
    def x(self) -> Any:
        """The sequence; None where none of the arguments is a tensor."""
        return dict(ends(self.args)).get(self.main)

    @property
    def alone(self) -> bool:
        """Whether the sequence is all that the model is called with."""
        return self.main == (0,) and len(self.args) == 1 and not isinstance(self.model, Called)

    def __call__(self, x: Any) -> Any:
        """Call the model with another sequence, and with all else as it was given."""
        return self.model(*mapped(self.args, lambda path, end: x if path == self.main else end))

    def lengths(self, axes: InputAxes) -> Tensor | None:
        """Return the real steps of each row, where an argument tells them: numbers, or a mask of ones before zeros."""
        found = self._lengths(axes)
        return None if found is None else found[1]

    def piece(self, axes: InputAxes, steps: slice) -> tuple[Any, ...]:
        """Return the arguments for some steps: whatever runs along time is cut, and lengths count what is left."""
        x, told = self.x, self._lengths(axes)
        begin, end, _ = steps.indices(x.shape[axes.time])

        def cut(path: Path, value: Any) -> Any:
            if told is not None and path == told[0] and _counts(value):
                left = (torch.as_tensor(value) - begin).clamp(0, end - begin)
                return left if isinstance(value, Tensor) else type(value)(left.tolist())
            if isinstance(value, Tensor) and (path == self.main or self._along(path, value, x, axes)):
                return value[(slice(None),) * axes.time + (steps,)]
            return value

        made: tuple[Any, ...] = mapped(self.args, cut)
        return made

    def states(self) -> list[int]:
        """Return which arguments are states: named like one, or behind one and of its shape; the sequence is none."""
        found: list[int] = []
        for place, value in enumerate(self.args[: len(self.names)]):
            behind = bool(found) and found[-1] == place - 1 and _same_shapes(value, self.args[place - 1])
            if place != self.main[0] and (behind or _is_state(self.names[place], value)):
                found.append(place)
        return found

    def _along(self, path: Path, value: Tensor, x: Tensor, axes: InputAxes) -> bool:
        """Say whether an argument has the rows and the steps of the sequence, where that has them."""
        if path[0] in self.states() or value.dim() <= max(axes.time, axes.batch or 0):
            return False
        same_rows = axes.batch is None or value.shape[axes.batch] == x.shape[axes.batch]
        return same_rows and value.shape[axes.time] == x.shape[axes.time]

    def _lengths(self, axes: InputAxes) -> tuple[Path, Tensor] | None:
        x = self.x
        if not isinstance(x, Tensor) or axes.batch is None:
            return None
        shape = (x.shape[axes.batch], x.shape[axes.time])
        for path, value in ends(self.args):
            keys = [key for key in path[1:] if isinstance(key, str)]
            name = keys[-1] if keys else self.names[path[0]]
            if path == self.main:
                continue
            if _counts(value) and len(value) == shape[0]:
                told = torch.as_tensor(value).detach().cpu().long()
                within = 1 <= int(told.min()) <= int(told.max()) <= shape[1]
                if within and (named_like_lengths(name) or are_lengths(value, axes.rows_first(x))):
                    return path, told
            if "mask" in name.lower() and isinstance(value, Tensor) and self._along(path, value, x, axes):
                real = axes.rows_first(value).cpu()
                first = real.bool()
                if value.dim() == 2 and bool((real == first).all()) and bool((first[:, 1:] <= first[:, :-1]).all()):
                    return path, first.sum(1)
        return None


def given_call(
    function: Callable[..., Any],
    model: nn.Module,
    inputs: tuple[Any, ...],
    *,
    kwargs: Mapping[str, Any],
    call: Callable[..., Any] | None,
    options: Mapping[str, Any],
) -> GivenCall:
    """Return the call that a user gave to a `function` of ours, which has these `options` of its own.

    Keyword inputs go where forward takes them by position; what it takes by name alone is handed in by name.
    """
    inner, name = unwrap_to_call(model), _public_name(function)
    inputs, kwargs = (
        as_tensors(inner, inputs),
        dict(zip(kwargs, as_tensors(inner, tuple(kwargs.values())), strict=True)),
    )
    if call is not None:
        if kwargs:
            raise BadInput(
                f"call= says how the model is called, so {next(iter(kwargs))}= has nowhere to go: put it there."
            )
        by_function, args, how = called(inner, inputs, call, name=name)
        return _read(GivenCall(by_function, args, how.names, given=(inputs, kwargs, call)), options)
    usual = inspect.signature(function).parameters
    refuse_clashes(inner, inputs, {key: None if usual[key].default is v else v for key, v in options.items()})
    taken = taken_by_position(inner)
    _refuse_options_by_position(inner, inputs, most=len(taken), said=(name, ", ".join(options)))
    if kwargs and set(kwargs) <= set(list(taken)[len(inputs) :]):
        last = max(list(taken).index(key) for key in kwargs)
        between = list(taken.values())[len(inputs) : last + 1]
        if all(p.name in kwargs or p.default is not p.empty for p in between):
            inputs, kwargs = (*inputs, *(kwargs.get(p.name, p.default) for p in between)), {}
    how = calling(inner, inputs, kwargs)
    if not kwargs:
        return _read(GivenCall(model, inputs, how.names, given=(inputs, {}, None)), options)
    by_name, args = Called(inner, lambda some, *args: how(some, args), None), (*inputs, *kwargs.values())
    return _read(GivenCall(by_name, args, how.names, given=(inputs, kwargs, None)), options)


def _public_name(function: Callable[..., Any]) -> str:
    return f"hs.measure.{function.__name__}" if ".measure." in function.__module__ else f"hs.{function.__name__}"


def _refuse_options_by_position(model: nn.Module, inputs: tuple[Any, ...], *, most: int, said: tuple[str, str]) -> None:
    """Refuse a plain number that forward has no place for: an option of ours, which are given by name."""
    if not most or len(inputs) <= most or not isinstance(inputs[most], int | float):
        return
    if any(p.kind is p.VAR_POSITIONAL for p in inspect.signature(model.forward).parameters.values()):
        return
    raise BadInput(
        f"{said[0]} hands all that follows the model to it, but {type(model).__name__}.forward takes {most} by "
        f"position, and {inputs[most]!r} is one more. Options of {said[0]} are given by name: {said[1]}."
    )


def _read(given: GivenCall, options: Mapping[str, Any]) -> GivenCall:
    """Tell which argument is the sequence; part its rows from its steps where a state tells that they share an axis."""
    given = _with_main(given)
    x, places = given.x, given.states() if given.main else []
    if not isinstance(x, Tensor) or x.dim() > 2 or any(options.get(each) is not None for each in _AXES):
        return given
    states = [part for place in places for part in tensors(given.args[place]).values()]
    # (layers, rows, units), or (rows, layers, units) and (rows, units).
    rows = {part.shape[-2] if part.shape[-2] > 1 else part.shape[0] for part in states}
    if len(rows) != 1 or any(part.shape[:1] == x.shape[:1] for part in states):
        return given
    (each,) = rows
    tokens = x.dim() == 2 and not x.is_floating_point()
    if each < 2 or len(x) == each or len(x) % each or (tokens and x.shape[1] == each):  # tokens: (time, rows)
        return given
    flat = {path for path, end in tensors(given.args).items() if path[0] not in places and len(end) == len(x)}
    run = given.model.forward if isinstance(given.model, Called) else given.model

    def flattened(_: nn.Module, *args: Any) -> Any:
        first = tensors(args)[given.main]
        joined = mapped(args, lambda path, end: end.flatten(0, 1) if path in flat else end)
        parted = (first.shape[0], first.shape[1])
        return mapped(
            run(*joined),
            lambda _, end: (
                end.reshape(*parted, *end.shape[1:]) if isinstance(end, Tensor) and _flat(end, parted) else end
            ),
        )

    args = mapped(given.args, lambda path, end: end.reshape(-1, each, *end.shape[1:]) if path in flat else end)
    return replace(given, model=Called(given.own, flattened, None), args=args)


def _flat(end: Tensor, parted: tuple[int, int]) -> bool:
    return end.dim() > 0 and end.shape[0] == parted[0] * parted[1]


def _with_main(given: GivenCall) -> GivenCall:
    """Tell which argument is the sequence: the first with the axes of one that is neither a state nor marks."""
    found = {
        path: end
        for path, end in ends(given.args)
        if isinstance(end, Tensor | PackedSequence)
        and not (path[0] > 0 and _is_state(given.names[path[0]], given.args[path[0]]))
    }

    def rank(path: Path) -> int:
        end = found[path]
        if isinstance(end, PackedSequence):
            return 0
        if end.dtype == torch.bool:
            return 4
        if end.dim() >= 3 or (end.dim() == 2 and not end.is_floating_point()):
            return 0
        return 1 if end.dim() == 2 else 2

    return replace(given, main=min(found, key=rank)) if found else given


def _is_state(name: str, value: Any) -> bool:
    """Say whether an argument is a state: by its name, or as a pair of tensors that are as large."""
    parts = list(tensors(value).values())
    if not parts or not all(part.is_floating_point() and part.dim() > 1 for part in parts):
        return False
    pair = isinstance(value, tuple | list) and len(parts) == 2 and parts[0].shape == parts[1].shape
    return named_like_state(name) or (pair and parts[0].dim() < 4)


def _same_shapes(one: Any, other: Any) -> bool:
    shapes = [[part.shape for part in tensors(each).values()] for each in (one, other)]
    return bool(shapes[0]) and shapes[0] == shapes[1]


def _counts(value: Any) -> bool:
    """Say whether these are whole numbers on one axis."""
    if isinstance(value, Tensor):
        return value.dim() == 1 and value.numel() > 0 and not value.is_floating_point() and value.dtype != torch.bool
    return numbers(value)


def _variables(call: Callable[..., Any]) -> dict[str, Any]:
    """Return what a function reads from around it, or has as defaults, and holds tensors."""
    if not isinstance(call, FunctionType):
        return {}
    around = inspect.getclosurevars(call)
    defaults = {n: p.default for n, p in inspect.signature(call).parameters.items() if p.default is not p.empty}
    read = {**around.nonlocals, **around.globals, **defaults}
    names = [each.argval for each in dis.get_instructions(call) if each.opname.startswith("LOAD_")]
    order = dict.fromkeys(each for name in names for each in (name if isinstance(name, tuple) else (name,)))
    found = {name: read[name] for name in order if name in read}
    return {name: value for name, value in found.items() if not isinstance(value, nn.Module) and tensors(value)}


def _rebound(call: Callable[..., Any], values: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the same function with other values for what it reads from around it."""
    assert isinstance(call, FunctionType)
    cells = zip(call.__code__.co_freevars, call.__closure__ or (), strict=True)
    closure = tuple(CellType(values[name]) if name in values else cell for name, cell in cells)
    again = FunctionType(call.__code__, {**call.__globals__, **values}, call.__name__, call.__defaults__, closure)
    parameters = inspect.signature(call).parameters
    again.__kwdefaults__ = call.__kwdefaults__
    given = {name: value for name, value in values.items() if name in parameters}
    return lambda model: again(model, **given)
