"""What only a training run shows: what is never updated, gradients changed too late, states that validation leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..carry import Carry
from ..cells import Call, EndState, layers
from .report import Finding

_ALIKE = 1e-3  # how far the factors of all gradients may differ to be one


class OptimizerWatch:
    """Sees whether an optimizer holds what is to be trained: of the model, and of the `hs.Learned` it starts from."""

    codes = ("HS206", "HS504")

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Take what is trained, and by what."""
        self._model, self._optimizer = model, optimizer
        self._recurrent = bool(layers(model))

    def found(self) -> Iterator[Finding]:
        """Yield what is so just now: a Carry may be attached, and parameters added, at any time."""
        held = {id(p) for group in self._optimizer.param_groups for p in group["params"]}
        carry = Carry.of(self._model) if self._recurrent else None
        learned = None if carry is None else carry.init
        if isinstance(learned, nn.Module):
            missing = [name for name, p in learned.named_parameters() if p.requires_grad and id(p) not in held]
            if missing:
                yield _outside(missing, learned)
        missing = [name for name, p in self._model.named_parameters() if p.requires_grad and id(p) not in held]
        if missing:
            yield Finding(
                "HS504",
                "error",
                ", ".join(missing[:3]) + (", …" if len(missing) > 3 else ""),
                f"{len(missing)} parameters that want a gradient are in no group of the optimizer (limit 0).",
                "the optimizer was made before these layers, or of an older copy of the model",
                "optimizer = torch.optim.Adam(model.parameters()), after the model is complete",
                {"missing": len(missing), "limit": 0.0},
            )


def _outside(missing: list[str], learned: nn.Module) -> Finding:
    return Finding(
        "HS206",
        "error",
        f"init of the Carry, {type(learned).__name__}",
        f"{len(missing)} of its parameters are in 0 of the optimizer's groups (needed: 1).",
        "it is a module of its own, beside the model: model.parameters() does not hold it",
        "optimizer = torch.optim.Adam([*model.parameters(), *learned.parameters()])",
        {"missing": len(missing), "limit": 0.0},
    )


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
        given: Any = call.given_native
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


def at_each_update(optimizer: torch.optim.Optimizer, look: Callable[[], None]) -> RemovableHandle:
    """Call `look` where gradients are whole: before each update, or behind the closure that makes them for it."""

    def hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is the optimizer
        if closure is None:
            look()
            return None
        asked = False

        def looked_at() -> Any:
            nonlocal asked
            loss = closure()
            if not asked:  # some optimizers ask several times for one update
                asked = True
                look()
            return loss

        return (args[0], looked_at, *args[2:]), {name: value for name, value in kwargs.items() if name != "closure"}

    return optimizer.register_step_pre_hook(hook)
