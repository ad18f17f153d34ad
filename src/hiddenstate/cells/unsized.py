"""Cells that do not say how large their state is: learned from the first state that they make, or by trial."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from .layer import arguments, named_like_state
from .native import flatten
from .snapshot import untouched
from .trials import (
    FIRST_STATES,
    ROWS,
    Candidate,
    StateForm,
    call_first_state,
    guesses,
    is_int,
    own_start,
    remember,
    try_step,
)

# What people call the size of a state; sizes of any other name, and those of weights, are tried after these.
_NAMES = ("hidden_dim", "n_hidden", "hidden", "num_hidden", "num_hiddens", "hidden_units", "n_units", "num_units")
_NAMES += ("units", "nhid", "n_hid", "hid_dim", "hid_size", "h_dim", "state_size", "state_dim", "rnn_size", "H")
_MOST = 24  # sizes that are tried
_in_vain: WeakSet[nn.Module] = WeakSet()  # modules for which no step could be made up that they take as a cell


def looks_unsized(module: nn.Module) -> bool:
    """Say whether a module may be a cell though it does not say its size: it takes an input and something like a state.

    A method that makes a first state tells as much as the name of an argument.
    """
    taken = arguments(type(module))
    if len(taken) < 2 or type(module).__module__.startswith("torch.") or own_start(module) == "initial_state":
        return False
    return named_like_state(taken[1]) or bool(_methods(module))


def learn(module: nn.Module, sample: Tensor | None = None, parts: int | None = None) -> StateForm | None:
    """Find out how large a cell's state is, and remember it; None where nothing that it takes could be found.

    What the cell itself makes as a first state counts first; then sizes that it names, and those of its weights, are
    tried as states of zeros. It has to give back what it was given, computed anew, and to keep its rows apart.

    Args:
        module: A cell that takes its state in one argument.
        sample: One step of its input, `(batch, ...)`; without it, one is made up.
        parts: Of how many tensors the state is, where that is known.
    """
    owner = getattr(module, "cell", module) if parts else module
    if sample is None and owner in _in_vain:
        return None
    if sample is not None and sample.dim() > (2 if sample.is_floating_point() else 1):
        return None  # as much may be a sequence, which other modules than cells take with a state
    with untouched(module), torch.no_grad():
        methods = dict(_made(owner, _methods(owner)))
        sizes = list(dict.fromkeys(_sizes(owner, sample, methods)))[:_MOST]
        ways: list[tuple[Candidate, str | None]] = [
            (c, name) for name, made in methods.items() for c in _candidate(made)
        ]
        ways += [(candidate, None) for size in sizes for candidate in _guesses(module, size, parts)]
    at = try_step(module, [candidate for candidate, _ in ways], sample, sizes)
    if at is None:
        if sample is None:
            _in_vain.add(owner)
        return None
    (native, axes), start = ways[at]
    state, form = flatten(native)
    remember(owner, next(iter(state.values())).shape[-1], start)
    return StateForm(form, axes)


def _methods(module: nn.Module) -> list[str]:
    return [name for name in FIRST_STATES if callable(getattr(module, name, None))]


def _made(module: nn.Module, methods: list[str]) -> Iterator[tuple[str, list[Any]]]:
    """Yield what methods make for two, three and `ROWS` rows, or for none where they take no number."""
    for name in methods:
        for rows in ((2, 3, ROWS), ()):
            try:
                made = [call_first_state(module, name, each) for each in rows] or [call_first_state(module, name)]
                if all(flatten(each)[0] for each in made):
                    yield name, made
                    break
            except Exception:  # whatever a user's method raises means that it is not called like this
                continue


def _candidate(made: list[Any]) -> Iterator[Candidate]:
    """Yield a first state of `ROWS` rows with the axes that grew with their number; nothing where none did."""
    if len(made) < 3:
        return
    two, three = (flatten(each)[0] for each in made[:2])
    axes = {
        name: next((axis for axis in range(part.dim()) if (part.shape[axis], three[name].shape[axis]) == (2, 3)), None)
        for name, part in two.items()
        if name in three and part.dim() == three[name].dim()
    }
    if len(axes) == len(two) and None not in axes.values():
        yield made[2], {name: axis for name, axis in axes.items() if axis is not None}


def _guesses(module: nn.Module, size: int, parts: int | None) -> list[Candidate]:
    found = guesses(module, size)
    if parts is None:
        return found
    zeros = found[0][0]
    native = (zeros,) * parts
    return [(native, dict.fromkeys(flatten(native)[0], 0))]


def _sizes(module: nn.Module, sample: Tensor | None, methods: dict[str, list[Any]]) -> Iterator[int]:
    """Yield what may be the size of the state, the likeliest first."""
    for made in methods.values():
        yield from (part.shape[-1] for part in flatten(made[0])[0].values() if part.dim())
    named = {name: value for name, value in vars(module).items() if is_int(value) and value > 0}
    yield from (named[name] for name in _NAMES if name in named)
    yield from named.values()
    for parameter in module.parameters():
        for size in parameter.shape[:2]:
            yield size
            yield from (size // gates for gates in (4, 3, 2) if size % gates == 0)
    if sample is not None and sample.dim() > 1 and sample.is_floating_point():
        yield sample.shape[-1]


def needed_arguments(module: nn.Module) -> list[str]:
    """Return the arguments without which a module cannot be called."""
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
