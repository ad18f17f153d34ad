"""How a model is called with its inputs: by position, by name, or by a function of the user's."""

from __future__ import annotations

import dis
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import CellType, FunctionType
from typing import Any

from torch import Tensor, nn

from ..errors import BadInput
from ..state import Path, tensors

_STATE_WORDS = ("h", "c", "hs", "cs", "hx", "cx", "hn", "cn", "ht", "ct", "hid", "hids", "mem")  # as words of a name
_STATE_PARTS = ("hidden", "state", "hx", "h0", "c0", "carry", "memory", "hc")  # anywhere in one

_BEGINS = re.compile(
    r"(^|_)(not_?|non_?|is_?|no_?)?(dones?|resets?|starts?|firsts?|init|begins?|beginnings?|terminals?|terminated|terminations?"
    r"|truncated|truncations?|episodes?|ends?|ended|keeps?|continues?|new)(_|$)",
    re.IGNORECASE,
)


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
    taken = list(taken_by_position(model))
    for name, value in told.items():
        if value is not None and name in taken and taken.index(name) >= len(inputs):
            raise BadInput(
                f"{name}= is an option of ours, and {type(model).__name__}.forward takes a {name} as well. To hand it "
                f"to the model, give it by position. For us alone, say how the model is called: "
                f"call=lambda model: model(x)."
            )


def path_name(names: Sequence[str], path: Path) -> str:
    """Return the name of an argument: its key in a dict, or what forward calls it."""
    keys = [key for key in path[1:] if isinstance(key, str)]
    return keys[-1] if keys else names[path[0]] if path[0] < len(names) else ""


def state_named(name: str) -> bool:
    """Say whether an argument of this name may be a state.

    What was before (prev_action, prev_output_tokens) is one only where the rest of its name says so.
    """
    words = [word for word in name.lower().split("_") if word not in ("prev", "previous", "last", "")]
    if not words:
        return bool(name)
    return any(word in _STATE_WORDS or any(part in word for part in _STATE_PARTS) for word in words)


def is_state(name: str, value: Any) -> bool:
    """Say whether an argument is a state: by its name, and by being real numbers with more than one axis."""
    return state_named(name) and isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 1


def begins_anew(name: str) -> bool:
    """Say whether a mask of this name tells where a sequence begins or ends, as `done` and `episode_starts` do."""
    return bool(_BEGINS.search(name))


class Called(nn.Module):
    """A model that is called by a function of the user's, with what that function reads as arguments."""

    def __init__(self, model: nn.Module, function: Callable[..., Any], variables: tuple[str, ...] | None) -> None:
        """Take the model as it is; `variables` are those that the function reads, None where it takes arguments."""
        super().__init__()
        self.model = model
        self._function, self._variables = function, variables

    def forward(self, *args: Any) -> Any:
        """Call the model as the user does."""
        if self._variables is None:
            return self._function(self.model, *args)
        return _rebound(self._function, dict(zip(self._variables, args, strict=True)))(self.model)


def called(
    model: nn.Module, inputs: tuple[Any, ...], call: Callable[..., Any]
) -> tuple[Called, tuple[Any, ...], Calling]:
    """Return a model that is called by `call`, its arguments, and how they are called.

    They are `inputs`, for `call(model, *inputs)`; for a function of the model alone, the tensors that it reads from
    around it.
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
            "call= reads no tensor from around it, so there is nothing to vary: hs.diagnose(model, call=lambda model: "
            "model.act(x)) with a tensor x, or hs.diagnose(model, x, call=lambda model, x: model.act(x))."
        )
    return Called(model, call, tuple(found)), tuple(found.values()), Calling(tuple(found))


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
