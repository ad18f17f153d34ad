"""The first state of a cell: what the cell says, makes or was seen to take, or else candidates to try."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias, TypeGuard
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from .native import Form, Native, flatten, rebuild
from .signature import arguments, named_like_state
from .weights import weights_like

Candidate: TypeAlias = tuple[Native, dict[str, int]]  # a native state of three rows, and the batch axis of each part

ROWS = 3  # not 1, which broadcasts, and not 2, which `h, c = state` would unpack along the batch

# Usual names of a method that makes a first state.
FIRST_STATES: tuple[str, ...] = ("init_hidden", "initHidden", "init_state", "initial_state", "init_hidden_state")
FIRST_STATES += ("initialize_hidden_state", "get_initial_state", "get_init_state", "begin_state", "zero_state")
FIRST_STATES += ("init_hiddens", "init_states", "initState", "initial_hidden")
# Usual names for the size of a state. Sizes with any other name, and those of weights, are tried after these.
_NAMES: tuple[str, ...] = ("hidden_dim", "n_hidden", "hidden", "num_hidden", "num_hiddens", "hidden_units", "n_units")
_NAMES += ("num_units", "units", "nhid", "n_hid", "hid_dim", "hid_size", "h_dim", "state_size", "state_dim", "rnn_size")
_MOST = 24  # sizes to try at most


class LearnedState(NamedTuple):
    """What was seen of the state of a cell that does not say its size."""

    form: Form
    axes: dict[str, int]  # part -> its batch axis
    shapes: dict[str, tuple[int, ...]]  # part -> the shape of one row
    start: str | None  # the method that makes a first state; None if the state starts as zeros


_learned: WeakKeyDictionary[nn.Module, LearnedState] = WeakKeyDictionary()


def remember(module: nn.Module, candidate: Candidate, start: str | None = None) -> None:
    """Remember a state that a cell was seen to take and return, and the name of the method that makes it."""
    native, axes = candidate
    parts, form = flatten(native)
    shapes = {name: tuple(part.movedim(axes[name], 0).shape[1:]) for name, part in parts.items()}
    _learned[module] = LearnedState(form, {name: axes[name] for name in parts}, shapes, start)


def learned_of(module: nn.Module) -> LearnedState | None:
    """Return what was seen of a cell's state, whatever the cell says itself; None if nothing was."""
    return _learned.get(module)


def units_of(module: nn.Module) -> int | None:
    """Return the number of units of a cell's state, as the cell says or as learned; None if unknown."""
    units = getattr(module, "hidden_size", None)
    if is_int(units):
        return units
    learned = _learned.get(module)
    return None if learned is None else next(iter(learned.shapes.values()))[-1]


def own_start(module: nn.Module) -> str | None:
    """Return the name of the method that makes a cell's first state; None if its state starts as zeros."""
    if hasattr(module, "initial_state"):
        return "initial_state"
    learned = _learned.get(module)
    return None if learned is None else learned.start


def call_initial_state(module: nn.Module, batch: int) -> Any:
    """Call a cell's `initial_state`, or the method that makes its first state under another name."""
    return _call(module, own_start(module) or "initial_state", batch)


def _call(module: nn.Module, name: str, *rows: int) -> Any:
    """Call a method that makes a first state; pass a device and a dtype if it requires them."""
    method: Callable[..., Any] = getattr(module, name)
    device, dtype = weights_like(module)
    extra = {"device": device, "dtype": dtype}
    parameters = inspect.signature(method).parameters.values()
    needed = {p.name: extra[p.name] for p in parameters if p.name in extra and p.default is p.empty}
    return method(*rows, **needed)


def looks_unsized(module: nn.Module) -> bool:
    """Say whether a module may be a cell without a known size: it takes an input and an argument named like a state.

    A method that makes a first state counts as much as the name of an argument.
    """
    taken = arguments(type(module))
    if len(taken) < 2 or type(module).__module__.startswith("torch.") or hasattr(module, "initial_state"):
        return False
    return named_like_state(taken[1]) or bool(_methods(module))


