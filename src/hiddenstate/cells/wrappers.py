"""Wrappers around users' models: torch.compile, DDP, FSDP and activation checkpointing."""

from __future__ import annotations

from torch import nn

from ..errors import BadInput
from .snapshot import is_sharded


def unwrap(model: nn.Module) -> nn.Module:
    """Return the user's own model from within the wrappers of torch.compile, DDP, FSDP and checkpointing."""
    return _wrapping(model)[-1]


def _wrapping(model: nn.Module) -> list[nn.Module]:
    """Return a model followed by the models it wraps, from the outside in."""
    found = [model]
    while (held := _WRAPPERS.get(type(model).__name__)) and isinstance(inner := model._modules.get(held), nn.Module):
        found.append(model := inner)
    return found


def unwrap_to_call(model: nn.Module, *, weights: bool = False) -> nn.Module:
    """Return `unwrap(model)` for calls of our own; raise if only the wrapper may call the model.

    With `weights`, raise also if the weights are gathered only during calls, since they or their gradients are needed.
    """
    *wrappers, inner = _wrapping(model)
    name = type(inner).__name__
    if any(type(each).__name__ == _FLAT for each in (*wrappers, *inner.modules())):
        raise BadInput(
            f"{name} is wrapped in {_FLAT}, or holds a module that is: its weights are there only while the wrapper is "
            f"called, and this needs calls of its own. Do it before the model is wrapped. What listens to your own "
            f"calls (hs.Carry, hs.record, hs.Monitor, hs.regularize.Penalty) works on the wrapped one."
        )
    if weights and any(map(is_sharded, inner.modules())):
        raise BadInput(
            f"{name} is sharded by fully_shard: its weights come and go with each call, so neither they nor gradients "
            f"to them can be looked at. Do this before the model is sharded. What listens to your own calls (hs.Carry, "
            f"hs.record, hs.Monitor, hs.regularize.Penalty) works on the sharded one."
        )
    return inner


_FLAT = "FullyShardedDataParallel"

# Wrappers around users' models, and the attribute that holds the model. By name, since importing them all is slow.
_WRAPPERS = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    _FLAT: "_fsdp_wrapped_module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "OptimizedModule": "_orig_mod",
}
