"""A piece of a step, run for all steps at once."""

from __future__ import annotations

import warnings
from typing import Protocol

import torch
from torch import Tensor, fx

from .pieces import Piece


class Places(Protocol):
    """Where values are found, and put."""

    same: dict[fx.Node, Tensor]
    varying: dict[fx.Node, Tensor]


class Sweep:
    """A piece whose inputs are given for all steps, (time, ...), and whose outputs come out likewise."""

    def __init__(self, piece: Piece) -> None:
        """Sweep this piece over time."""
        self.piece = piece

    def __call__(self, places: Places) -> None:
        """Read the inputs, and put the outputs beside them."""
        if not self.piece.outputs:
            return
        fixed = places.same
        values = [fixed[node] if node in fixed else places.varying[node] for node in self.piece.inputs]
        axes = tuple(None if node in fixed else 0 for node in self.piece.inputs)
        with warnings.catch_warnings():
            # An operation without a rule for all steps at once is run for one after the other: slower, not wrong.
            warnings.filterwarnings("ignore", message=".*performance drop.*")
            results = torch.vmap(self.piece.call, in_dims=axes)(*values)
        places.varying.update(zip(self.piece.outputs, results, strict=True))
