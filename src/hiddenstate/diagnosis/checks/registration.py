"""What a model holds: registered, trained, and in the optimizer."""

from __future__ import annotations

import re

from torch import Tensor, nn

from ...state import tensors
from ..finding import Finding
from ..hiding import Hidden, hidden_things
from ..patient import Patient
from ..probes.parameters import parameter_gradients
from ..probes.repeats import traced
from ..probes.shapes import base

_STATE = r"(h|c|hx|cx|hs|hidden|cell|state|s|h0|c0|hidden_state|cell_state)"
_FIRST = r"(init|initial|start|first|learned|default|zero)"
_INITIAL = re.compile(rf"(^|[._]){_STATE}_?(0|{_FIRST})$|(^|[._]){_FIRST}_?{_STATE}$|initial_", re.IGNORECASE)


def everything_registered(patient: Patient) -> Finding | None:
    """HS205: modules, parameters or tensors that `.to()` and `.parameters()` miss."""
    modules = [thing for thing in patient.hidden if isinstance(thing.value, nn.Module) and _matters(thing)]
    if modules:
        holder = modules[0].holder
        count = len(modules)
        return _missed(
            holder,
            f"{count} module{'s' if count > 1 else ''} in {holder} with {_weights(modules)} weights, of which "
            f"parameters() returns 0 (needed: all).",
            "a plain list or dict of modules is invisible to nn.Module"
            if not modules[0].direct
            else "the attribute was set without registering the module",
            f"self.{holder.rpartition('.')[2]} = nn.ModuleList([...])",
        )
    parameters = [thing for thing in patient.hidden if isinstance(thing.value, nn.Parameter)]
    if parameters:
        holder = parameters[0].holder
        return _missed(
            holder,
            f"{len(parameters)} parameters in {holder}, of which parameters() returns 0 (needed: all).",
            "a plain list or dict of parameters is invisible to nn.Module",
            f"self.{holder.rpartition('.')[2]} = nn.ParameterList([...])",
        )
    return _plain_tensor(patient)


def _matters(thing: Hidden) -> bool:
    return any(parameter.requires_grad for parameter in thing.value.parameters())


def _weights(modules: list[Hidden]) -> int:
    return sum(parameter.numel() for thing in modules for parameter in thing.value.parameters())


def _missed(holder: str, evidence: str, cause: str, advice: str) -> Finding:
    return Finding("HS205", "error", holder, evidence, cause, advice, {"registered": 0.0})


def _plain_tensor(patient: Patient) -> Finding | None:
    held = [t for t in patient.hidden if isinstance(t.value, Tensor) and t.value.dim() > 0 and t.value.is_leaf]
    if not held or patient.reset_method:
        return None
    used = {id(tensor) for event in traced(patient).trace.events for tensor in event.inputs}
    used |= {id(part) for call in base(patient).calls for part in tensors(call.given_native).values()}
    after = {id(thing.value) for thing in _still_there(patient)}
    for thing in held:
        if id(thing.value) in used and id(thing.value) in after:
            return Finding(
                "HS205",
                "warning",
                thing.name,
                f"a tensor of shape {tuple(thing.value.shape)} is used by forward and is neither parameter nor buffer: "
                f"0 of 1 follow the model to another device (needed: 1).",
                "a tensor in a plain attribute stays behind when the model moves, and is not saved with it",
                f"self.register_buffer({thing.holder.rpartition('.')[2]!r}, tensor), or nn.Parameter(tensor)",
                {"registered": 0.0},
            )
    return None


def _still_there(patient: Patient) -> list[Hidden]:
    """Return what is held after a call: a state that each call replaces is no constant."""
    with patient.afresh():
        patient.call()
        return hidden_things(patient.model)


def initial_state_trained(patient: Patient) -> Finding | None:
    """HS206: a first state that wants to be learned and is not."""
    for thing in patient.hidden:
        value = thing.value
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and value.is_leaf and value.requires_grad:
            return _untrained(
                thing.name,
                "it wants a gradient, and is not among the parameters() of the model: 0 of 1 (needed: 1).",
                "a tensor with requires_grad=True in an attribute is no parameter",
                f"self.{thing.holder.rpartition('.')[2]} = nn.Parameter(torch.zeros(...))",
            )
    names = {name: p for name, p in patient.model.named_parameters() if p.requires_grad and _INITIAL.search(name)}
    if not names:
        return None
    optimized = _optimized(patient)
    for name, parameter in names.items():
        if patient.optimizers and id(parameter) not in optimized:
            return _untrained(
                name,
                "it is a parameter of the model, and in 0 of the optimizer's groups (needed: 1).",
                "the optimizer was made before the parameter, or from other parameters",
                "make the optimizer after the model is complete: optimizer = Adam(model.parameters())",
            )
    gradients = parameter_gradients(patient)
    for name in names:
        if gradients.sizes.get(name) == 0 and gradients.usable:
            return _untrained(
                name,
                f"its gradient is {'missing' if name in gradients.missing else 'exactly 0'} on {gradients.batches} "
                f"batches (limit: above 0).",
                "it is detached, read through .data, or overwritten on the way to the layer",
                "h0 = self.h0.expand(-1, x.size(0), -1).contiguous(), without detach or .data",
            )
    return None


def _untrained(where: str, evidence: str, cause: str, advice: str) -> Finding:
    return Finding("HS206", "error", where, evidence, cause, advice, {"trained": 0.0})


def _optimized(patient: Patient) -> set[int]:
    return {id(p) for optimizer in patient.optimizers for group in optimizer.param_groups for p in group["params"]}


def optimizer_complete(patient: Patient) -> Finding | None:
    """HS504: parameters that want a gradient and are in no optimizer."""
    if not patient.optimizers:
        return None
    optimized = _optimized(patient)
    missing = [n for n, p in patient.model.named_parameters() if p.requires_grad and id(p) not in optimized]
    total = sum(1 for p in patient.model.parameters() if p.requires_grad)
    if not missing:
        return None
    shown = ", ".join(missing[:3]) + (", …" if len(missing) > 3 else "")
    return Finding(
        "HS504",
        "error",
        shown,
        f"{len(missing)} of {total} parameters that want a gradient are in no group of the optimizer (limit 0).",
        "the optimizer was made before these layers, or of an older copy of the model"
        if len(missing) < total
        else "the optimizer holds the parameters of another model, or of this one before it was replaced",
        "optimizer = torch.optim.Adam(model.parameters()), after the model is complete",
        {"missing": len(missing), "limit": 0.0},
    )


def dropout_between_layers(patient: Patient) -> list[Finding]:
    """HS305: dropout on a layer of depth one, where torch applies none."""
    found = []
    for name, module in patient.model.named_modules():
        if isinstance(module, nn.RNNBase) and module.num_layers == 1 and module.dropout > 0:
            found.append(
                Finding(
                    "HS305",
                    "warning",
                    name or "the model itself",
                    f"dropout={module.dropout:g} with num_layers=1 (needed: 2 layers or more).",
                    "torch drops out between layers only, and a single layer has no between",
                    f"nn.Dropout({module.dropout:g}) on the layer's output, or num_layers=2",
                    {"dropout": float(module.dropout), "layers": 1},
                )
            )
    return found
