"""Probe: where gradients arrive, at each step of the input, at each layer, and at each parameter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ...cells import Call
from ...state import tensors
from ..inputs import ModelInputs, packed, unpacked
from ..outcome import Outcome, gap, same
from ..patient import Patient, PatientProbe
from .calls import OutputLayout, PlainCall, RepeatedCall, TracedCall, by_rows, finals


@dataclass(slots=True, eq=False)
class Arrival:
    """What of the main output's gradient arrives at one call of a fused layer."""

    call: Call
    output: Tensor | None  # (batch, time, unit)
    state: dict[str, Tensor | None]


@dataclass(slots=True, eq=False)
class Backward(PatientProbe):
    """Where the gradients of one call arrive."""

    outcome: Outcome
    connected: bool  # the output has a graph at all
    steps: dict[str, Tensor] = field(default_factory=dict)  # where -> (batch, time) size of d final output / d step
    arrivals: list[Arrival] = field(default_factory=list)

    @classmethod
    def measure(cls, patient: Patient) -> Backward:
        """Take the gradient of the final output to every step, and of the main output to every layer's results."""
        seen = backward_to_steps(patient, patient.inputs)
        seen.arrivals = _arrivals(patient, seen.outcome) if seen.connected else []
        return seen


def backward_to_steps(patient: Patient, inputs: ModelInputs) -> Backward:
    """Take the gradient of the final output to every step of these inputs; `arrivals` stays empty."""
    inputs, leaf = _with_leaf(inputs)
    run = patient.run(inputs, grad=True, collect=True)
    last = [each for each in finals(patient, run) if each.requires_grad]
    if not last:
        return Backward(run, False)
    seen = Backward(run, True)
    sources = _sources(run, leaf)
    total = torch.stack([projected(each) for each in last]).sum()
    found = gradients(total, [source.tensor for source in sources])
    pieces: dict[str, list[Tensor]] = {}
    for source, gradient in zip(sources, found, strict=True):
        arranged = source.arrange(torch.zeros_like(source.tensor) if gradient is None else gradient)
        arranged = arranged if arranged.dim() > 2 else arranged.unsqueeze(2)
        pieces.setdefault(source.name, []).append(arranged.detach().double().flatten(2).norm(dim=2).cpu())
    for name, sizes in pieces.items():  # of a cell, one for each step
        if len({len(size) for size in sizes}) == 1:
            seen.steps[name] = torch.cat(sizes, dim=1)
    return seen


def _with_leaf(inputs: ModelInputs) -> tuple[ModelInputs, Tensor | None]:
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


def reaches_input(patient: Patient) -> bool:
    """Say whether a gradient of any output arrives at the main input, also where discrete outputs do not move."""
    inputs, leaf = _with_leaf(patient.inputs)
    run = patient.run(inputs, grad=True)
    outputs = [t for t in run.outputs.values() if t.requires_grad]
    if leaf is None or not outputs:
        return False
    (gradient,) = gradients(torch.stack([projected(t) for t in outputs]).sum(), [leaf])
    return arrives(gradient)


def reaches_outputs(patient: Patient, name: str) -> bool:
    """Whether a gradient of the outputs themselves, without the loss, arrives at a parameter."""
    parameter = dict(patient.model.named_parameters())[name]
    outputs = [t for t in patient.run(grad=True).outputs.values() if t.requires_grad]
    return bool(outputs) and arrives(*gradients(torch.stack([projected(t) for t in outputs]).sum(), [parameter]))


def projected(y: Tensor) -> Tensor:
    """Return one number that every entry of `y` takes part in, with weights of its own."""
    generator = torch.Generator().manual_seed(11)
    weights = torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y)
    # Entries such as masked logits are -inf on purpose, and their gradient would be NaN.
    return (torch.where(y.isfinite(), y, torch.zeros_like(y)) * weights).sum()


def gradients(total: Tensor, wanted: list[Tensor]) -> list[Tensor | None]:
    """Return the gradient of `total` to each tensor, None where it is not part of the graph; the graph is kept."""
    return list(torch.autograd.grad(total, wanted, retain_graph=True, allow_unused=True)) if wanted else []


@dataclass(frozen=True, slots=True, eq=False)
class _StepSource:
    """A tensor that holds steps of the input, or what was made of them."""

    name: str
    tensor: Tensor
    arrange: Callable[[Tensor], Tensor]  # its gradient -> (batch, time, ...)


