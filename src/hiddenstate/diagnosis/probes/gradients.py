"""Where gradients of the output arrive: at each step of the input, at each layer, at each parameter."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from ..inputs import Inputs, packed, unpacked
from ..patient import Patient, Run, probe
from ..watching import Call
from .shapes import by_rows, final, layout


@dataclass(slots=True, eq=False)
class Arrival:
    """What of the main output's gradient arrives at one call of a layer."""

    call: Call
    output: Tensor | None  # (batch, time, unit)
    state: dict[str, Tensor | None]


@dataclass(slots=True, eq=False)
class Backward:
    """The gradients of one run."""

    run: Run
    connected: bool  # the output has a graph at all
    steps: dict[str, Tensor] = field(default_factory=dict)  # where -> (batch, time) size of d final output / d step
    arrivals: list[Arrival] = field(default_factory=list)


@probe
def backward(patient: Patient) -> Backward:
    """Take the gradient of the final output to every step, and of the main output to every layer's results."""
    seen = _to_steps(patient, patient.inputs)
    seen.arrivals = _arrivals(patient, seen.run) if seen.connected else []
    return seen


@probe
def one_step_less(patient: Patient) -> Backward:
    """Take the gradient of the final output to every step of a sequence that ends one step earlier."""
    inputs = patient.inputs
    paths = [slot.path for slot in inputs.slots if slot.time is not None and slot.steps == inputs.steps]
    return _to_steps(patient, inputs.crop(int(inputs.last.max()), paths))


def _to_steps(patient: Patient, inputs: Inputs) -> Backward:
    inputs, leaf = with_leaf(inputs)
    run = patient.run(inputs, grad=True, watch=True)
    last = final(patient, run)
    if last is None or not last.requires_grad:
        return Backward(run, False)
    seen = Backward(run, True)
    sources = _sources(run, leaf)
    found = gradients(projected(last), [tensor for tensor, _ in sources.values()])
    for (name, (tensor, arrange)), gradient in zip(sources.items(), found, strict=True):
        gradient = torch.zeros_like(tensor) if gradient is None else gradient
        arranged = arrange(gradient)
        if arranged is not None:
            seen.steps[name] = arranged.detach().abs().flatten(2).norm(dim=2).cpu()
    _join_cells(seen)
    return seen


def with_leaf(inputs: Inputs) -> tuple[Inputs, Tensor | None]:
    """Return the call with its main sequence as a leaf that wants a gradient; tokens cannot."""
    x = inputs.get(inputs.main)
    if isinstance(x, PackedSequence):
        padded, lengths = unpacked(x)
        if not padded.is_floating_point():
            return inputs, None
        leaf = padded.detach().clone().requires_grad_()
        return inputs.put(inputs.main, packed(leaf.clone(), lengths, x)), leaf
    if not x.is_floating_point():
        return inputs, None
    leaf = x.detach().clone().requires_grad_()
    # The model is given a copy: it may change its input in place, which torch forbids for a leaf.
    return inputs.put(inputs.main, leaf.clone()), leaf


def projected(y: Tensor) -> Tensor:
    """Return one number that every entry of `y` takes part in, with weights of its own."""
    generator = torch.Generator().manual_seed(11)
    weights = torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y)
    # Entries such as masked logits are -inf on purpose, and their gradient would be NaN.
    return (torch.where(y.isfinite(), y, torch.zeros_like(y)) * weights).sum()


def gradients(total: Tensor, wanted: list[Tensor]) -> list[Tensor | None]:
    """Return the gradient of `total` to each tensor, None where it is not part of the graph; the graph is kept."""
    return list(torch.autograd.grad(total, wanted, retain_graph=True, allow_unused=True)) if wanted else []


