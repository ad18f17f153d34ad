"""The states that layers were given in calls which activation checkpointing runs again in a backward pass."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from ..cells import Call, may_be_recomputed, under_checkpointing
from ..errors import CarryError
from ..state import State
from .kept import requires_grad

_MOST = 256  # calls of one layer that may wait for their backward pass


@dataclass(slots=True, eq=False)
class _Handed:
    shape: torch.Size
    sum: Tensor  # of the input's values weighted by their places, to recognize the call
    state: State | None
    done: bool = False  # whether it has been run again


class Replays:
    """The states that layers were given in calls that may be run again."""

    def __init__(self) -> None:
        """Start without any."""
        self._handed: dict[str, deque[_Handed]] = {}

    def __bool__(self) -> bool:
        """Say whether any call may still be run again."""
        return any(not one.done for handed in self._handed.values() for one in handed)

    def note(self, call: Call, state: State | None, *, grad: bool, graph: bool) -> None:
        """Remember the state of a call that a backward pass may run again.

        `grad`: the model was called with gradients on. `graph`: gradients go back into the call before.
        """
        if not may_be_recomputed(grad_before=grad):
            return
        back = requires_grad(state) or (state is not None and graph)
        if back and not torch.is_grad_enabled() and under_checkpointing():
            raise CarryError(
                f"the layer {call.layer.name!r} runs under activation checkpointing in its reentrant form, through "
                f"which no gradient goes back into the carried state. Use use_reentrant=False, or detach=True."
            )
        handed = self._handed.setdefault(call.layer.name, deque(maxlen=_MOST))
        handed.append(_Handed(*_known_by(call), state))

    def state_for(self, call: Call) -> State | None:
        """Return the state that the same call was given when it first ran."""
        handed = self._handed.get(call.layer.name)
        if not handed:
            return None  # it was first called without a Carry, or without a state to hand over
        shape, total = _known_by(call)
        fits = [one for one in handed if one.shape == shape and bool(torch.isclose(one.sum, total, rtol=1e-6, atol=0))]
        if not fits or any(not _same(one.state, fits[-1].state) for one in fits):
            raise CarryError(
                f"the layer {call.layer.name!r} runs once more within a backward pass (activation checkpointing), and "
                f"{'none' if not fits else f'{len(fits)}'} of the calls since had this input, so the state that it "
                f"went on from cannot be told. Run backward after each call of the model."
            )
        again = next((one for one in fits if not one.done), fits[-1])
        again.done = True
        return again.state


def _known_by(call: Call) -> tuple[torch.Size, Tensor]:
    x = call.input
    data = x if isinstance(x, Tensor) else x.data
    values = (data.detach().abs() if data.is_complex() else data.detach()).flatten().double()
    return data.shape, values @ torch.arange(1, len(values) + 1, device=values.device, dtype=values.dtype)


def _same(one: State | None, other: State | None) -> bool:
    if one is None or other is None:
        return one is other
    return one is other or all(torch.equal(part, other[name]) for name, part in one.items())
