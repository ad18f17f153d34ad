"""A fused layer as somebody else's library may have it, and the adapter that teaches it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import hiddenstate as hs
from hiddenstate.cells import Adapter, Spec


class Leaky(nn.Module):
    """Leaky sums over `(time, batch, feature)`; gives `(outputs, memory)`."""

    def __init__(self, features: int, units: int) -> None:
        super().__init__()
        self.read = nn.Linear(features, units)
        self.units = units

    def forward(self, sequence: Tensor, memory: Tensor | None = None) -> tuple[Tensor, Tensor]:
        memory = sequence.new_zeros(sequence.shape[1], self.units) if memory is None else memory
        outs = []
        for step in sequence:
            memory = 0.7 * memory + torch.tanh(self.read(step))
            outs.append(memory)
        return torch.stack(outs), memory

    def run_alone(self, sequence: Tensor) -> Tensor:
        """The memory after a sequence: the sum written out."""
        values = torch.tanh(self.read(sequence))
        weights = 0.7 ** torch.arange(len(values) - 1, -1, -1.0)
        return torch.einsum("t,tbu->bu", weights, values)


class LeakyAdapter(Adapter):
    """Teaches `Leaky`."""

    kind, fused = "leaky", True

    def spec(self, module):
        return Spec(("memory",), {"memory": module.units}, input_size=module.read.in_features, batch_first=False)

    def initial(self, module, batch):
        return hs.State({"memory": module.read.weight.new_zeros(batch, module.units)})

    def to_state(self, module, native, *, batch=None):
        return hs.State({"memory": native})

    def to_native(self, module, state, *, batched=True):
        return state["memory"]

    def split(self, module, result):
        return result

    def rows(self, module, args, kwargs):
        return (args[0] if args else kwargs["sequence"]).shape[1], True


class LeakyByName(Leaky):
    """Takes its memory by name alone."""

    def forward(self, sequence: Tensor, *, memory: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return super().forward(sequence, memory)


class LeakyMasked(Leaky):
    """Takes its memory after something else."""

    def forward(
        self, sequence: Tensor, mask: Tensor | None = None, memory: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return super().forward(sequence if mask is None else sequence * mask, memory)


class LeakyOdd(Leaky):
    """Calls its memory so that nobody knows it by its name."""

    def forward(self, sequence: Tensor, *, leak: float = 0.7, kept: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return super().forward(sequence, kept)


class OddAdapter(LeakyAdapter):
    """Says where the memory goes."""

    def given(self, module, args, kwargs):
        return kwargs.get("kept")

    def give(self, module, args, kwargs, native):
        return args, {**kwargs, "kept": native}


LEAKY = (Leaky, LeakyByName, LeakyMasked, LeakyOdd)


class Reader(nn.Module):
    """A model around it."""

    def __init__(self, kind: type[Leaky] = Leaky) -> None:
        super().__init__()
        self.leaky = kind(3, 4)

    def forward(self, sequence: Tensor) -> Tensor:
        return self.leaky(sequence=sequence)[0]


hs.register(Leaky, LeakyAdapter())
hs.register(LeakyOdd, OddAdapter())
