"""What only a training run shows: gradients changed after their update, states that validation leaves behind."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ..cells import Call, EndState, Succession
from ..state import tensors
from .report import Finding

_ALIKE = 1e-3  # how far the factors of all gradients may differ to be one


class UpdateWatch:
    """Sees whether gradients are scaled after the optimizer has used them, as clipping in the wrong place does."""

    def __init__(self) -> None:
        """Begin with no update."""
        self._kept: list[tuple[Tensor, int, float]] = []  # gradient, how often it had been written, its norm

    def before(self, model: nn.Module) -> None:
        """Remember the gradients that an update is about to use."""
        found = [p.grad for p in model.parameters() if p.grad is not None and not p.grad.is_sparse]
        self._kept = [(grad, grad._version, float(grad.detach().norm())) for grad in found]

    def after(self) -> Finding | None:
        """Say, at the next training call, whether all of them were multiplied by one number since; None where not."""
        kept, self._kept = [each for each in self._kept if each[2] > 0], []
        if len(kept) < 2 or any(grad._version == version for grad, version, _ in kept):
            return None
        factors = torch.tensor([float(grad.detach().norm()) / norm for grad, _, norm in kept])
        factor = float(factors.median())
        if not 0 < factor <= 1 + _ALIKE or float((factors - factor).abs().max()) > _ALIKE * factor:
            return None
        return Finding(
            "HS505",
            "warning",
            "the optimizer",
            f"all {len(kept)} gradients were multiplied by {factor:.3g} after the update had used them (limit: none).",
            "gradients are clipped after optimizer.step(), when they have done their work",
            "loss.backward(); torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0); optimizer.step()",
            {"factor": factor, "gradients": len(kept)},
        )


class ValidationWatch:
    """Sees whether a training call begins with the state in which a call in eval mode ended."""

    def __init__(self) -> None:
        """Begin with no call."""
        self._ended: dict[nn.Module, EndState] = {}

    def evaluated(self, call: Call) -> None:
        """Remember what a layer ended in, in eval mode."""
        try:
            self._ended[call.layer.module] = EndState.of(call.state_native)
        except Exception:  # a cell that returns something of its own: nothing to compare
            self._ended.pop(call.layer.module, None)

    def trained(self, call: Call) -> Finding | None:
        """Say whether a training call goes on from there."""
        ended = self._ended.pop(call.layer.module, None)
        given: Any = call.given_native if ended is not None else None
        if ended is None or given is None or not ended.handed_on(given):
            return None
        name = call.layer.name or "model"
        return Finding(
            "HS208",
            "warning",
            name,
            "1 of 1 training calls after a call in eval mode began with the state in which that one ended (limit 0).",
            "the model keeps its state, and validation moves it on: training goes on from the validation data",
            "model.reset_state() before and after validation; with hs.Carry: with carry.fresh(): validate(model)",
            {"calls": 1.0, "limit": 0.0},
        )


def not_handed_on(where: str, succession: Succession) -> Finding | None:
    """Say that a loop outside the model does not hand the states of a layer on; None where it does."""
    complaint = succession.complaint()
    if complaint is None:
        return None
    return Finding(
        "HS101" if complaint.mixes_rows else "HS103",
        "warning",
        where,
        f"{complaint.seen} (limit 0).",
        complaint.cause,
        f"# {complaint.way_out}",
        {"calls": complaint.calls, "limit": 0.0},
    )


def given_to(call: Call) -> Any:
    """Return the state that a layer was handed, None where there is none or it cannot be read."""
    try:
        return call.given_native
    except Exception:  # a layer that is called in a way of its own
        return None


def has_gradients(module: nn.Module) -> bool:
    """Say whether a backward pass has reached a module."""
    return any(p.grad is not None and bool(p.grad.any()) for p in module.parameters() if not p.is_sparse)


def is_finite(result: Any) -> bool:
    """Say whether a layer's result is finite, judged by the last part of its state; on a GPU asking would cost a wait.

    What is not finite in any other part is in this one too, at the next step at the latest.
    """
    last = result
    while isinstance(last, tuple | list) and last:
        last = last[-1]
    if not isinstance(last, Tensor):
        last = next(reversed(tensors(result).values()), None)
    if last is None or last.is_cuda or not last.is_floating_point():
        return True
    return math.isfinite(float(last.detach().sum()))
