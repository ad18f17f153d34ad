"""One step of a cell, as a recording reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..cells import Call, untouched
from .steps import Named, Placed

_TORCH_CELLS = ("lstm_cell", "gru_cell", "rnn_cell")


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One call of a cell, read as far as somebody asks."""

    call: Call
    gates: dict[Named, Tensor]

    def given(self) -> dict[str, Placed] | None:
        """Return the state that the step was given, or None."""
        native = self.call.given_native
        return None if native is None else self._placed(native)

    def initial(self) -> dict[str, Placed]:
        """Return the state that a step without one starts from; nothing where only the cell itself knows."""
        layer = self.call.layer
        try:
            with untouched(layer.module), torch.no_grad():
                first = layer.initial(self.call.rows)
        except Exception:  # a cell that makes its first state inside itself
            return {}
        return {name: Placed(part, first.batch_axis[name]) for name, part in first.items()}

    def after(self, *, first: bool) -> dict[str, Placed]:
        """Return the state after the step; `first`: no step of this cell was seen before."""
        if self.call.layer.kind in _TORCH_CELLS:
            return self._placed(self.call.result)
        if first and (given := self.call.given_native) is not None:
            self._placed(given)  # teaches what the state looks like, where the cell would have to be tried otherwise
        return self._placed(self.call.state_native)

    def _placed(self, native: Any) -> dict[str, Placed]:
        layer = self.call.layer
        rows, batched = layer.rows(self.call.args, self.call.kwargs)
        if layer.kind in _TORCH_CELLS:
            own = native if isinstance(native, tuple | list) else (native,)
            return {name: Placed(part, 0 if batched else None) for name, part in zip("hc", own, strict=False)}
        state = layer.to_state(native, batch=rows)
        return {name: Placed(part, state.batch_axis[name]) for name, part in state.items()}
