"""The calling convention of public functions: the arguments after the model are its inputs; `call=` overrides that."""

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
from .axes import InputAxes, rows_beside_steps
from .batches import are_lengths, as_tensors, named_like_lengths
from .signature import named_like_state
from .wrappers import unwrap_to_call

T = TypeVar("T")
_AXES = ("time_axis", "batch_axis")  # options by which the user describes the input


@dataclass(frozen=True, slots=True)
class Calling:
    """The names of the arguments of a call; the last `keywords` of them are passed by keyword."""

    names: tuple[str, ...]  # "" for an argument whose name is unknown
    keywords: int = 0

    def __call__(self, model: nn.Module, args: tuple[Any, ...]) -> Any:
        """Call the model."""
        positional, named = self.parted(args)
        return model(*positional, **named)

    def parted(self, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and keyword arguments, as they are passed."""
        first = len(args) - self.keywords
        return args[:first], dict(zip(self.names[len(self.names) - self.keywords :], args[first:], strict=True))


def calling(model: nn.Module, inputs: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Calling:
    """Return how a model is called with these inputs: which name each has, and how many go by keyword."""
    named = list(taken_by_position(model))
    told = [named[place] if place < len(named) else "" for place in range(len(inputs))]
    return Calling((*told, *kwargs), len(kwargs))


def taken_by_position(model: nn.Module) -> dict[str, inspect.Parameter]:
    """Return the parameters that forward takes by position, by their names."""
    try:
        taken = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):
        return {}
    return {p.name: p for p in taken if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)}


def refuse_clashes(model: nn.Module, inputs: tuple[Any, ...], told: Mapping[str, Any]) -> None:
    """Raise if an option of ours has the name of an argument that forward takes and did not get: it is ambiguous."""
    if type(model).__module__.startswith(f"{__package__.partition('.')[0]}."):
        return  # a layer of ours gives it the same meaning
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
    """A model that is called through a function of the user's; its arguments are what that function reads."""

    def __init__(self, model: nn.Module, function: Callable[..., Any], variables: tuple[str, ...] | None) -> None:
        """Take the model as it is. `variables` are the names that the function reads; None if it takes arguments."""
        super().__init__()
        self.__class__ = type(type(model).__name__, (type(self),), {})  # messages show the name of the user's model
        self.model = model
        self.training = model.training
        self._function, self._variables = function, variables

    def forward(self, *args: Any) -> Any:
        """Call the model through the user's function."""
        if self._variables is None:
            return self._function(self.model, *args)
        return _rebound(self._function, dict(zip(self._variables, args, strict=True)))(self.model)


def called(
    model: nn.Module, inputs: tuple[Any, ...], call: Callable[..., Any], *, name: str = "hs.diagnose"
) -> tuple[Called, tuple[Any, ...], Calling]:
    """Return a model that is called through `call`, its arguments, and how these are passed.

    For `call(model, *inputs)`, the arguments are `inputs`. For a function of the model alone, they are the tensors
    that it reads from the scopes around it. `name` is the public function, for error messages.
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
    """A call as the user gave it; the sequence among its arguments can be replaced or cut."""

    model: nn.Module  # called as `model(*args)`: the user's own, or a wrapper that calls it as the user asked
    args: tuple[Any, ...]
    names: tuple[str, ...]  # of the arguments, "" if unknown
    main: Path = ()  # the path to the sequence among the arguments, () if there is none
    given: tuple[tuple[Any, ...], Mapping[str, Any], Callable[..., Any] | None] = ((), {}, None)  # inputs, kwargs, call

    def ask(self, function: Callable[..., T], **options: Any) -> T:
        """Return the result of another public function for the same call."""
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
        """The sequence; None if no argument is a tensor."""
        return dict(ends(self.args)).get(self.main)

    @property
    def alone(self) -> bool:
        """Whether the sequence is the only argument."""
        return self.main == (0,) and len(self.args) == 1 and not isinstance(self.model, Called)

    def __call__(self, x: Any) -> Any:
        """Call the model with another sequence, and with all other arguments as they were given."""
        return self.model(*mapped(self.args, lambda path, end: x if path == self.main else end))

    def lengths(self, axes: InputAxes) -> Tensor | None:
        """Return the real steps of each row, if an argument holds them as numbers or as a mask."""
        found = self._lengths(axes)
        return None if found is None else found[1]

    def piece(self, axes: InputAxes, steps: slice) -> tuple[Any, ...]:
        """Return the arguments for some of the steps: all that run along time are cut, and lengths are adjusted."""
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
        """Return the places of arguments that are states: named like one, or shaped like one and placed behind one."""
        found: list[int] = []
        for place, value in enumerate(self.args[: len(self.names)]):
            behind = bool(found) and found[-1] == place - 1 and _same_shapes(value, self.args[place - 1])
            if place != self.main[0] and (behind or _is_state(self.names[place], value)):
                found.append(place)
        return found

    def _along(self, path: Path, value: Tensor, x: Tensor, axes: InputAxes) -> bool:
        """Say whether an argument has the rows and steps of the sequence along the axes of those."""
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
    """Return the call that a user described to the public function `function`, which has `options` of its own.

    Keyword inputs become positional ones if forward takes them by position; keyword-only ones stay keyword inputs.
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
    """Raise if more positional inputs came than forward takes: probably an option of ours without its keyword."""
    if not most or len(inputs) <= most or not isinstance(inputs[most], int | float):
        return
    if any(p.kind is p.VAR_POSITIONAL for p in inspect.signature(model.forward).parameters.values()):
        return
    raise BadInput(
        f"{said[0]} hands all that follows the model to it, but {type(model).__name__}.forward takes {most} by "
        f"position, and {inputs[most]!r} is one more. Options of {said[0]} are given by name: {said[1]}."
    )


def _read(given: GivenCall, options: Mapping[str, Any]) -> GivenCall:
    """Find the sequence among the arguments, and split its first axis if a state shows that it joins steps and rows."""
    given = _with_main(given)
    x, places = given.x, given.states() if given.main else []
    if not isinstance(x, Tensor) or x.dim() > 2 or any(options.get(each) is not None for each in _AXES):
        return given
    rows = rows_beside_steps(x, [part for place in places for part in tensors(given.args[place]).values()])
    if rows is None:
        return given
    beside = {path: end for path, end in tensors(given.args).items() if path[0] not in places}
    flat = {path for path, end in beside.items() if end.shape[:1] == x.shape[:1]}
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

    args = mapped(given.args, lambda path, end: end.reshape(-1, rows, *end.shape[1:]) if path in flat else end)
    return replace(given, model=Called(given.own, flattened, None), args=args)


def _flat(end: Tensor, parted: tuple[int, int]) -> bool:
    return end.dim() > 0 and end.shape[0] == parted[0] * parted[1]


def _with_main(given: GivenCall) -> GivenCall:
    """Find the sequence among the arguments that are not states, if there are any."""
    found = {
        path: end
        for path, end in ends(given.args)
        if isinstance(end, Tensor | PackedSequence)
        and not (path[0] > 0 and _is_state(given.names[path[0]], given.args[path[0]]))
    }
    return replace(given, main=sequence_among(found)) if found else given


def sequence_among(found: Mapping[Path, Any]) -> Path:
    """Return the path of the sequence: the first tensor shaped like one that is not a mask."""

    def rank(path: Path) -> int:
        end = found[path]
        if isinstance(end, PackedSequence):
            return 0
        if end.dtype == torch.bool:
            return 4
        if end.dim() >= 3 or (end.dim() == 2 and not end.is_floating_point()):
            return int(is_mask(end))
        return 2 if end.dim() == 2 else 3

    return min(found, key=rank)


def is_mask(end: Tensor) -> bool:
    """Say whether a tensor holds only 0 and 1, one for each row and step."""
    single = end.dim() == 2 or (end.dim() == 3 and end.shape[2] == 1)
    return end.dtype == torch.bool or (single and bool(((end == 0) | (end == 1)).all()))


def _is_state(name: str, value: Any) -> bool:
    """Say whether an argument is a state: by its name, or since it is a pair of tensors of the same shape."""
    parts = list(tensors(value).values())
    if not parts or not all(part.is_floating_point() and part.dim() > 1 for part in parts):
        return False
    pair = isinstance(value, tuple | list) and len(parts) == 2 and parts[0].shape == parts[1].shape
    return named_like_state(name) or (pair and parts[0].dim() < 4)


def _same_shapes(one: Any, other: Any) -> bool:
    shapes = [[part.shape for part in tensors(each).values()] for each in (one, other)]
    return bool(shapes[0]) and shapes[0] == shapes[1]


def _counts(value: Any) -> bool:
    """Say whether this is a tensor of whole numbers with one axis."""
    if isinstance(value, Tensor):
        return value.dim() == 1 and value.numel() > 0 and not value.is_floating_point() and value.dtype != torch.bool
    return numbers(value)


def _variables(call: Callable[..., Any]) -> dict[str, Any]:
    """Return the variables with tensors in them that a function reads from enclosing scopes or has as defaults."""
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
    """Return the same function with other values for the variables it reads from enclosing scopes."""
    assert isinstance(call, FunctionType)
    cells = zip(call.__code__.co_freevars, call.__closure__ or (), strict=True)
    closure = tuple(CellType(values[name]) if name in values else cell for name, cell in cells)
    again = FunctionType(call.__code__, {**call.__globals__, **values}, call.__name__, call.__defaults__, closure)
    parameters = inspect.signature(call).parameters
    again.__kwdefaults__ = call.__kwdefaults__
    given = {name: value for name, value in values.items() if name in parameters}
    return lambda model: again(model, **given)