def needed_arguments(module: nn.Module) -> list[str]:
    """Return the arguments that a module cannot be called without."""
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def guesses(module: nn.Module, hidden: int) -> list[Candidate]:
    """Return states that a module of `hidden` units may take: one tensor or two, plain or stacked."""
    device, dtype = weights_like(module)
    layers = getattr(module, "num_layers", 1)
    deep = (layers if isinstance(layers, int) else 1) * (2 if getattr(module, "bidirectional", False) is True else 1)

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(*shape, ROWS, hidden, device=device, dtype=dtype)

    return [
        (zeros(), {"h": 0}),
        ((zeros(), zeros()), {"h": 0, "c": 0}),
        (zeros(deep), {"h": 1}),
        ((zeros(deep), zeros(deep)), {"h": 1, "c": 1}),
    ]


def candidates(
    module: nn.Module, sample: Tensor | None, *, parts: int | None = None, handed: Any = None
) -> tuple[list[tuple[Candidate, str | None]], list[int]]:
    """Return candidate states for a cell that says nothing of them, with the method that made each, and their sizes.

    First come states that the cell was called with, then those that it makes itself, then zeros. The sizes of the zeros
    come from the cell's attributes and weights. `parts` is the number of tensors in the state, if known.
    """
    made = {name: states for name in _methods(module) if (states := _made(module, name))}
    sizes = list(dict.fromkeys(_sizes(module, sample, made)))[:_MOST]
    ways: list[tuple[Candidate, str | None]] = []
    if handed is not None and sample is not None:
        ways += [(candidate, None) for candidate in _as_handed(handed, len(sample))]
    ways += [(candidate, name) for name, states in made.items() for candidate in _with_axes(states)]
    for size in sizes:
        zeros = guesses(module, size)
        several = (zeros[0][0],) * (parts or 0)
        ways += [(g, None) for g in (zeros if parts is None else [(several, dict.fromkeys(flatten(several)[0], 0))])]
    return ways, sizes


def _methods(module: nn.Module) -> list[str]:
    return [name for name in FIRST_STATES if callable(getattr(module, name, None))]


def _made(module: nn.Module, name: str) -> list[Any]:
    """Return what a method makes for two, three and `ROWS` rows, or without rows if it takes no number."""
    for rows in ((2, 3, ROWS), ()):
        try:
            made = [_call(module, name, each) for each in rows] or [_call(module, name)]
            if all(flatten(each)[0] for each in made):
                return made
        except Exception:  # the user's method cannot be called like this
            continue
    return []


def _with_axes(made: list[Any]) -> Iterator[Candidate]:
    """Yield a first state of `ROWS` rows, with the axes that grew with the number of rows; nothing if none did."""
    if len(made) < 3:
        return
    two, three = (flatten(each)[0] for each in made[:2])
    axes = {}
    for name, part in two.items():
        other = three.get(name)
        if other is None or other.dim() != part.dim():
            return
        grown = [axis for axis in range(part.dim()) if (part.shape[axis], other.shape[axis]) == (2, 3)]
        if not grown:
            return
        axes[name] = grown[0]
    yield made[2], axes


def _as_handed(native: Any, rows: int) -> Iterator[Candidate]:
    """Yield zeros in the form of a state that a call of `rows` rows was given; nothing if no axis has these rows."""
    try:
        parts, form = flatten(native)
    except Exception:  # not made of tensors
        return
    axes = {name: list(part.shape).index(rows) for name, part in parts.items() if rows in part.shape}
    if parts and len(axes) == len(parts):
        first = {n: p.detach().select(axes[n], 0).unsqueeze(axes[n]) for n, p in parts.items()}
        zeros = {n: torch.zeros_like(p).repeat_interleave(ROWS, axes[n]) for n, p in first.items()}
        yield rebuild(form, zeros), axes


def _sizes(module: nn.Module, sample: Tensor | None, made: Mapping[str, list[Any]]) -> Iterator[int]:
    """Yield possible sizes of the state, the likeliest first."""
    for states in made.values():
        yield from (part.shape[-1] for part in flatten(states[0])[0].values() if part.dim())
    named = {name: value for name, value in vars(module).items() if is_int(value) and value > 0}
    yield from (named[name] for name in _NAMES if name in named)
    yield from named.values()
    for parameter in module.parameters():
        for size in parameter.shape[:2]:
            yield size
            yield from (size // gates for gates in (4, 3, 2) if size % gates == 0)
    if sample is not None and sample.dim() > 1 and sample.is_floating_point():
        yield sample.shape[-1]


def is_int(value: object) -> TypeGuard[int]:
    """Say whether this is an integer, and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)
