"""Layers that are known by what a watched call showed, not by their type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import NotRecurrent, StateMismatch
from ..state import Path, State, mapped, tensors
from .behavior import Found, Part, Recurrence
from .layer import Adapter, Layer, Spec
from .native import Native
from .weights import weights_like


def seen_layers(
    model: nn.Module, by_type: Sequence[Layer], known: Sequence[Layer], found: Found
) -> tuple[list[Layer], Found]:
    """Return the layers that types and a watched call show together; where only names suggest a cell, the call decides.

    `by_type` lists modules named like cells instead of the layers they hold; `known` lists the layers known for sure.
    """
    seen, sure = _named(model, found), {layer.module for layer in known}
    cells = {layer.module: layer for layer in seen if isinstance(layer.adapter, SeenCell)}
    against = {each.module: each for each in found.contradicted}
    kept, parts, doubts = [], set(), []
    for layer in by_type:
        inside = [other for other in (*known, *seen) if other.module is not layer.module and _within(other, layer)]
        inside += [other for other in seen if other.module is layer.module and not isinstance(other.adapter, SeenCell)]
        if layer.module in sure or layer.fused:
            kept.append(layer)
        elif layer.name in against and layer.module not in cells:
            doubts.append(against[layer.name])
        elif not (inside or layer.module in cells):
            kept.append(layer)
        elif layer.module in cells:
            if _same_state(layer, cells[layer.module]):
                kept.append(layer)
                parts.add(layer.module)
        elif layer.name and all(other.module in cells or other.module in sure for other in inside):
            kept.append(layer)  # a cell that is built from other cells
            parts |= {other.module for other in inside}
        else:  # it is only named like a cell: the recurrence is inside it
            kept += [other for other in known if _within(other, layer)]
    kept = [replace(layer, iterates=layer.name in found.iterated) for layer in kept]
    found = replace(found, unsure=(*found.unsure, *doubts))
    return [*kept, *(layer for layer in seen if layer.module not in parts)], found


_REPEATS = 3  # repetitions within one call


def _named(model: nn.Module, found: Found) -> list[Layer]:
    made: dict[str, Layer] = {}
    modules = dict(model.named_modules(remove_duplicate=False))
    for recurrence in found.recurrences:
        if recurrence.kind == "iteration" and recurrence.module in found.iterated:
            continue  # already listed by its type
        module = modules.get(recurrence.module, model)
        placed = all(part.argument and part.result is not None for part in recurrence.parts)
        is_cell = recurrence.kind == "cell" and placed
        # From call to call, a loop may or may not be in time or continue kept state; its name must not depend on that.
        word = "loop" if recurrence.steps >= _REPEATS and recurrence.kind != "cache" else recurrence.kind
        number = recurrence.line.rpartition(":")[2]
        name = recurrence.module if is_cell else ".".join(filter(None, (recurrence.module, word + number)))
        while name in made:
            name += "_"
        made[name] = Layer(name, module, (SeenCell if is_cell else SeenAdapter)(recurrence))
    return list(made.values())


def _within(layer: Layer, outer: Layer) -> bool:
    return not outer.name or layer.name.startswith(f"{outer.name}.")


def _same_state(guess: Layer, seen: Layer) -> bool:
    """Say whether a guessed layer has the parts, batch axes and sizes that were seen."""
    try:
        with torch.no_grad():
            state = guess.initial(_ROWS)
    except Exception:  # the guess cannot even make a first state
        return False
    parts = seen.seen.parts if seen.seen is not None else ()
    axes = list(state.batch_axis.values())
    shapes = [[*part.shape] for part in parts]
    for part, shape in zip(parts, shapes, strict=True):
        if part.batch_axis is not None:
            shape[part.batch_axis] = _ROWS
    return axes == [part.batch_axis for part in parts] and [list(t.shape) for t in state.values()] == shapes


_ROWS = 2


class SeenAdapter(Adapter):
    """A loop, an iteration, an attribute or a cache: it can be listed and recorded, but not called by itself."""

    recurrence: Recurrence

    def __init__(self, recurrence: Recurrence) -> None:
        """Read names, axes and sizes from what was seen."""
        self.kind, self.recurrence = recurrence.kind, recurrence
        self.parts = tuple(part.name for part in recurrence.parts)
        self.axes = {part.name: part.batch_axis for part in recurrence.parts}
        self._shapes = {part.name: part.shape for part in recurrence.parts}
        self._dtypes = {part.name: part.dtype for part in recurrence.parts}

    def spec(self, module: nn.Module) -> Spec:
        """Return the parts that cross from one repetition to the next, with their sizes."""
        return Spec(parts=self.parts, sizes={name: self._of_row(name).numel() for name in self.parts})

    def initial(self, module: nn.Module, batch: int) -> State:
        """Raise: only the model itself knows this state."""
        raise NotRecurrent(self._refusal(module))

    def to_state(self, module: nn.Module, native: Native, *, batch: int | None = None) -> State:
        """Name the parts of a dict; if no part has a known batch axis, they are shown as a single row."""
        unknown = [name for name in self.parts if self.axes[name] is None]
        if len(unknown) == len(self.parts):
            return State.alike({name: part.unsqueeze(0) for name, part in native.items()}, 0)
        if unknown:
            raise StateMismatch(f"where the rows of {unknown[0]!r} are could not be told from the call that was seen.")
        return State(native, {name: axis for name, axis in self.axes.items() if axis is not None})

    def to_native(self, module: nn.Module, state: State, *, batched: bool = True) -> Native:
        """Return a dict of the parts, as `give` takes them."""
        if state.keys() != set(self.parts):
            raise StateMismatch(
                f"the state has the parts {', '.join(state)}, "
                f"but {type(module).__name__} needs {', '.join(self.parts)}."
            )
        known = any(axis is not None for axis in self.axes.values())
        return dict(state) if known else {name: part.squeeze(0) for name, part in state.items()}

    def split(self, module: nn.Module, result: Any) -> tuple[Any, Native]:
        """Raise: a call of the module returns no state."""
        raise NotRecurrent(self._refusal(module))

    def _of_row(self, name: str) -> Tensor:
        shape, axis = list(self._shapes[name]), self.axes[name]
        if axis is not None:
            shape[axis] = 1
        return torch.empty(shape, device="meta")

    def _refusal(self, module: nn.Module) -> str:
        return (
            f"the {self.kind} at {self.recurrence.line} in {type(module).__name__} is no module of its own that could "
            f"be called with a state. hs.layers(model, *inputs).explain() shows what was seen."
        )


class SeenCell(SeenAdapter):
    """A module that was called repeatedly with a value among its arguments that it had returned before."""

    def __init__(self, recurrence: Recurrence) -> None:
        """Remember the places of the state among arguments and results."""
        super().__init__(recurrence)
        self._into = {part.name: _place(part) for part in recurrence.parts}
        self._out = {part.name: tuple(part.result or ()) for part in recurrence.parts}
        self._starts = {part.name: part.initial for part in recurrence.parts}
        # The nesting of the state in a result, with the names of the parts instead of tensors.
        self._nesting: Any = _nesting(recurrence.returned, self._out)

    def initial(self, module: nn.Module, batch: int) -> State:
        """Return zeros if the model was seen to start from zeros or without a state; else raise."""
        if any(first is not None and bool(first.any()) for first in self._starts.values()):
            raise NotRecurrent(
                f"{type(module).__name__} was seen to start from a state that the model itself makes, and it is not "
                f"zero: nobody else knows how it is made."
            )
        device, _ = weights_like(module)
        parts = {}
        for name, axis in self.axes.items():
            shape = list(self._shapes[name])
            if axis is not None:
                shape[axis] = batch
            parts[name] = torch.zeros(shape, dtype=self._dtypes[name], device=device)
        return self.to_state(module, parts)

    def split(self, module: nn.Module, result: Any) -> tuple[Any, Native]:
        """Take the parts from their places in the result; the output is the first tensor that is not a part."""
        found = tensors(result)
        missing = [name for name, place in self._out.items() if place not in found]
        if missing:
            raise NotRecurrent(
                f"{type(module).__name__} returned something else than when it was first seen: {missing[0]!r} is not "
                f"where it was. hs.register({type(module).__name__}, adapter) teaches what its calls look like."
            )
        native = {name: found[place] for name, place in self._out.items()}
        others = [tensor for place, tensor in found.items() if place not in self._out.values()]
        return (others[0] if others else next(iter(native.values()))), native

    def rows(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, bool]:
        """Count rows in the state; if there is none yet, in the first tensor among the arguments."""
        native = self.given(module, args, kwargs)
        for name, axis in self.axes.items():
            if native is not None and axis is not None:
                return native[name].shape[axis], True
        x = next(iter(tensors((args, kwargs)).values()), None)
        return (x.shape[0], True) if x is not None and x.dim() else (1, False)

    def given(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Native | None:
        """Return the parts among a call's arguments; None unless all of them are there."""
        found = tensors((args, kwargs))
        native = {name: found[place] for name, place in self._into.items() if place in found}
        return native if len(native) == len(self._into) else None

    def give(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], native: Native
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Put the parts at their places among the arguments."""
        values = {place: native[name] for name, place in self._into.items()}
        if self.given(module, args, kwargs) is not None:
            found: tuple[tuple[Any, ...], dict[str, Any]] = mapped((args, kwargs), lambda at, end: values.get(at, end))
            return found
        inputs, named = list(args), dict(kwargs)
        arguments = _by_argument(values)
        if len(arguments) == 1 and self._nesting is not None:  # nest them as the module's own result does
            arguments = {next(iter(arguments)): mapped(self._nesting, lambda _, name: native[name])}
        for (side, first), inner in arguments.items():
            if side == 1:
                named[first] = inner
            else:
                inputs[first:] = [*inputs[first:first], *[None] * (first - len(inputs)), inner, *inputs[first + 1 :]]
        return tuple(inputs), named


def _nesting(result: Any, places: Mapping[str, Path]) -> Any:
    """Return the container in a result that holds exactly the state, with part names instead of tensors."""
    prefix: Path = ()
    while len(places) > 1 and len({place[: len(prefix) + 1] for place in places.values()}) == 1:
        prefix = next(iter(places.values()))[: len(prefix) + 1]
    inner = result
    for step in prefix:
        inner = getattr(inner, step) if isinstance(step, str) and hasattr(inner, step) else inner[step]
    names = {place[len(prefix) :]: name for name, place in places.items()}
    if len(places) < 2 or tensors(inner).keys() != names.keys():
        return None
    return mapped(inner, lambda path, _: names.get(path))


def _place(part: Part) -> Path:
    side, *rest = part.argument or ("args", 1)
    return (0 if side == "args" else 1, *rest)


def _by_argument(values: Mapping[Path, Tensor]) -> dict[tuple[int, Any], Any]:
    """Nest tensors by their places: tuples for integer keys, dicts for names."""
    groups: dict[tuple[int, Any], dict[Path, Tensor]] = {}
    for (side, first, *rest), tensor in values.items():
        groups.setdefault((side, first), {})[tuple(rest)] = tensor
    return {argument: _nested(inner) for argument, inner in groups.items()}


def _nested(values: Mapping[Path, Tensor]) -> Any:
    if () in values:
        return values[()]
    keys: Sequence[Any] = list(dict.fromkeys(path[0] for path in values))
    inner = {key: _nested({path[1:]: t for path, t in values.items() if path[0] == key}) for key in keys}
    return tuple(inner[key] for key in sorted(inner)) if all(isinstance(key, int) for key in keys) else inner
