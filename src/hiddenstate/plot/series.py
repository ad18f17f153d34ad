"""What a picture along time is drawn from: one row of a trajectory, without its padding, with its tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import BadInput
from ..recording import Trajectory

# What would be invisible on an axis, as people write it.
_INVISIBLE = {" ": "␣", "\n": "↵", "\t": "⇥", "\r": "←", "": "∅"}


def one_row(traj: Trajectory | Tensor, *, part: str = "h", row: int = 0) -> Tensor:
    """Return one row of a part or gate, (time, unit), without its padding, detached and on the CPU.

    >>> walk = hs.Trajectory(torch.zeros(2, 5, 3), torch.tensor([5, 2]))
    >>> one_row(walk, row=1).shape
    torch.Size([2, 3])
    """
    if isinstance(traj, Trajectory):
        values, lengths = traj.part(part), traj.lengths
    elif isinstance(traj, Tensor) and traj.dim() in (2, 3):
        values, lengths = traj.unsqueeze(0) if traj.dim() == 2 else traj, None
    else:
        seen = f"a tensor of shape {tuple(traj.shape)}" if isinstance(traj, Tensor) else type(traj).__name__
        raise BadInput(
            f"drawn is a trajectory, or a tensor (batch, time, unit) or (time, unit), but this is {seen}. "
            f"A recording has one trajectory for each track: rec['lstm.l0']."
        )
    if not -len(values) <= row < len(values):
        raise BadInput(f"row {row} was asked for, but the trajectory has {len(values)} rows.")
    steps = values.shape[1] if lengths is None else int(lengths[row])
    # Copied: what is drawn stays as it was seen, whatever happens to the tensor afterwards.
    return values[row, :steps].detach().to("cpu", torch.float32, copy=True)  # (time, unit)


def readable(tokens: Sequence[str], steps: int, *, what: str = "tokens") -> list[str]:
    """Return one label for each step, with what would be invisible made visible; a wrong count is refused.

    >>> readable(["a", " ", "b"], 3)
    ['a', '␣', 'b']
    """
    if len(tokens) != steps:
        raise BadInput(f"there are {len(tokens)} {what}, but {steps} steps: one for each step is needed.")
    return [_INVISIBLE.get(str(token), str(token).replace("\n", "↵").replace("\t", "⇥")) for token in tokens]
