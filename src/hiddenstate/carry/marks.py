"""Rows that start anew or end within one call of the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..cells import Call, Layer
from ..errors import BadInput, CarryError, StateMismatch
from ..state import State
from ..unrolling import Recurrent, unroll


@dataclass(frozen=True, slots=True, eq=False)
class Marks:
    """What the next call of the model is told: where rows start anew, and where they end."""

    starts: Tensor | None  # (batch, time) bool on the CPU; the first step is dealt with before the call
    lengths: Tensor | None  # (batch,) int64 on the CPU

    def piece(self, layer: Layer, rows: int, begin: int, steps: int) -> Marks:
        """Return the marks of `steps` steps from `begin` on, as one layer sees them."""
        given = len(self.starts) if self.starts is not None else len(self.lengths) if self.lengths is not None else rows
        if given != rows:
            raise StateMismatch(
                f"carry.mark was told of {given} rows, but the layer {layer.name!r} is called with {rows} rows."
            )
        if self.starts is not None and begin + steps > self.starts.shape[1]:
            raise StateMismatch(
                f"carry.mark was told of {self.starts.shape[1]} steps, but the layer {layer.name!r} is at step "
                f"{begin + steps}. The marks speak of the steps that the recurrent layers see."
            )
        starts = None if self.starts is None else self.starts[:, begin : begin + steps]
        lengths = None if self.lengths is None else (self.lengths - begin).clamp(0, steps)
        return Marks(starts, lengths)

    def check_taken(self, layer: Layer, steps: int) -> None:
        """Refuse marks that spoke of other steps than the layer took."""
        longest = 0 if self.lengths is None or not len(self.lengths) else int(self.lengths.max())
        told = longest if self.starts is None else self.starts.shape[1]
        if max(told, longest) > steps:
            raise CarryError(
                f"carry.mark was told of {max(told, longest)} steps, but the layer {layer.name!r} took {steps}. "
                f"The marks speak of the steps that the recurrent layers see."
            )


def read_marks(starts: Any, lengths: Any) -> Marks:
    """Return what the user said, checked."""
    if starts is not None:
        starts = torch.as_tensor(starts).detach().cpu()
        if starts.dtype != torch.bool or starts.dim() != 2:
            raise BadInput(
                f"starts are {starts.dtype} of shape {tuple(starts.shape)}, but a bool tensor (batch, time) is needed, "
                f"True where a row starts anew before that step."
            )
    if lengths is not None:
        lengths = torch.as_tensor(lengths).detach().cpu()
        if lengths.dtype == torch.bool or lengths.is_floating_point() or lengths.dim() != 1:
            raise BadInput(
                f"lengths are {lengths.dtype} of shape {tuple(lengths.shape)}, but one whole number for each row is "
                f"needed."
            )
        lengths = lengths.long()
        if len(lengths) and int(lengths.min()) < 0:
            raise BadInput(f"a row has {int(lengths.min())} steps, but 0 or more are needed; 0 lets its state wait.")
    if starts is not None and lengths is not None and len(starts) != len(lengths):
        raise BadInput(f"starts speak of {len(starts)} rows, but lengths of {len(lengths)}.")
    return Marks(starts, lengths)


def run_marked(call: Call, state: State, marks: Marks, start: Callable[[int], State]) -> Call:
    """Run a call of a fused layer from `state`, with rows that start anew or end on the way."""
    layer = call.layer
    own = {} if isinstance(layer.module, Recurrent) else {"initial": start}
    out, last = unroll(layer.module, call.x, state, lengths=marks.lengths, resets=marks.starts, **own)  # type: ignore[arg-type]
    output = out if layer.spec.batch_first else out.transpose(0, 1)
    return call.returned(layer.join(output, layer.to_native(last)))
