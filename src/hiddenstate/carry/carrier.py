"""The interface between the listener that hands states over and the code that finds out which states to hand over."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._compiling import compiling
from ..cells import Layer, Listener, Rank
from ..errors import CarryError
from .pieces import Inputs


@dataclass(frozen=True, slots=True)
class CarryOptions:
    """The options of a `Carry`, explained there."""

    strict: bool = True
    detach: bool = True
    override: bool = False
    exact: bool = True


class Carrier(Listener, ABC):
    """The listener that hands states over; it is told which layers to carry."""

    rank, title = Rank.CARRY, "hs.Carry"
    running = False  # whether a call of the model is under way

    @abstractmethod
    def begin_with(self, layer: Layer, values: Mapping[str, list[Tensor]]) -> None:
        """Keep the end state of a layer whose call was watched, but not heard."""

    @abstractmethod
    def give_up(self, layer: Layer) -> None:
        """Stop keeping the state of a layer."""

    @abstractmethod
    def called_anew(self) -> str:
        """Return a layer that was called again in one call of the model with another state than it gave."""

    @abstractmethod
    def try_call(self, inputs: Inputs, *, on: bool) -> Any:
        """Make a call of our own with a separate state: from the start, or continuing from the last such call."""


def refuse_export() -> None:
    """Raise if torch.export is making the call."""
    if torch.compiler.is_exporting() and compiling():
        raise CarryError(
            "torch.export would bake the state that is carried just now into the exported program. "
            "Close the Carry first: hs.Carry.of(model).close()."
        )
