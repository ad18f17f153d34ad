"""A cell by itself, stepped along a sequence, so that it can be examined like a model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..cells import as_layer


class Stepped(nn.Module):
    """Calls a cell once for each step of `x (batch, time, ...)`; returns outputs `(batch, time, ...)` and the state."""

    def __init__(self, cell: nn.Module) -> None:
        """Take the cell as it is."""
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """Return what the cell gave at each step, and its last state."""
        layer = as_layer(self.cell, sample=x[:, 0])
        native = layer.to_native(layer.initial(len(x))) if state is None else state
        outputs = []
        for x_t in x.unbind(1):
            output, native = layer.split(self.cell(x_t, native))
            outputs.append(output)
        return torch.stack(outputs, dim=1), native
