"""Reading the signature of a module's forward: which argument is the sequence or step, and which the state."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from inspect import Parameter
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ..errors import NotRecurrent

Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]

_BY_POSITION = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_REST = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)  # *args, **kwargs

# Names of a second argument that is a state. Endings count too: `prev_state`, `lstm_hidden`.
_STATE_NAMES = {"state", "states", "hidden", "hiddens", "h", "hx", "hc", "prev", "previous", "carry", "memory", "mem"}
_STATE_NAMES |= {"h0", "h_0", "h_prev", "hprev", "h_t", "ht", "h_tm1", "hidden_states", "past", "last", "context_state"}
# Names of a step of the input. They matter only for an argument that comes after a state.
_INPUT_NAMES = {
    "x",
    "xt",
    "x_t",
    "xs",
    "inp",
    "inpt",
    "inputs",
    "u",
    "u_t",
    "token",
    "tokens",
    "word",
    "emb",
    "embedded",
}
# Names of the arguments after the first state argument, if the state is spread over several.
_FURTHER = ("c", "c0", "c_0", "cx", "c_t", "ct", "c_prev", "cprev", "c_tm1", "cell", "cells", "prev_c", "s", "m", "n")


def named_like_state(name: str) -> bool:
    """Say whether an argument with this name is a state."""
    name = name.lower().strip("_")
    return (
        name in _STATE_NAMES
        or name.endswith(("_state", "_states", "_hidden", "_hx", "_carry"))
        or (name.startswith(("hidden_", "state_", "prev_", "h_", "init_")))
    )


def named_like_further(name: str) -> bool:
    """Say whether an argument with this name is one of several that hold a state."""
    return named_like_state(name) or name.lower() in _FURTHER


def state_first(module: nn.Module) -> NotRecurrent | None:
    """Return an error if forward takes its state before its input, so that it cannot be stepped as a cell; else None.

    If such a module were called as `(x, state)`, each would be mistaken for the other, silently if they are equally
    wide.
    """
    taken = [each.name for each in _parameters(type(module)) if each.default is Parameter.empty]
    if len(taken) != 2 or not named_like_state(taken[0]) or named_like_further(taken[1]):
        return None
    if taken[1].lower() not in _INPUT_NAMES and not taken[1].lower().startswith(("input", "x_")):
        return None
    kind, (state, x) = type(module).__name__, taken
    return NotRecurrent(
        f"{kind}.forward({state}, {x}) takes its state first, but a cell is called with its input first: each would be "
        f"taken for the other. Swap the two, def forward(self, {x}, {state}), or wrap the cell in a module whose "
        f"forward(self, x, state) returns self.cell(state, x)."
    )


class StateArgument(NamedTuple):
    """Which argument of a forward is the state."""

    name: str | None  # None: positional only
    place: int | None  # its place among the positional arguments; None: keyword only
    optional: bool  # whether the module can be called without it


def arguments(kind: type[nn.Module]) -> tuple[str, ...]:
    """Return the names of the arguments that a forward takes by position."""
    forward = _forward(kind)
    return () if forward is None else _positional(forward)


@lru_cache(maxsize=1024)
def _positional(forward: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(each.name for each in _parameters_of(forward) if each.kind in _BY_POSITION)


def state_argument(kind: type[nn.Module], name: str | None = None) -> StateArgument | None:
    """Return which argument of a forward is the state; None if no argument is, or if several could be.

    With `name`, it is the argument of that name; a subclass without one has a single argument that looks like a state.
    Without `name`, it is the second argument, as in `forward(x, state)`. If the second one is optional and does not
    look like a state, it is the one that does, as in `forward(x, mask=None, state=None)`.
    """
    forward = _forward(kind)
    return None if forward is None else _state_argument(forward, name)


@lru_cache(maxsize=1024)
def _state_argument(forward: Callable[..., Any], name: str | None) -> StateArgument | None:
    taken = _parameters_of(forward)
    named = [each for each in taken[1:] if each.kind not in _REST]
    likely = _likely(taken)
    states = [each for each in likely if named_like_state(each.name)]
    if name is None:
        second = next((each for each in named[:1] if each.kind in _BY_POSITION), None)
        if len(states) == 1 and (second is None or second.default is not Parameter.empty):
            return _argument(taken, states[0])
        return None if second is None else _argument(taken, second)
    own = [each for each in named if each.name == name] or states
    if own:
        return _argument(taken, own[0]) if own[0].name == name or len(likely) == 1 else None
    kinds = {each.kind for each in taken}
    if not kinds & {*_REST}:
        return None
    # It passes *args or **kwargs on to its base class, so it is called as the base class is.
    before = sum(each.kind in _BY_POSITION for each in taken)
    place = max(1, before) if Parameter.VAR_POSITIONAL in kinds else None
    return StateArgument(name if Parameter.VAR_KEYWORD in kinds else None, place, optional=True)


def _likely(taken: tuple[Parameter, ...]) -> list[Parameter]:
    """Return the arguments that look like a state or a part of one; a switch such as `return_state=False` does not."""
    named = [each for each in taken[1:] if each.kind not in _REST and named_like_further(each.name)]
    return [each for each in named if each.default is None or each.default is Parameter.empty]


def _argument(taken: tuple[Parameter, ...], state: Parameter) -> StateArgument:
    place = next(number for number, each in enumerate(taken) if each is state)
    name = None if state.kind is Parameter.POSITIONAL_ONLY else state.name
    return StateArgument(name, place if state.kind in _BY_POSITION else None, optional=state.default is None)


def first_input(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | PackedSequence:
    """Return the sequence or step among the arguments of a call."""
    if args:
        x = args[0]
    else:  # a forward of *args and **kwargs only: it is called like torch's own layers
        first = next((each.name for each in _parameters(type(module))[:1] if each.kind not in _REST), "input")
        x = kwargs.get(first)
    if not isinstance(x, Tensor | PackedSequence):
        raise NotRecurrent(
            f"{type(module).__name__} was called with {type(x).__name__} as its first argument, "
            f"but a tensor or a PackedSequence was expected there."
        )
    return x


def given_state(module: nn.Module, call: Arguments, name: str | None = None) -> Any:
    """Return the state among the arguments of a call, or None."""
    taken, (args, kwargs) = state_argument(type(module), name), call
    if taken is None:
        return None
    if taken.place is not None and len(args) > taken.place:
        return args[taken.place]
    return None if taken.name is None else kwargs.get(taken.name)


def give_state(module: nn.Module, call: Arguments, state: Any, name: str | None = None) -> Arguments:
    """Return the arguments of a call with `state` among them."""
    taken, (args, kwargs) = state_argument(type(module), name), call
    place = None if taken is None else taken.place
    if taken is not None and place is not None and len(args) >= place and (len(args) > place or taken.name is None):
        return (*args[:place], state, *args[place + 1 :]), kwargs
    if taken is None or taken.name is None:
        raise _takes_no_state(module, name)
    return args, {**kwargs, taken.name: state}


def _takes_no_state(module: nn.Module, name: str | None) -> NotRecurrent:
    kind, taken = type(module).__name__, _parameters(type(module))
    likely = _likely(taken)
    several = " and ".join(each.name for each in likely) if len(likely) > 1 else ""
    why = f"which of {several} takes it is unclear" if several else "none of its arguments is named like one"
    return NotRecurrent(
        f"{kind} was to be handed a state, but of forward({', '.join(map(str, taken))}) {why}. Let forward take the "
        f"whole state as {name or 'state'}=None and hand it on, or say where it goes with an adapter of your own: "
        f"hs.register({kind}, adapter)."
    )


def _parameters(kind: type[nn.Module]) -> tuple[Parameter, ...]:
    forward = _forward(kind)
    return () if forward is None else _parameters_of(forward)


def _forward(kind: type[nn.Module]) -> Callable[..., Any] | None:
    try:
        forward: Callable[..., Any] = kind.forward
    except AttributeError:  # a scripted module has no forward in Python
        return None
    return forward


@lru_cache(maxsize=1024)
def _parameters_of(forward: Callable[..., Any]) -> tuple[Parameter, ...]:
    try:
        return tuple(inspect.signature(forward).parameters.values())[1:]
    except (TypeError, ValueError):
        return ()
