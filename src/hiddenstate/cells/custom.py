"""Cells that users write: `forward(x, state) -> state` or `-> (output, state)`."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ..errors import HiddenStateWarning, NotRecurrent, StateMismatch
from ..state import State
from .first_states import ROWS, call_initial_state, guesses, is_int, learned_of, own_start, remember, units_of
from .layer import Adapter, Spec
from .native import Form, Native, flatten, matches, names, rebuild
from .returned import parted
from .signature import arguments, first_input, named_like_state
from .snapshot import untouched
from .trials import StateForm, Takes, cell_comes_first, learn, read_form, try_out
from .warning import warn
from .weights import weights_like

_told: WeakSet[type[nn.Module]] = WeakSet()  # kinds of cells whose unusual order of parts was warned about


class CellAdapter(Adapter):
    """The adapter of any cell that follows the `Cell` protocol; it learns the form of the state once."""

    kind = "cell"

    def __init__(self, known: WeakKeyDictionary[nn.Module, StateForm] | None = None) -> None:
        """Start without any known cells, or with the cells that another adapter knows."""
        self._known = WeakKeyDictionary() if known is None else known

    def spec(self, module: nn.Module) -> Spec:
        """Read the spec from an initial state of one row."""
        # Zeros are made here without calling the module's own code, which may have side effects.
        with untouched(module) if own_start(module) is not None else nullcontext(), torch.no_grad():
            state = self.initial(module, 1)
        sizes = {name: part.numel() for name, part in state.items()}  # of one row
        size = getattr(module, "input_size", None)
        return Spec(parts=tuple(state), sizes=sizes, input_size=size if isinstance(size, int) else None)

    def initial(self, module: nn.Module, batch: int) -> State:
        """Return the cell's `initial_state(batch)`, or zeros of `hidden_size` in the form that it takes."""
        device, dtype = weights_like(module)
        if own_start(module) is not None:
            known = self._form(module)
            parts, found = flatten(call_initial_state(module, batch))
            self._check_form(module, known.form, found)
            return State({name: part.to(device) for name, part in parts.items()}, known.axes)
        hidden = _hidden_size(module)
        known, learned = self._form(module), learned_of(module)
        shapes: dict[str, tuple[int, ...]] = {}
        for name, axis in known.axes.items():
            shapes[name] = (_cells_in(module), batch, hidden) if axis else (batch, hidden)
        if learned is not None and not is_int(getattr(module, "hidden_size", None)):
            shapes = {n: (*of[: known.axes[n]], batch, *of[known.axes[n] :]) for n, of in learned.shapes.items()}
        zeros = {n: torch.zeros(shape, device=device, dtype=dtype) for n, shape in shapes.items()}
        return State.alike(zeros, known.axes)

    def to_state(self, module: nn.Module, native: Native, *, batch: int | None = None) -> State:
        """Name the parts, and remember their nesting for `to_native`."""
        parts, form = flatten(native)
        if form == ("h", "c") and cell_comes_first(type(module)):
            _tell_of_order(type(module))
        known = self._known.get(module)
        if known is None and own_start(module) is not None:
            known = self._form(module)
        if known is not None and matches(known.form, native):
            self._known[module] = known._replace(form=form)
            return State(parts, known.axes)
        if known is not None and known.sure:
            raise StateMismatch(
                f"the state is {_nesting(native)}, but that of {type(module).__name__} is {_nesting(known.form)}."
            )
        axes = {name: _guess_axis(module, part, batch) for name, part in parts.items()}
        self._known[module] = StateForm(form, axes, sure=False)
        return State(parts, axes)

    def to_native(self, module: nn.Module, state: State, *, batched: bool = True) -> Native:
        """Return the parts in the nesting that the cell takes."""
        form = self._form(module, state).form
        if set(names(form)) != set(state):
            raise StateMismatch(
                f"the state has the parts {', '.join(state)}, "
                f"but {type(module).__name__} needs {', '.join(names(form))}."
            )
        return rebuild(form, state)

    def split(self, module: nn.Module, result: Any) -> tuple[Any, Native]:
        """Tell `-> state` from `-> (output, state)` by the form of the state, and `-> (h, y)` by its names."""
        known = self._form(module)
        form, found = known.form, parted(module, known.form, result)
        if found is not None:
            return _output(result) if found[1] is result else found[0], found[1]
        pair = isinstance(result, tuple | list) and len(result) == 2
        if pair and not known.sure and isinstance(result[1], tuple | list | dict):
            return result[0], result[1]
        raise NotRecurrent(
            f"{type(module).__name__} returned {_nesting(result)}, but its state is {_nesting(form)}: a cell returns "
            f"the next state, or (output, next state). A cell that returns something else needs hs.register."
        )

    def learn(self, module: nn.Module, sample: Tensor | None = None) -> Takes:
        """Learn the form of the state, using a real step `sample (batch, ...)` and the arguments that a call takes."""
        known = self._known.get(module)
        if known is None or not known.sure:
            known = self._try(module, sample) or known
            if known is not None:
                self._known[module] = known
        return "step" if known is None else known.takes

    def _try(self, module: nn.Module, sample: Tensor | None = None) -> StateForm | None:
        if own_start(module) == "initial_state":
            known = _form_of_initial_state(module)
            with untouched(module), torch.no_grad():
                native = call_initial_state(module, ROWS)
            found = try_out(module, [(native, known.axes)], sample)
            return known if found is None else known._replace(takes=found.takes)
        learned = learned_of(module)
        if learned is not None:
            return StateForm(learned.form, learned.axes)
        if units_of(module) is None:
            return learn(module, sample)
        found = try_out(module, guesses(module, _hidden_size(module)), sample)
        if found is not None:
            if sample is not None and found.takes == "step":
                same = [each for each in guesses(module, _hidden_size(module)) if each[1] == found.axes]
                remember(module, same[0])
            return found
        form = read_form(module)
        return StateForm(form or "h", dict.fromkeys(names(form or "h"), 0), sure=form is not None)

    def _form(self, module: nn.Module, state: State | None = None) -> StateForm:
        known = self._known.get(module)
        if known is not None and known.sure:
            return known
        known = known or self._try(module)
        if state is not None and (known is None or not known.sure) and set(state) in ({"h"}, {"h", "c"}):
            # No other source: the form is that of the state that somebody made for this cell.
            form = ("h", "c") if "c" in state else "h"
            known = StateForm(form, dict(state.batch_axis), sure=False)
        if known is None:
            _hidden_size(module)  # raises, and says what is missing
            raise AssertionError("a cell with hidden_size has a form")
        self._known[module] = known
        return known

    def _check_form(self, module: nn.Module, form: Form, found: Form) -> None:
        if names(form) != names(found):
            raise StateMismatch(
                f"{type(module).__name__}.initial_state returned the parts {', '.join(names(found))}, "
                f"but its state had {', '.join(names(form))} before. A cell keeps one form of state."
            )


