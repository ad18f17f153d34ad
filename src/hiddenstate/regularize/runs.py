"""Runs of a layer, with their graphs: one call of it, or several that go on from each other."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..cells import Call, Layer
from ..errors import BadInput
from ..state import tensors
from .masking import Lengths


@dataclass(slots=True, eq=False)
class Run:
    """One run of a layer: a call, and those that went on from the state it ended in."""

    model_call: int  # the number of the model call it belongs to
    calls: list[Call]
    watched: bool = False  # whether its graph says when it is used up

    @property
    def layer(self) -> Layer:
        """Whose run it is."""
        return self.calls[0].layer

    @property
    def has_graph(self) -> bool:
        """Whether a gradient can be taken back through it."""
        return any(map(has_graph, self.calls))

    def goes_on_with(self, call: Call) -> bool:
        """Say whether `call` is this run's next one, by its state; rows may end on the way, but not appear."""
        last = self.calls[-1]
        if call.given_native is None or call.rows > last.rows or last.lengths is not None or call.lengths is not None:
            return False
        given, begun, ended = (
            list(tensors(native).values())
            for native in (call.given_native, self.calls[0].given_native, last.state_native)
        )
        if any(a.data_ptr() == b.data_ptr() for a, b in zip(given, ended, strict=False)):
            return True
        # Zeros, and the state that this run began with, are where a sequence starts; others were changed on the way.
        zeros = not any(bool(part.any()) for part in given)
        return not (zeros or (len(given) == len(begun) and all(map(torch.equal, given, begun))))


def has_graph(call: Call) -> bool:
    """Say whether a gradient can be taken back through a call."""
    return any(tensor.requires_grad for tensor in tensors(call.result).values())


def states_of(run: Run, lengths: Lengths | None) -> tuple[Tensor, Tensor | None]:
    """Return the states of a run, (batch, time, unit), and the lengths of its rows where they differ."""
    h, known = _joined([_states(call) for call in run.calls])
    packed = run.calls[0].lengths
    if packed is not None:
        return h, packed.to(h.device)
    if lengths is None or known is not None:
        return h, known
    given = torch.as_tensor(lengths, device=h.device)
    if given.shape != h.shape[:1]:
        raise BadInput(
            f"lengths have shape {tuple(given.shape)}, but layer {run.layer.label} ran {h.shape[0]} rows. "
            f"Where layers run different batches, use regularize.activity and its like on each output."
        )
    return h, given


def _states(call: Call) -> Tensor:
    if call.layer.fused:
        return call.output
    state = call.state
    name = "h" if "h" in state else next(iter(state))
    return state[name].movedim(state.batch_axis[name], 0).flatten(1).unsqueeze(1)


def _joined(pieces: list[Tensor]) -> tuple[Tensor, Tensor | None]:
    rows = len(pieces[0])
    if len(pieces[-1]) == rows:
        return (torch.cat(pieces, dim=1) if len(pieces) > 1 else pieces[0]), None
    # Rows that ended early: those left are the first ones.
    padded = [torch.cat([piece, piece.new_zeros(rows - len(piece), *piece.shape[1:])]) for piece in pieces]
    lengths = torch.zeros(rows, dtype=torch.int64)
    for piece in pieces:
        lengths[: len(piece)] += piece.shape[1]
    return torch.cat(padded, dim=1), lengths.to(pieces[0].device)
