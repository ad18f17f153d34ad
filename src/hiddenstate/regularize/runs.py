"""What a layer's calls left behind, with its graph: one sequence, or steps to be joined."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from ..errors import BadInput
from ..recording import Layer
from .masking import Lengths

Arguments: TypeAlias = "tuple[tuple[Any, ...], dict[str, Any]]"


@dataclass(slots=True, eq=False)
class Run:
    """One run of a layer: a whole sequence, or the steps of a cell."""

    layer: str
    call: int  # the number of the model call it belongs to
    steps: list[Tensor]  # one (batch, time, unit), or for each step (batch, unit)
    fused: bool
    starts: bool = True  # whether the call was given no state, so that it begins a sequence
    lengths: Tensor | None = None  # (batch,) where they are known

    def goes_on_with(self, other: Run) -> bool:
        """Say whether `other` is this run's next step; rows may end on the way, but not appear."""
        return (
            not (self.fused or other.fused or other.starts)
            and self.call == other.call
            and len(other.steps[0]) <= len(self.steps[-1])
        )


def read_run(layer: Layer, call_args: Arguments, result: Any, call: int) -> Run:
    """Return what one call of a layer left."""
    output, native = layer.split(result)
    if not layer.fused:
        rows, _ = layer.rows(*call_args)
        state = layer.to_state(native, batch=rows)
        name = "h" if "h" in state else next(iter(state))
        h = state[name].movedim(state.batch_axis[name], 0).flatten(1)
        return Run(layer.name, call, [h], fused=False, starts=layer.given(*call_args) is None)
    if isinstance(output, PackedSequence):
        padded, lengths = pad_packed_sequence(output, batch_first=True)
        return Run(layer.name, call, [padded], fused=True, lengths=lengths.to(padded.device))
    if output.dim() == 2:  # one sequence, without a batch axis
        output = output.unsqueeze(0)
    elif not layer.spec.batch_first:
        output = output.transpose(0, 1)
    return Run(layer.name, call, [output], fused=True)


def joined(run: Run, lengths: Lengths | None) -> tuple[Tensor, Tensor | None]:
    """Return the states of a run, (batch, time, unit), and the lengths of its rows where they differ."""
    h, known = (run.steps[0], run.lengths) if run.fused else _stacked(run.steps)
    if lengths is None or known is not None:
        return h, known
    given = torch.as_tensor(lengths, device=h.device)
    if given.shape != h.shape[:1]:
        raise BadInput(
            f"lengths have shape {tuple(given.shape)}, but layer {run.layer or '(the model)'} ran {h.shape[0]} rows. "
            f"Where layers run different batches, use regularize.activity and its like on each output."
        )
    return h, given


def _stacked(steps: list[Tensor]) -> tuple[Tensor, Tensor | None]:
    rows = [len(step) for step in steps]
    if rows[-1] == rows[0]:
        return torch.stack(steps, dim=1), None
    # Rows that ended early: those left are the first ones.
    padded = [torch.cat([step, step.new_zeros(rows[0] - len(step), step.shape[1])]) for step in steps]
    counts = torch.tensor(rows, device=steps[0].device)
    lengths = (torch.arange(rows[0], device=counts.device) < counts.unsqueeze(1)).sum(0)
    return torch.stack(padded, dim=1), lengths
