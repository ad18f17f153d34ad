"""What is kept between calls: each layer's last state, and the rows that start anew."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..cells import Layer, untouched
from ..errors import StateMismatch
from ..state import Rows, State, row_index
from .initial import Start, part_of


@dataclass(slots=True)
class Kept:
    """The states of a model's layers by name, and for each the rows that start anew at the next call."""

    states: dict[str, State] = field(default_factory=dict)
    anew: dict[str, Tensor] = field(default_factory=dict)  # layer -> bool (batch,)

    def copy(self) -> Kept:
        """Return one that can advance by itself."""
        return Kept(dict(self.states), {name: mask.clone() for name, mask in self.anew.items()})

    def detach(self) -> Kept:
        """Return one whose states are cut from the graph."""
        return Kept({name: state.detach() for name, state in self.states.items()}, self.anew)

    def mark(self, layer: Layer, rows: Rows) -> Tensor | None:
        """Return the rows of `layer` that start anew, those named here among them, without noting it yet."""
        state = self.states.get(layer.name)
        if state is None:
            return None  # every row starts anew anyway
        mask = torch.zeros(state.batch, dtype=torch.bool)
        mask[row_index(rows, state.batch, mask.device, unique=True)] = True
        old = self.anew.get(layer.name)
        return mask if old is None else mask | old

    def advance(self, staged: dict[str, State]) -> None:
        """Take over the states of a finished call; a smaller batch moves the first rows and lets the others wait."""
        for name, state in staged.items():
            kept = self.states.get(name)
            waiting = kept.batch - state.batch if kept is not None else 0
            if kept is not None and waiting > 0:
                self.states[name] = kept.put(range(state.batch), state)
                mask = self.anew.get(name)
                if mask is not None:
                    mask[: state.batch] = False
            else:
                self.states[name] = state
                self.anew.pop(name, None)

    def current(self, layer: Layer, start: Start) -> State | None:
        """Return what `layer` would go on from."""
        state = self.states.get(layer.name)
        mask = self.anew.get(layer.name)
        if state is None or mask is None or not bool(mask.any()):
            return state
        rows = mask.nonzero()[:, 0].tolist()
        return state.put(rows, fitting(start.of(layer, state.batch), state).select(rows))


def fitting(initial: State, kept: State) -> State:
    """Return an initial state in the kept one's dtypes, which autocast or a custom cell may have changed."""
    parts = {name: initial[name].to(part.dtype) if name in initial else None for name, part in kept.items()}
    missing = [name for name, part in parts.items() if part is None]
    if missing:
        raise StateMismatch(
            f"the initial state has the parts {', '.join(initial)}, but the layer's also has {', '.join(missing)}."
        )
    return State({name: part for name, part in parts.items() if part is not None}, kept.batch_axis)


def join(found: list[Layer], states: dict[str, State]) -> State | None:
    """Return one State for the whole model, parts named `encoder.lstm.h`."""
    parts, axes = {}, {}
    for layer in found:
        for part, tensor in states.get(layer.name, {}).items():
            parts[layer.part(part)] = tensor
            axes[layer.part(part)] = states[layer.name].batch_axis[part]
    return State(parts, axes) if parts else None


def part(found: list[Layer], state: State) -> dict[str, State]:
    """Return each layer's state out of the whole model's, checked against the layers."""
    own = {layer.name: part_of(state, layer, found) for layer in found}
    for layer in found:
        layer.to_native(own[layer.name])  # raises where sizes, layers or parts do not fit
        _check_kind(layer, own[layer.name])
    known = sum(len(inner) for inner in own.values())
    if known < len(state):
        raise StateMismatch(
            f"the state has {len(state)} parts ({', '.join(state)}), but this model's layers take {known} of them: "
            f"{', '.join(layer.label for layer in found)}. It belongs to another model."
        )
    return own


def _check_kind(layer: Layer, state: State) -> None:
    with untouched(layer.module), torch.no_grad():
        expected = layer.initial(1)
    for part, tensor in state.items():
        name, like = layer.part(part), expected[part]
        if tensor.dtype != like.dtype:
            raise StateMismatch(
                f"part {name!r} is {tensor.dtype}, but the layer works in {like.dtype}. "
                f"Cast it: state.to({like.dtype})."
            )
        if tensor.device != like.device:
            raise StateMismatch(
                f"part {name!r} is on {tensor.device}, but the layer is on {like.device}. "
                f"A loaded state comes on the CPU: move it with state.to({str(like.device)!r})."
            )