def _sources(run: Outcome, leaf: Tensor | None) -> list[_StepSource]:
    inputs = run.inputs
    argument, x = inputs.argument(inputs.main), inputs.get(inputs.main)
    rows, time = argument.rows if inputs.batched else None, argument.time
    found: list[_StepSource] = []
    if leaf is not None and time is not None:
        packed_input = isinstance(x, PackedSequence)
        found.append(_StepSource("the input", leaf, lambda g: g if packed_input else _arranged(g, rows, time)))
    for place, seen in enumerate(run.calls.embedded):
        name, tokens, vectors = f"{seen.name}#{place}", seen.tokens, seen.vectors
        if not isinstance(x, Tensor) or not vectors.requires_grad or time is None:
            continue
        if same(tokens, x):
            found.append(_StepSource(name, vectors, lambda g: _arranged(g, rows, time)))
        elif tokens.dim() == 2 and rows is not None and same(tokens.T, x):
            found.append(_StepSource(name, vectors, lambda g: _arranged(g, time, rows)))
    for place, call in enumerate(run.calls):
        data = _data(call.input)
        if data.requires_grad:
            # One step each is one sequence; calls of many steps each may well be several sequences.
            name = f"{call.layer.label}#{place}" if call.layer.fused and call.steps > 1 else call.layer.label
            found.append(_StepSource(name, data, partial(_as_input, call)))
    return found


def _data(value: Tensor | PackedSequence) -> Tensor:
    return value.data if isinstance(value, PackedSequence) else value


def _like(value: Tensor | PackedSequence, data: Tensor) -> Tensor | PackedSequence:
    return value._replace(data=data) if isinstance(value, PackedSequence) else data


def _as_input(call: Call, gradient: Tensor) -> Tensor:
    return call.fed(_like(call.input, gradient)).x


def _arranged(gradient: Tensor, rows: int | None, time: int) -> Tensor:
    return gradient.movedim(time, 0)[None] if rows is None else gradient.movedim((rows, time), (0, 1))


def _arrivals(patient: Patient, run: Outcome) -> list[Arrival]:
    leaf = patient[OutputLayout].main
    tensor = run.outputs.get(leaf.path) if leaf is not None else None
    if leaf is None or tensor is None or not tensor.requires_grad:
        return []
    calls = [(call, call.state) for call in run.calls if call.layer.fused]
    wanted = [part for call, state in calls for part in (_data(call.output_native), *state.values())]
    keep = [part for part in wanted if part.requires_grad]
    total = projected(by_rows(tensor, leaf, run.inputs.batch))
    found = dict(zip(map(id, keep), gradients(total, keep), strict=True))
    arrivals = []
    for call, state in calls:
        gradient = found.get(id(_data(call.output_native)))
        output = None if gradient is None else _as_output(call, gradient)
        arrivals.append(Arrival(call, output, {name: found.get(id(part)) for name, part in state.items()}))
    return arrivals


def _as_output(call: Call, gradient: Tensor) -> Tensor:
    return call.returned(call.layer.join(_like(call.output_native, gradient), call.state_native)).output


class Summaries(tuple[Arrival, ...], PatientProbe):
    """Fused layers whose results end in one value for each row, and go into no further layer."""

    @classmethod
    def measure(cls, patient: Patient) -> Summaries:
        """Pick them from the backward pass."""
        leaf = patient[OutputLayout].main
        if leaf is None or leaf.stepwise or leaf.state or not patient[Backward].connected:
            return cls()
        found = patient[Backward]
        fed = {id(t) for call in found.outcome.calls for t in tensors((call.input, call.given_native)).values()}

        def handed_on(call: Call) -> bool:
            return any(id(t) in fed for t in tensors((call.output_native, call.state_native)).values())

        return cls(arrival for arrival in found.arrivals if not handed_on(arrival.call))


def arrives(*gradients: Tensor | None) -> bool:
    """Say whether any of these gradients is there, and not all zero."""
    return any(gradient is not None and bool(gradient.abs().max() > 0) for gradient in gradients)


