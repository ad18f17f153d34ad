"""Parameters that nothing reaches: computed and never used, or without a gradient."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..finding import Finding
from ..patient import Patient
from ..probes.parameters import matters, parameter_gradients
from ..probes.repeats import traced

_UNITS = 4  # of a gate at least: fewer may all be off by chance
_MOST = 12  # suspects that are tried one by one


def gates_used(patient: Patient) -> Finding | None:
    """HS302: a gate or weight takes part in the computation, and what it gives is used nowhere."""
    found = parameter_gradients(patient)
    if not found.usable:
        return None
    touched = {id(tensor) for event in traced(patient).trace.events for tensor in event.inputs}
    named = dict(patient.model.named_parameters())
    whole = _torch_layers(patient)
    suspects = [n for n, size in found.sizes.items() if size == 0 and id(named[n]) in touched and n not in whole]
    unused = [name for name in suspects[:_MOST] if not matters(patient, name)]
    if unused:
        shown = ", ".join(unused[:3]) + (", …" if len(unused) > 3 else "")
        kind = "missing" if unused[0] in found.missing else "exactly 0"
        return _unused(
            shown, f"its gradient is {kind} on {found.batches} batches (limit: above 0), though forward uses it"
        )
    return _unused_block(patient)


def _unused_block(patient: Patient) -> Finding | None:
    """One gate of several that share a weight."""
    found = parameter_gradients(patient)
    skipped = _torch_layers(patient) | {
        f"{name}.weight" for name, module in patient.model.named_modules() if isinstance(module, nn.Embedding)
    }
    for name, sizes in found.largest.items():
        if name in skipped or sizes.dim() == 0:
            continue
        for axis, length in enumerate(sizes.shape):
            dead = sizes.movedim(axis, 0).reshape(length, -1).amax(1) == 0
            for gates in (2, 3, 4, 5, 6):
                block = _dead_block(dead, gates)
                if block is None:
                    continue
                where = torch.zeros_like(sizes, dtype=torch.bool).movedim(axis, 0)
                where[block * (length // gates) : (block + 1) * (length // gates)] = True
                if not matters(patient, name, where.movedim(0, axis)):
                    return _unused(
                        f"{name}, gate {block} of {gates}",
                        f"the gradient of {length // gates} of its {length} rows is exactly 0 on "
                        f"{found.batches} batches "
                        f"(limit: above 0), that of the others is not",
                    )
    return None


def _torch_layers(patient: Patient) -> set[str]:
    """Return the parameters of torch's own layers, whose gates are all used."""
    inside = {
        id(p)
        for module in patient.model.modules()
        if isinstance(module, nn.RNNBase | nn.RNNCellBase)
        for p in module.parameters(recurse=False)
    }
    return {name for name, p in patient.model.named_parameters() if id(p) in inside}


def _dead_block(dead: Tensor, gates: int) -> int | None:
    """Return the first of `gates` equal blocks that is all dead, where every dead entry is part of such a block."""
    if len(dead) % gates or len(dead) // gates < _UNITS or not bool(dead.any()) or bool(dead.all()):
        return None
    blocks = dead.reshape(gates, -1)
    if not bool((blocks.all(1) | ~blocks.any(1)).all()):
        return None
    return int(blocks.all(1).nonzero()[0])


def _unused(where: str, seen: str) -> Finding:
    return Finding(
        "HS302",
        "warning",
        where,
        f"{seen}, and other values of it change no output.",
        "a gate is computed and then another variable is used in its place, or the line that uses it is missing",
        "use every gate: c = f * c + i * g; h = o * torch.tanh(c)",
        {"gradient": 0.0, "limit": 0.0},
    )


def all_trained(patient: Patient) -> Finding | None:
    """HS503: parameters that want a gradient and get none."""
    found = parameter_gradients(patient)
    if not found.usable:
        return None
    without: list[str] = []
    whole = _torch_layers(patient)
    for name, size in found.sizes.items():
        # An exact zero that other values lift is a unit that is off, such as a ReLU, and not a lost parameter.
        # A torch layer of one step that starts from zeros has a recurrent weight without effect, and no fault.
        off = name not in whole and len(without) < _MOST
        if size == 0 and (name in found.missing or (off and not matters(patient, name))):
            without.append(name)
    if not without:
        return None
    entered = {id(t) for event in traced(patient).trace.events for t in event.inputs}
    named = dict(patient.model.named_parameters())
    called = [name for name in without if id(named[name]) in entered]
    shown = ", ".join(without[:3]) + (", …" if len(without) > 3 else "")
    cause = (
        "what they give is detached, converted or made under torch.no_grad() before it reaches the output"
        if called
        else "they are never used in forward: a layer left over, or another one used in its place"
    )
    return Finding(
        "HS503",
        "warning",
        shown,
        f"{len(without)} of {len(found.sizes)} parameters have no gradient on {found.batches} batches (limit 0).",
        cause,
        "use the layer, remove it, or freeze it on purpose: layer.requires_grad_(False)",
        {"without": len(without), "limit": 0.0},
    )
