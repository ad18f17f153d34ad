"""Any layer as a dynamical system; for torch's own layers and cells, with derivatives in closed form."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ..cells import Layer, as_layer, is_step, layer_axes, layers
from ..errors import NotRecurrent
from .closed_forms import FORMS, ClosedForm, GateWeights
from .system import System, check_sequence

_LAYERS: tuple[type[nn.Module], ...] = (nn.RNN, nn.LSTM, nn.GRU, nn.RNNCell, nn.LSTMCell, nn.GRUCell)


def as_system(layer: nn.Module, x: Tensor | None = None) -> System:
    """Return a layer as a system, with closed forms if they are known."""
    if not isinstance(layer, nn.Module):
        raise NotRecurrent(f"dynamics are measured of a recurrent layer, but this is {type(layer).__name__}.")
    held = layers(layer)
    if held and all(one.module is not layer for one in held) and not is_step(layer):
        names = ", ".join(one.label for one in held)
        raise NotRecurrent(
            f"this is measured of one recurrent layer, but this {type(layer).__name__} is a model around {names}: "
            f"give that layer, and as x what it is given there, such as the embedded tokens."
        )
    found = as_layer(layer, x[:, 0] if x is not None and x.dim() == 3 and x.numel() else None)
    if found.spec.bidirectional:
        raise NotRecurrent(
            f"this {type(found.module).__name__} is bidirectional: it reads the future too, so no state leads to the "
            f"next one. Measure a layer of one direction, for example one built from the forward weights alone."
        )
    return TorchSystem(found) if _has_closed_form(found.module) else System(found, x)


def driven(
    layer: nn.Module, x: Tensor, *, time_axis: int | None = None, batch_axis: int | None = None, at_least: int = 1
) -> tuple[System, Tensor]:
    """Return a layer as a system, and its input converted from the layer's own layout to `(batch, time, feature)`."""
    first = x.transpose(0, 1) if (time_axis == 0 or batch_axis == 1) and x.dim() > 1 else x
    system = as_system(layer, first)
    if isinstance(x, Tensor) and x.dim() > 1:
        axes = layer_axes(system.layer, x, time_axis=time_axis, batch_axis=batch_axis)
        x = axes.rows_first(x)
    return system, check_sequence(system, x, at_least=at_least)


@dataclass(frozen=True, slots=True)
class StackedLayer:
    """The weights of one layer of a stack, and the places of its h and c in the state vector."""

    weights: GateWeights
    h: slice
    c: slice | None


class TorchSystem(System):
    """A stack of torch's RNN, LSTM or GRU as in eval mode, without dropout between layers."""

    def __init__(self, layer: Layer) -> None:
        """Lay out the vector: h of each layer, then c of each layer."""
        super().__init__(layer)
        spec = layer.spec
        module = layer.module
        name = layer.kind.removesuffix("_cell")
        self.form: ClosedForm = FORMS[getattr(module, "nonlinearity", "tanh") if name == "rnn" else name]
        visible = spec.sizes["h"]
        self.levels = []
        for depth in range(spec.layers):
            c = None
            if "c" in spec.sizes:
                begin = spec.layers * visible + depth * spec.sizes["c"]
                c = slice(begin, begin + spec.sizes["c"])
            weights = _weights(module, f"_l{depth}" if layer.fused else "")
            self.levels.append(StackedLayer(weights, slice(depth * visible, (depth + 1) * visible), c))

    def step(self, x: Tensor, vectors: Tensor) -> Tensor:
        """Return the next vectors, differentiable in both arguments."""
        hidden, cells = [], []
        for level in self.levels:
            h, c = self.form.step(level.weights, level.weights.drive(x), self._parts(level, vectors))
            hidden.append(h)
            cells += [] if c is None else [c]
            x = h
        return torch.cat([*hidden, *cells], dim=1)

    def walk(self, x: Tensor, start: Tensor | None = None) -> Tensor:
        """Run layer by layer: what depends on the input alone is one matmul for all steps."""
        vectors = self.initial(len(x)) if start is None else start
        hidden, cells = [], []
        with torch.no_grad():
            for level in self.levels:
                parts = self._parts(level, vectors)
                steps = []
                for drive in level.weights.drive(x).unbind(1):
                    parts = self.form.step(level.weights, drive, parts)
                    steps.append(parts)
                x = torch.stack([h for h, _ in steps], dim=1)
                hidden.append(x)
                cells += [torch.stack([c for _, c in steps if c is not None], dim=1)] if level.c is not None else []
        return torch.cat([*hidden, *cells], dim=2)

    def jacobians(self, x: Tensor, vectors: Tensor) -> Tensor:
        """Return d next / d state in closed form; each layer depends on those below it through its input."""
        return self._derivatives(x, vectors, inputs=0)

    def whole_jacobians(self, x: Tensor, vectors: Tensor) -> Tensor:
        """Return d next / d (state, input) side by side: (row, S, S + feature)."""
        return self._derivatives(x, vectors, inputs=x.shape[1])

    def _derivatives(self, x: Tensor, vectors: Tensor, *, inputs: int) -> Tensor:
        with torch.no_grad():
            whole = vectors.new_zeros(len(vectors), self.size, self.size + inputs)
            below: slice | None = None
            for level in self.levels:
                weights, parts = level.weights, self._parts(level, vectors)
                wanted = below is not None or inputs > 0
                found = self.form.derivatives(weights, weights.drive(x), parts, by_input=wanted)
                for rows, block in ((level.h, found.h), (level.c, found.c)):
                    if rows is None or block is None:
                        continue
                    if below is not None and block.by_input is not None:
                        whole[:, rows] = block.by_input @ whole[:, below]
                    elif block.by_input is not None:
                        whole[:, rows, self.size :] = block.by_input
                    whole[:, rows, level.h] += block.by_h
                    if level.c is not None and block.by_c is not None:
                        whole[:, rows, level.c] += block.by_c
                x, below = found.next_h, level.h
        return whole

    def in_double(self) -> TorchSystem:
        """Return the same system with its weights in double precision."""
        other = copy(self)
        other.dtype = other.input_dtype = torch.float64
        other.levels = [replace(level, weights=level.weights.double()) for level in self.levels]
        return other

    def initial(self, rows: int) -> Tensor:
        """Return zeros, which torch starts from."""
        return torch.zeros(rows, self.size, dtype=self.dtype, device=self.device)

    def _parts(self, level: StackedLayer, vectors: Tensor) -> tuple[Tensor, Tensor | None]:
        return vectors[:, level.h], None if level.c is None else vectors[:, level.c]


def _has_closed_form(module: nn.Module) -> bool:
    """Say whether a module is one of torch's own, and no subclass overrides its forward."""
    return any(isinstance(module, kind) and type(module).forward is kind.forward for kind in _LAYERS)


def _weights(module: nn.Module, suffix: str) -> GateWeights:
    def get(name: str) -> Tensor | None:
        found = getattr(module, f"{name}{suffix}", None)
        return found.detach() if isinstance(found, Tensor) else None

    w_ih, w_hh = get("weight_ih"), get("weight_hh")
    assert w_ih is not None
    assert w_hh is not None
    return GateWeights(w_ih, w_hh, get("bias_ih"), get("bias_hh"), get("weight_hr"))
