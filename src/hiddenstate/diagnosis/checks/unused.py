"""Parameters that nothing reaches: computed and never used, or without a gradient."""

from __future__ import annotations

from ..finding import Finding
from ..patient import Patient
from ..probes.cells import own_cells
from ..probes.parameters import matters, parameter_gradients
from ..probes.repeats import traced

_MOST = 12  # suspects that are tried one by one


def gates_used(patient: Patient) -> Finding | None:
    """HS302: a gate or weight takes part in the computation, and what it gives is used nowhere."""
    found = parameter_gradients(patient)
    if not found.usable:
        return None
    touched = {id(tensor) for event in traced(patient).trace.events for tensor in event.inputs}
    named = dict(patient.model.named_parameters())
    suspects = [name for name, size in found.sizes.items() if size == 0 and id(named[name]) in touched]
    unused = [name for name in suspects[:_MOST] if not matters(patient, name)]
    if unused:
        shown = ", ".join(unused[:3]) + (", …" if len(unused) > 3 else "")
        kind = "missing" if unused[0] in found.missing else "exactly 0"
        return _unused(shown, f"its gradient is {kind} on {found.batches} batches (limit: above 0), though forward uses it")
    return _unused_block(patient)


def _unused_block(patient: Patient) -> Finding | None:
    """One gate of several that share a weight."""
    found = parameter_gradients(patient)
    prefixes = {layer.module: layer.name for layer in own_cells(patient)}
    for module, prefix in prefixes.items():
        units = getattr(module, "hidden_size", None)
        if not isinstance(units, int) or units < 2:
            continue
        for name, _ in module.named_parameters():
            full = f"{prefix}.{name}" if prefix else name
            sizes = found.largest.get(full)
            if sizes is None or sizes.dim() == 0:
                continue
            for axis, length in enumerate(sizes.shape):
                if length % units or length // units < 2:
                    continue
                blocks = sizes.movedim(axis, 0).reshape(length // units, -1).amax(1)
                dead = (blocks == 0).nonzero()[:, 0].tolist()
                if not dead or len(dead) == len(blocks):
                    continue
                where = (sizes == 0).movedim(axis, 0)
                where[: dead[0] * units] = False
                where[(dead[0] + 1) * units :] = False
                if not matters(patient, full, where.movedim(0, axis)):
                    return _unused(
                        f"{full}, gate {dead[0]} of {len(blocks)}",
                        f"the gradient of {units} of its {length} rows is exactly 0 on {found.batches} batches "
                        f"(limit: above 0), that of the others is not",
                    )
    return None


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
    without = []
    for name, size in found.sizes.items():
        # An exact zero that other values lift is a unit that is off, such as a ReLU, and not a lost parameter.
        if size == 0 and (name in found.missing or (len(without) < _MOST and not matters(patient, name))):
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
