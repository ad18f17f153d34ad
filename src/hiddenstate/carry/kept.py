"""The states kept between calls, and the state a layer continues from: its last one, with a start in some rows."""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..cells import Layer, untouched
from ..errors import CarryError, StateMismatch
from ..state import Rows, State, row_index
from .attributes import copied
from .initial import Start, part_of


@dataclass(slots=True)
class Kept:
    """The states of a model's layers by name, and for each layer the rows that start anew at the next call."""

    states: dict[str, State] = field(default_factory=dict)
    anew: dict[str, Tensor] = field(default_factory=dict)  # layer -> bool (batch,)
    # Attributes that may turn out to be states: module and name -> their value.
    raw: dict[tuple[nn.Module, str], Any] = field(default_factory=dict)
    loaded: frozenset[str] = frozenset()  # layers in a checkpoint that calls may have to show first
    graph: bool = False  # whether gradients go back into the call that ended in these states

    @property
    def loaded_parts(self) -> dict[str, Set[str]]:
        """The layers in a checkpoint, with the parts of their states."""
        return {name: set(self.states[name]) for name in self.loaded if name in self.states}

    def copy(self) -> Kept:
        """Return a copy that can advance independently."""
        anew = {name: mask.clone() for name, mask in self.anew.items()}
        return Kept(dict(self.states), anew, dict(self.raw), self.loaded, self.graph)

    def detach(self) -> Kept:
        """Return a copy with detached states."""
        states = {name: state.detach() for name, state in self.states.items()}
        return Kept(states, self.anew, {place: copied(value) for place, value in self.raw.items()}, self.loaded)

    def mark(self, layer: Layer, rows: Rows) -> Tensor | None:
        """Return which rows of `layer` will start anew if these rows do too; nothing is changed yet."""
        state = self.states.get(layer.name)
        if state is None:
            return None  # every row starts anew in any case
        mask = torch.zeros(state.batch, dtype=torch.bool)
        mask[row_index(rows, state.batch, mask.device, unique=True)] = True
        old = self.anew.get(layer.name)
        return mask if old is None else mask | old

    def check_rows_shared(self) -> None:
        """Raise if layers have different numbers of rows, so that single rows cannot be named."""
        rows = {name: state.batch for name, state in self.states.items()}
        if len(set(rows.values())) > 1:
            seen = ", ".join(f"{name or 'the model itself'} {count}" for name, count in rows.items())
            one = next(iter(rows))
            raise StateMismatch(
                f"the carried layers have different numbers of rows ({seen}), as words within sentences have, so which "
                f"of their rows belong to one row of the batch is not known. Let all start anew, carry.reset(), or "
                f"carry one layer by itself, whose rows are then those that are meant: "
                f"hs.Carry(model.get_submodule({one!r}))."
            )

    def advance(self, staged: dict[str, State]) -> None:
        """Take over the states of a finished call; after a smaller batch, the other rows keep theirs."""
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

    def current(self, layer: Layer, start: Callable[[Layer, int], State]) -> State | None:
        """Return what `layer` would continue from; `start` makes the state of rows that start anew."""
        state = self.states.get(layer.name)
        mask = self.anew.get(layer.name)
        if state is None or mask is None or not bool(mask.any()):
            return state
        rows = mask.nonzero()[:, 0].tolist()
        return state.put(rows, fitting(start(layer, state.batch), state).select(rows))


def fitting(initial: State, kept: State) -> State:
    """Return an initial state in the dtypes of the kept one, which autocast or a custom cell may have changed."""
    parts = {name: initial[name].to(part.dtype) if name in initial else None for name, part in kept.items()}
    missing = [name for name, part in parts.items() if part is None]
    if missing:
        raise StateMismatch(
            f"the initial state has the parts {', '.join(initial)}, but the layer's also has {', '.join(missing)}."
        )
    return State({name: part for name, part in parts.items() if part is not None}, kept.batch_axis)


def join(found: list[Layer], states: dict[str, State]) -> State | None:
    """Return one State for the whole model, with parts named like `encoder.lstm.h`."""
    parts, axes = {}, {}
    for layer in found:
        for part, tensor in states.get(layer.name, {}).items():
            parts[layer.part(part)] = tensor
            axes[layer.part(part)] = states[layer.name].batch_axis[part]
    return State(parts, axes) if parts else None


def part(found: list[Layer], state: State) -> dict[str, State]:
    """Split a whole model's state into one for each layer, checked against the layers."""
    own = {layer.name: part_of(state, layer, found) for layer in found}
    for layer in found:
        layer.to_native(own[layer.name])  # raises if sizes or parts do not fit
        _check_kind(layer, own[layer.name])
    known = sum(len(inner) for inner in own.values())
    if known < len(state):
        raise StateMismatch(
            f"the state has {len(state)} parts ({', '.join(state)}), but this model's layers take {known} of them: "
            f"{', '.join(layer.label for layer in found)}. It belongs to another model."
        )
    return own


def _check_kind(layer: Layer, state: State) -> None:
    if layer.seen is not None:
        _check_seen(layer, state)
        return
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


def _check_seen(layer: Layer, state: State) -> None:
    """Raise if a state differs from the one that was seen in a call, except in its number of rows."""
    assert layer.seen is not None
    for part in layer.seen.parts:
        sizes = [list(part.shape), list(state[part.name].shape)]
        for shape in sizes:
            if part.batch_axis is not None and part.batch_axis < len(shape):
                shape[part.batch_axis] = -1
        if sizes[0] != sizes[1] or state[part.name].dtype != part.dtype:
            raise StateMismatch(
                f"part {layer.part(part.name)!r} is {state[part.name].dtype} of shape {tuple(state[part.name].shape)}, "
                f"but {part.dtype} like {part.shape} was seen there."
            )


