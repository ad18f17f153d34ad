"""Taps: chosen steps, each with a head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn

from ..errors import BadInput
from .last import at_steps
from .pool import Pool
from .steps import Lengths, Source, Steps, assert_later, captured, read_steps, traced

Short: TypeAlias = Literal["error", "last", "zero"]


class Taps(Pool):
    """The results of heads at chosen steps: (batch, taps, out).

    Args:
        steps: the steps to tap, counted from 0; negative ones count from each row's own end, so -1 is its last.
        heads: one module for all taps, or a list with one for each; a head gets (rows, unit). Without heads, the
            result is the states themselves.
        every: instead of `steps`: taps at 0, every, 2 * every, … as far as the states go.
        short: what a row gets for a tap beyond its end: "error" raises, "last" takes the row's nearest step, "zero"
            gives zeros, through which no gradient flows.

    >>> taps = Taps([0, -1], nn.Linear(4, 3))
    >>> taps(torch.randn(2, 5, 4), [5, 2]).shape
    torch.Size([2, 2, 3])
    >>> Taps(every=2)(torch.arange(5.0).reshape(1, 5, 1)).flatten()
    tensor([0., 2., 4.])
    """

    def __init__(
        self,
        steps: Sequence[int] | None = None,
        heads: nn.Module | Sequence[nn.Module] | None = None,
        *,
        every: int | None = None,
        short: Short = "error",
    ) -> None:
        super().__init__()
        self.steps, self.every = _read_taps(steps, every)
        # A tensor made under torch.jit.trace would cause a warning.
        self.register_buffer("_taps", torch.tensor(self.steps or (), dtype=torch.int64), persistent=False)
        self._taps: Tensor
        if short not in get_args(Short):
            raise BadInput(f"short is 'error', 'last' or 'zero', but this is {short!r}.")
        self.short = short
        self.heads = _read_heads(heads, None if self.steps is None else len(self.steps))

    def present(self, h: Source, lengths: Lengths | None = None) -> Tensor:
        """Return which taps each row is long enough for: bool (batch, taps)."""
        return self._places(read_steps(h, lengths))[1]

    def forward(self, h: Source, lengths: Lengths | None = None) -> Tensor:
        """Return the results of the heads at the tapped steps."""
        return self.pool(read_steps(h, lengths))

    def pool(self, steps: Steps) -> Tensor:
        """Return the results of the heads at the tapped steps."""
        index, present = self._places(steps)
        if self.short == "error":
            _refuse_short(steps, index, present)
        last = steps.h.shape[1] - 1 if steps.lengths is None else (steps.lengths - 1).unsqueeze(1)
        results = self._apply_heads(at_steps(steps.h, index.clamp(min=0).clamp(max=last)))
        return torch.where(present.unsqueeze(-1), results, 0.0) if self.short == "zero" else results

    def extra_repr(self) -> str:
        """Return which steps are tapped, for printing."""
        return f"every={self.every}" if self.steps is None else f"{list(self.steps)}"

    def _places(self, steps: Steps) -> tuple[Tensor, Tensor]:
        """Return each row's tapped steps, (batch, taps), and whether they are within the row."""
        batch, time = steps.h.shape[:2]
        if self.every is not None:
            taps = torch.arange(0, time, self.every, device=steps.h.device)
        else:
            taps = self._taps.to(steps.h.device)
        ends = steps.lengths if steps.lengths is not None else torch.full((batch,), time, device=steps.h.device)
        ends = ends.unsqueeze(1)
        index = torch.where(taps < 0, ends + taps, taps)
        return index, (index >= 0) & (index < ends)

    def _apply_heads(self, tapped: Tensor) -> Tensor:
        if self.heads is None:
            return tapped
        if not isinstance(self.heads, nn.ModuleList):
            results: Tensor = self.heads(tapped.flatten(0, 1))
            return results.reshape(*tapped.shape[:2], *results.shape[1:])
        if not traced() and len(self.heads) != tapped.shape[1]:
            raise BadInput(
                f"there are {len(self.heads)} heads, but every={self.every} makes {tapped.shape[1]} taps of these "
                f"states. For sequences of any length give one head, which all taps share."
            )
        found = [head(tapped[:, tap]) for tap, head in enumerate(self.heads)]
        if not traced() and any(result.shape != found[0].shape for result in found):
            shapes = ", ".join(str(tuple(result.shape)) for result in found)
            raise BadInput(f"the heads give different shapes, {shapes}, but (batch, taps, out) needs one out for all.")
        return torch.stack(found, dim=1)


def _read_taps(steps: Sequence[int] | None, every: int | None) -> tuple[tuple[int, ...] | None, int | None]:
    if (steps is None) == (every is None):
        raise BadInput("Taps needs either steps, for example Taps([10, 20, -1]), or every, for example Taps(every=10).")
    if steps is None:
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise BadInput(f"every is a whole number from 1, but this is {every!r}.")
        return None, every
    if isinstance(steps, int):
        raise BadInput(f"steps are a list, but this is one number: Taps([{steps}]), or Taps(every={steps}).")
    taps = tuple(steps)
    wrong = [tap for tap in taps if not isinstance(tap, int) or isinstance(tap, bool)]
    if wrong or not taps:
        raise BadInput(f"steps are one or more whole numbers, but these are {list(taps)!r}.")
    return taps, None


def _read_heads(heads: nn.Module | Sequence[nn.Module] | None, taps: int | None) -> nn.Module | None:
    if heads is None or (isinstance(heads, nn.Module) and not isinstance(heads, nn.ModuleList)):
        return heads
    own = list(heads)
    if not all(isinstance(head, nn.Module) for head in own):
        raise BadInput(f"heads are one module or a list of modules, but these are {heads!r}.")
    if taps is not None and len(own) != taps:
        raise BadInput(f"there are {len(own)} heads for {taps} taps: give one for each, or one module for all.")
    return nn.ModuleList(own)


def _refuse_short(steps: Steps, index: Tensor, present: Tensor) -> None:
    if traced():
        return
    if captured():
        assert_later(present.all(), "a row is too short for a tap")
    elif not bool(present.all()):
        row, tap = (int(place) for place in (~present).nonzero()[0])
        length = steps.h.shape[1] if steps.lengths is None else int(steps.lengths[row])
        at = int(index[row, tap])
        raise BadInput(
            f"tap {tap} asks for step {at} of row {row}, which has {length} steps, 0 to {length - 1}. "
            f"Short rows get their nearest step with Taps(..., short='last'), or zeros with short='zero'."
        )
