"""States that the model itself passes to its layers: which of them are replaced by the carried state."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..cells import Call, Layer, may_be_recomputed, under_checkpointing
from ..errors import CarryError
from ..state import State, tensors
from .attributes import checkpointed
from .examination import Examination
from .kept import Kept, NextState, all_zero, requires_grad, same


@dataclass(slots=True, eq=False)
class GivenStates:
    """What is known of the states that a model passes to its layers, and what replaces them."""

    examination: Examination
    next: NextState
    override: bool
    own: dict[str, State] = field(default_factory=dict)  # the model's own start of each layer in its last call
    _first: dict[str, State] = field(default_factory=dict)  # the model's own start when no state was kept
    _ended: dict[str, State] = field(default_factory=dict)  # each layer's last end state, whatever was reset since
    _detaching: set[str] = field(default_factory=set)  # layers whose state the model detaches at every step
    _cuts: dict[str, int] = field(default_factory=dict)  # in this call, by layer: steps before which it was detached
    _cut_at_times: set[str] = field(default_factory=set)  # layers whose state is detached before some steps only
    changing: set[str] = field(default_factory=set)  # layers whose state the model changes between steps
    _unclear: dict[str, str] = field(default_factory=dict)  # by layer: the attribute it may continue from
    fed: set[str] = field(default_factory=set)  # layers that were seen to get an attribute's value
    _replaced: set[str] = field(default_factory=set)  # layers that got the carried state instead of the model's own

    def is_own(self, call: Call, arguments: Any, kept: Kept, *, first: bool, grad: bool) -> bool:
        """Say whether a state is the model's own start, to be replaced; `arguments` came with the call of the model.

        If a layer is known to continue from an attribute, any other state it gets `first` in a call is the model's way
        of starting anew. `grad` says whether the model was called with gradients on.
        """
        adopted, name = self.examination.adopted, call.layer.name
        source = adopted.handing(tensors(call.given_native).values())
        if source is not None:  # it continues from an attribute, which holds the kept state
            self._check_kept(call, source[1], grad=grad)
            adopted.feeds.setdefault(source, set()).add(name)
            self.fed.add(name)
            return True
        if first and name in self.fed:
            return False
        own = self.override and name not in self.examination.handed_in and not from_the_caller(call, arguments)
        if own and first and name in kept.states:
            self.check_unclear(call.layer)
        return own

    def check_unclear(self, layer: Layer) -> None:
        """Raise before replacing a start if the model may continue from an attribute: it may be a reset."""
        if layer.name in self._unclear:
            attribute = self._unclear[layer.name]
            raise CarryError(
                f"{layer.label!r} starts from what the model makes in this call, although the model keeps in "
                f"{attribute} what it ended in, and may go on from that: whether this start is its own reset, or to be "
                f"replaced, is not known. Let the first two calls go on from {attribute}; or leave out override=True."
            )

    def goes_on(self, layer: Layer, own: State, kept: State | None) -> bool:
        """Say whether the model hands a layer what is kept, or what it may have made of it: by a mask on it, say."""
        last = self._ended.get(layer.name)
        if kept is None or same(own, kept):
            return True
        return layer.name in self._unclear and last is not None and same(last, kept) and not all_zero(own)

    def kept_for(self, layer: Layer, kept: Kept) -> Kept:
        """Return the kept states without that of a layer which the model has reset by passing it no state.

        It is a reset if the attribute that the model otherwise passes to the layer has a value.
        """
        if layer.name in self.fed and self.examination.adopted.holds_for(layer.name):
            return Kept()
        if layer.name in self._unclear and layer.name in kept.states:
            attribute = self._unclear[layer.name]
            raise CarryError(
                f"{layer.label!r} is handed no state in this call, while {attribute} holds what it ended in, and the "
                f"model may go on from that: whether this is its own reset, or the carried state is to be handed on, "
                f"is not known. Let the first two calls go on from {attribute}, or let the model not keep it."
            )
        return kept

    def _check_kept(self, call: Call, attribute: str, *, grad: bool) -> None:
        """Raise if a layer continues from an attribute that a backward pass will read again with another value."""
        if may_be_recomputed(grad_before=grad) and under_checkpointing():
            raise checkpointed(repr(call.layer.label), attribute)

    def instead(self, call: Call, kept: Kept, rows: int) -> State | None:
        """Return the replacement for the state that a layer gets first in a call of the model."""
        layer, own = call.layer, call.given
        assert own is not None
        self.own[layer.name] = own.detach()
        state = self.next.of(kept, layer, rows, own=self._start_of_rows(layer, kept, own))
        if layer.name in self._cut_at_times and requires_grad(state) and torch.is_grad_enabled():
            raise CarryError(
                f"the model cuts the state of {layer.label!r} from its graph before some steps and not before others, "
                f"so whether gradients go from this call back into the one before is not known, although the graph is "
                f"to be kept (detach=False, or tbptt with k2 > k1). Leave the detach out of the model."
            )
        return state.detach() if state is not None and layer.name in self._detaching else state

    def begun(self, call: Call, kept: Kept) -> None:
        """Look at the state that a layer gets when no state is kept for it."""
        own = call.given
        assert own is not None
        self.check_anew(call.layer, kept, own)
        self._first[call.layer.name] = own.detach().clone()  # a copy: a buffer may be written in place

    def _start_of_rows(self, layer: Layer, kept: Kept, own: State) -> State | None:
        """Return the start of rows that begin anew; None if the layer starts them by itself."""
        anew = kept.anew.get(layer.name)
        if layer.name not in kept.states or anew is None or not bool(anew.any()):
            return own
        if not self._is_kept(layer):
            self.check_anew(layer, kept, own)
        return self.beginning(layer, own)

    def _is_kept(self, layer: Layer) -> bool:
        return any(layer.name in names for names in self.examination.adopted.feeds.values())

    def beginning(self, layer: Layer, own: State) -> State | None:
        """Return the start of new sequences if the model passes `own`; None if the layer starts them by itself."""
        if layer.name in self.examination.adopted.from_none:
            return None
        if not self._is_kept(layer):
            return own
        first = self._first.get(layer.name)  # what the layer gets now is the attribute's value, not a start
        if first is not None and all_zero(first):
            return own.map(torch.zeros_like)
        raise CarryError(
            f"single rows of {layer.label!r} cannot start anew: the model keeps its state, and makes what rows begin "
            f"with only where nothing is kept. carry.reset() starts all rows anew."
        )

    def beginning_of(self, call: Call, arguments: Any) -> State | None:
        """Return the model's own start of a layer, which rows that start anew in mid-sequence begin with as well."""
        layer, own, examination = call.layer, call.given, self.examination
        if own is None or not self.next.start.is_zeros or layer.name in examination.handed_in:
            return None
        begins = None if from_the_caller(call, arguments) else self.beginning(layer, own)
        if begins is own and self._is_ended(layer, own):
            raise _out_of_sight(layer, "rows of it start anew in mid-sequence")
        if begins is not None and layer.name in examination.made_of_input:
            raise no_beginning(layer)
        return begins

    def check_heeded(self, call: Call, kept: Kept) -> None:
        """Raise for operations that are impossible on a state that the model keeps and passes out of our sight."""
        own, name = call.given, call.layer.name
        assert own is not None
        self.check_anew(call.layer, kept, own)
        last = kept.states[name]
        if (
            kept.graph
            and torch.is_grad_enabled()
            and requires_grad(last)
            and not requires_grad(own)
            and same(own, last)
        ):
            raise CarryError(
                f"{call.layer.label!r} is handed what it ended in, cut from its graph by the model itself, so no "
                f"gradient goes from this call back into the one before, although the graph is to be kept "
                f"(detach=False, or tbptt with k2 > k1). Leave the detach out of the model."
            )

    def check_anew(self, layer: Layer, kept: Kept, own: State) -> None:
        """Raise if a layer that was reset gets its old end state as a start: the model keeps it where we cannot see."""
        last, anew = self._ended.get(layer.name), kept.anew.get(layer.name)
        if last is None or (layer.name in kept.states and (anew is None or not bool(anew.any()))):
            return
        if self._is_ended(layer, own):
            raise _out_of_sight(layer, "it was reset")

    def _is_ended(self, layer: Layer, own: State) -> bool:
        """Say whether the model hands a layer what it ended in last, and not zeros."""
        last = self._ended.get(layer.name)
        return last is not None and same(own, last) and not all_zero(last)

    def started(self, call: Call, *, by_itself: bool) -> None:
        """Note how a layer was started for which no state was kept."""
        known = self.examination.adopted.from_none
        (known.add if by_itself else known.discard)(call.layer.name)

    def ended(self, states: dict[str, State], steps: dict[str, int]) -> None:
        """Note the end states of layers after so many steps, and the attributes in which the model keeps them."""
        self._cut_at_times |= {name for name, count in self._cuts.items() if count < steps.get(name, 0) - 1}
        self._cuts = {}
        adopted = self.examination.adopted
        places = {name: adopted.holding(state.values()) for name, state in states.items() if name not in adopted.layers}
        # A layer that is the model itself gets its state from the caller: the model's code does not decide there.
        self._unclear = {n: place[1] for n, place in places.items() if n and place and place in adopted.going_on}
        self._ended.update({name: state.detach() for name, state in states.items()})

    def is_last(self, given: Any, last: Any, *, grad: bool) -> bool:
        """Say whether a layer gets its own last output of this call, unchanged, and nothing else has to be checked.

        `grad` says whether the model was called with gradients on.
        """
        if given is not last or not isinstance(given, Tensor):
            if type(given) is not tuple or type(last) is not tuple or len(given) != len(last):
                return False
            if not all([one is two and isinstance(one, Tensor) for one, two in zip(given, last, strict=True)]):
                return False
        if self.examination.adopted.began or torch._C._is_any_autocast_enabled():
            return False
        return not may_be_recomputed(grad_before=grad)

    def stepped(self, call: Call, kept: Kept, last: tuple[Any, State | None]) -> None:
        """Look at the state of a layer that is called again in one call of the model; `last` is what it gave before."""
        name, (native, staged) = call.layer.name, last
        if requires_grad(staged) and not requires_grad(call.given):
            self._detaching.add(name)
            self._cuts[name] = self._cuts.get(name, 0) + 1
        ends = {tensor.untyped_storage().data_ptr() for tensor in tensors(native).values()}
        if all(part.untyped_storage().data_ptr() in ends for part in tensors(call.given_native).values()):
            return
        if call.given is not None and staged is not None and same(call.given, staged):
            return
        if self.override and name not in self.changing and name in kept.states:
            raise CarryError(
                f"the layer {name!r} is called again in this call of the model with a start of its own, which no call "
                f"did before, so it is unclear which of the two goes on from the carried state."
            )
        self.changing.add(name)


