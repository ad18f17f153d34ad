"""The laws of an adapter: what it says of a module, checked on the module."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..cells import Adapter, flatten, invented_inputs, untouched
from ..errors import BadInput
from ..state import State
from .law import Laws, difference, enforce

_ROWS, _STEPS = 3, 5


@dataclass(frozen=True, slots=True, eq=False)
class AdapterUnderTest:
    """A module, its adapter, and one input in the module's own layout."""

    module: nn.Module
    adapter: Adapter
    x: Tensor

    @property
    def batch_axis(self) -> int:
        """The batch axis of the input and the output."""
        return 1 if self.adapter.fused and not self.adapter.spec(self.module).batch_first else 0

    @property
    def rows(self) -> int:
        """The number of rows of the input."""
        return self.x.shape[self.batch_axis]

    def call(self, x: Tensor, state: State | None = None) -> tuple[Any, Any]:
        """Return output and native state of one call, from `state` if there is one."""
        args: tuple[Any, ...] = (x,)
        kwargs: dict[str, Any] = {}
        if state is not None:
            native = self.adapter.to_native(self.module, state)
            args, kwargs = self.adapter.give(self.module, args, kwargs, native)
        return self.adapter.split(self.module, self.module(*args, **kwargs))

    def run(self, x: Tensor, state: State) -> tuple[Any, State]:
        """Return output and state of one call from `state`."""
        out, native = self.call(x, state)
        return out, self.adapter.to_state(self.module, native, batch=x.shape[self.batch_axis])

    def initial(self, rows: int) -> State:
        """Return the initial state of that many rows."""
        return self.adapter.initial(self.module, rows)


def check_adapter(
    kind: type[nn.Module], adapter: Adapter, *, make: Callable[[], nn.Module] | None = None, x: Tensor | None = None
) -> None:
    """Raise `LawBroken`, an `AssertionError`, if what `adapter` says of modules of type `kind` is not true.

    An adapter is what `hs.register(kind, adapter)` takes; for this check it need not be registered.

    >>> from hiddenstate.cells import Adapter, Spec
    >>> class Sums(nn.Module):
    ...     def forward(self, x, total):  # (batch, time, 4), (batch, 4)
    ...         sums = total.unsqueeze(1) + x.cumsum(1)
    ...         return sums, sums[:, -1]
    >>> class SumsAdapter(Adapter):
    ...     kind, fused = "sums", True
    ...     def spec(self, module):
    ...         return Spec(("total",), {"total": 4}, input_size=4)
    ...     def initial(self, module, batch):
    ...         return hs.State({"total": torch.zeros(batch, 4)})
    ...     def to_state(self, module, native, *, batch=None):
    ...         return hs.State({"total": native})
    ...     def to_native(self, module, state, *, batched=True):
    ...         return state["total"]
    ...     def split(self, module, result):
    ...         return result
    >>> check_adapter(Sums, SumsAdapter())

    Args:
        kind: The type of module.
        adapter: The adapter to check.
        make: Makes such a module; None: `kind()`.
        x: An input in the module's own layout with at least two rows; and two steps if one call runs a sequence.
            None: made up from the spec's `input_size`, or from the module's sizes.
    """
    name = f"{type(adapter).__name__} for {kind.__name__}"
    try:
        module = kind() if make is None else make()
    except TypeError as error:
        raise BadInput(
            f"{kind.__name__}() fails: {error}. Say how to make one: make=lambda: {kind.__name__}(3, 4)."
        ) from (error)
    if not isinstance(module, kind):
        raise BadInput(f"make returned {type(module).__name__}, but a {kind.__name__} is needed.")
    with untouched(module), torch.no_grad():
        module.eval()
        enforce(LAWS, AdapterUnderTest(module, adapter, _input(module, adapter) if x is None else x), name)


def _input(module: nn.Module, adapter: Adapter) -> Tensor:
    spec = adapter.spec(module)
    shape = (_ROWS,) if not adapter.fused else (_ROWS, _STEPS) if spec.batch_first else (_STEPS, _ROWS)
    if spec.input_size is not None:
        like = adapter.initial(module, 1)
        dtype = next((part.dtype for part in like.values() if part.is_floating_point()), torch.get_default_dtype())
        return torch.randn(*shape, spec.input_size, dtype=dtype, device=like.device)
    for x in invented_inputs(module, *shape):
        try:
            AdapterUnderTest(module, adapter, x).call(x, adapter.initial(module, _ROWS))
        except Exception:  # another made-up input may work
            continue
        return x
    raise BadInput(f"no input could be made up for {type(module).__name__}: give x=, or an input_size in the spec.")


def _spec_is_complete(trial: AdapterUnderTest) -> str | None:
    spec = trial.adapter.spec(trial.module)
    if not spec.parts or set(spec.sizes) != set(spec.parts):
        return f"The parts are {spec.parts}, and there are sizes of {tuple(spec.sizes)}."
    return None


def _first_state_fits_the_spec(trial: AdapterUnderTest) -> str | None:
    spec = trial.adapter.spec(trial.module)
    for rows in (1, 4):
        state = trial.initial(rows)
        if tuple(state) != spec.parts:
            return f"The spec has {', '.join(spec.parts)}, the first state {', '.join(state)}."
        if state.batch != rows:
            return f"It was asked for {rows} rows and made {state.batch}: {state}."
        for name, part in state.items():
            size, found = spec.sizes[name], part.numel() // rows
            if found not in (size, size * spec.layers * spec.directions):
                return f"Part {name!r} has {found} numbers for each row, but {size} units by the spec."
    return None


