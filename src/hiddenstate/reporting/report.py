"""`report`: one page about a model's hidden state."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..cells import BegunDataSet, given_call, is_data_set, read_batch
from ..diagnosis import Monitor
from ..errors import BadInput
from .evidence import Tokens, gather
from .page import page
from .training_page import training_page


def report(
    model: nn.Module | Monitor,
    *inputs: Any,
    path: str | os.PathLike[str] = "report.html",
    tokens: Tokens | None = None,
    labels: Sequence[str] | None = None,
    lengths: Tensor | None = None,
    batch_axis: int | None = None,
    time_axis: int | None = None,
    targets: Any = None,
    loss: Callable[..., Tensor] | None = None,
    tell: Callable[[str], None] | None = None,
    call: Callable[..., Any] | None = None,
    **kwargs: Any,
) -> Path:
    """Write one self-contained page about the hidden state of `model` as it runs on `inputs`, and return its path.

    The page shows the doctor's findings, the layers, every state and gate of the first row, memory, distances, paths
    and the spectrum of the Jacobian. It opens without a network. The model comes back unchanged.

    Args:
        model: Any model with recurrent layers or cells in it; it is called as `model(*inputs, **kwargs)`, in eval
            mode. Or an `hs.Monitor`: then the page shows its training run, findings as they came and went, and
            memory, saturation and gradients along it.
        *inputs: What the model is called with; or a DataLoader: the pictures show its first batch, and statistics
            cover the states of all batches, one batch at a time.
        path: Where to write; missing folders are created.
        tokens: A name for each step of the first row: a list of strings, or one list for each row.
        labels: A name for each row.
        lengths: The real steps of each row, if the inputs do not tell the model.
        batch_axis: Which axis of the inputs holds the rows: 1 for a model that takes time first. If it is not given,
            memory is measured along the axis that the model takes for time, and the doctor asks (`hs.diagnose`).
        time_axis: Which axis of the inputs holds the steps.
        targets: For the doctor: with `loss`, it also examines gradients.
        loss: `loss(output, targets)`.
        tell: Called with a few words about the present task; by default they are shown on a terminal.
        call: How to call the model, if not through its forward: `call=lambda model: model.act(x, state)`, or
            `call(model, *inputs)`; for a DataLoader `call(model, batch)`.
        kwargs: What the model is called with by name.

    >>> import tempfile, pathlib
    >>> where = pathlib.Path(tempfile.mkdtemp(), "report.html")
    >>> hs.report(torch.nn.GRU(3, 8, batch_first=True), torch.randn(2, 12, 3), path=where) == where
    True
    """
    if isinstance(model, Monitor):
        if inputs or kwargs or call is not None:
            raise BadInput("a report of a Monitor shows what it has seen, and takes no inputs: hs.report(monitor).")
        where = _writable(Path(path))
        _write(where, training_page(model))
        return where
    if not isinstance(model, nn.Module):
        raise BadInput(f"a report is made of an nn.Module, but this is {type(model).__name__}.")
    if batch_axis not in (0, 1, None):
        raise BadInput(f"batch_axis is 0 for (batch, time, ...) or 1 for (time, batch, ...), but is {batch_axis!r}.")
    if time_axis not in (0, 1, None) or (time_axis is not None and time_axis == batch_axis):
        raise BadInput(f"time_axis is 1 for (batch, time, ...) or 0 for (time, batch, ...), but is {time_axis!r}.")
    if time_axis is not None:
        batch_axis = 1 - time_axis
    where = _writable(Path(path))
    options = {"tokens": tokens, "labels": labels, "lengths": lengths, "targets": targets, "loss": loss}
    data = BegunDataSet(inputs[0]) if len(inputs) == 1 and is_data_set(inputs[0]) else None
    if data is not None and call is None:
        batch = read_batch(model, data.first, lengths=lengths)
        inputs, lengths, options = batch.args, batch.lengths, {}
    elif data is not None:
        inputs = (data.first,)
    evidence = gather(
        given_call(report, model, inputs, kwargs=kwargs, call=call, options=options),
        data,
        tokens=tokens,
        labels=labels,
        lengths=lengths,
        batch_axis=batch_axis,
        doctor={"targets": targets, "loss": loss},
        tell=tell or _shown,
    )
    _write(where, page(evidence))
    return where


def _shown(doing: str) -> None:
    """Show the present task on a terminal; print nothing in notebooks, logs and tests."""
    if sys.stderr.isatty():
        print(f"report: {doing} …", file=sys.stderr)


def _writable(path: Path) -> Path:
    """Raise for a path that cannot be written to, before any work is done."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError("it is a folder; a file name is needed, such as report.html")
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise BadInput(f"the report cannot be written to {path}: {error.strerror or error}.") from error
    return path


def _write(path: Path, text: str) -> None:
    # Written under another name first: a reader never sees half a page, and an older page survives a full disk.
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