@dataclass(frozen=True, slots=True, eq=False)
class NextState:
    """Makes the state that the next call gets from the kept one."""

    start: Start
    strict: bool  # whether another number of rows is an error

    def of(self, kept: Kept, layer: Layer, rows: int, *, own: State | None = None) -> State | None:
        """Return what a layer continues from, None if it starts by itself; `own` is the start that the model makes."""
        if layer.name not in kept.states:
            # A layer that makes its own first state is left to it: its start may not be zeros.
            alone = self.start.is_zeros and (own is not None or layer.starts_itself)
            return None if alone else self.start.of(layer, rows)
        state, anew = self.kept(kept, layer, rows), kept.anew.get(layer.name)
        if anew is not None and bool(anew[:rows].any()):
            first = own if own is not None and self.start.is_zeros else self.start.of(layer, rows)
            chosen = anew[:rows].nonzero()[:, 0].tolist()
            state = state.put(chosen, fitting(first, state).select(chosen))
        return self._reverse_anew(layer, state)

    def kept(self, kept: Kept, layer: Layer, rows: int) -> State:
        """Return the kept state for `rows` rows, without regard to rows that start anew."""
        state = kept.states[layer.name]
        if rows != state.batch:
            kept.check_rows_shared()
        fewer = self._fewer(layer, state, rows)
        if any(tensor.requires_grad and _graph_is_freed(tensor) for tensor in state.values()):
            raise CarryError(
                f"the carried state of {layer.label!r} still holds the graph of an earlier batch, and a backward "
                f"pass has used that graph up: the next one would fail. Keep detach=True, the default, "
                f"or cut it after each backward: carry.state = carry.state.detach()."
            )
        if fewer:
            state = state.select(slice(0, rows))
        if not torch.is_inference_mode_enabled() and any(part.is_inference() for part in state.values()):
            state = state.clone()  # autograd refuses tensors that were made in inference mode
        return state

    def _fewer(self, layer: Layer, kept: State, rows: int) -> bool:
        """Say whether only the first rows continue; raise for any other mismatch in the number of rows."""
        batch = kept.batch
        if rows == batch or (not self.strict and rows < batch):
            return rows < batch
        way_out = (
            "The last batch of an epoch is often smaller: use drop_last=True, or Carry(model, rows='first')."
            if rows < batch
            else "Another set of sequences begins with carry.reset(), or, as validation in between, in carry.fresh()."
        )
        carried = f"the carried state of {layer.label!r} has {batch}"
        raise StateMismatch(f"the input has {rows} rows, but {carried}. {way_out}")

    def _reverse_anew(self, layer: Layer, state: State) -> State:
        if not both_ways(layer):
            return state
        initial = fitting(self.start.of(layer, state.batch), state)
        odd = torch.arange(1, 2 * layer.spec.layers, 2, device=state.device)
        return State(
            {name: tensor.index_copy(0, odd, initial[name].index_select(0, odd)) for name, tensor in state.items()},
            state.batch_axis,
        )


def both_ways(layer: Layer) -> bool:
    """Say whether a layer also runs backwards."""
    return layer.fused and layer.spec.bidirectional


def in_full_precision(state: State, layer: Layer) -> State:
    """Return a state in the precision of the layer's weights."""
    # Autocast leaves half-precision states, which the layer would refuse once autocast is off.
    if not torch.is_autocast_enabled(next(iter(state.values())).device.type):
        return state
    weight = next((p for p in layer.module.parameters() if p.is_floating_point()), None)
    if weight is None or weight.dtype not in (torch.float32, torch.float64):
        return state
    return state.map(lambda part: part.to(weight.dtype) if part.dtype in (torch.float16, torch.bfloat16) else part)


def requires_grad(state: State | None) -> bool:
    """Say whether a state has a graph."""
    return state is not None and any(part.requires_grad for part in state.values())


def same(one: State, other: State) -> bool:
    """Say whether two states hold the same values."""
    return one.keys() == other.keys() and all(
        part.shape == other[name].shape and torch.equal(part.detach().to(other[name]), other[name].detach())
        for name, part in one.items()
    )


def all_zero(state: State) -> bool:
    """Say whether a state is all zeros."""
    return all(not bool(tensor.detach().any()) for tensor in state.values())


def _graph_is_freed(tensor: Tensor) -> bool:
    """Say whether the graph behind `tensor` was used up by a backward pass.

    The raw saved values of its nodes are looked at: unpacking them could run a checkpointed call again.
    """
    nodes = [tensor.grad_fn]
    for _ in range(64):  # the first node that saved anything decides
        if not nodes:
            return False
        node = nodes.pop(0)
        if node is None:
            continue
        names = [name for name in dir(node) if name.startswith("_raw_saved_")]
        try:
            saved = [each for name in names for each in _listed(getattr(node, name))]
        except RuntimeError:  # the only error that raw access raises: the value was freed
            return True
        if saved:
            return all(each.data is None for each in saved)
        nodes.extend(inner for inner, _ in node.next_functions)
    return False


def _listed(thing: Any) -> list[Any]:
    return list(thing) if isinstance(thing, tuple | list) else [thing]