def _rows_are_counted(trial: AdapterUnderTest) -> str | None:
    found = trial.adapter.rows(trial.module, (trial.x,), {})
    expected = (trial.rows, True)
    return None if found == expected else f"An input of shape {tuple(trial.x.shape)} gave {found}, not {expected}."


def _what_is_given_is_found(trial: AdapterUnderTest) -> str | None:
    adapter, module = trial.adapter, trial.module
    if adapter.given(module, (trial.x,), {}) is not None:
        return "A state was found in a call that had none."
    native = adapter.to_native(module, trial.initial(trial.rows))
    for args in ((trial.x,), (trial.x, None)):
        found = adapter.given(module, *adapter.give(module, args, {}, native))
        if found is None:
            return f"None was found in a call with {len(args)} arguments by position that was given one."
        if seen := difference(flatten(native)[0], flatten(found)[0]):
            return seen
    return None


def _input_may_be_named(trial: AdapterUnderTest) -> str | None:
    taken = list(inspect.signature(trial.module.forward).parameters.values())[:1]
    if not taken or taken[0].kind not in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY):
        return None
    adapter, module, kwargs = trial.adapter, trial.module, {taken[0].name: trial.x}
    try:
        found = adapter.rows(module, (), kwargs), adapter.given(module, (), kwargs)
        args, kwargs = adapter.give(module, (), kwargs, adapter.to_native(module, trial.initial(trial.rows)))
        _, native = adapter.split(module, module(*args, **kwargs))
    except (IndexError, KeyError, TypeError) as error:
        return f"A call with {taken[0].name}=x cannot be read: {type(error).__name__}: {error}."
    if found != ((trial.rows, True), None):
        return f"In a call with {taken[0].name}=x, {found[0]} rows and the state {found[1]} were found."
    return difference(flatten(trial.call(trial.x, trial.initial(trial.rows))[1])[0], flatten(native)[0])


def _join_undoes_split(trial: AdapterUnderTest) -> str | None:
    if not trial.adapter.fused:
        return None  # only sequences are joined from pieces
    out, native = trial.call(trial.x, trial.initial(trial.rows))
    again = trial.adapter.split(trial.module, trial.adapter.join(trial.module, out, native))
    return difference(flatten(native)[0], flatten(again[1])[0])


def _names_and_back(trial: AdapterUnderTest) -> str | None:
    _, native = trial.call(trial.x, trial.initial(trial.rows))
    state = trial.adapter.to_state(trial.module, native, batch=trial.rows)
    parts = trial.adapter.spec(trial.module).parts
    if (tuple(state), state.batch) != (parts, trial.rows):
        return f"{', '.join(parts)} with {trial.rows} rows were expected, and {state} came of it."
    (before, form), (after, again) = flatten(native), flatten(trial.adapter.to_native(trial.module, state))
    return f"{form!r} came back as {again!r}." if form != again else difference(before, after)


def _first_state_is_the_start(trial: AdapterUnderTest) -> str | None:
    try:
        by_itself = trial.call(trial.x)
    except TypeError:  # the module requires a state
        return None
    given = trial.call(trial.x, trial.initial(trial.rows))
    return difference(flatten(given[1])[0], flatten(by_itself[1])[0])


def _rows_are_where_it_says(trial: AdapterUnderTest) -> str | None:
    _, state = trial.run(trial.x, trial.initial(trial.rows))  # a state whose rows differ
    out, whole = trial.run(trial.x, state)
    for row in range(trial.rows):
        alone, final = trial.run(trial.x.narrow(trial.batch_axis, row, 1), state.select([row]))
        here, there = _named(out, whole.select([row])), _named(alone, final)
        if "the output" in here:
            here["the output"] = here["the output"].narrow(trial.batch_axis, row, 1)
        if seen := difference(here, there):
            return f"Row {row} among {trial.rows} rows, and alone: {seen}"
    return None


def _cuts_change_nothing(trial: AdapterUnderTest) -> str | None:
    if not trial.adapter.fused or trial.adapter.spec(trial.module).directions == 2:
        return None  # a single step cannot be cut, and a layer that runs backwards needs the whole sequence
    time = 1 - trial.batch_axis
    steps = trial.x.shape[time]
    out, whole = trial.run(trial.x, trial.initial(trial.rows))
    for cut in range(1, steps):
        head, middle = trial.run(trial.x.narrow(time, 0, cut), trial.initial(trial.rows))
        tail, final = trial.run(trial.x.narrow(time, cut, steps - cut), middle)
        joined = torch.cat([head, tail], dim=time) if isinstance(out, Tensor) else None
        if seen := difference(_named(out, whole), _named(joined, final)):
            return f"Cut after step {cut} of {steps}: {seen}"
    return None


def _named(out: Any, state: State) -> dict[str, Tensor]:
    shown = {"the output": out} if isinstance(out, Tensor) else {}
    return {**shown, **{f"part {name!r} of the state": part for name, part in state.items()}}


LAWS: Laws[AdapterUnderTest] = {
    "its spec names every part, each with its size": _spec_is_complete,
    "a first state has the parts and sizes of the spec, and as many rows as were asked for": _first_state_fits_the_spec,
    "the rows of a call are counted": _rows_are_counted,
    "a state that a call is given is found in it, and none where there is none": _what_is_given_is_found,
    "a call whose input is named is read like one by position": _input_may_be_named,
    "split takes apart what join puts together": _join_undoes_split,
    "a state goes to names and back as it was": _names_and_back,
    "a call without a state begins from the first state": _first_state_is_the_start,
    "the rows of a state are where it says": _rows_are_where_it_says,
    "a sequence may be cut anywhere, with the state handed on": _cuts_change_nothing,
}
