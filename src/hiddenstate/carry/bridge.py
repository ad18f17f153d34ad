"""Turning an encoder's last state into a decoder's first, whatever their kinds and sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..cells import Layer
from ..errors import StateMismatch
from ..state import State
from .initial import needed_layers, part_of


@dataclass(frozen=True, slots=True)
class _Depth:
    """One layer of a stack, and where its part of the whole model's state is."""

    layer: Layer
    place: int  # index of the layer in its fused stack
    directions: int
    sizes: dict[str, int]  # part -> units in one direction

    def read(self, state: State, part: str, direction: int) -> Tensor:
        """Return (batch, unit) of one part and direction."""
        tensor = state[part]
        if self.layer.fused and state.batch_axis[part] == 1:
            return tensor[self.place * self.directions + direction].flatten(1)
        return tensor.movedim(state.batch_axis[part], 0).flatten(1)


class Bridge(nn.Module):
    """Maps the encoder's final State to the State its decoder starts from.

    If kind, layers, directions and sizes agree, the state is handed over unchanged. Otherwise each part of each decoder
    layer is a linear map of the same part in an encoder layer, or of h if the encoder has no such part. Layers are
    paired from the top down, and both directions of an encoder layer are concatenated. A mapped h goes through tanh,
    because h is bounded; c is not.

    >>> encoder = torch.nn.LSTM(3, 8, num_layers=2, bidirectional=True)
    >>> decoder = torch.nn.GRU(5, 6, num_layers=1)
    >>> bridge = Bridge(encoder, decoder)
    >>> _, last = encoder(torch.randn(7, 4, 3))
    >>> bridge(last)
    State(h (1, 4, 6) float32; batch of 4)
    """

    def __init__(self, encoder: nn.Module, decoder: nn.Module) -> None:
        """Compare the two, and make a linear map wherever they differ."""
        super().__init__()
        # Stored in tuples, so that the two models are not registered as submodules of the bridge.
        self._encoder, self._decoder = (needed_layers(encoder),), (needed_layers(decoder),)
        above, below = _depths(self._decoder[0]), _depths(self._encoder[0])
        self._pairs = [(depth, below[max(0, len(below) - len(above) + k)]) for k, depth in enumerate(above)]
        self.maps = nn.ModuleDict()
        weight = next((p for p in decoder.parameters() if p.is_floating_point()), torch.empty(0))
        for k, (to, source) in enumerate(self._pairs):
            for part, size in to.sizes.items():
                origin = part if part in source.sizes else next(iter(source.sizes))
                width = source.directions * source.sizes[origin]
                if (origin, source.directions, source.sizes[origin]) == (part, to.directions, size):
                    continue
                linear = nn.Linear(width, to.directions * size, device=weight.device, dtype=weight.dtype)
                self.maps[_key(k, part)] = linear

    def forward(self, state: State | Any) -> State:
        """Return the decoder's first State; `state` is the encoder's State, or the native state of its only layer."""
        states = self._read(state)
        made: dict[str, dict[str, list[Tensor]]] = {layer.name: {} for layer in self._decoder[0]}
        for k, (to, source) in enumerate(self._pairs):
            for part, size in to.sizes.items():
                new = self._map(k, part, states[source.layer.name], source)
                made[to.layer.name].setdefault(part, []).extend(torch.split(new, size, dim=1))
        return self._assemble(made)

    def native(self, state: State | Any) -> Any:
        """Return the decoder's first state in its native form, if it has a single recurrent layer."""
        (layers,) = self._decoder
        if len(layers) != 1:
            raise StateMismatch(f"the decoder has {len(layers)} recurrent layers, so no single native state fits them.")
        return layers[0].to_native(part_of(self(state), layers[0], layers))

    def extra_repr(self) -> str:
        """Say so if nothing needs to be mapped."""
        return "" if len(self.maps) else "the states fit as they are"

    def _read(self, state: State | Any) -> dict[str, State]:
        (found,) = self._encoder
        if not isinstance(state, State):
            if len(found) != 1:
                raise StateMismatch(
                    f"the encoder has {len(found)} recurrent layers, and a native state does not say whose it is. "
                    f"Give a State with parts named {found[0].part('h')!r} and so on, as carry.state does."
                )
            own = {found[0].name: found[0].to_state(state)}
        else:
            own = {layer.name: part_of(state, layer, found) for layer in found}
        for layer in found:
            layer.to_native(own[layer.name])  # raises if it is not a state of this encoder
        return own

    def _map(self, k: int, part: str, state: State, source: _Depth) -> Tensor:
        origin = part if part in source.sizes else next(iter(source.sizes))
        features = torch.cat([source.read(state, origin, way) for way in range(source.directions)], dim=1)
        if _key(k, part) not in self.maps:
            return features
        linear = cast(nn.Linear, self.maps[_key(k, part)])
        mapped: Tensor = linear(features.to(linear.weight.dtype))
        return mapped.tanh() if part == "h" else mapped

    def _assemble(self, made: dict[str, dict[str, list[Tensor]]]) -> State:
        parts, axes = {}, {}
        for layer in self._decoder[0]:
            with torch.no_grad():
                template = layer.initial(1)
            for part, pieces in made[layer.name].items():
                name, axis, like = layer.part(part), template.batch_axis[part], template[part]
                axes[name] = axis
                if layer.fused and axis == 1:
                    parts[name] = torch.stack([_shaped(piece, like[0, 0].shape) for piece in pieces]).to(like.dtype)
                else:
                    parts[name] = _shaped(pieces[0], like.select(axis, 0).shape).movedim(0, axis).to(like.dtype)
        return State(parts, axes)


def _depths(found: list[Layer]) -> list[_Depth]:
    depths = []
    for layer in found:
        spec = layer.spec
        for place in range(spec.layers):
            depths.append(_Depth(layer, place, spec.directions, dict(spec.sizes)))
    return depths


def _key(k: int, part: str) -> str:
    return f"{k}/{part.replace('.', '/')}"


def _shaped(rows: Tensor, shape: torch.Size) -> Tensor:
    return rows.reshape(len(rows), *shape)