class SequenceAdapter(CellAdapter):
    """The adapter of a user's own layer that runs a whole sequence in one call, as `nn.LSTM` does."""

    kind = "layer"
    fused = True

    def __init__(self, cells: CellAdapter) -> None:
        """Share what `cells` knows."""
        super().__init__(cells._known)

    def spec(self, module: nn.Module) -> Spec:
        """Read the spec from an initial state of one row; a leading axis counts layers."""
        known = self._form(module)
        with untouched(module), torch.no_grad():
            state = self.initial(module, 1)
        first = next(iter(state))
        layers = state[first].shape[0] if known.axes[first] == 1 else 1
        sizes = {name: part.numel() // layers for name, part in state.items()}
        size = getattr(module, "input_size", None)
        return Spec(
            parts=tuple(state),
            sizes=sizes,
            layers=layers,
            input_size=size if isinstance(size, int) else None,
            batch_first=known.takes != "time first",
        )

    def rows(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, bool]:
        """Count the rows along the batch axis of this layer."""
        x = first_input(module, args, kwargs)
        if isinstance(x, PackedSequence):
            return int(x.batch_sizes[0]), True
        return x.shape[1 if self._form(module).takes == "time first" else 0], True


def is_cell(module: nn.Module) -> bool:
    """Say whether a module looks like a user's own cell. Taking two tensors is not enough."""
    taken = arguments(type(module))
    if len(taken) < 2:
        return False
    if callable(getattr(module, "initial_state", None)):
        return True
    return len(taken) == 2 and isinstance(getattr(module, "hidden_size", None), int) and named_like_state(taken[1])


def _hidden_size(module: nn.Module) -> int:
    hidden = units_of(module)
    if hidden is None:
        raise NotRecurrent(
            f"{type(module).__name__} has neither initial_state(batch) nor hidden_size, and no state of a size that it "
            f"names or has in its weights was taken and given back, so its first state is unknown. "
            f"Give the cell a method initial_state(batch) that returns it, or hand a state in."
        )
    return hidden


def _cells_in(module: nn.Module) -> int:
    count: int = getattr(module, "num_layers", 1) * (2 if getattr(module, "bidirectional", False) is True else 1)
    return count


def _form_of_initial_state(module: nn.Module) -> StateForm:
    # The batch axis is the one that differs between two batch sizes.
    with untouched(module), torch.no_grad():
        (two, form), (three, _) = (flatten(call_initial_state(module, batch)) for batch in (2, 3))
    axes = {}
    for name, part in two.items():
        grown = [axis for axis in range(part.dim()) if part.shape[axis] == 2 and three[name].shape[axis] == 3]
        if not grown:
            raise StateMismatch(
                f"{type(module).__name__}.initial_state(2) gives part {name!r} the shape {tuple(part.shape)} and "
                f"initial_state(3) {tuple(three[name].shape)}: no axis has one entry for each row. "
                f"A learned h0 of shape (1, units) becomes one with h0.expand(batch, -1)."
            )
        axes[name] = grown[0]
    return StateForm(form, axes)


def _guess_axis(module: nn.Module, part: Tensor, batch: int | None) -> int:
    fits = [axis for axis, size in enumerate(part.shape) if batch is None or size == batch]
    if len(fits) > 1 and part.dim() == 3 and getattr(module, "num_layers", None) == part.shape[0]:
        return 1  # a stack of layers in torch's layout (layers, batch, unit)
    if not fits:
        raise StateMismatch(
            f"{type(module).__name__} was called with {batch} rows and a state of shape {tuple(part.shape)}, "
            f"in which no axis has {batch} entries. Give it initial_state(batch), which tells where the rows are."
        )
    return fits[0]


def _tell_of_order(kind: type[nn.Module]) -> None:
    if kind not in _told:
        _told.add(kind)
        warn(
            f"{kind.__name__} keeps its state as (c, h), but the parts of a pair are named by their places, h first: "
            f"what is called 'h' here is its c, in recordings, penalties and measures. Let it keep (h, c), as torch's "
            f"cells do, or a dict with these names.",
            HiddenStateWarning,
        )


def _output(native: Native) -> Tensor:
    if isinstance(native, Tensor):
        return native
    parts = flatten(native)[0]
    return parts.get("h", next(iter(parts.values())))


def _nesting(thing: Any) -> str:
    if isinstance(thing, Tensor | str):
        return "a tensor"
    if isinstance(thing, dict):
        return "a dict of " + ", ".join(str(key) for key in thing)
    if isinstance(thing, tuple | list):
        return f"({', '.join(_nesting(inner) for inner in thing)})"
    return type(thing).__name__