def from_the_caller(call: Call, arguments: Any) -> bool:
    """Say whether a layer's state came with the call of the model, so that the caller has decided on it."""
    own = {tensor.untyped_storage().data_ptr() for tensor in tensors(arguments).values()}
    given: Iterable[Tensor] = tensors(call.given_native).values()
    return any(part.untyped_storage().data_ptr() in own for part in given)


def not_used(layer: Layer, state: State, line: str) -> str:
    """Return the warning that the model passes a state of its own, so that the carried state is not used."""
    made = "of zeros" if all_zero(state) else "that is not the carried one"
    return (
        f"the layer {layer.name!r} is handed a state {made} by the model itself ({line}), so the carried state is not "
        f"used. hs.Carry(model, override=True) puts it there; or let the model pass no state (None)."
    )


def _out_of_sight(layer: Layer, told: str) -> CarryError:
    """Return the refusal of a start for a layer that goes on from what the model keeps where nobody sees it."""
    return CarryError(
        f"{layer.label!r} goes on from what it ended in, although {told}: the model keeps it where it is not seen (a "
        f"global, a closure, an object of its own, a part of a larger tensor), so it does not start anew. Reset it "
        f"there, or keep it in an attribute of a module that holds just these rows."
    )


def no_beginning(layer: Layer) -> CarryError:
    """Return the error for rows that start anew in mid-sequence from an unknown start."""
    return CarryError(
        f"rows of {layer.label!r} start anew in mid-sequence, but the model makes what each of them starts from of the "
        f"call's input, and what the next sequence's would be is not known. Cut the input where rows start, and reset "
        f"them in between."
    )
