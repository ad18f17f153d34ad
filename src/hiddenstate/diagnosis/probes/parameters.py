"""Which parameters the loss reaches: gradients over several batches, in both modes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...state import tensors
from ..difference import gap
from ..outcome import Outcome
from ..patient import Patient, PatientProbe
from .calls import PlainCall
from .gradients import projected


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
    plain = patient[PlainCall]
    for number in range(3):
        with patient.afresh():
            parameter = dict(patient.model.named_parameters())[name]
            generator = torch.Generator().manual_seed(91 + number)
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter)
            kept = parameter.data
            # Other data for the same parameter, not a change in place: graphs of earlier runs are still needed.
            parameter.data = noise if where is None else torch.where(where, noise, kept)
            try:
                run = patient.call()
            finally:
                parameter.data = kept
        if gap(plain, run) > 0:
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
