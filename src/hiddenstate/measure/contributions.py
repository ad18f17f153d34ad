"""The contributions of input and memory to the next state, step by step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..errors import BadInput
from ..state import shown_in_short
from .series import valid_steps, without_padding
from .system import System, at_rest
from .torch_system import TorchSystem, driven

_GATES = {
    "rnn": ("h",),
    "gru": ("reset", "update", "candidate"),  # in torch's own order
    "lstm": ("input", "forget", "candidate", "output"),
}


@shown_in_short
@dataclass(frozen=True, slots=True, eq=False)
class Contributions:
    """The size of what the input adds, and of what the previous state adds, at each step; NaN in the padding."""

    input: Tensor  # (batch, time) ‖W_ih x‖; by ablation, how far the next state moves without the input
    memory: Tensor  # (batch, time) ‖W_hh h‖ with the previous h; by ablation, how far it moves without that
    by: str  # "weights" for torch's layers and cells, "ablation" for others, which have no such two terms
    gates: Mapping[str, Contributions] = field(default_factory=dict)  # for each gate of an LSTM or GRU

    @property
    def share(self) -> Tensor:
        """The memory's share of both sizes together: (batch, time), 0 for the input alone, 1 for the memory alone."""
        total = self.input + self.memory
        return torch.where(total > 0, self.memory / total, torch.nan)

    def __str__(self) -> str:
        """Return one line, and one for each gate."""
        lines = [f"input {_mean(self.input)}, memory {_mean(self.memory)}: memory has {_share(self)} (by {self.by})"]
        lines += [
            f"  {name}: input {_mean(gate.input)}, memory {_mean(gate.memory)}: memory has {_share(gate)}"
            for name, gate in self.gates.items()
        ]
        return "\n".join(lines)


def contributions(
    layer: nn.Module,
    x: Tensor,
    *,
    level: int = 0,
    state: object = None,
    lengths: Tensor | None = None,
    time_axis: int | None = None,
    batch_axis: int | None = None,
) -> Contributions:
    """Return how much of each step comes from the input, `W_xh·x`, and how much from memory, `W_hh·h`.

    For torch's layers and cells, these are the two terms inside each activation, without biases (for a GRU's candidate,
    before the reset gate). Any other cell is run without its input and without its state, which are replaced by zeros:
    how far the next state moves is the size of what was removed. `by` says which of the two was done.

    Args:
        layer: A recurrent layer of one direction, or a cell.
        x: Its input in the layer's own layout: (time, batch, feature) with `batch_first=False`; for a cell
            (batch, time, feature).
        level: Which layer of a stack.
        state: The state to start from; by default zeros, or the cell's own start.
        lengths: The real steps of each row.
        time_axis: Which axis of x is time, if not as the layer's own `batch_first` says.
        batch_axis: Which axis of x holds the rows.

    >>> rnn = torch.nn.RNN(1, 1, bias=False, batch_first=True)
    >>> _ = torch.nn.init.constant_(rnn.weight_ih_l0, 2.0), torch.nn.init.constant_(rnn.weight_hh_l0, 0.5)
    >>> contributions(rnn, torch.ones(1, 2, 1)).input
    tensor([[2., 2.]])
    """
    system, x = driven(layer, x, time_axis=time_axis, batch_axis=batch_axis)
    with at_rest(system.layer.module), torch.no_grad():
        if not x.is_floating_point():
            raise BadInput(f"x is {x.dtype}: what a token adds is what its embedding adds. Give the embedded input.")
        valid = valid_steps(x, lengths)
        x = without_padding(x, valid)
        start = system.start(state, len(x))
        states = system.walk(x, start)
        before = torch.cat([start.unsqueeze(1), states[:, :-1]], dim=1)  # (batch, time, entry)
        depth = system.spec.layers
        if not -depth <= level < depth:
            raise BadInput(f"level {level} is asked for, but the layer has {depth}: 0 to {depth - 1}.")
        if isinstance(system, TorchSystem):
            return _by_weights(system, x, (states, before), valid, level % depth)
        return _by_ablation(system, x, states, before, valid)


def _by_weights(
    system: TorchSystem, x: Tensor, walked: tuple[Tensor, Tensor], valid: Tensor, level: int
) -> Contributions:
    states, before = walked
    here = system.levels[level]
    given = x if level == 0 else states[..., system.levels[level - 1].h]
    driven, recurring = given @ here.weights.w_ih.T, before[..., here.h] @ here.weights.w_hh.T
    names = _GATES[system.layer.kind.removesuffix("_cell")]
    pairs = zip(names, driven.chunk(len(names), -1), recurring.chunk(len(names), -1), strict=True)
    gates = {name: _sized(one, other, valid, "weights") for name, one, other in pairs}
    return _sized(driven, recurring, valid, "weights", gates if len(gates) > 1 else {})


def _by_ablation(system: System, x: Tensor, states: Tensor, before: Tensor, valid: Tensor) -> Contributions:
    batch, time = valid.shape
    flat, past = x.flatten(0, 1), before.flatten(0, 1)
    without_input = system.step(torch.zeros_like(flat), past).reshape(batch, time, -1)
    without_state = system.step(flat, torch.where(system.smooth, 0.0, past)).reshape(batch, time, -1)
    moved = [(states - other)[..., system.smooth] for other in (without_input, without_state)]
    return _sized(moved[0], moved[1], valid, "ablation")


def _sized(
    one: Tensor, other: Tensor, valid: Tensor, by: str, gates: Mapping[str, Contributions] | None = None
) -> Contributions:
    sizes = [part.norm(dim=-1).masked_fill(~valid, torch.nan) for part in (one, other)]
    return Contributions(sizes[0], sizes[1], by, gates or {})


def _mean(sizes: Tensor) -> str:
    return f"{float(sizes.nanmean()):.3g}"


def _share(found: Contributions) -> str:
    return f"{float(found.share.nanmean()):.0%}"
