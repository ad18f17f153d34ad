"""Layers that do not call torch's kernels: only what they give out is known of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from ..cells import Call
from ..state import State
from .padded import Layout


@dataclass(frozen=True, slots=True, eq=False)
class Outputs:
    """The outputs of one direction of the last layer; its gates and gradients nobody has seen."""

    h: Tensor  # (time, batch, unit)
    layout: Layout
    initial: dict[str, Tensor]  # part -> (batch, unit)

    def states(self) -> dict[str, Tensor]:
        """Return h, `(time, batch, unit)`."""
        return {"h": self.h}

    @property
    def gates(self) -> dict[str, Tensor]:
        """Nothing."""
        return {}

    def grads(self) -> dict[str, Tensor]:
        """Return nothing: an output's own gradient is not that of the state, which also acts on later steps."""
        return {}

    def expects_grads(self) -> bool:
        """Say that none will come."""
        return False


def outputs(call: Call) -> dict[int, Outputs]:
    """Return the outputs of the last layer by their place in the state; nothing where they are not what h was."""
    layer, spec, out = call.layer, call.layer.spec, call.output_native
    units = spec.sizes[spec.parts[0]]
    packed = out if isinstance(out, PackedSequence) else None
    values = call.output.detach().transpose(0, 1).flatten(2) if packed is None else packed.data.detach()
    if values.shape[-1] != units * spec.directions:
        return {}
    layout = Layout.of(values, None if packed is None else packed.batch_sizes, packed)
    first = (spec.layers - 1) * spec.directions
    given = call.given
    state = layer.initial(call.rows) if given is None else given
    found = {}
    for d in range(spec.directions):
        h = layout.pad(values[..., d * units : (d + 1) * units]).clone()
        end = h[0] if d else h[layout.lengths.to(h.device) - 1, torch.arange(h.shape[1], device=h.device)]
        if torch.allclose(end, _rows(call.state, spec.parts[0], first + d).to(end), 1e-3, 1e-5):
            found[first + d] = Outputs(h, layout, {name: _rows(state, name, first + d) for name in state})
    return found


def _rows(state: State, name: str, place: int) -> Tensor:
    """Return one part of one layer and direction, `(batch, unit)`; of a layer that stacks none, all of it."""
    part, axis = state[name].detach(), state.batch_axis[name]
    rows = part[place] if axis == 1 and part.dim() == 3 else part.movedim(axis, 0).flatten(1)
    return rows.clone()