@dataclass(frozen=True, slots=True, eq=False)
class ParameterGradients(PatientProbe):
    """The largest gradient of every parameter that wants one, over several batches."""

    sizes: dict[str, float]  # name -> largest |gradient|, 0 where there never was one
    largest: dict[str, Tensor]  # name -> largest |gradient| of each entry
    missing: frozenset[str]  # not part of any graph
    infinite: tuple[str, ...]  # with NaN or Inf somewhere
    batches: int
    usable: bool  # some parameter got a gradient

    @classmethod
    def measure(cls, patient: Patient) -> ParameterGradients:
        """Take the gradient of the loss, or of all outputs, to every parameter, on three batches."""
        named = {name: p for name, p in patient.model.named_parameters() if p.requires_grad}
        rows = torch.ones(patient.whole.batch, dtype=torch.bool)
        batches = [
            (patient.whole, {"train": True, "number": 0}),
            (patient.whole.other_rows(rows, seed=81), {"train": True, "number": 1}),
            (patient.whole, {"train": False, "number": 2}),
        ]
        largest: dict[str, Tensor] = {}
        infinite: list[str] = []
        failures: list[Exception] = []
        for inputs, how in batches:
            try:
                total = objective(patient, patient.run(inputs, grad=True, **how))
            except Exception as error:  # such as BatchNorm in training with one row; another batch may do
                failures.append(error)
                continue
            if total is None:
                continue
            for name, gradient in zip(named, _gradients(total, list(named.values())), strict=True):
                if gradient is None:
                    continue
                size = gradient.detach().abs()
                if not bool(size.isfinite().all()):
                    infinite.append(name)
                size = size.nan_to_num()
                largest[name] = torch.maximum(largest[name], size) if name in largest else size
        if len(failures) == len(batches):
            raise failures[0]
        sizes = {
            name: float(largest[name].max()) if name in largest and largest[name].numel() else 0.0 for name in named
        }
        missing = frozenset(name for name in named if name not in largest)
        return cls(
            sizes, largest, missing, tuple(dict.fromkeys(infinite)), len(batches) - len(failures), any(sizes.values())
        )


def objective(patient: Patient, run: Outcome) -> Tensor | None:
    """Return the user's loss, or where there is none a number that all outputs take part in."""
    if patient.loss is not None:
        total = patient.loss(run.result, patient.targets)
        return total if total.requires_grad else None
    outputs = [t for t in tensors(run.result).values() if t.is_floating_point() and t.requires_grad]
    return torch.stack([projected(t) for t in outputs]).sum() if outputs else None


def _gradients(total: Tensor, parameters: list[Tensor]) -> list[Tensor | None]:
    found = torch.autograd.grad(total, parameters, allow_unused=True)
    return [g.to_dense() if g is not None and g.is_sparse else g for g in found]


def matters(patient: Patient, name: str, where: Tensor | None = None) -> bool:
    """Say whether other values of a parameter (of the entries `where`) change any output."""
    kept = patient[RepeatedCall].gap > 0  # then it may matter from the second call on
    with patient.afresh():
        plain = [patient.call() for _ in range(2)] if kept else [patient[PlainCall]]
    for number in range(3):
        with patient.afresh():
            parameter = dict(patient.model.named_parameters())[name]
            generator = torch.Generator().manual_seed(91 + number)
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter)
            own = parameter.data
            # Other data for the same parameter, not a change in place: graphs of earlier runs are still needed.
            parameter.data = noise if where is None else torch.where(where, noise, own)
            try:
                runs = [patient.call() for _ in plain]
            finally:
                parameter.data = own
        if any(gap(a, b) > 0 for a, b in zip(plain, runs, strict=True)):
            return True
    return False


def in_torch_layers(model: nn.Module) -> set[str]:
    """Return the names of the parameters of torch's own layers, whose gates are all used."""
    inside = {
        id(p)
        for module in model.modules()
        if isinstance(module, nn.RNNBase | nn.RNNCellBase)
        for p in module.parameters(recurse=False)
    }
    return {name for name, p in model.named_parameters() if id(p) in inside}


def meets_zeros(patient: Patient, parameter: Tensor) -> bool:
    """Say whether a parameter only ever meets zeros, as that of the state does in one step from a start of zeros."""
    ours, zeros = {id(parameter)}, False
    for operation in patient[TracedCall].trace:
        if not ours & {id(tensor) for tensor in operation.inputs}:
            continue
        others = [t for t in operation.inputs if id(t) not in ours and t.is_floating_point() and not t.requires_grad]
        if not others and all(id(tensor) in ours for tensor in operation.inputs):
            ours |= {id(tensor) for tensor in operation.outputs}  # transposed, or a piece of it
        elif others and not any(bool(tensor.any()) for tensor in others):
            zeros = True
        else:
            return False
    return zeros
