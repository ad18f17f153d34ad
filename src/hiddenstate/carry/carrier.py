"""Who hands states over, how, and what it is asked by those who find out what is to be handed over."""

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
    """How a state is carried: see `Carry`."""

    strict: bool = True
    detach: bool = True
    override: bool = False
    exact: bool = True


class Carrier(Listener, ABC):
    """Who hands the states over, and is told what is carried."""

    rank, title = Rank.CARRY, "hs.Carry"
    running = False  # whether a call of the model is under way

    @abstractmethod
    def begin_with(self, layer: Layer, values: Mapping[str, list[Tensor]]) -> None:
        """Keep what a layer ended in that was only seen, not heard."""

    @abstractmethod
    def give_up(self, layer: Layer) -> None:
        """Keep nothing of a layer after all."""

    @abstractmethod
    def called_anew(self) -> str:
        """Name a layer that was called again in one call of the model, with something else than it gave."""

    @abstractmethod
    def try_call(self, inputs: Inputs, *, on: bool) -> Any:
        """Make a call of our own, carried apart from the user's: from the start, or on from the last such call."""


def refuse_export() -> None:
    """Refuse a call that torch.export makes."""
    if torch.compiler.is_exporting() and compiling():
        raise CarryError(
            "torch.export would bake the state that is carried just now into the exported program. "
            "Close the Carry first: hs.Carry.of(model).close()."
        )
