"""Watching a training run for what only it shows: parameters never updated, late gradient changes, leaked states."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..carry import Carry
from ..cells import Call, EndState, Layer, Succession, layers
from ..state import tensors
from .advice import detaching
from .patient import held_tensors
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
    """Sees whether gradients are scaled or cut when the optimizer has used them, as clipping too late does."""

    def __init__(self) -> None:
        """Begin with no update."""
        self._kept: list[tuple[Tensor, int]] = []  # gradient, how often it had been written
        self._sizes = torch.empty(0, 2)  # (gradient, 2) its norm, and its largest value

    @property
    def waits(self) -> bool:
        """Whether the next training call tells of an update."""
        return bool(self._kept)

    def before(self, model: nn.Module) -> None:
        """Remember the gradients that an update is about to use."""
        found = [p.grad for p in model.parameters() if p.grad is not None and not p.grad.is_sparse and p.grad.numel()]
        self._kept = [(grad, grad._version) for grad in found]
        self._sizes = _sizes(found)

    def after(self) -> Finding | None:
        """Say, at the next training call, whether all of them were scaled by one number or cut at one; else None."""
        kept, self._kept = self._kept, []
        if len(kept) < 2 or any(grad._version == version for grad, version in kept):
            return None
        before, now = self._sizes.double().cpu(), _sizes([grad for grad, _ in kept]).double().cpu()
        told = before[:, 0] > 0
        if int(told.sum()) < 2 or not bool(now.isfinite().all()):
            return None
        return _scaled(before[told, 0], now[told, 0]) or _cut_off(before, now)


def _sizes(grads: list[Tensor]) -> Tensor:
    if not grads:
        return torch.empty(0, 2)
    found = [torch.stack([grad.detach().norm(), grad.detach().abs().amax()]) for grad in grads]
    return torch.stack([each.to(found[0]) for each in found])


def _scaled(before: Tensor, now: Tensor) -> Finding | None:
    """Say whether all norms were multiplied by one number, 1 at most."""
    factors = now / before
    factor = float(factors.median())
    if not 0 < factor <= 1 + _ALIKE or float((factors - factor).abs().max()) > _ALIKE * factor:
        return None
    seen = f"all {len(now)} gradients were multiplied by {factor:.3g}"
    return _too_late(seen, "clip_grad_norm_", {"factor": factor, "gradients": len(now)})


def _cut_off(before: Tensor, now: Tensor) -> Finding | None:
    """Say whether no value is beyond one number: the largest of each gradient that went beyond it, others as before."""
    limit = now[:, 1].max()
    beyond = before[:, 1] > limit
    cut = bool((now[beyond, 1] == limit).all()) and bool((now[~beyond] == before[~beyond]).all())
    if not float(limit) > 0 or not bool(beyond.any()) or not cut:
        return None
    seen = f"{int(beyond.sum())} of {len(now)} gradients were cut off at ±{float(limit):.3g}"
    return _too_late(seen, "clip_grad_value_", {"limit": float(limit), "gradients": len(now)})


def _too_late(seen: str, by: str, numbers: dict[str, float]) -> Finding:
    return Finding(
        "HS505",
        "warning",
        "the optimizer",
        f"{seen} after the update had used them (limit: none).",
        "gradients are clipped after optimizer.step(), when they have done their work",
        f"loss.backward(); torch.nn.utils.{by}(model.parameters(), 1.0); optimizer.step()",
        numbers,
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

    def waits(self, call: Call) -> bool:
        """Say whether a training call tells of the call in eval mode before it."""
        return call.layer.module in self._ended

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


def graph_grows(shared: int, model: nn.Module, found: list[Layer]) -> Finding:
    """Say that the graph of a call reaches into what a backward pass has gone through."""
    held = [name for name, tensor in held_tensors(model).items() if tensor.grad_fn is not None]
    return Finding(
        "HS203",
        "error",
        ", ".join(held) or "the state that the model is handed",
        f"the graph of this call holds {shared} nodes of calls whose backward pass has run (limit 0): the next "
        f"backward fails, or with retain_graph=True takes ever longer.",
        "a state is kept from call to call with its graph",
        detaching(held, found),
        {"shared": shared, "limit": 0.0},
    )


def not_handed_on(where: str, succession: Succession, *, over: bool) -> Finding | None:
    """Say that a loop outside the model does not hand the states of a layer on; None where it does, or may yet."""
    complaint = succession.complaint(over=over)
    if complaint is None or complaint.too_many:
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


def begins_anew(call: Call) -> bool:
    """Say whether a layer runs a whole sequence from no state; False where that cannot be read."""
    try:
        return call.given_native is None and call.steps > 1
    except Exception:  # a layer that is called in a way of its own
        return False


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
