"""Operations that make one value of all steps of a row, and whether padded steps take part in them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..inputs import ModelInputs
from ..outcome import Operation, Outcome
from ..padding import padded
from ..patient import Patient, PatientProbe


@dataclass(frozen=True, slots=True)
class StepPool:
    """One operation over the steps."""

    name: str
    shape: tuple[int, ...]  # of what it was applied to
    rows: int  # the axes of rows and steps in it
    time: int
    counts: bool  # padded steps take part


class PooledSteps(tuple[StepPool, ...], PatientProbe):
    """All operations of a call that are applied over the steps, those whose result is another with padding first."""

    @classmethod
    def measure(cls, patient: Patient) -> PooledSteps:
        """Trace a call with padding in every row, where the model takes one; else the call as it is."""
        inputs = patient.inputs
        longer = padded(inputs, 3 if inputs.steps + 3 != inputs.batch else 4)
        run = None if longer is None else _traced(patient, longer)
        run = run or _traced(patient, inputs)
        found = [] if run is None else [_pool(operation, run.inputs) for operation in run.trace]
        pools = [pool for pool in found if pool is not None]
        return cls(sorted(pools, key=lambda pool: (not pool.counts, _ORDER.index(pool.name))))


_ORDER = ("softmax", "mean", "max", "amax", "adaptive_max_pool1d", "adaptive_avg_pool1d", "avg_pool1d", "sum")


def _traced(patient: Patient, inputs: ModelInputs) -> Outcome | None:
    try:
        return patient.run(inputs, trace=True)
    except Exception:  # a model of fixed length
        return None


def _pool(operation: Operation, inputs: ModelInputs) -> StepPool | None:
    if operation.name not in _ORDER or not operation.inputs or not operation.outputs:
        return None
    x, dim = operation.inputs[0], operation.kwargs.get("dim", operation.args[1] if len(operation.args) > 1 else None)
    dim = -1 if operation.name.endswith("1d") else dim[0] if isinstance(dim, list | tuple) and len(dim) == 1 else dim
    longest = inputs.steps if inputs.lengths is None else int(inputs.lengths.max())  # as many as an unpacked output has
    if type(dim) is not int or x.dim() < 2 or x.shape[dim] not in (inputs.steps, longest) or not x.is_floating_point():
        return None
    time = dim % x.dim()
    rows = next((axis for axis in range(x.dim()) if axis != time and x.shape[axis] == inputs.batch), None)
    if rows is None:
        return None
    values = (operation.outputs[0] if operation.name == "softmax" else x).detach().movedim((rows, time), (0, 1))
    return StepPool(
        operation.name, tuple(x.shape), rows, time, _counts(operation.name, values, inputs.valid[:, : x.shape[time]])
    )


def _counts(name: str, values: Tensor, valid: Tensor) -> bool:
    """Whether padded steps take part: `values (batch, time, ...)` are what is pooled, of a softmax what it gave."""
    real = valid.to(values.device).reshape(*valid.shape, *[1] * (values.dim() - 2))
    if bool(valid.all()):
        return False
    if name in ("sum", "softmax"):
        return bool(values.masked_fill(real, 0).any())
    if "max" in name:
        return not torch.equal(values.masked_fill(~real, -torch.inf).amax(1), values.amax(1))
    return True
