"""Everything that one call of a model leaves behind, to be compared with what another call leaves."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .case import LoopCase


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a call gave and what it changed, after a backward pass where there are gradients."""

    outputs: list[Any]
    structure: str  # what holds the outputs: lists, dicts, named tuples
    grads: dict[str, Tensor | None]  # of parameters, by name
    input_grads: list[Tensor | None]
    state: dict[str, Any]  # the state dict
    seen: Any
    streams: tuple[Any, ...]  # where torch's, Python's and numpy's random streams stand

    def differences(self, other: Outcome, *, atol: float = 0.0, rtol: float = 0.0) -> list[str]:
        """Say where two outcomes differ; values may differ by the tolerances, all else by nothing."""
        parts: list[tuple[str, Any, Any]] = [("structure of the outputs", self.structure, other.structure)]
        parts += [(f"output {i}", a, b) for i, (a, b) in enumerate(zip(self.outputs, other.outputs, strict=False))]
        for what in ("grads", "state"):
            ours, theirs = getattr(self, what), getattr(other, what)
            parts += [(f"names of {what}", [*ours], [*theirs])]
            parts += [(f"{what} of {name}", ours[name], theirs[name]) for name in ours if name in theirs]
        pairs = zip(self.input_grads, other.input_grads, strict=False)
        parts += [(f"gradient of input {i}", a, b) for i, (a, b) in enumerate(pairs)]
        parts += [("what was left", self.seen, other.seen)]
        parts += list(
            zip(("torch's stream", "Python's stream", "numpy's stream"), self.streams, other.streams, strict=True)
        )
        return [what for what, one, two in parts if not _alike(one, two, atol, rtol)]


def leaves(value: Any) -> list[Any]:
    """All tensors and other things in an output, in order, whatever it is made of."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [leaf for one in dataclasses.fields(value) for leaf in leaves(getattr(value, one.name))]
    parts = pytree.tree_leaves(value)
    return [leaf for part in parts for leaf in (leaves(part) if dataclasses.is_dataclass(part) else [part])]


def outcome(case: LoopCase, model: nn.Module, args: tuple[Any, ...]) -> Outcome:
    """Call the model as the case does and go backward; `args` should be fresh, as some models write to theirs."""
    result = case.run(model, args)
    outputs = leaves(result)
    total = [out.abs().double().square().sum() for out in outputs if isinstance(out, Tensor) and out.requires_grad]
    if total:
        torch.stack(total).sum().backward()
    return Outcome(
        outputs=outputs,
        structure=str(pytree.tree_structure(result)),
        grads={name: parameter.grad for name, parameter in model.named_parameters()},
        input_grads=[arg.grad for arg in leaves(args) if isinstance(arg, Tensor) and arg.requires_grad],
        state=dict(model.state_dict()),
        seen=case.seen(model),
        streams=(_torchs(), random.getstate(), np.random.get_state()[1].tolist()),
    )


def _torchs() -> Tensor:
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return torch.cat([torch.get_rng_state(), *gpus])


def asking_for_gradients(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same arguments, those of floating point as leaves that ask for gradients."""
    return pytree.tree_map_only(
        Tensor, lambda x: x.detach().clone().requires_grad_() if x.is_floating_point() else x, args
    )


def _alike(one: Any, other: Any, atol: float, rtol: float) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if (one.shape, one.dtype, one.requires_grad) != (other.shape, other.dtype, other.requires_grad):
            return False
        if one.is_sparse and other.is_sparse:
            one, other = one.to_dense(), other.to_dense()
        if not (one.is_floating_point() or one.is_complex()) or atol == rtol == 0.0:
            return torch.equal(one, other)
        return torch.allclose(one, other, atol=atol, rtol=rtol, equal_nan=True)
    return type(one) is type(other) and one == other
