"""Layers that do not call torch's kernels: only what they give out is known of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from ..cells import Layer
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


def outputs(layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> dict[int, Outputs]:
    """Return the outputs of the last layer by their place in the state; nothing where they are not as wide as h."""
    spec = layer.spec
    out, _ = layer.split(result)
    rows, batched = layer.rows(args, kwargs)
    packed = out if isinstance(out, PackedSequence) else None
    values = (out if packed is None else packed.data).detach()
    if packed is None:
        values = values if batched else values.unsqueeze(0 if spec.batch_first else 1)
        values = values.transpose(0, 1) if spec.batch_first else values
    layout = Layout.of(values, None if packed is None else packed.batch_sizes, packed)
    given = layer.given(args, kwargs)
    state = layer.initial(rows) if given is None else layer.to_state(given, batch=rows)
    units = spec.sizes[spec.parts[0]]
    if values.shape[-1] != units * spec.directions:
        return {}
    first = (spec.layers - 1) * spec.directions
    return {
        first + d: Outputs(
            layout.pad(values[..., d * units : (d + 1) * units]).clone(),
            layout,
            {name: part[first + d].detach().clone() for name, part in state.items()},
        )
        for d in range(spec.directions)
    }