def _sources(run: Run, leaf: Tensor | None) -> dict[str, tuple[Tensor, Any]]:
    inputs = run.inputs
    slot = inputs.slot(inputs.main)
    found: dict[str, tuple[Tensor, Any]] = {}
    if leaf is not None and slot.time is not None:
        time = slot.time
        if isinstance(inputs.get(inputs.main), PackedSequence):
            found["the input"] = (leaf, lambda g: g if g.dim() > 2 else g.unsqueeze(2))
        else:
            found["the input"] = (leaf, lambda g: _arranged(g, slot.rows if inputs.batched else None, time))
    tokens = inputs.get(inputs.main)
    for name, given, vectors in run.watch.embedded:
        if not isinstance(tokens, Tensor) or not vectors.requires_grad or slot.time is None:
            continue
        rows = slot.rows if inputs.batched else None
        if given.shape == tokens.shape and torch.equal(given, tokens):
            found[name] = (vectors, lambda g, rows=rows, time=slot.time: _arranged(g, rows, time))
        elif given.dim() == 2 and given.T.shape == tokens.shape and torch.equal(given.T, tokens):
            found[name] = (vectors, lambda g: _arranged(g, slot.time, slot.rows))  # type: ignore[arg-type]
    for place, call in enumerate(run.watch.calls):
        x = call.x.data if isinstance(call.x, PackedSequence) else call.x
        if not isinstance(x, Tensor) or not x.requires_grad:
            continue
        name = f"{call.layer.name or 'the model itself'}#{place}"
        if call.layer.fused:
            found[name] = (x, lambda g, call=call: _of_call(g, call))
        else:
            found[f"{name}:step"] = (x, lambda g: (g if g.dim() > 1 else g[None]).flatten(1).unsqueeze(1))
    return found


def _of_call(gradient: Tensor, call: Call) -> Tensor:
    if isinstance(call.x, PackedSequence):
        return unpacked(call.x._replace(data=gradient))[0]
    if gradient.dim() == 2:
        return gradient[None]
    return gradient if call.layer.spec.batch_first else gradient.transpose(0, 1)


def _arranged(gradient: Tensor, rows: int | None, time: int) -> Tensor | None:
    arranged = gradient.movedim(time, 0)[None] if rows is None else gradient.movedim((rows, time), (0, 1))
    return arranged if arranged.dim() > 2 else arranged.unsqueeze(2)


def _join_cells(seen: Backward) -> None:
    """Join the steps of a cell, each a call of its own, along time."""
    groups: dict[str, list[Tensor]] = {}
    for name in [name for name in seen.steps if name.endswith(":step")]:
        groups.setdefault(name.partition("#")[0], []).append(seen.steps.pop(name))
    for name, pieces in groups.items():
        if len({len(piece) for piece in pieces}) == 1:
            seen.steps[name] = torch.cat(pieces, dim=1)


def _arrivals(patient: Patient, run: Run) -> list[Arrival]:
    leaf = layout(patient).main
    tensor = run.outputs.get(leaf.path) if leaf is not None else None
    if leaf is None or tensor is None or not tensor.requires_grad:
        return []
    calls = [call for call in run.watch.calls if call.state is not None]
    wanted: list[Tensor] = []
    for call in calls:
        assert call.state is not None
        wanted.append(call.output.data if isinstance(call.output, PackedSequence) else call.output)
        wanted.extend(call.state.values())
    total = projected(by_rows(tensor, leaf, run.inputs.batch))
    keep = [w for w in wanted if w.requires_grad]
    found = dict(zip(map(id, keep), gradients(total, keep), strict=True))
    arrivals = []
    for call in calls:
        assert call.state is not None
        raw = call.output.data if isinstance(call.output, PackedSequence) else call.output
        gradient = found.get(id(raw))
        out = None if gradient is None else _as_sequence(gradient, call)
        arrivals.append(Arrival(call, out, {name: found.get(id(part)) for name, part in call.state.items()}))
    return arrivals


def _as_sequence(gradient: Tensor, call: Call) -> Tensor:
    if isinstance(call.output, PackedSequence):
        return unpacked(call.output._replace(data=gradient))[0]
    if not call.layer.fused:
        return (gradient if gradient.dim() > 1 else gradient[None]).unsqueeze(1)
    if gradient.dim() == 2:
        return gradient[None]
    return gradient if call.layer.spec.batch_first else gradient.transpose(0, 1)
