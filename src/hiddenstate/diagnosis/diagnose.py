"""The examination: one call, all checks, a report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..errors import BadInput, DiagnosisFailed
from .catalog import TITLES
from .finding import RANK
from .report import Report
from .thresholds import Thresholds


def diagnose(
    model: nn.Module,
    *inputs: Any,
    lengths: Tensor | Sequence[int] | None = None,
    targets: Any = None,
    loss: Callable[[Any, Any], Tensor] | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    batch_axis: int = 0,
    ignore: Iterable[str] = (),
    thresholds: Mapping[str, float] | None = None,
    fail_on: Literal["error", "warning", "note"] | None = None,
) -> Report:
    """Return a Report of what is wrong with the hidden state of `model`, how we know, and what to change.

    The model is called as `model(*inputs)`, many times, and comes back as it was. A healthy model gets no finding:

    >>> model = torch.nn.LSTM(3, 8, batch_first=True)
    >>> diagnose(model, torch.randn(4, 10, 3)).ok
    True

    Args:
        model: Any model with recurrent layers, a layer, or a cell. For a cell or a layer inputs may be left out.
        inputs: What the model is called with.
        lengths: The real steps of each row; a model that needs them has them among its inputs as well, and where they
            are named so in its forward, that is enough.
        targets: What `loss` compares the output with.
        loss: Called as `loss(output, targets)` with the raw output.
        optimizer: The optimizer, or several, that should train every parameter.
        batch_axis: Where the rows of the sequences are.
        ignore: Codes that are not wanted, such as `["HS501"]`.
        thresholds: Other limits, by name: see `hiddenstate.diagnosis.Thresholds`.
        fail_on: Raise `DiagnosisFailed` where a finding is this grave, or graver.
    """
    if not isinstance(model, nn.Module):
        raise BadInput(f"hs.diagnose takes an nn.Module, but this is {type(model).__name__}.")
    unwanted = _known_codes(ignore)
    if fail_on is not None and fail_on not in RANK:
        raise BadInput(f"fail_on is 'error', 'warning', 'note' or None, but is {fail_on!r}.")
    if optimizer is None:
        optimizers: tuple[torch.optim.Optimizer, ...] = ()
    else:
        optimizers = tuple(optimizer) if isinstance(optimizer, list | tuple) else (optimizer,)  # type: ignore[assignment]
    from .examination import admit, examined  # all the checks, which a plain `import hiddenstate` can do without

    patient = admit(
        model,
        inputs,
        lengths=lengths,
        batch_axis=batch_axis,
        thresholds=Thresholds.adjusted(thresholds),
        targets=targets,
        loss=loss,
        optimizers=optimizers,
    )
    report = examined(patient, type(model).__name__, unwanted)
    if fail_on is not None and report.worst() and RANK[report.worst()] <= RANK[fail_on]:
        raise DiagnosisFailed(f"the model has a finding of severity {report.worst()!r}.\n{report.text()}")
    return report


def _known_codes(ignore: Iterable[str]) -> frozenset[str]:
    codes = frozenset([ignore] if isinstance(ignore, str) else ignore)
    unknown = sorted(codes - TITLES.keys())
    if unknown:
        raise BadInput(f"there is no finding {unknown[0]!r} to ignore: codes go from HS101 to HS504.")
    return codes
